"""LoopThread: the one asyncio loop of a worker process, and how work on it is interrupted.

It stands where Dramatiq's EventLoopThread would (`dramatiq.asyncio.set_event_loop_thread`), which gives a
cancelled coroutine exactly one second and then raises RuntimeError while its cleanup still runs: the retry
overlaps the first attempt, and whoever filters on TimeLimitExceeded no longer sees it. Closing a Firefox context
can take longer than that. Here the worker thread waits for the cleanup within a budget of ours, and the
interrupt is raised as it came.

Plain asyncio, not anyio's portal: anyio cancels by level, so every `await` of a cleanup would be cancelled again,
where asyncio cancels once. A portal is also ended without a bound, and by the exit of a forked child, which then
waits for ever for a thread that it does not have.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from dramatiq.middleware import Interrupt, Shutdown

from asyncworker.ending import Interruption, current_interruption
from asyncworker.errors import ForkedBrowser, SessionOver

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
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._running: set[_Work[Any]] = set()
        self._entrance: deque[_Work[Any]] = deque()
        self._is_called = False  # the loop will come to the entrance by itself

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
        if self._loop is None or self._loop.is_closed():
            raise RuntimeError("the loop thread is not running: actors run in a worker, after its boot")
        return self._loop

    @property
    def thread_id(self) -> int | None:
        """The ident of the loop's thread; None when it is not running."""
        return self._thread.ident if self._thread is not None else None

    @property
    def is_here(self) -> bool:
        """True when it runs, and in this very process."""
        return os.getpid() == self._pid and self._loop is not None and not self._loop.is_closed()

    def start(self, *, timeout: float | None = None) -> None:
        """Start the thread. `timeout` is Dramatiq's, in seconds, and not needed: starting waits for no one.

        Raises:
            RuntimeError: When it is running already.
        """
        if self._loop is not None and os.getpid() == self._pid:
            raise RuntimeError("the loop thread is running already; stop() it first")
        self._pid = os.getpid()
        self._running.clear()
        self._entrance.clear()
        self._is_called = False
        self._stopping = asyncio.Event()
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        # A daemon, so that code that ignores its cancellation cannot keep the process from ending.
        self._thread = threading.Thread(
            target=_live, args=(self._stopping, started), name="asyncworker-loop", daemon=True
        )
        self._thread.start()
        self._loop = started.result()

    def run_coroutine(self, coro: Coroutine[Any, Any, R]) -> R:
        """Run `coro` on the loop and wait for it here; called by Dramatiq in a worker thread.

        When the thread is interrupted (time limit, shutdown), the coroutine is cancelled once, its cleanup runs
        to its end or to the budget's, and then the interrupt is raised.

        Raises:
            Shutdown: When the coroutine was cancelled by `drain` or `stop`.
            RuntimeError: On the loop's own thread, where this would wait for itself.
        """
        work: _Work[R] | None = None
        try:
            work = _Work(coro, self._foreign_loop(), self._running)
            work.begun = True
            self._enter(work)
            while not work.wait(INTERRUPT_CHECK_S):
                if work.task is None:  # an interrupt may have kept another thread from calling the loop
                    work.call_loop(self._let_in)
        except Interrupt as interrupt:
            if work is not None:
                self._await_cleanup(work, type(interrupt).__name__)
            raise
        finally:
            if work is None or not work.begun:
                coro.close()
        try:
            return work.result()
        finally:
            del work  # an exception from there holds this frame, and the frame would hold the exception

    def _enter(self, work: _Work[Any]) -> None:
        """Have the loop start this; from the waiting thread.

        The loop is called once for all that come before it is there: what wakes it gives the interpreter's lock away,
        and a thread that wants it back waits in line.
        """
        self._entrance.append(work)
        if self._is_called:
            return
        self._is_called = True
        try:
            work.call_loop(self._let_in)
        except RuntimeError:  # the loop has ended meanwhile
            self._is_called = work.begun = False
            raise

    def _let_in(self) -> None:
        """Start what has come; on the loop."""
        self._is_called = False  # before the look: what comes from here on calls again
        while self._entrance:
            self._entrance.popleft().start()

    def call(self, coro: Coroutine[Any, Any, R], *, timeout_ms: int) -> R:
        """Run the runtime's own work on the loop from another thread, bounded.

        Raises:
            TimeoutError: When it took longer; it is cancelled then.
        """
        try:
            loop = self._foreign_loop()
        except BaseException:
            coro.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coro, loop)
        try:
            return future.result(timeout_ms / 1000)
        except TimeoutError:
            future.cancel()
            raise

    def drain(self, *, timeout_ms: int) -> int:
        """Wait for the coroutines still running; cancel them after `timeout_ms`.

        Returns:
            How many did not end even then.
        """
        return self.call(self._drain(timeout_ms), timeout_ms=timeout_ms + self._cleanup_timeout_ms + 5_000)

    def stop(self) -> None:
        """End the loop and its thread; what still runs on it is cancelled.

        Waits for its cleanup, but not for ever: a thread whose code ignores that is left to end with the process.
        """
        loop, thread, stopping = self._loop, self._thread, self._stopping
        self._loop = self._thread = self._stopping = None
        if loop is None or thread is None or stopping is None or os.getpid() != self._pid:
            return
        for work in tuple(self._running):
            work.shut_down = True
        with contextlib.suppress(RuntimeError):  # it has ended already
            loop.call_soon_threadsafe(stopping.set)
        thread.join(self._cleanup_timeout_ms / 1000)
        if thread.is_alive():
            logger.error(
                "the loop did not end in %d ms (ASYNCWORKER_CLEANUP_TIMEOUT_MS): code on it ignores its cancellation",
                self._cleanup_timeout_ms,
            )

    def join(self) -> None:
        """Nothing is left to join after `stop`; here because Dramatiq's interface has it."""

    def _foreign_loop(self) -> asyncio.AbstractEventLoop:
        """The loop, for a thread that is not its own."""
        loop = self.loop
        if loop is _loop_of_this_thread():
            raise RuntimeError(
                "an async actor was called like a function by code on the loop, which would wait for itself for "
                "ever; send() it a message, or await its function"
            )
        return loop

    async def _drain(self, timeout_ms: int) -> int:
        late = await _ended_within(timeout_ms, tuple(work for work in self._running if not work.left))
        late += tuple(work for work in self._running if work.left)
        for work in late:
            work.shut_down = True
            work.insist()
        if late:
            logger.warning("%d attempts were still running after %d ms and are cancelled", len(late), timeout_ms)
            late = await _ended_within(self._cleanup_timeout_ms, late)
        return len(late)

    def _await_cleanup(self, work: _Work[Any], reason: str) -> None:
        """Wait until the cancelled work has ended; a further interrupt of this thread changes nothing."""
        budget_s = self._cleanup_timeout_ms / 1000
        cancellations, deadline = 1, time.monotonic() + budget_s
        while True:
            try:
                work.cancel(cancellations, reason)
                if work.wait(INTERRUPT_CHECK_S):
                    return
                if time.monotonic() < deadline:
                    continue
                if cancellations == 2:
                    logger.error("the code ignored two cancellations; it is left running and its slot is free again")
                    work.left = True
                    return
                cancellations, deadline = 2, deadline + budget_s
                logger.error(
                    "the cleanup did not end in %d ms (ASYNCWORKER_CLEANUP_TIMEOUT_MS); cancelling it too",
                    self._cleanup_timeout_ms,
                )
            except Interrupt:
                continue


