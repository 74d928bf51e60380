"""The actor of the chaos run: a page, and an effect in a database outside that is guarded by a step."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from reading import read

from asyncworker import Session, actor

#: Around the effect the code waits for up to so long, so that a kill finds it before, in and after it.
PAUSE_S = 0.04


@actor(
    actor_name="visits.visit",
    store_results=True,
    max_retries=12,
    min_backoff=200,
    max_backoff=2_000,
    time_limit=20_000,
)
async def visit(
    session: Session, folder: str, url: str, number: int, *, trap: str = "", traps: int = 0, seed: int | None = None
) -> str:
    """Read a page, and have an effect once.

    Parameters:
        trap: A page that ends its renderer, which the first `traps` attempts open instead.
    """
    began = time.monotonic()
    title = await read(session.page, trap if session.attempt.number <= traps else url)
    note(Path(folder) / "pages", began, time.monotonic())
    async with session.once("effect", number) as step:
        if not step.done:
            await asyncio.sleep(session.random.uniform(0, PAUSE_S))
            await asyncio.to_thread(apply, Path(folder) / "effects.db", step.id, session.attempt.message_id)
            await asyncio.sleep(session.random.uniform(0, PAUSE_S))
            step.value = title
    return title


def note(path: Path, *times: float) -> None:
    """Add a line, with this process's number, in one write."""
    with path.open("ab", buffering=0) as file:
        file.write(f"{os.getpid()} {' '.join(map(str, times))}\n".encode())


def apply(path: Path, once: str, message_id: str) -> None:
    """The effect, unique by the step, and beside it that it was asked for, in one transaction."""
    with closing(sqlite3.connect(path, timeout=60)) as database, database:
        added = database.execute("INSERT OR IGNORE INTO effects VALUES (?, ?)", (once, message_id)).rowcount
        database.execute("INSERT INTO asked VALUES (?, ?, ?)", (once, message_id, added))
