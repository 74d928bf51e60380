"""Watchdog: notices what no time limit can end, says where it hangs, and has the process replaced.

Code that blocks the loop (`time.sleep`, a computation, a busy `while`) stops every session of the process, and the
cleanup of the ladder with them. A thread in a call to C sees no interrupt. Neither can be ended from within, so after
its limit the process exits, with a code that says so: its messages are recovered as those of any worker that died,
and a supervisor starts another. Dramatiq's own master stops all its other workers then.
"""

from __future__ import annotations

import contextvars
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from dramatiq import Broker, Worker
from dramatiq.middleware import Middleware as DramatiqMiddleware

from asyncworker import processes
from asyncworker.loop import LoopThread
from asyncworker.middleware import BrowserMiddleware
from asyncworker.session import Attempt, current_attempt
from asyncworker.settings import Settings
from asyncworker.time_limit import Overdue, TimeLimit

logger = logging.getLogger("asyncworker.watchdog")

#: The exit code of a process that replaces itself: of sysexits.h, "temporary failure, try again".
EXIT_REPLACED = 75

#: The loop is asked this often, and is blocked when it has not answered for so long: together below two seconds.
CHECK_S = 0.2
NOTICE_S = 1.4

#: Of the time between two looks no more counts: a process that was frozen, or starved, was not blocked by its code.
MOST_COUNTED_S = 1.0

#: What is still to be said and killed before the exit may take so long, and may hang on a lock of the blocked thread.
LAST_WORDS_S = 8.0

#: A call that keeps the interpreter to itself stops this thread, too: then faulthandler's ends the process, with code
#: 1 and the stacks on stderr, so much later. It is told this often that all is well.
INTERPRETER_GRACE_S = 10.0
ALL_WELL_S = 5.0


def replace_process(reason: str) -> None:
    """End this process at once, so that another takes its place and its messages are run again."""
    threading.Thread(target=_exit_in, args=(LAST_WORDS_S,), daemon=True).start()
    logger.critical(
        "this process ends with exit code %d and is to be replaced: %s. Its messages are run again. Under Dramatiq's "
        "own master all its other workers stop, too",
        EXIT_REPLACED,
        reason,
    )
    mine = processes.new_token()
    processes.kill(lambda token: (token.pid, token.born) == (mine.pid, mine.born))
    os._exit(EXIT_REPLACED)


def _exit_in(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(EXIT_REPLACED)


class Watchdog(DramatiqMiddleware):
    """A thread of each worker process that watches its loop and its worker threads.

    Parameters:
        settings: `loop_block_limit_ms` and `cleanup_timeout_ms` are its limits.
        replace: Called with the reason when the process cannot go on; None: it is only logged.
    """

    def __init__(self, settings: Settings, *, replace: Callable[[str], None] | None = replace_process) -> None:
        self._settings = settings
        self._replace = replace
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._of_loop: _Loop | None = None
        self._of_threads: _Threads | None = None

    @property
    def blocked(self) -> str | None:
        """By what the loop is blocked now, and for how long; None: it is served."""
        return self._of_loop.blocked if self._of_loop is not None else None

    @property
    def stuck(self) -> str | None:
        """Which threads see no interrupt; None: none."""
        return self._of_threads.stuck if self._of_threads is not None else None

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        browser = next((each for each in broker.middleware if isinstance(each, BrowserMiddleware)), None)
        if browser is None or browser.loop_thread is None:
            return
        self._stop.clear()
        self._of_loop = _Loop(browser.loop_thread, self._settings, self._replace)
        looks = [self._of_loop.look]
        if (limits := next((each for each in broker.middleware if isinstance(each, TimeLimit)), None)) is not None:
            self._of_threads = _Threads(worker, limits, self._settings, self._replace)
            looks.append(self._of_threads.look)
        self._tell_all_is_well()
        self._thread = threading.Thread(target=self._run, args=(looks,), name="asyncworker-watchdog", daemon=True)
        self._thread.start()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * CHECK_S)
            self._thread = None

    def _run(self, looks: list[Callable[[float], None]]) -> None:
        looked_at = told_at = time.monotonic()
        while not self._stop.wait(CHECK_S):
            now = time.monotonic()
            counted_s, looked_at = min(now - looked_at, MOST_COUNTED_S), now
            if now - told_at >= ALL_WELL_S:
                told_at = now
                self._tell_all_is_well()
            for look in looks:
                try:
                    look(counted_s)
                except Exception:
                    logger.exception("the watchdog could not look; it looks again")
        if self._replace is not None:
            faulthandler.cancel_dump_traceback_later()

    def _tell_all_is_well(self) -> None:
        if self._replace is not None:
            limit_s = self._settings.loop_block_limit_ms / 1000 + INTERPRETER_GRACE_S
            faulthandler.dump_traceback_later(limit_s, exit=True, file=2)  # sys.stderr may be a framed pipe


