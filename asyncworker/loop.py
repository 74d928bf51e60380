"""LoopThread: the one asyncio loop of a worker process, and how work on it is interrupted.

It stands where Dramatiq's EventLoopThread would (`dramatiq.asyncio.set_event_loop_thread`), which gives a
cancelled coroutine exactly one second and then raises RuntimeError while its cleanup still runs: the retry
overlaps the first attempt, and whoever filters on TimeLimitExceeded no longer sees it. Closing a Firefox context
can take longer than that. Here the worker thread waits for the cleanup within a budget of ours, and the
interrupt is raised as it came.

The thread and the loop's life are anyio's portal. The work itself runs in plain asyncio tasks, not in the
portal's: anyio cancels by level, so every `await` of a cleanup would be cancelled again; asyncio cancels once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal
from dramatiq.middleware import Interrupt, Shutdown

from asyncworker.errors import ForkedBrowser

logger = logging.getLogger("asyncworker.loop")

R = TypeVar("R")

#: An exception that is raised in a thread from outside is seen only between two bytecodes, so a worker thread
#: that waits for the loop comes up this often.
INTERRUPT_CHECK_S = 0.1


class LoopThread:
    """One asyncio loop in a thread of its own.

    Parameters:
        cleanup_timeout_ms: How long an interrupted coroutine may take to end.
    """

    def __init__(self, *, cleanup_timeout_ms: int) -> None:
        self._cleanup_timeout_ms = cleanup_timeout_ms
        self._pid = os.getpid()
        self._exits = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop.

        Raises:
            RuntimeError: Before `start` and after `stop`.
            ForkedBrowser: In a fork of the process that started it, where its thread does not exist.
        """
        if os.getpid() != self._pid:
            raise ForkedBrowser(
                f"the loop thread of process {self._pid} does not exist in its fork {os.getpid()}; start children "
                "with the `spawn` method"
            )
        if self._loop is None:
            raise RuntimeError("the loop thread is not running: actors run in a worker, after its boot")
        return self._loop

    def start(self, *, timeout: float | None = None) -> None:
        """Start the thread. `timeout` is Dramatiq's, in seconds, and not needed: starting waits for no one."""
        self._portal = self._exits.enter_context(start_blocking_portal("asyncio", name="asyncworker-loop"))
        self._loop = self._portal.call(_running_loop)

    def run_coroutine(self, coro: Coroutine[Any, Any, R]) -> R:
        """Run `coro` on the loop and wait for it here; called by Dramatiq in a worker thread.

        When the thread is interrupted (time limit, shutdown), the coroutine is cancelled once, its cleanup runs
        to its end or to the budget's, and then the interrupt is raised.
        """
        try:
            loop = self.loop
        except BaseException:
            coro.close()
            raise
        work = _Work(coro)
        try:
            loop.call_soon_threadsafe(work.start, self._running)
            while not work.done.wait(INTERRUPT_CHECK_S):
                pass
        except Interrupt:
            loop.call_soon_threadsafe(work.cancel)
            self._await_cleanup(loop, work)
            raise
        return work.result()

    def call(self, coro: Coroutine[Any, Any, R], *, timeout_ms: int) -> R:
        """Run the runtime's own work on the loop from another thread, bounded.

        Raises:
            TimeoutError: When it took longer; it is cancelled then.
        """
        future = asyncio.run_coroutine_threadsafe(coro, self.loop)
        try:
            return future.result(timeout_ms / 1000)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def drain(self, *, timeout_ms: int) -> int:
        """Wait for the coroutines still running; cancel them after `timeout_ms`.

        Returns:
            How many did not end even then.
        """
        return self.call(self._drain(timeout_ms), timeout_ms=timeout_ms + self._cleanup_timeout_ms + 5_000)

    def stop(self) -> None:
        """End the loop and its thread; what still runs on it is cancelled."""
        portal, self._portal, self._loop = self._portal, None, None
        if portal is not None:
            self._exits.close()

    def join(self) -> None:
        """Nothing is left to join after `stop`; here because Dramatiq's interface has it."""

    async def _drain(self, timeout_ms: int) -> int:
        if not self._running:
            return 0
        _, late = await asyncio.wait(set(self._running), timeout=timeout_ms / 1000)
        for task in late:
            task.cancel()
        if late:
            logger.warning("%d attempts were still running after %d ms and are cancelled", len(late), timeout_ms)
            _, late = await asyncio.wait(late, timeout=self._cleanup_timeout_ms / 1000)
        return len(late)

    def _await_cleanup(self, loop: asyncio.AbstractEventLoop, work: _Work[Any]) -> None:
        """Wait until the cancelled work has ended; a further interrupt of this thread changes nothing."""
        deadline = time.monotonic() + self._cleanup_timeout_ms / 1000
        insisted = False
        while not work.done.is_set():
            try:
                if work.done.wait(INTERRUPT_CHECK_S) or time.monotonic() < deadline:
                    continue
            except Interrupt:
                continue
            if insisted:
                logger.error("the code ignored two cancellations; it is left running and its slot is free again")
                return
            logger.error(
                "the cleanup did not end in %d ms (ASYNCWORKER_CLEANUP_TIMEOUT_MS); cancelling it too",
                self._cleanup_timeout_ms,
            )
            insisted, deadline = True, deadline + self._cleanup_timeout_ms / 1000
            loop.call_soon_threadsafe(work.cancel)


class _Work(Generic[R]):
    """One coroutine on the loop, awaited by a thread."""

    def __init__(self, coro: Coroutine[Any, Any, R]) -> None:
        self.done = threading.Event()
        self._coro = coro
        self._task: asyncio.Task[R] | None = None

    def start(self, running: set[asyncio.Task[Any]]) -> None:
        if self.done.is_set():  # interrupted before the loop came to it
            return
        self._task = asyncio.get_running_loop().create_task(self._coro)
        running.add(self._task)
        self._task.add_done_callback(running.discard)
        self._task.add_done_callback(lambda _: self.done.set())

    def cancel(self) -> None:
        if self._task is None:
            self._coro.close()
            self.done.set()
        else:
            self._task.cancel()

    def result(self) -> R:
        if self._task is None or self._task.cancelled():
            raise Shutdown("the worker process is shutting down")
        return self._task.result()


async def _running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()
