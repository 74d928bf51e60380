"""arq: its worker looks for work every half second (`poll_delay`), its default."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from _stamps import parameters, stamp
from arq import ArqRedis, create_pool
from arq.connections import RedisSettings

settings = RedisSettings.from_dsn(parameters["url"])

_client: ArqRedis


async def note(context: dict[Any, Any], number: int) -> None:
    stamp(number)


class Worker:
    functions = (note,)
    redis_settings = settings
    max_jobs = parameters["threads"]
    keep_result = 0  # as everywhere here: nothing is kept of a message that has ended


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[None]:
    global _client
    _client = await create_pool(settings)
    try:
        yield
    finally:
        await _client.aclose()


async def send(number: int) -> None:
    await _client.enqueue_job("note", number)


async def later(number: int, delay_ms: int) -> None:
    await _client.enqueue_job("note", number, _defer_by=delay_ms / 1000)
