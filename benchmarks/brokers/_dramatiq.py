"""The actors of plain Dramatiq and of this project's broker: declared on the broker that is the global one by then."""

from __future__ import annotations

import asyncio

import dramatiq
from _stamps import parameters, stamp


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
