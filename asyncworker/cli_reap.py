"""The command `asyncworker reap`: what dead workers left on this host, shown and ended."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import typer
from rich.table import Table
from rich.text import Text

from asyncworker import processes, scratch
from asyncworker.processes import Token
from asyncworker.terminal import CODES, DryRun, Json, age, console, print_json, safe, say

HEADER = ("pid", "role", "owner", "age", "memory")


@dataclass(frozen=True)
class LeftOver:
    """A process whose owner is dead; `owner` was the worker's pid."""

    pid: int
    role: str
    owner: int
    age_ms: int
    memory_bytes: int

    def cells(self) -> tuple[str, ...]:
        memory = f"{self.memory_bytes / 1024**2:.0f} MB"
        return str(self.pid), safe(self.role), str(self.owner), age(self.age_ms), memory


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(epilog=CODES)(reap)


def reap(dry_run: DryRun = False, as_json: Json = False) -> None:
    """Kill the drivers and browsers that dead workers left on this host, and remove their temporary directories.

    They are known by a token in their environment and by the directory's name, never by the name of a program. What
    living workers own is left alone, and so is what belongs to another container. A worker does the same when it
    starts.
    """
    found, directories = _look(), scratch.left_over()
    killed = removed = 0
    if not dry_run:
        killed, removed = processes.sweep(), scratch.sweep()
    left, kept = ([], []) if dry_run else (_look(), scratch.left_over())
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "processes": [asdict(each) for each in found],
                "directories": [{"path": str(path), "owner": scratch.owner(path)} for path in directories],
                "killed": killed,
                "removed": removed,
                "left": [each.pid for each in left],
                "kept": [str(path) for path in kept],
            }
        )
    else:
        _print(found, directories)
        _say_what_was_done(len(found), len(directories), killed, removed, dry_run=dry_run)
        if left or kept:
            _say_what_is_left(left, kept)
    raise typer.Exit(1 if left or kept else 0)


def _look() -> list[LeftOver]:
    """The processes that a sweep would kill, those that use most memory first."""
    described = (_describe(process, token) for process, token in processes.left_over())
    return sorted((each for each in described if each is not None), key=lambda each: -each.memory_bytes)


def _describe(process: psutil.Process, token: Token) -> LeftOver | None:
    try:
        with process.oneshot():
            age_ms = max(0, round((time.time() - process.create_time()) * 1000))
            return LeftOver(process.pid, token.role, token.pid, age_ms, process.memory_info().rss)
    except psutil.Error:  # it has ended meanwhile
        return None


def _print(found: list[LeftOver], directories: list[Path]) -> None:
    if found:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in HEADER:
            table.add_column(name, justify="left" if name == "role" else "right", no_wrap=True)
        for each in found:
            table.add_row(*(Text(cell) for cell in each.cells()))
        console.print(table)
    for path in directories:
        say(f"{path} of process {scratch.owner(path)}")


def _say_what_was_done(found: int, directories: int, killed: int, removed: int, *, dry_run: bool) -> None:
    if not (found or directories or killed or removed):
        say("no worker left anything on this host")
    elif dry_run:
        say(f"{_processes(found)} would be killed, {_directories(directories)} removed")
    else:
        say(f"{_processes(killed)} killed, {_directories(removed)} removed")


def _say_what_is_left(left: list[LeftOver], kept: list[Path]) -> None:
    what = [f"process {each.pid}" for each in left] + [str(path) for path in kept]
    say(f"still there: {', '.join(what)}; they may be another user's: run this as that user, or as root")


def _processes(number: int) -> str:
    return f"{number} process" if number == 1 else f"{number} processes"


def _directories(number: int) -> str:
    return f"{number} directory" if number == 1 else f"{number} directories"
