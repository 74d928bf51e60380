"""What both of taskiq's brokers here share. It has no delays without a scheduler, a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from _stamps import stamp
from taskiq import AsyncBroker


def set_up(broker: AsyncBroker) -> tuple[Callable[[int], Awaitable[Any]], Callable[[], Any]]:
    """How a producer of this broker sends, and how it is opened."""

    @broker.task(task_name="note")
    async def note(number: int) -> None:
        stamp(number)

    async def send(number: int) -> None:
        await note.kiq(number)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        await broker.startup()
        try:
            yield
        finally:
            await broker.shutdown()

    return send, opened
