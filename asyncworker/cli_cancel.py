"""The command `asyncworker cancel`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from asyncworker.settings import load
from asyncworker.terminal import Json, print_json, safe, say

if TYPE_CHECKING:
    from asyncworker.cancelling import Cancellation

CODES = (
    "Exit code 0: none of them runs, or will; 1: one has succeeded, has not ended yet, is a dead letter or is unknown; "
    "2: it cannot be done, and why."
)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(epilog=CODES)(cancel)


def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="MESSAGE...", help="Ids of messages, as `send` prints them.")],
    wait_ms: Annotated[int, typer.Option("--wait-ms", min=0, help="How long to wait for the end of one that runs.")] = (
        10_000
    ),
    as_json: Json = False,
) -> None:
    """Cancel messages, whether they wait or run; none of them is run again by itself.

    What waits is dropped. What runs is ended as by its time limit: its code is cancelled and its context closed.
    """
    from asyncworker.broker import make_broker
    from asyncworker.cancelling import cancel_many
    from asyncworker.queues import open_broker

    settings = load()
    is_rabbitmq = settings.broker_url is not None and settings.broker_url.is_rabbitmq
    with contextlib.closing(make_broker(settings)) if is_rabbitmq else open_broker(settings) as broker:
        answers = cancel_many(ids, wait_ms=wait_ms, broker=broker)
    if as_json:
        print_json({"cancelled": [each.facts() for each in answers]})
    else:
        for each in answers:
            say(safe(sentence(each, wait_ms)))
    raise typer.Exit(0 if all(each.is_cancelled for each in answers) else 1)


def sentence(answer: Cancellation, wait_ms: int) -> str:
    """What became of one, in words."""
    what, on = f"message {answer.message_id}", f" on {answer.worker}" if answer.worker else ""
    match answer.found:
        case "waiting":
            return f"{what} was waiting and is dropped"
        case "delayed":
            return f"{what} was delayed and is dropped"
        case "lost":
            return f"{what} was with a worker that has died; it is dropped"
        case "running" if answer.outcome == "succeeded":
            return f"{what} was running{on} and has succeeded before its worker heard of this"
        case "running" if answer.is_cancelled:
            how = f" ({answer.outcome})" if answer.outcome else ""
            return f"{what} was running{on} and ended after {answer.took_ms} ms{how}"
        case "running":
            return (
                f"{what} is running{on} and has not ended within {wait_ms} ms; its worker ends it, or if that is dead "
                "the next one drops it"
            )
        case "ended" if answer.is_cancelled:
            return f"{what} had been cancelled already"
        case "ended":
            return f"{what} had ended already: {answer.outcome or 'how is not known'}"
        case "dead":
            return f"{what} is a dead letter, which no worker takes; `asyncworker dead discard` drops it"
        case "noted":
            return f"{what} is noted as cancelled: the worker that takes it drops it, or ends it if it is running"
    return f"the broker knows no message {answer.message_id}; should one come with that id, it is dropped"
