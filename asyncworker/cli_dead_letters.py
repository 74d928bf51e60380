"""The commands `asyncworker dead …`: dead letters listed, shown, retried, discarded."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from asyncworker.errors import ConfigurationError
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
    cut,
    errors,
    one_line,
    print_json,
    safe,
    say,
    table_width,
)

if TYPE_CHECKING:
    from asyncworker.dead_letters import DeadLetters, Done, Letter, Selection
    from asyncworker.ledger import Row

#: As many dead letters are listed, unless told otherwise.
LISTED = 50

HEADER = ("id", "died", "queue", "actor", "seed")

#: With less room than this for the error, a table of dead letters would tell too little.
LEAST_ROOM = 24

#: Of an id a list shows so much; a command takes it for the whole.
SHORT_ID = 8

#: As many refusals are told one by one.
REFUSALS = 10

#: Options that have a line of their own.
TOLD_ELSEWHERE = {
    "retries",
    "crashes",
    "traceback",
    "last_error",
    "redis_message_id",
    "requeue_timestamp",
    "eta",
    "identity_seed",
    "identity_digest",
    "identity_drawn_by",
}

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_ms(text: str) -> int:
    """A duration as it is typed, in ms: 90s, 15m, 2h, 3d.

    Raises:
        typer.BadParameter: When it is none, or has no unit.
    """
    matched = re.fullmatch(r"([0-9]{1,12})\s*([a-z]+)", text.strip())
    if matched is None or matched[2] not in _UNITS_MS:
        raise typer.BadParameter(f"{text!r} is no age; write it as 500ms, 90s, 15m, 2h or 3d")
    return int(matched[1]) * _UNITS_MS[matched[2]]


Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids, or how they begin.")]
All = Annotated[bool, typer.Option("--all", help="All of them.")]
OfQueue = Annotated[str | None, typer.Option("--queue", help="Of this queue only.")]
OfActor = Annotated[str | None, typer.Option("--actor", help="Of this actor only.")]
OfError = Annotated[str | None, typer.Option("--error", help="With this text in the error or its traceback.")]
OfSeed = Annotated[int | None, typer.Option("--seed", help="With this seed only.")]
Older = Annotated[
    int | None, typer.Option(parser=duration_ms, metavar="AGE", help="That died longer ago: 90s, 15m, 2h, 3d.")
]
Younger = Annotated[
    int | None, typer.Option(parser=duration_ms, metavar="AGE", help="That died less long ago: 90s, 15m, 2h, 3d.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many, the latest first.")]

dead = typer.Typer(
    help="Dead letters, the messages that were given up: list, show, retry or discard them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@contextlib.contextmanager
def _dead_letters() -> Iterator[DeadLetters]:
    from asyncworker.dead_letters import DeadLetters
    from asyncworker.queues import open_broker

    with open_broker(load()) as broker:
        yield DeadLetters(broker)


@dead.command("list", epilog=CODES)
def list_dead(
    queue: OfQueue = None,
    actor: OfActor = None,
    error: OfError = None,
    seed: OfSeed = None,
    older_than: Older = None,
    younger_than: Younger = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the latest first.")] = LISTED,
    as_json: Json = False,
) -> None:
    """List them, the latest first."""
    from asyncworker.dead_letters import Wanted

    with _dead_letters() as letters:
        wanted = Wanted(queue, actor, error, seed, older_than, younger_than)
        found = [letter.facts() for letter in islice(letters.find(wanted), limit + 1)]
    more, found = len(found) > limit, found[:limit]
    if as_json:
        print_json({"dead": found, "more": more})
        return
    _print_letters(found)
    if not found:
        say("no dead letters" if wanted == Wanted() else "no dead letter is like that")
    if more:
        say(f"there are more than {limit}: --limit shows them", errors)


@dead.command(epilog=CODES)
def show(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="The message's id, or how it begins.")],
    as_json: Json = False,
) -> None:
    """Show all that is known of one.

    Its arguments, seed, identity, error, times and options, and its attempts in the ledger.
    """
    with _dead_letters() as letters:
        (letter,) = letters.named([identifier])
        rows = letters.attempts(letter)
    if as_json:
        print_json(letter.all_facts() | {"attempts": [asdict(row) for row in rows]})
    else:
        _print_letter(letter, rows)


@dead.command(epilog=CODES)
def retry(
    ids: Ids = None,
    queue: OfQueue = None,
    actor: OfActor = None,
    error: OfError = None,
    seed: OfSeed = None,
    older_than: Older = None,
    younger_than: Younger = None,
    limit: Limit = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Put them back in their queues.

    They keep their seeds, arguments and options, and have all of their retries again. Name them by id, by filters,
    or take --all. Those that are not named by id are shown first, and it asks.
    """
    filters = (queue, actor, error, seed, older_than, younger_than)
    with _dead_letters() as letters:
        selection = _selected(letters, ids or [], filters, limit, everything)
        if not dry_run and selection.places:
            _ask_for(selection, "would be put back in their queues", "Put them back?", yes or bool(ids))
        done = None if dry_run else letters.retry(selection.places)
    _print_done(selection, done, as_json, "put back", "retried")


