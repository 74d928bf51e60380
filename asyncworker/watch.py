"""Watch: notices that a session's browser or page is of no more use, and ends the code that waits on something else."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncworker.engines import Engine, Fault
from asyncworker.engines.capabilities import refusal
from asyncworker.errors import BrowserCrashed, EngineError, PageCrashed, TooManyRequests, Unsupported
from asyncworker.generation import Lease, crashed, drifted

#: When the browser or the page is gone, a call in flight says so itself within milliseconds; code that waits
#: for something else is cancelled after this.
FAULT_GRACE_S = 0.25


class Watch:
    """Notices the death of a session's browser or page and cancels the code that waits on something else."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self._engine = engine
        self._lease = lease
        self._fault: EngineError | TooManyRequests | None = None
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelling = 0
        self._cancelled = False
        self._may_cancel = True
        self._ended = False

    def begin(self) -> None:
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task else 0
        self._lease.generation.watchers.append(self._browser_lost)
        self._lease.page.on("crash", self._page_crashed)
        if self._lease.generation.lost is not None:
            self._browser_lost(self._lease.generation.lost)

    def end(self) -> EngineError | TooManyRequests | None:
        """Stop watching; returns what was noticed."""
        if not self._ended:
            self._ended = True
            self._lease.generation.watchers.remove(self._browser_lost)
            self._lease.page.remove_listener("crash", self._page_crashed)
        if self._timer is not None:
            self._timer.cancel()
        return self._fault

    def cancelled_by_us(self) -> bool:
        """True when the cancellation in flight is this watch's and no one else's."""
        if not self._cancelled or self._task is None:
            return False
        return self._task.uncancel() <= self._cancelling

    async def explain(self, error: Exception) -> EngineError | TooManyRequests | Unsupported | None:
        """Stop watching; returns the death that `error` came of, which may be announced a moment after it.

        Or what else the engine says by it: that it cannot do this, or that its browser is of no more use.
        """
        self._may_cancel = False
        hint = self._engine.classify(error)
        if hint is Fault.unsupported:
            self.end()
            return refusal(self._engine.name, error)
        if hint in (Fault.gone, Fault.page_crashed, Fault.unclear):
            deadline = asyncio.get_running_loop().time() + FAULT_GRACE_S
            while self._fault is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 -- bounded
                await asyncio.sleep(0.01)
        if self._fault is None and hint is not None:
            self._fault = self._named_by(hint, error)
        return self.end()

    def _named_by(self, hint: Fault, error: Exception) -> EngineError | None:
        if hint is Fault.page_crashed:
            return self._page_error()
        if hint is Fault.exit_drifted:
            self._lease.generation.retired = True  # the host ends it when this lease is given back
            return drifted(self._engine.name, self._lease.generation, error)
        return None

    def _browser_lost(self, reason: str) -> None:
        self.notice(crashed(self._engine.name, self._lease.generation))

    def _page_crashed(self, _: object) -> None:
        self.notice(self._page_error())

    def _page_error(self) -> PageCrashed:
        number = self._lease.generation.number
        return PageCrashed(
            f"the page's renderer died in browser {number} ({self._engine.name}); the message is retried with the "
            "same seed",
            engine=self._engine.name,
            generation=number,
        )

    def notice(self, fault: EngineError | TooManyRequests) -> None:
        """The code is to end with this, unless it does so by itself within a moment."""
        if isinstance(self._fault, BrowserCrashed):
            return
        self._fault = fault
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FAULT_GRACE_S, self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and self._may_cancel and not self._ended:
            self._cancelled = True
            self._task.cancel()
