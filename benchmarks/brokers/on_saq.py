"""SAQ on Redis: each of its coroutines waits in the store for a message (BLMOVE)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from _stamps import parameters, stamp
from saq import Queue

queue = Queue.from_url(parameters["url"])


async def note(context: dict[str, Any], *, number: int) -> None:
    stamp(number)


settings = {"queue": queue, "functions": [note], "concurrency": parameters["threads"]}


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[None]:
    await queue.connect()
    try:
        yield
    finally:
        await queue.disconnect()


# ttl=-1, as everywhere here: nothing is kept of a message that has ended.


async def send(number: int) -> None:
    await queue.enqueue("note", number=number, ttl=-1)


async def later(number: int, delay_ms: int) -> None:
    await queue.enqueue("note", number=number, ttl=-1, scheduled=int(time.time() + delay_ms / 1000))
