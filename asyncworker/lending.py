"""A slot and a context, lent together for one session, and given back together whatever its code does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from asyncworker.browser import BrowserHost
from asyncworker.generation import Lease
from asyncworker.identity import Identity
from asyncworker.phases import Phases, opening

logger = logging.getLogger("asyncworker.browser")


class Slots:
    """How many sessions a process may have at once; each is taken and given back once.

    Attributes:
        total: None: as many as are wanted.
        in_use: Those that a session has, and those whose context is still being closed.
    """

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.in_use = 0
        self._free = asyncio.Semaphore(total) if total is not None else None

    async def take(self) -> None:
        """Take one, as soon as there is one. Unbounded: the caller bounds it."""
        if self._free is not None:
            await self._free.acquire()
        self.in_use += 1

    def give(self) -> None:
        self.in_use -= 1
        if self._free is not None:
            self._free.release()


class Loan:
    """What one session has."""

    def __init__(self, host: BrowserHost, slots: Slots, lease: Lease, phases: Phases) -> None:
        self.lease = lease
        self._phases = phases
        self._host = host
        self._slots = slots
        self._returning: asyncio.Task[None] | None = None

    @classmethod
    async def take(
        cls, host: BrowserHost, slots: Slots, identity: Identity, options: Mapping[str, Any], phases: Phases
    ) -> Loan:
        """Have a context lent for a slot that is taken already; without one the slot is given back."""
        try:
            with opening(phases):
                return cls(host, slots, await host.lend(identity, options), phases)
        except BaseException:
            slots.give()
            raise

    def end(self, reason: str) -> asyncio.Task[None]:
        """End the session: refuse its calls, close its context within its bound, and give the slot back.

        Once, whoever asks first. What is returned is no part of the session's own task: neither a further
        cancellation nor code that ignores its own ends it.
        """
        if self._returning is None:
            lease = self.lease
            pages = [page for context in (lease.context, *lease.others) for page in context.pages]
            lease.ending.come(reason, lease.page, lease.context, *lease.others, *pages)
            self._phases.begin_close()
            self._returning = self._host.spawn(self._give_back())
        return self._returning

    async def _give_back(self) -> None:
        try:
            await self._host.take_back(self.lease)
        except Exception:  # a failing close fails no message
            logger.warning("a context of browser %d did not close", self.lease.generation.number, exc_info=True)
        finally:
            self._phases.end_close()
            self._slots.give()
