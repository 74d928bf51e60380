"""Recycler: when a browser has had its time, the next one is brought up beside it and takes over.

A browser, and with Playwright its driver, grows with every context. Messages must not notice that it is replaced: so
it serves on until the next one is up, then gets no new contexts, and ends with its last one, or at a limit that is
longer than any time limit unless a shorter one is set. When the next one does not come up, it serves on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from asyncworker.generation import Clock, Generation
from asyncworker.launching import ENGINE_GRACE_S, LONGEST_BACKOFF_MS
from asyncworker.settings import Settings
from asyncworker.turn import Turn

logger = logging.getLogger("asyncworker.browser")

#: When the next browser did not come up, it is not tried again before this.
RETRY_S = 60.0

#: Whoever waits for its turn asks this often.
TURN_POLL_S = 1.0

#: What a turn may take beyond its limits, on a machine that is busy.
TURN_SLACK_MS = 30_000

#: A memory limit that is reached with so few contexts is worth a warning.
FEW_CONTEXTS = 20


class Owner(Protocol):
    """What the recycler asks of the host."""

    def usable(self) -> Iterable[Generation]:
        """The browsers that get new contexts."""

    def is_wanted(self, generation: Generation) -> bool:
        """Whether another browser of its key is worth having before a message asks for it."""

    async def replace(self, generation: Generation) -> bool:
        """Bring up the next one and have it take over; False when the old one goes on, or is gone by itself."""

    def retire(self, generation: Generation) -> None:
        """No new contexts; it ends with its last one."""

    async def ended(self, generation: Generation, timeout_s: float | None) -> bool:
        """Wait until its processes are gone; False when that took too long."""

    def cut_off(self, generation: Generation, reason: str) -> None:
        """End it under its contexts."""


class Recycler:
    """Looks at the browsers of one host, and has one at a time replaced.

    Parameters:
        counts: Of the host; browsers_recycled is counted in it.
        spawn: Runs work beside the messages.
        turn: Whose turn it is on this machine.
    """

    def __init__(
        self,
        owner: Owner,
        settings: Settings,
        clock: Clock,
        counts: Counter[str],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        turn: Turn | None = None,
    ) -> None:
        self._owner = owner
        self._settings = settings
        self._clock = clock
        self._counts = counts
        self._spawn = spawn
        self._turn = turn or Turn()
        self._recycling = False
        self._waiting = False
        self._not_before = 0.0
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look at the browsers from now on; more than once is once."""
        wanted = self._settings.recycle_age_ms or self._settings.recycle_memory_mb or self._settings.recycle_after
        if self._looking is None and wanted:
            self._looking = asyncio.create_task(self._look_forever(), name="asyncworker-recycling")

    async def end(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    def consider(self, generation: Generation) -> None:
        """Begin to replace the browser if it is due and it is this process's turn; else it serves on."""
        if self._recycling or not generation.usable or self._clock.monotonic() < self._not_before:
            return
        reason = self._due(generation)
        if reason is None:
            return
        if not self._turn.take(self._longest_ms(generation)):
            if not self._waiting:
                logger.info(
                    "browser %d is due to be recycled (%s); it serves on until the worker process that recycles now "
                    "is done",
                    generation.number,
                    reason,
                )
            self._waiting = True
            return
        self._waiting = False
        self._recycling = True
        self._spawn(self._recycle(generation, reason))

    async def look(self) -> None:
        """Measure the browsers, and consider each."""
        for generation in list(self._owner.usable()):
            if limit_mb := self._settings.recycle_memory_mb:
                generation.memory_mb = await generation.launched.memory_mb(limit_mb)
            self.consider(generation)

    async def _look_forever(self) -> None:
        interval_s = self._settings.recycle_check_ms / 1000
        looked_at = self._clock.monotonic()
        while True:
            await asyncio.sleep(min(interval_s, TURN_POLL_S) if self._waiting else interval_s)
            try:
                if self._clock.monotonic() - looked_at >= interval_s or not self._waiting:
                    looked_at = self._clock.monotonic()
                    await self.look()
                else:
                    for generation in list(self._owner.usable()):
                        self.consider(generation)
            except Exception:
                logger.exception("the browsers could not be looked at; it is tried again")

    def _due(self, generation: Generation) -> str | None:
        """Why the browser is to be replaced, with the figures; None: it is not."""
        settings = self._settings
        age_ms = (self._clock.monotonic() - generation.launched_at) * 1000
        if settings.recycle_after and generation.contexts >= settings.recycle_after:
            return f"{generation.contexts} contexts, ASYNCWORKER_RECYCLE_AFTER is {settings.recycle_after}"
        if settings.recycle_age_ms and age_ms >= settings.recycle_age_ms:
            return f"{age_ms:.0f} ms old, ASYNCWORKER_RECYCLE_AGE_MS is {settings.recycle_age_ms}"
        # One that has served no one would be replaced by one that is no smaller.
        if settings.recycle_memory_mb and generation.contexts and generation.memory_mb > settings.recycle_memory_mb:
            limit = f"ASYNCWORKER_RECYCLE_MEMORY_MB is {settings.recycle_memory_mb}"
            return f"{generation.memory_mb:.0f} MB after {generation.contexts} contexts, {limit}"
        return None

    async def _recycle(self, generation: Generation, reason: str) -> None:
        """Replace one browser; the turn is held until it has ended."""
        try:
            if not await self._step_down(generation, reason):
                return
            self._turn.extend(self._longest_ms(generation))
            limit_ms = self._drain_ms(generation)
            if not await self._owner.ended(generation, limit_ms / 1000):
                said = f"it was to be replaced, and its last contexts did not end within {limit_ms:.0f} ms"
                logger.warning(
                    "browser %d is ended with %d contexts open: %s", generation.number, generation.leases, said
                )
                self._owner.cut_off(generation, said)
                await self._owner.ended(generation, None)
        finally:
            self._recycling = False
            self._turn.give_back()

    async def _step_down(self, generation: Generation, reason: str) -> bool:
        """Have the browser get no new contexts; False when it goes on."""
        few = generation.contexts < FEW_CONTEXTS and "MEMORY" in reason
        started = self._clock.monotonic()
        if not self._owner.is_wanted(generation):
            self._owner.retire(generation)
            logger.info("browser %d is recycled (%s); the next message launches one", generation.number, reason)
        elif await self._owner.replace(generation):
            logger.log(
                logging.WARNING if few else logging.INFO,
                "browser %d is recycled (%s): the next one took over after %d ms; %d contexts are open%s",
                generation.number,
                reason,
                (self._clock.monotonic() - started) * 1000,
                generation.leases,
                "; so few contexts may need more memory: raise the limit" if few else "",
            )
        else:
            self._not_before = self._clock.monotonic() + RETRY_S
            return False
        self._counts["browsers_recycled"] += 1
        return True

    def _drain_ms(self, generation: Generation) -> float:
        """How long the last contexts have: what was set, or until every time limit and all clean-up is over."""
        settings = self._settings
        if settings.recycle_drain_ms is not None:
            return settings.recycle_drain_ms
        left_ms = (generation.busy_until - self._clock.monotonic()) * 1000
        return max(left_ms, settings.time_limit_ms) + settings.cleanup_timeout_ms + settings.close_timeout_ms

    def _longest_ms(self, generation: Generation) -> float:
        """After this the turn has been given back, or the process hangs."""
        settings = self._settings
        launch_ms = settings.launch_timeout_ms + ENGINE_GRACE_S * 1000 + LONGEST_BACKOFF_MS
        closing_ms = 2 * settings.close_timeout_ms  # the browser and its driver
        return launch_ms + self._drain_ms(generation) + closing_ms + TURN_SLACK_MS