@dead.command(epilog=CODES)
def discard(
    ids: Ids = None,
    queue: OfQueue = None,
    actor: OfActor = None,
    error: OfError = None,
    seed: OfSeed = None,
    older_than: Older = None,
    younger_than: Younger = None,
    limit: Limit = None,
    everything: All = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Drop them for good.

    Name them by id, by filters, or take --all. Those that are not named by id are shown first, and it asks.
    """
    filters = (queue, actor, error, seed, older_than, younger_than)
    with _dead_letters() as letters:
        selection = _selected(letters, ids or [], filters, limit, everything)
        if not dry_run and selection.places:
            _ask_for(selection, "would be dropped for good", "Drop them?", yes or bool(ids))
        done = None if dry_run else letters.discard(selection.places)
    _print_done(selection, done, as_json, "dropped", "discarded")


def _selected(
    letters: DeadLetters, ids: list[str], filters: tuple[Any, ...], limit: int | None, everything: bool
) -> Selection:
    """The dead letters that a command line means.

    Raises:
        ConfigurationError: When it names none, or in two ways.
    """
    from asyncworker.dead_letters import Selection, Wanted

    wanted = Wanted(*filters)
    ways = [bool(ids), wanted != Wanted() or limit is not None, everything]
    if sum(ways) != 1:
        raise ConfigurationError(
            "say which dead letters: by their ids, by filters such as --actor or --limit, or all of them with --all"
            + ("; not in two ways at once" if any(ways) else "")
        )
    return Selection.of(letters.named(ids) if ids else islice(letters.find(wanted), limit))


def _ask_for(selection: Selection, what: str, question: str, yes: bool) -> None:
    """Show what will happen to which dead letters, and ask."""
    if not yes:
        _preview(selection)
    ask(f"{counted(len(selection.places), 'dead letter')} {what}", question, yes=yes)


def _preview(selection: Selection) -> None:
    for (actor, queue), count in selection.counts.most_common():
        say(f"{count:>7}  {actor or 'no message'}, queue {queue}", errors)
    for letter in selection.examples:
        line = f"         {letter.id[:SHORT_ID]} {letter.error or 'its worker has left no word of why'}"
        say(one_line(line, errors.width), errors)
    if len(selection.places) > len(selection.examples):
        say("         …", errors)


def _print_done(selection: Selection, done: Done | None, as_json: bool, verb: str, field: str) -> None:
    """Say what became of a selection; None: it was only looked at."""
    count, gone, refused = (done.count, done.gone, done.refused) if done else (0, 0, [])
    if as_json:
        facts = {"dry_run": done is None, "selected": len(selection.places), field: count, "gone": gone}
        print_json(facts | {"refused": [{"id": each, "reason": why} for each, why in refused]})
    elif done is None:
        _preview(selection)
        say(f"{counted(len(selection.places), 'dead letter')} would be {verb}")
    else:
        say(f"{counted(count, 'dead letter')} {verb}" + (f"; {gone} were there no longer" if gone else ""))
    for each, why in refused[:REFUSALS]:
        say(f"{each} cannot be {field}: {why}; `asyncworker dead discard {each}` drops it", errors)
    if len(refused) > REFUSALS:
        say(f"… and {len(refused) - REFUSALS} more cannot be {field}", errors)
    raise typer.Exit(1 if gone or refused else 0)


def _print_letters(found: list[dict[str, Any]]) -> None:
    """A table of dead letters; lines for each where the terminal is too narrow."""
    rows = [_cells(each) for each in found]
    room = console.width - table_width([HEADER, *rows]) - 2
    if not found or room < LEAST_ROOM:
        for each, (identifier, died, queue, actor, seed) in zip(found, rows, strict=True):
            say(f"{identifier} {actor}, queue {queue}, seed {seed}, {died}")
            say(one_line(f"  {each['error'] or '-'}", console.width))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*HEADER, "error"):
        table.add_column(name, no_wrap=True)
    for each, row in zip(found, rows, strict=True):
        table.add_row(*map(Text, row), Text(one_line(each["error"] or "-", room)))
    console.print(table)


def _cells(facts: dict[str, Any]) -> tuple[str, ...]:
    actor = "no message" if facts["unreadable"] else facts["actor"]
    seed = "-" if facts["seed"] is None else str(facts["seed"])
    words = (facts["id"][:SHORT_ID], _ago(facts["died_ms"]), facts["queue"], actor, seed)
    return tuple(one_line(word) for word in words)


def _print_letter(letter: Letter, rows: list[Row]) -> None:
    facts = letter.all_facts()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in _shown(letter, facts):
        table.add_row(name, Text(safe(cut(value))))
    console.print(table)
    for row in rows:
        took = "still open" if row.took_ms is None else f"{row.took_ms} ms"
        who = f", identity {row.identity}{' (another visitor than before)' if row.identity_changed else ''}"
        say(
            f"attempt {row.attempt}: {row.outcome} on {row.worker} at {_at(row.opened_ms)}, {took}"
            + (who if row.identity else "")
            + _phases(row)
            + (f": {' '.join(row.error.split())}" if row.error else "")
        )
    if letter.message and not rows:
        say("attempts: the ledger knows none; it keeps them for a day, and workers of plain Dramatiq write none")
    if letter.traceback is not None:
        say(cut(letter.traceback).rstrip())


def _phases(row: Row) -> str:
    if not row.phase:
        return ""
    times = ", ".join(f"{phase} {took_ms} ms" for phase, took_ms in row.phases_ms.items())
    return f", in phase {row.phase}" + (f" ({times})" if times else "")


def _shown(letter: Letter, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The names and values of what is known of a dead letter."""
    yield "id", letter.id
    if letter.id != letter.store_id:
        yield "id in the store", letter.store_id
    yield "queue", letter.place.queue
    yield "died", f"{_at(letter.place.died_ms)}, {_ago(letter.place.died_ms)}"
    yield "error", letter.error or "its worker has left no word of why"
    if letter.message is None:
        yield "body", "-" if letter.body is None else repr(letter.body)
        return
    yield "sent", _at(letter.message.message_timestamp)
    yield "actor", letter.message.actor_name
    yield "arguments", json.dumps(facts["args"], ensure_ascii=False)
    yield "keywords", json.dumps(facts["kwargs"], ensure_ascii=False)
    yield "seed", "-" if letter.seed is None else str(letter.seed)
    if (visitor := letter.visitor) is not None:
        yield "identity", f"{visitor.digest}, drawn by {visitor.drawn_by} for seed {visitor.seed}"
    yield "retries", f"{facts['retries']} after failures, {facts['crashes']} after crashes"
    options = {name: value for name, value in letter.options.items() if name not in TOLD_ELSEWHERE}
    if options:
        yield "options", json.dumps(options, ensure_ascii=False)


def _at(at_ms: float) -> str:
    """A moment, in UTC; `?` for what is none, since a body comes from outside."""
    try:
        return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "?"


def _ago(at_ms: int) -> str:
    return f"{age(max(0, int(time.time() * 1000) - at_ms))} ago"