class _End(Generic[R]):
    """How the code of a piece of work has ended.

    It knows nothing of the task: that holds a frame which holds this, and what was raised holds the frame.
    """

    def __init__(self) -> None:
        self.is_there = False
        self.returned: list[R] = []
        self.raised: list[BaseException] = []
        # A bare lock, released at the end. An Event or a Future waits in Python code, which an interrupt may leave
        # half way: with its own lock held, on which the loop would then block for ever.
        self._latch = threading.Lock()
        self._latch.acquire()

    def wait(self, seconds: float) -> None:
        if not self.is_there:
            self._latch.acquire(timeout=seconds)

    def come(self) -> None:
        if not self.is_there:
            self.is_there = True
            self._latch.release()


class _Work(Generic[R]):
    """One coroutine on the loop, awaited by a thread."""

    def __init__(self, coro: Coroutine[Any, Any, R], loop: asyncio.AbstractEventLoop, running: set[_Work[Any]]) -> None:
        self.begun = False
        self.shut_down = False  # cancelled because the worker ends, not by its own code
        self.left = False  # it has ignored two cancellations: a stop waits for it no more than it must
        self.task: asyncio.Task[None] | None = None
        self._coro = coro
        self._loop = loop
        self._running = running
        self._cancellations = 0
        self._context = contextvars.copy_context()  # the waiting thread's; the loop is called by any of them
        self._interruption = Interruption()
        self._context.run(current_interruption.set, self._interruption)
        self._end: _End[R] = _End()

    def call_loop(self, work: Callable[..., None], *args: object) -> None:
        """Have the loop do this; raises RuntimeError when it has ended."""
        self._loop.call_soon_threadsafe(work, *args)

    def wait(self, seconds: float) -> bool:
        """Wait a while, from the waiting thread; True when it has ended, or its loop has."""
        self._end.wait(seconds)
        if not self._end.is_there and self._loop.is_closed():  # it ended before it came to this
            self._coro.close()
            self._end.come()
        return self._end.is_there

    def cancel(self, times: int, reason: str) -> None:
        """Have it cancelled for the n-th time, from the waiting thread; saying so again changes nothing."""
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile, and with it the work
            self.call_loop(self._cancel, times, reason)

    def insist(self) -> None:
        """Cancel it once more, on the loop."""
        self._cancel(self._cancellations + 1, Shutdown.__name__)

    def _cancel(self, times: int, reason: str) -> None:
        if self._end.is_there or times <= self._cancellations:
            return
        self._cancellations = times
        if self.task is None:
            self._over(None)
        else:
            self._interruption.tell(reason)  # first: what the code calls when it is cancelled is refused already
            self.task.cancel()

    def result(self) -> R:
        """What the code returned; what it raised, as it is."""
        try:
            if self._end.returned:
                return self._end.returned.pop()
            consequences = asyncio.CancelledError | SessionOver
            if not self._end.raised or (self.shut_down and isinstance(self._end.raised[0], consequences)):
                raise Shutdown("the worker process is shutting down")
            raise self._end.raised.pop()
        finally:
            del self  # an exception from here holds this frame, and the frame would hold the exception

    def start(self) -> None:
        """Start it, on the loop."""
        if self._end.is_there:  # interrupted before the loop came to it
            return
        self._running.add(self)
        self.task = self._loop.create_task(_run(self._coro, self._end), context=self._context)
        self.task.add_done_callback(self._over)

    def _over(self, _: asyncio.Task[None] | None) -> None:
        self._coro.close()  # cancelled before it began, it would complain that no one awaited it
        self._running.discard(self)
        self._end.come()


