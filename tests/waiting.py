"""Tests wait for facts, with a deadline; never for a guess."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
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
