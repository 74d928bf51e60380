"""A generation is one launched browser; a lease is a context of it, lent for one session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from asyncworker.ending import Ending
from asyncworker.engines import Launched
from asyncworker.errors import BrowserCrashed, BrowserRecycled, ExitDrifted
from asyncworker.identity import Identity

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page


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
    identity: Identity
    launched: Launched
    gone: asyncio.Future[None]
    leases: int = 0
    retired: bool = False
    #: It has let a step pass its limit: nothing of it is waited for at length any more.
    wedged: bool = False
    lost: str | None = None
    used_at: float = 0.0
    launched_at: float = 0.0
    #: Contexts that were opened on it so far, and what its processes held when they were last looked at.
    contexts: int = 0
    memory_mb: float = 0.0
    #: When a page was last seen to finish a navigation, and when it was last probed, by the host's clock; None: never.
    proved_at: float | None = None
    probed_at: float | None = None
    failed_probes: int = 0
    #: The latest time, by the host's clock, at which the time limit of an attempt on it passes.
    busy_until: float = 0.0
    #: The next one has taken over; this one counts as no browser of `max_browsers` any more.
    replaced: bool = False
    #: It was ended with contexts open, since they outlasted the limit for that.
    cut_off: bool = False
    ending: asyncio.Task[None] | None = None
    watchers: list[Callable[[str], None]] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return not self.retired and self.lost is None


@dataclass(eq=False)
class Lease:
    """A context lent for one session, with its page open, and what the code opened beside it."""

    generation: Generation
    identity: Identity
    browser: Browser
    context: BrowserContext
    page: Page
    others: list[BrowserContext] = field(default_factory=list)
    ending: Ending = field(default_factory=Ending)


def crashed(engine: str, generation: Generation) -> BrowserCrashed:
    """The error of a message whose browser died, or was ended under it."""
    if generation.cut_off:
        return BrowserRecycled(
            f"browser {generation.number} ({engine}) was ended under this attempt: {generation.lost}; it is retried "
            "with the same seed and uses up no retry",
            engine=engine,
            generation=generation.number,
        )
    reason = generation.lost or "it closed the connection"
    return BrowserCrashed(
        f"browser {generation.number} ({engine}) died under this attempt: {reason}; it is retried with the same seed",
        engine=engine,
        generation=generation.number,
    )


def drifted(engine: str, generation: Generation, error: BaseException) -> ExitDrifted:
    """The error of a message under whose browser the proxy's exit changed."""
    return ExitDrifted(
        f"the proxy's exit changed under browser {generation.number} ({engine}), or could not be verified: {error}; "
        "the browser is replaced and the message run again with the same seed",
        engine=engine,
        generation=generation.number,
    )
