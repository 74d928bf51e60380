"""Tests wait for facts, with a deadline; never for a guess."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

#: By how much a loaded machine may make anything late, a process of its own included. An upper bound in a test is what
#: is promised and this, where no fact can take the place of the clock; what would be wrong has to take longer.
BUSY_S = 6.0

#: How often a watched loop, and the thread beside it, are to be served.
TICK_S = 0.005


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
    """How long the running loop was not served at the most, in seconds in which this process could have served it.

    A thread beside the loop counts them, and no clock: a machine that has no core for the process holds up both, and
    what blocks the loop holds up the loop alone.
    """

    longest_s: float = 0.0
    _unserved: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def served(self) -> None:
        self._unserved = 0

    def count(self) -> None:
        while not self._over.wait(TICK_S):
            self._unserved += 1
            self.longest_s = max(self.longest_s, self._unserved * TICK_S)

    def end(self) -> None:
        self._over.set()


@contextlib.asynccontextmanager
async def loop_watched() -> AsyncIterator[LoopWatch]:
    """Tick on the loop during the block, and beside it."""
    watch = LoopWatch()

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            watch.served()

    ticking = asyncio.create_task(tick())
    beside = threading.Thread(target=watch.count, name="beside the loop")
    beside.start()
    try:
        yield watch
    finally:
        watch.end()
        beside.join()
        ticking.cancel()
