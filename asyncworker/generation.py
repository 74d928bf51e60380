"""A generation is one launched browser; a lease is a context of it, lent for one session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from asyncworker.engines import Launched
from asyncworker.errors import BrowserCrashed

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

T = TypeVar("T")


class Clock(Protocol):
    """The time that the host measures and sleeps by; tests pass one that takes no time."""

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class LoopClock:
    """The running loop's own time."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(eq=False)
class Generation:
    """The n-th launch of this process and whoever uses it."""

    number: int
    key: Hashable
    launched: Launched
    gone: asyncio.Future[None]
    leases: int = 0
    retired: bool = False
    lost: str | None = None
    used_at: float = 0.0
    ending: asyncio.Task[None] | None = None
    watchers: list[Callable[[str], None]] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return not self.retired and self.lost is None


@dataclass(eq=False)
class Lease:
    """A context lent for one session, with its page open, and what the code opened beside it."""

    generation: Generation
    browser: Browser
    context: BrowserContext
    page: Page
    others: list[BrowserContext] = field(default_factory=list)


def crashed(engine: str, generation: Generation) -> BrowserCrashed:
    """The error of a message whose browser died."""
    reason = generation.lost or "it closed the connection"
    return BrowserCrashed(
        f"browser {generation.number} ({engine}) died under this attempt: {reason}; it is retried with the same seed",
        engine=engine,
        generation=generation.number,
    )


async def shielded(work: Awaitable[T]) -> T:
    """Await bounded `work` to its end even when cancelled meanwhile, then let the cancellation go on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
