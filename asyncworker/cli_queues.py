"""The commands about queues: how they stand, pausing, resuming, purging."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from asyncworker import cli_dead_letters
from asyncworker.settings import load
from asyncworker.terminal import (
    CODES,
    DryRun,
    Json,
    Yes,
    age,
    ask,
    console,
    counted,
    print_json,
    safe,
    say,
    table_width,
)

if TYPE_CHECKING:
    from asyncworker.queues import Queue, Queues

HEADER = ("queue", "waiting", "delayed", "running", "lost", "dead", "oldest", "")

Name = Annotated[str, typer.Argument(help="The queue's name.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands, and those about dead letters."""
    for command in (queues, pause, resume, purge):
        app.command(epilog=CODES)(command)
    app.add_typer(cli_dead_letters.dead, name="dead")


@contextlib.contextmanager
def _queues() -> Iterator[Queues]:
    from asyncworker.queues import Queues, open_broker

    with open_broker(load()) as broker:
        yield Queues(broker)


def queues(as_json: Json = False) -> None:
    """Show how every queue stands.

    running: living workers have fetched them; lost: dead workers had, and no one has taken them back yet;
    oldest: how long the message at the front has waited.
    """
    with _queues() as known:
        found = known.all()
    if as_json:
        print_json({"queues": [queue.facts() for queue in found]})
    elif not found:
        say("the broker knows no queue yet: send a message, or start a worker")
    else:
        _print_queues(found)


def pause(queue: Name, as_json: Json = False) -> None:
    """Have no worker fetch a queue's messages.

    Sending goes on, and what workers have fetched already is run. It lasts until `resume`, for workers that are
    started later too.
    """
    with _queues() as known:
        name = known.known(queue)
        changed = known.pause(name)
        stands = known.look(name)
    _print_change(stands, changed, as_json, "is paused" if changed else f"was paused {age(stands.paused_ms)} ago")


def resume(queue: Name, as_json: Json = False) -> None:
    """Have a paused queue's messages fetched again."""
    with _queues() as known:
        name = known.known(queue)
        changed = known.resume(name)
        stands = known.look(name)
    _print_change(stands, changed, as_json, "goes on" if changed else "was not paused")


def purge(
    queue: Name,
    with_dead: Annotated[bool, typer.Option("--dead", help="The dead letters, too.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Drop a queue's waiting and delayed messages.

    What runs is left alone, and without --dead so are its dead letters. It says how many there are, and asks.
    """
    with _queues() as known:
        name = known.known(queue)
        most, stands = known.would_purge(name, dead=with_dead), known.look(name)
        parts = f"{most.waiting} waiting and {counted(most.delayed, 'delayed message')}"
        if with_dead:
            parts += f", {counted(most.dead, 'dead letter')}"
        left = f"{stands.running} running" + ("" if with_dead else f", {counted(stands.dead, 'dead letter')}")
        if most.total and not dry_run:
            ask(f"queue {name}: {parts} would be dropped for good; left alone: {left}", "Drop them?", yes=yes)
            most = known.purge(name, dead=with_dead)
    if as_json:
        dropped = {"waiting": most.waiting, "delayed": most.delayed, "dead": most.dead}
        print_json({"queue": name, "dry_run": dry_run, **dropped})
    elif dry_run:
        say(f"queue {name}: {parts} would be dropped; left alone: {left}")
    else:
        dead_too = f" and {counted(most.dead, 'dead letter')}" if with_dead else ""
        say(f"queue {name}: dropped {most.waiting} waiting, {most.delayed} delayed{dead_too}")


def _print_change(stands: Queue, changed: bool, as_json: bool, what: str) -> None:
    if as_json:
        print_json(stands.facts() | {"changed": changed})
    else:
        say(f"queue {stands.name} {what}: {stands.waiting} waiting, {stands.delayed} delayed, {stands.running} running")


def _print_queues(found: list[Queue]) -> None:
    """A table of queues; a line for each where the terminal is too narrow."""
    rows = [_cells(queue) for queue in found]
    if table_width([HEADER, *rows]) > console.width:
        for queue in found:
            say(_queue_sentence(queue))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEADER:
        table.add_column(name, justify="left" if name in ("queue", "") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, style="dim" if cell == "0" else "") for cell in row[:-1]), Text(row[-1], "yellow"))
    console.print(table)


def _cells(queue: Queue) -> tuple[str, ...]:
    numbers = (queue.waiting, queue.delayed, queue.running, queue.lost, queue.dead)
    state = f"paused {age(queue.paused_ms)}" if queue.paused else ""
    return safe(queue.name), *map(str, numbers), age(queue.oldest_ms), state


def _queue_sentence(queue: Queue) -> str:
    parts = [f"{queue.waiting} waiting"] + ([f"oldest {age(queue.oldest_ms)}"] if queue.oldest_ms is not None else [])
    for name in ("delayed", "running", "lost", "dead"):
        if number := getattr(queue, name):
            parts.append(f"{number} {name}")
    return f"{queue.name}: {', '.join(parts)}" + (f"; paused {age(queue.paused_ms)}" if queue.paused else "")
