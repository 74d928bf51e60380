"""The command `asyncworker health`: what the worker processes of this deployment on this host say of themselves."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from asyncworker.health_sockets import ask_all, members, together
from asyncworker.probing import State
from asyncworker.settings import load
from asyncworker.terminal import Json, age, console, print_json, safe, say

#: 2 is every command's for what cannot be done.
EXIT_CODES = {State.ready: 0, State.sick: 1, None: 3, State.starting: 4, State.draining: 5}

HEADER = ("pid", "state", "for", "browser", "slots", "last probe", "reason")

CODES = (
    "Exit code 0: ready; 1: sick; 2: it cannot be asked, and why; 3: there is no worker; 4: starting; 5: draining. Of "
    "several workers it is the worst one's, in the order sick, starting, draining."
)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(epilog=CODES)(health)


def health(
    pid: Annotated[int | None, typer.Option(help="Only this worker process.", min=1)] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Exit code 0 unless one cannot help itself: frozen, or its loop is blocked.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask all worker processes of this deployment on this host how they are: starting, ready, draining or sick.

    One that does not answer within two seconds is sick. Whose they are is told by the state directory.
    """
    settings = load()
    asked = [each for each in members(settings) if pid is None or each.owner.pid == pid]
    answers = ask_all(asked)
    state = together(answers)
    is_live = bool(answers) and all(answer["live"] for answer in answers)
    if as_json:
        print_json({"state": state, "live": is_live, "workers": answers})
    elif answers:
        _print(answers)
    else:
        which = "" if pid is None else f" with the pid {pid}"
        say(f"there is no worker process{which} on this host of the deployment in {settings.state_dir}")
    raise typer.Exit(_exit_code(state, is_live, live))


def _exit_code(state: State | None, is_live: bool, only_live: bool) -> int:
    if only_live and state is not None:
        return 0 if is_live else 1
    return EXIT_CODES[state]


def _print(answers: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEADER:
        table.add_column(name, no_wrap=name != "reason")
    for answer in answers:
        table.add_row(*(Text(safe(cell)) for cell in _cells(answer)))
    console.print(table)


def _cells(answer: dict[str, Any]) -> tuple[str, ...]:
    now = round(time.time() * 1000)
    slots = "-" if answer["slots"] is None else f"{answer['slots_in_use']} of {answer['slots']}"
    probe = "-"
    if (last := answer["probe"]) is not None:
        said = "failed after" if last["failure"] else "passed in"
        probe = f"{age(max(0, now - last['at_ms']))} ago, {said} {last['ms']} ms"
    since = age(max(0, now - answer["since_ms"]))
    browser = "-" if answer["browser"] is None else str(answer["browser"])
    return str(answer["pid"]), answer["state"], since, browser, slots, probe, answer["reason"]
