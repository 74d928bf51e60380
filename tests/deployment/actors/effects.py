"""Actors whose effects lie in a database outside: how often each took place is what the tests look at."""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import dramatiq

from asyncworker import Session, actor, get_broker

#: So that a test that fails leaves no worker waiting.
LONGEST_S = 60


def note(directory: str, event: str) -> None:
    with (Path(directory) / "events").open("a") as file:
        file.write(f"{event}\n")


def insert(directory: str, key: str, *, unique: str | None = None) -> None:
    """Add a row; where it is unique by `unique`, it may be there already."""
    with closing(sqlite3.connect(Path(directory) / "effects.db", timeout=30)) as database, database:
        database.execute("INSERT OR IGNORE INTO effects (key, once) VALUES (?, ?)", (key, unique))


async def until(path: Path) -> None:
    ends = time.monotonic() + LONGEST_S
    while not path.exists() and time.monotonic() < ends:
        await asyncio.sleep(0.01)


@actor(queue_name="effects", store_results=True, max_retries=5, min_backoff=50, max_backoff=100)
async def buy(
    session: Session, directory: str, key: str, *, on_lost: Any = "open", pause: str = "before", confirm: bool = False
) -> dict[str, Any]:
    """Insert once. It waits for the file `go`, before the effect or between it and its completion."""
    go = Path(directory) / "go"
    async with session.once("insert", key, on_lost=on_lost) as step:
        was_done = step.done
        if not step.done:
            note(directory, f"entered {session.attempt.fence}")
            if pause == "before":
                await until(go)
            if confirm:
                await step.confirm()
            await asyncio.to_thread(insert, directory, key, unique=step.id if pause == "after" else None)
            if pause == "after":
                note(directory, "inserted")
                await until(go)
            step.value = {"by": session.attempt.message_id}
    return {"was_done": was_done, "value": step.value, "fence": session.attempt.fence}


if get_broker().can_guard:  # the deployment is also served from RabbitMQ, where such actors are refused

    @dramatiq.actor(queue_name="effects", delivery="at_most_once")
    def pay(directory: str, key: str, *, fail: bool = False) -> None:
        """Insert, and wait for the file `go`."""
        insert(directory, key)
        note(directory, "paid")
        if fail:
            raise RuntimeError("after the effect")
        ends = time.monotonic() + LONGEST_S
        while not (Path(directory) / "go").exists() and time.monotonic() < ends:
            time.sleep(0.01)

    @dramatiq.actor(queue_name="effects", unique="{key}", store_results=True, max_retries=3, min_backoff=500)
    def single(directory: str, key: str, *, failures: int = 0) -> int:
        """Insert, fail so often, and wait for the file `go`; returns how often it was inserted."""
        insert(directory, key)
        note(directory, "ran")
        with closing(sqlite3.connect(Path(directory) / "effects.db", timeout=30)) as database:
            (count,) = database.execute("SELECT count(*) FROM effects WHERE key = ?", (key,)).fetchone()
        if count <= failures:
            raise RuntimeError("told to fail")
        ends = time.monotonic() + LONGEST_S
        while not (Path(directory) / "go").exists() and time.monotonic() < ends:
            time.sleep(0.01)
        return int(count)
