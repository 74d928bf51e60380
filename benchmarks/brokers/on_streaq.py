"""streaq: Redis streams and coredis."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from _stamps import parameters, stamp
from streaq import Worker

worker: Worker[None] = Worker(redis_url=parameters["url"], concurrency=parameters["threads"])


@worker.task(ttl=0)  # as everywhere here: nothing is kept of a message that has ended
async def note(number: int) -> None:
    stamp(number)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[None]:
    async with worker:
        yield


async def send(number: int) -> None:
    await note.enqueue(number)


async def later(number: int, delay_ms: int) -> None:
    await note.enqueue(number).start(delay=delay_ms // 1000)
