"""The commands `asyncworker pace …`: which sites are asked how often, and by whom that is changed at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from asyncworker.settings import load
from asyncworker.terminal import CODES, Json, age, console, counted, print_json, safe, say, table_width

if TYPE_CHECKING:
    from asyncworker.paces import Key

HEADER = ("site", "exit", "rate", "last min", "waiting", "running", "")

pace = typer.Typer(
    help="Show how often sites are asked, and change it for all workers at once.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

Site = Annotated[str, typer.Argument(metavar="KEY", help="A host, for all its exits; or one key, as host|exit.")]
Name = Annotated[
    str,
    typer.Argument(metavar="HOST", help="A host, with or without its port, *.domain, default, or one key: host|exit."),
]


@pace.callback()
def show(context: typer.Context, as_json: Json = False) -> None:
    """Show each key that was used within a day, or that messages wait for.

    last min: requests that were let go in the last 60 seconds; waiting: messages in line, which no worker holds.
    """
    if context.invoked_subcommand is not None:
        return
    from asyncworker.paces import open_paces

    with open_paces(load()) as paces:
        keys, rates = paces.all(), paces.rates()
    if as_json:
        print_json({"keys": [key.facts() for key in keys], "rates": rates})
        return
    if keys:
        _print_keys(keys)
    else:
        say("no key was used within a day: no message of an actor with a pace was sent")
    for name, rate in rates.items():
        say(f"set at run time: {name} {rate}")


@pace.command("set", epilog=CODES)
def set_rate(
    host: Name, rate: Annotated[str, typer.Argument(help="As 2/s, 30/m, 1/10s or 10/h.")], as_json: Json = False
) -> None:
    """Set a rate for all workers, from now on; it goes before what actors and the file of paces say."""
    from asyncworker.paces import open_paces

    with open_paces(load()) as paces:
        keys = paces.set_rate(host, rate)
    _print_change(keys, as_json, f"{host} is asked {rate} from now on", {"name": host, "rate": rate})


@pace.command("unset", epilog=CODES)
def unset_rate(host: Name, as_json: Json = False) -> None:
    """Take back what `set` has set: the rate of actors and of the file of paces holds again."""
    from asyncworker.paces import open_paces

    with open_paces(load()) as paces:
        keys = paces.unset_rate(host)
    _print_change(keys, as_json, f"{host} has its own rate again", {"name": host})


@pace.command(epilog=CODES)
def hold(
    key: Site,
    duration: Annotated[
        str | None, typer.Option("--for", help="As 90s, 10m or 2h; none: until release, for 31 days at most.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for whoever looks.")] = "by hand",
    as_json: Json = False,
) -> None:
    """Let no message of a site go. What runs goes on; what is due waits in line."""
    from asyncworker.paces import duration_ms, open_paces

    for_ms = None if duration is None else duration_ms(duration)
    with open_paces(load()) as paces:
        keys = paces.hold(key, for_ms=for_ms, reason=reason)
    _print_states(keys, as_json)


@pace.command(epilog=CODES)
def release(key: Site, as_json: Json = False) -> None:
    """End a hold, whoever made it, and all that is left of a site's slowing down."""
    from asyncworker.paces import open_paces

    with open_paces(load()) as paces:
        released = paces.release(key)
    if as_json:
        print_json({"keys": [each.facts() | {"changed": changed} for each, changed in released]})
        return
    for each, changed in released:
        say(f"{each.name} {'goes on' if changed else 'was not held'}: {_waiting(each)}")


def _print_states(keys: list[Key], as_json: bool) -> None:
    if as_json:
        print_json({"keys": [each.facts() for each in keys]})
        return
    for each in keys:
        say(f"{each.name} is {_state(each)}: {_waiting(each)}")


def _print_change(keys: list[Key], as_json: bool, sentence: str, facts: dict[str, object]) -> None:
    if as_json:
        print_json(facts | {"keys": [each.facts() for each in keys]})
        return
    known = ", ".join(each.name for each in keys) or "no key that is known yet"
    say(f"{sentence}; that is: {known}")


def _waiting(key: Key) -> str:
    return f"{counted(key.state.waiting, 'message')} in line, {key.state.running} running"


def _state(key: Key) -> str:
    """Held, slowed, or out of its budget, in words; empty: nothing of it."""
    state, words = key.state, []
    if key.held_ms is not None:
        words.append(f"held for {age(key.held_ms)}" + (f" ({state.reason})" if state.reason else ""))
    if state.slowed:
        words.append(f"slowed to 1/{2**state.slowed}")
    if state.budget is not None:
        words.append(f"{state.spent} of {state.budget} today")
    return ", ".join(words)


def _print_keys(keys: list[Key]) -> None:
    """A table; a line for each key where the terminal is too narrow."""
    rows = [_cells(key) for key in keys]
    if table_width([HEADER, *rows]) > console.width:
        for key in keys:
            say(_sentence(key))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEADER:
        table.add_column(name, justify="right" if name in HEADER[3:6] else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, style="dim" if cell == "0" else "") for cell in row[:-1]), Text(row[-1], "yellow"))
    console.print(table)


def _cells(key: Key) -> tuple[str, ...]:
    state = key.state
    numbers = (state.used, state.waiting, state.running)
    return safe(state.subject), safe(state.exit), state.rate or "-", *map(str, numbers), safe(_state(key))


def _sentence(key: Key) -> str:
    state, more = key.state, _state(key)
    rate = state.rate or "no rate"
    return f"{key.name}: {rate}, {state.used} in the last minute, {_waiting(key)}" + (f"; {more}" if more else "")
