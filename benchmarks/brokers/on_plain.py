"""Plain Dramatiq as its manual sets it up: the Redis broker with its default middleware, and AsyncIO."""

from __future__ import annotations

import asyncio

import dramatiq
from _stamps import parameters, stamp
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO

broker = RedisBroker(url=parameters["url"])  # type: ignore[no-untyped-call]
broker.add_middleware(AsyncIO())
dramatiq.set_broker(broker)


@dramatiq.actor
async def note(number: int) -> None:
    stamp(number)


@dramatiq.actor
async def held(number: int) -> None:
    stamp(number)
    if parameters["holds"]:
        await asyncio.sleep(3_600)


send = note.send
hold = held.send


def later(number: int, delay_ms: int) -> None:
    note.send_with_options(args=(number,), delay=delay_ms)