def _loop_of_this_thread() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _run(coro: Coroutine[Any, Any, R], end: _End[R]) -> None:
    """Run `coro`, and tell how it ended as soon as it has: a task's callbacks come only with the loop's next round.

    Nothing that it raises ends the task: SystemExit and KeyboardInterrupt would end the loop, and every other attempt.
    """
    try:
        end.returned.append(await coro)
    except BaseException as error:  # noqa: BLE001 -- it is raised in the waiting thread
        end.raised.append(error)
    finally:
        end.come()


async def _ended_within(timeout_ms: int, works: tuple[_Work[Any], ...]) -> tuple[_Work[Any], ...]:
    """Wait for them; returns those that have not ended."""
    tasks = {work.task: work for work in works if work.task is not None}
    if not tasks:
        return ()
    _, late = await asyncio.wait(tasks, timeout=timeout_ms / 1000)
    return tuple(tasks[task] for task in late)


def _live(stopping: asyncio.Event, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    """The loop's life, in its thread. What else runs on it when it shall stop is cancelled by asyncio."""

    async def until_stopped() -> None:
        started.set_result(asyncio.get_running_loop())
        await stopping.wait()

    main = until_stopped()
    try:
        asyncio.run(main)
    except BaseException as error:
        if started.done():
            logger.critical("the loop has ended; no actor runs in this process any more: restart it", exc_info=True)
        else:
            started.set_exception(error)
    finally:
        main.close()  # a loop that could not be made has not come to it