class _Loop:
    """Whether the loop is served."""

    def __init__(self, thread: LoopThread, settings: Settings, replace: Callable[[str], None] | None) -> None:
        self._loop = thread.loop
        self._thread_id = thread.thread_id
        self._limit_ms = settings.loop_block_limit_ms
        self._replace = replace
        self._is_asked = False
        self._blocked_s = 0.0
        self._is_noticed = False
        self._is_given_up = False

    def look(self, counted_s: float) -> None:
        if not self._is_asked:
            self._came_back()
            self._is_asked = True
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # it has ended
                return
            return
        self._blocked_s += counted_s
        if self._blocked_s >= NOTICE_S and not self._is_noticed:
            self._is_noticed = True
            logger.error("%s; nothing else of this process goes on meanwhile. It is at:\n%s", *self._described())
        if self._blocked_s * 1000 >= self._limit_ms and not self._is_given_up:
            self._is_given_up = True
            said, _ = self._described()
            _give_up(self._replace, f"{said}, longer than ASYNCWORKER_LOOP_BLOCK_LIMIT_MS={self._limit_ms} allows")

    @property
    def blocked(self) -> str | None:
        return self._described()[0] if self._is_noticed else None

    def _answer(self) -> None:
        self._is_asked = False

    def _came_back(self) -> None:
        if self._is_noticed:
            logger.warning("the loop goes on, after about %d ms", self._blocked_s * 1000)
        self._blocked_s, self._is_noticed, self._is_given_up = 0.0, False, False

    def _described(self) -> tuple[str, str]:
        frame = sys._current_frames().get(self._thread_id or 0)
        attempt = _attempt_at(frame)
        by = (
            f"message {attempt.message_id} ({attempt.actor})"
            if attempt and attempt.message_id
            else "code of no message"
        )
        return f"the loop is blocked for {self._blocked_s * 1000:.0f} ms by {by}", _stack(frame)


class _Threads:
    """Whether the worker threads see that their time is up."""

    def __init__(
        self, worker: Worker, limits: TimeLimit, settings: Settings, replace: Callable[[str], None] | None
    ) -> None:
        self._worker = worker
        self._limits = limits
        # An interrupted thread waits for the cleanup of its code, and for it to end when it is cancelled once more.
        self._grace_ms = 2 * settings.cleanup_timeout_ms + settings.close_timeout_ms
        self._replace = replace
        self._known: set[Overdue] = set()
        self._is_given_up = False

    @property
    def stuck(self) -> str | None:
        if not (known := self._known):
            return None
        names = ", ".join(sorted(f"{each.message_id} ({each.actor})" for each in known))
        return f"{len(known)} of its threads see no interrupt, and it takes no messages; they are at {names}"

    def look(self, counted_s: float) -> None:
        overdue = set(self._limits.overdue(self._grace_ms))
        for each in overdue - self._known:
            logger.error(
                "message %s (%s) does not end, %d ms after its time limit or its cancellation: its thread sees no "
                "interrupt. It is at:\n%s",
                each.message_id,
                each.actor,
                self._grace_ms,
                _stack(sys._current_frames().get(each.thread)),
            )
        if overdue and not self._known:
            # No new messages: the others finish what they are at, and the process is replaced when they have.
            threading.Thread(target=self._worker.pause, name="asyncworker-pause", daemon=True).start()
        elif self._known and not overdue:
            threading.Thread(target=self._worker.resume, name="asyncworker-resume", daemon=True).start()
        self._known = overdue
        if overdue and len(overdue) == self._limits.at_work and not self._is_given_up:
            self._is_given_up = True
            names = ", ".join(sorted(f"{each.message_id} ({each.actor})" for each in overdue))
            _give_up(
                self._replace,
                f"{len(overdue)} of its {self._worker.worker_threads} threads are in calls that no time limit "
                f"interrupts, at messages {names}",
            )


def _give_up(replace: Callable[[str], None] | None, reason: str) -> None:
    if replace is None:
        logger.critical("this process would be replaced: %s", reason)
    else:
        replace(reason)


def _attempt_at(frame: FrameType | None) -> Attempt | None:
    """The attempt whose code runs in a loop's thread: it is in the context that the loop's handle runs in."""
    while frame is not None:
        if frame.f_code.co_name == "_run":
            context = getattr(frame.f_locals.get("self"), "_context", None)
            if isinstance(context, contextvars.Context):
                return context.get(current_attempt)
        frame = frame.f_back
    return None


def _stack(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  (unknown)"
