"""The loop, the runtime and the browser of one process of a Celery worker: begun, found, and ended."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

from dramatiq.asyncio import get_event_loop_thread, set_event_loop_thread

from asyncworker import processes, scratch
from asyncworker.errors import EngineError, ForkedBrowser
from asyncworker.identity import new_seed
from asyncworker.loop import LoopThread
from asyncworker.middleware import SWITCH_INTERVAL_S
from asyncworker.runtime import Runtime, set_runtime
from asyncworker.settings import DEFAULT_SLOTS, Settings

logger = logging.getLogger("asyncworker.celery")


class Process:
    """What this process has; every method belongs to the process that calls it, also after a fork.

    Parameters:
        settings: The deployment's.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        #: The pid of a worker whose children run the tasks; it never has a browser.
        self.parent: int | None = None
        self._seed = settings.seed
        self._there: tuple[int, LoopThread, Runtime] | None = None

    @property
    def has_begun(self) -> bool:
        return self._there is not None and self._there[0] == os.getpid()

    def become_parent(self) -> None:
        """This process will fork: it gets no browser, and those that it forks share its seed."""
        self.parent = os.getpid()
        self._draw_seed()

    def check(self) -> None:
        """Raise ForkedBrowser in a process that has no browser and never will; one that was forked has a loop then."""
        if self.parent not in (None, os.getpid()):
            self.begin()
        elif self.parent is not None:
            raise ForkedBrowser(
                "this is the parent of a prefork worker, whose children each have a browser of their own: use it in a "
                "task, or in a handler of worker_process_init"
            )

    def begin(self) -> None:
        """Start the loop, unless there is one; the browser is launched on its first use."""
        there: object = get_event_loop_thread()
        if self.has_begun or (isinstance(there, LoopThread) and there.is_here):
            return
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loop_thread = LoopThread(cleanup_timeout_ms=self.settings.cleanup_timeout_ms)
        loop_thread.start()
        runtime = Runtime(self.settings)
        slots = self.settings.slots or DEFAULT_SLOTS
        runtime.limit(min(slots, runtime.engine.max_contexts or slots))
        seed = self._draw_seed()
        runtime.default_seed = lambda: seed
        self._there = os.getpid(), loop_thread, runtime
        set_event_loop_thread(loop_thread)  # type: ignore[arg-type]  # Dramatiq's interface, not its class
        set_runtime(runtime, loop_thread.loop)
        atexit.register(self._kill_at_exit, os.getpid())
        threading.Thread(target=_sweep, name="asyncworker-sweep", daemon=True).start()
        if self.settings.warm:
            threading.Thread(target=self._warm, args=(loop_thread, runtime), daemon=True).start()

    def end(self) -> None:
        """Close the browser and end the loop; nothing when this process has none."""
        if not self.has_begun or self._there is None:
            return
        _, loop_thread, runtime = self._there
        self._there = None
        settings = self.settings
        try:
            loop_thread.drain(timeout_ms=settings.stop_timeout_ms)
            limit_ms = settings.launch_timeout_ms + 3 * settings.close_timeout_ms
            loop_thread.call(runtime.close(), timeout_ms=limit_ms)
        except TimeoutError:
            logger.error("the browsers did not close in time; killing them")
        finally:
            _kill_mine()
            set_runtime(None)
            set_event_loop_thread(None)
            loop_thread.stop()

    def _draw_seed(self) -> int:
        if self._seed is None:
            self._seed = new_seed()
        return self._seed

    def _warm(self, loop_thread: LoopThread, runtime: Runtime) -> None:
        try:
            warming = runtime.host.warm(runtime.identity(self._draw_seed()))
            loop_thread.call(warming, timeout_ms=self.settings.browser_wait_ms + 5_000)
        except (EngineError, TimeoutError) as error:
            logger.error("the browser could not be launched at boot: %s", error)

    def _kill_at_exit(self, pid: int) -> None:
        """A worker that was stopped cold sends no signal of its end."""
        if self.has_begun and pid == os.getpid():
            _kill_mine()


def _kill_mine() -> None:
    mine = processes.new_token()
    processes.kill(lambda token: (token.pid, token.born) == (mine.pid, mine.born))


def _sweep() -> None:
    if killed := processes.sweep():
        logger.warning("killed %d processes that dead workers left behind", killed)
    if removed := scratch.sweep():
        logger.warning("removed %d temporary directories that dead workers left behind", removed)
