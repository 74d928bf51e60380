"""The commands `asyncworker once …`: steps that a person may have to decide, listed and decided."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from asyncworker.errors import NotThere
from asyncworker.settings import load
from asyncworker.terminal import CODES, Json, print_facts, print_json, safe, say

if TYPE_CHECKING:
    from asyncworker.once import Steps

once = typer.Typer(
    help='Steps of `session.once(..., on_lost="unknown")` whose outcome no one may know: list or decide them.',
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Decision(StrEnum):
    """What a person has found out."""

    done = "done"
    open = "open"


@contextlib.contextmanager
def _steps() -> Iterator[Steps]:
    from asyncworker.broker import make_broker
    from asyncworker.middleware import steps_of
    from asyncworker.queues import open_broker

    settings = load()
    if settings.broker_url is None or not settings.broker_url.is_rabbitmq:
        with open_broker(settings) as broker:
            yield steps_of(broker)
        return
    with contextlib.closing(make_broker(settings)) as other:
        yield steps_of(other)


@once.command("list", epilog=CODES)
def list_steps(as_json: Json = False) -> None:
    """Show the steps that a person has to decide, and those that are held and may become such."""
    with _steps() as steps:
        found = steps.records.undecided()
    if as_json:
        print_json({"steps": [asdict(each) for each in found]})
        return
    if not found:
        say("there is nothing to decide")
    for each in found:
        at = f"{datetime.fromtimestamp(each.since_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
        state = "unknown" if each.state == "unknown" else "held, its holder is silent" if each.is_over else "held"
        say(f"{safe(each.step)}: {state} since {at}, by message {safe(each.message)} on {safe(each.worker)}")


@once.command(epilog=CODES)
def resolve(
    step: Annotated[str, typer.Argument(help="The step, as `list` and the dead letter's error show it.")],
    decision: Annotated[
        Decision, typer.Argument(help="done: its effect took place; open: it did not, the next attempt runs it.")
    ],
    value: Annotated[str, typer.Option(help="With done: what `step.value` gives from now on, as JSON.")] = "null",
    as_json: Json = False,
) -> None:
    """Say what became of a step. Then put its message back: `asyncworker dead retry ID`."""
    try:
        json.loads(value)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{value} is no JSON: {error}; a text is written '\"text\"'") from None
    with _steps() as steps:
        resolved = steps.records.resolve(step, decision, value, steps.kept_ms)
    if not resolved:
        raise NotThere(
            f"there is nothing to decide about a step {step!r}: there is none, it is done, or a living worker is at "
            "it; `asyncworker once list` shows those that there are",
            name=step,
        )
    print_facts({"step": step, "state": str(decision)}, as_json, f"step {safe(step)} is {decision} from now on")
