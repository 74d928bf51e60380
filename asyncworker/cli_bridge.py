"""The command `asyncworker celery bridge`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncworker.errors import ConfigurationError
from asyncworker.settings import load
from asyncworker.terminal import Json, counted, cut, errors, print_facts, say

if TYPE_CHECKING:
    from asyncworker.celery.bridge import Bridge, Report

CODES = (
    "Exit code 0: stopped in order, or with --once all of it is here; 1: the same, but messages that cannot be read "
    "are left at the source; 2: it cannot be done, and why."
)


def add_to(group: typer.Typer) -> None:
    """Register the command."""
    group.command(epilog=CODES)(bridge)


def bridge(
    source: Annotated[
        str,
        typer.Option("--from", metavar="URL", help="The app's broker_url: redis://, rediss://, sentinel://, amqp://."),
    ],
    queue: Annotated[list[str] | None, typer.Option(help="A queue of Celery's; repeatable; none: celery.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when there is nothing left to take.")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="One of the app's broker_transport_options; repeatable."),
    ] = None,
    max_priority: Annotated[
        int | None, typer.Option(min=1, max=255, help="With RabbitMQ, x-max-priority of the queues, if they have one.")
    ] = None,
    lease_ms: Annotated[
        int, typer.Option(min=1_000, help="With Redis, a bridge that is silent for so long has died.")
    ] = 30_000,
    as_json: Json = False,
) -> None:
    """Take the messages of an existing Celery broker and enqueue them here, for producers that cannot change yet.

    Each is acknowledged there when it is enqueued here. Tasks with an eta are delayed here, and keep their priority.
    SIGTERM or Ctrl-C stops it in order; one that is killed loses nothing: the next takes what it held.
    """
    if importlib.util.find_spec("celery") is None:
        raise ConfigurationError("the bridge needs Celery, which is not installed: pip install 'asyncworker[celery]'")
    options = dict(_option(each) for each in option or [])
    with _bridge(source, queue or ["celery"], options, max_priority, lease_ms) as made, _stopped_by_signals(made):
        report = made.run(once=once)
    print_facts(report.facts(), as_json, _sentence(report))
    raise typer.Exit(1 if report.left else 0)


@contextlib.contextmanager
def _bridge(
    url: str, queues: list[str], options: dict[str, Any], max_priority: int | None, lease_ms: int
) -> Iterator[Bridge]:
    from asyncworker.broker import make_broker
    from asyncworker.celery.bridge import Bridge, open_source
    from asyncworker.celery.stores import store_of
    from asyncworker.urls import SecretUrl

    source = open_source(SecretUrl(url), queues, options=options, max_priority=max_priority, lease_ms=lease_ms)
    with contextlib.closing(make_broker(load())) as broker, contextlib.closing(store_of(None)) as marks:
        yield Bridge(source, broker, marks, on_news=lambda line: say(cut(line), errors))


@contextlib.contextmanager
def _stopped_by_signals(made: Bridge) -> Iterator[None]:
    before = {each: signal.signal(each, lambda *_: made.stop()) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ConfigurationError(f"--option {text} is no name=value, as in --option visibility_timeout=3600")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _sentence(report: Report) -> str:
    words = f"{counted(report.moved, 'message')} came over"
    if report.known:
        words += f"; {report.known} had come before, from a bridge that died"
    if report.left:
        words += f"; {counted(len(report.left), 'message')} that cannot be read are left at the source"
    if report.with_workers:
        words += (
            f"; {counted(report.with_workers, 'message')} are with Celery's own workers: stop those, and if they have "
            "died, --option visibility_timeout=SECONDS, as the app has it, brings back what they held for so long"
        )
    return words
