"""A command of the machine's, run with bounds: one that does not get anywhere is killed.

Being alive is no progress, and neither is a line of log: a download that retries for ever writes lines. What
counts is bytes written, by the command and by everything that it started.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncworker import processes
from asyncworker.settings import child_environment

#: A command that has written less than this since the last look has not moved.
PROGRESS_BYTES = 64 * 1024

#: How often a command that works is mentioned.
NEWS_EVERY_MS = 10_000

#: How long to wait after SIGTERM, and again after SIGKILL.
END_TIMEOUT_MS = 2_000

Say = Callable[[str], None]


@dataclass(frozen=True)
class Patience:
    """How long a command may run: without progress, and in all."""

    stall_ms: int
    overall_ms: int


DOWNLOAD = Patience(stall_ms=15_000, overall_ms=1_800_000)
UNPACK = Patience(stall_ms=120_000, overall_ms=900_000)  # killing dpkg half way is worse than waiting


@dataclass(frozen=True)
class Step:
    """One command of a way; `optional`: its failure is not the way's."""

    command: tuple[str, ...]
    patience: Patience = DOWNLOAD
    environment: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    own_temporary_directory: bool = False


def run(step: Step, *, on_news: Say = lambda text: None) -> str | None:
    """Run a command to its end, within its patience.

    Returns:
        None when it succeeded, else why it did not; nothing of a command that did not succeed still runs.
    """
    token = processes.new_token("install")
    with tempfile.TemporaryDirectory(prefix="asyncworker-install-", ignore_cleanup_errors=True) as folder:
        output = Path(folder) / "output"
        environment = {**step.environment, processes.VARIABLE: str(token)}
        if step.own_temporary_directory:  # what a killed download leaves behind goes with the folder
            environment["TMPDIR"] = folder
        with output.open("wb") as file:
            try:
                process = subprocess.Popen(
                    step.command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=child_environment(**environment),
                )
            except OSError as error:
                return f"{step.command[0]} does not run: {error.strerror}"
        try:
            overdue = _watch(process, step.patience, on_news)
        finally:
            _end(process, token)
        return _verdict(process, overdue, output)


def _watch(process: subprocess.Popen[bytes], patience: Patience, on_news: Say) -> str | None:
    """Wait for the end; returns why the command shall be killed, or None when it ended itself."""
    written: dict[int, int] = {}
    started = moved_at = news_at = time.monotonic()
    moved = 0
    while process.poll() is None:
        now = time.monotonic()
        total = _written(process, written)
        if total - moved >= PROGRESS_BYTES:
            moved, moved_at = total, now
        if (now - moved_at) * 1000 >= patience.stall_ms:
            return f"no progress in {patience.stall_ms / 1000:g} s"
        if (now - started) * 1000 >= patience.overall_ms:
            return f"not done in {patience.overall_ms / 1000:g} s"
        if moved and (now - news_at) * 1000 >= NEWS_EVERY_MS:
            news_at = now
            on_news(f"{total / 1e6:.0f} MB written in {now - started:.0f} s")
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    return None


def _written(process: subprocess.Popen[bytes], written: dict[int, int]) -> int:
    """Bytes that the command and its descendants have written so far, to whatever."""
    try:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = []
    for member in tree:
        try:
            written[member.pid] = max(written.get(member.pid, 0), _written_by(member))
        except (psutil.Error, OSError):
            continue
    return sum(written.values())


def _written_by(process: psutil.Process) -> int:
    if psutil.LINUX:
        return int(process.io_counters().write_chars)
    # Elsewhere a process does not say what it writes; time on the processor is the next best sign of life.
    return int(sum(process.cpu_times()[:2]) * 10 * PROGRESS_BYTES)


def _end(process: subprocess.Popen[bytes], token: processes.Token) -> None:
    """End the command and all that it started; what a successful one left running is meant to run."""
    if process.poll() == 0:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)  # its own session: the group is its alone
            process.wait(END_TIMEOUT_MS / 1000)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    processes.kill_launch(token)


def _verdict(process: subprocess.Popen[bytes], overdue: str | None, output: Path) -> str | None:
    if overdue is None and process.returncode == 0:
        return None
    said = _telling_line(output.read_bytes()[-65_536:].decode(errors="replace"))
    what = overdue or f"exit code {process.returncode}"
    return f"{what}: {said}" if said else what


def _telling_line(text: str) -> str:
    """The first line that calls itself an error, else the last one."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if re.match(r"(?:error|e|fatal)\s*:", line, re.IGNORECASE)]
    return shortened((errors or lines[-1:] or [""])[0])


def shortened(text: str, longest: int = 300) -> str:
    """The text on one line; of a long one its beginning and its end, where the cause is."""
    text = " ".join(text.split())
    half = longest // 2 - 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"
