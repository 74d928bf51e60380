"""How much of the store's memory the ledger takes: rows as a worker writes them, in a Valkey of this script's own.

Each message is one attempt of an actor with a session: its row is opened, gains its browser and its identity, is
closed with its phases, and then gains the time of the close, as in a worker. Some messages fail and are run again.
What a row takes is the growth of the store's `used_memory`, divided; the settings' default is what that is scaled to.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import redis
from _harness import Check, Report, main, say
from rich.table import Table

from asyncworker import embedded
from asyncworker.identity import MAX_SEED
from asyncworker.ledger import Kept, Outcome, RedisLedger, Row
from asyncworker.settings import load

#: Required: as many rows as the ledger keeps by default, in MiB, and how many messages a day these are enough for.
MOST_MIB = 1024
MESSAGES = 1_000_000

ACTORS = ("pages.title", "catalogue.product", "search.results")

#: An error's text, as long as Playwright's usual one for a page that did not load.
ERROR = 'TimeoutError: Page.goto: Timeout 30000ms exceeded.\nCall log:\n  - navigating to "https://shop.example/p/1"'


def measure(options: argparse.Namespace) -> Report:
    count = 10_000 if options.quick else options.rows
    figures = {}
    for name, again in (("each succeeds", 0.0), ("one of ten is run again", 0.1)):
        figures[name] = bytes_of_a_row(count, again=again)
        say(f"{name}: {figures[name]:.0f} bytes a row")
    return judge(figures, count)


def bytes_of_a_row(count: int, *, again: float) -> float:
    """What a row takes in a store of its own, where so many messages of one have a second attempt."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with redis.Redis(unix_socket_path=str(embedded.ensure(Path(folder)))) as client:
                before = _used(client)
                written = write(client, count, random.Random(again), again=again)
                return (_used(client) - before) / written
        finally:
            embedded.stop(Path(folder))


def write(client: redis.Redis, count: int, draw: random.Random, *, again: float) -> int:
    """Write at least so many rows; returns how many they are."""
    settings = load({})
    ledger = RedisLedger(client, kept=Kept(settings.ledger_age_ms, settings.ledger_rows))
    written = 0
    while written < count:
        message_id, seed, actor = (
            str(uuid.UUID(int=draw.getrandbits(128))),
            draw.randint(0, MAX_SEED),
            draw.choice(ACTORS),
        )
        outcomes = [Outcome.succeeded] if draw.random() >= again else [Outcome.failed, Outcome.succeeded]
        for outcome in outcomes:
            began_ms = int(time.time() * 1000)
            worker = f"worker-{draw.randrange(16):02}.shop.internal:{draw.randrange(2, 4_000_000)}"
            row = Row(message_id, 0, actor, seed, worker, began_ms, phase="wait")
            row = replace(ledger.open(row), generation=draw.randrange(1, 40), phase="context")
            row = replace(row, identity=f"{draw.getrandbits(48):012x}", drawn_by="invisible_core 53.48.0", phase="code")
            ledger.close(row)
            phases = tuple(draw.randrange(most) for most in (900, 9, 90, 30_000))
            error = None if outcome is Outcome.succeeded else ERROR
            row = replace(row.closed(outcome, began_ms + sum(phases)), phases=phases, error=error)
            ledger.close(row)
            ledger.note(replace(row, phases=(*phases, draw.randrange(900))), at_any_cost=True)
            written += 1
    return written


def _used(client: redis.Redis) -> int:
    memory: dict[str, int] = client.info("memory")  # type: ignore[assignment]
    return memory["used_memory"]


def judge(figures: dict[str, float], count: int) -> Report:
    kept = load({}).ledger_rows
    table = Table(title=f"{count} rows, scaled to {kept:,}, which are kept by default")
    for column in ("messages", "bytes a row", f"MiB of {kept:,} rows", f"MiB of {MESSAGES:,} rows"):
        table.add_column(column, justify="left" if column == "messages" else "right")
    for name, size in figures.items():
        table.add_row(name, f"{size:.0f}", f"{_mib(size * kept):.0f}", f"{_mib(size * MESSAGES):.0f}")
    checks = [
        Check("MiB of the rows that are kept by default", _mib(max(figures.values()) * kept), "<=", MOST_MIB),
        Check("rows that are kept by default", kept, ">=", MESSAGES),
    ]
    sizes = {name: round(size, 1) for name, size in figures.items()}
    return Report(checks, {"rows": count, "kept_rows": kept, "bytes_a_row": sizes}, table)


def _mib(size: float) -> float:
    return size / 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=100_000, help="rows to write")


def run(argv: Sequence[str] | None = None) -> int:
    return main(__doc__, measure, add_options=add_options, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
