"""Tests wait for facts, with a deadline; never for a guess."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


def wait_until(fact: Callable[[], T], what: str, *, timeout_ms: int = 30_000) -> T:
    """Return what `fact()` returns as soon as that is true.

    Raises:
        AssertionError: When it was not within `timeout_ms`; it says `what` was waited for, and the last value.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    while not (value := fact()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_ms} ms: {what} (last: {value!r})")
        time.sleep(0.01)
    return value


async def eventually(fact: Callable[[], T], what: str, *, timeout_ms: int = 30_000) -> T:
    """`wait_until` on a loop, which goes on meanwhile."""
    deadline = time.monotonic() + timeout_ms / 1000
    while not (value := fact()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_ms} ms: {what} (last: {value!r})")
        await asyncio.sleep(0.01)
    return value


@dataclass
class LoopWatch:
    """How long the running loop was not served at the most, in seconds."""

    longest_s: float = 0.0
    _served_at: float = field(default_factory=time.monotonic)

    def note(self) -> None:
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - self._served_at)
        self._served_at = now


@contextlib.asynccontextmanager
async def loop_watched() -> AsyncIterator[LoopWatch]:
    """Tick on the loop during the block."""
    watch = LoopWatch()

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.005)
            watch.note()

    ticking = asyncio.create_task(tick())
    try:
        yield watch
    finally:
        watch.note()
        ticking.cancel()
