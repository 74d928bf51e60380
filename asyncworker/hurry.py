"""Hurry: what a worker process does when it is told to stop, and when it is told so again.

Dramatiq's worker notices the first signal within a second, and begins messages until then; at the second one it ends
whatever it is at, so that its messages are lost. Here no message begins after the first signal. The second one shortens
each step of the stop: what runs is interrupted and goes back to its queue, browsers that do not close are killed, and
the process ends in time whatever its code does. The third one ends it at once.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import redis
from dramatiq import Broker, Worker
from dramatiq.middleware import Middleware

from asyncworker import processes, scratch
from asyncworker.errors import BrokerUnavailable
from asyncworker.heartbeat import consumed_queues, hasty
from asyncworker.middleware import BrowserMiddleware
from asyncworker.settings import Settings
from asyncworker.time_limit import TimeLimit

logger = logging.getLogger("asyncworker.worker")

#: The exit code of a process that was told more than once: Dramatiq's own for that.
EXIT_TOLD_AGAIN = 1

#: Those that Dramatiq's workers obey.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)

#: A message that began at the very moment of the signal is interrupted when it is seen: this often.
LOOK_EVERY_S = 0.05

#: Who is told again waits so much longer for a store that is away.
STORE_S = 1.0

#: What is still to be said and killed before the end may take so long.
LAST_WORDS_S = 8.0

Handler = Callable[[int, FrameType | None], Any]


class Hurry(Middleware):
    """Listens to the signals of a worker process, before Dramatiq's own handler does.

    It stands before all that has something to do at the end, so that its own last hook is the last of all: that is
    where the exit code is decided.

    Parameters:
        settings: Told again, a process has `stop_timeout_ms` to end, and its browsers half of that.
    """

    def __init__(self, settings: Settings) -> None:
        self._limit_s = settings.stop_timeout_ms / 1000
        self._told: set[int] = set()
        self._told_again = 0

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if multiprocessing.parent_process() is None or not is_main:  # not a child of the command dramatiq
            return
        for number in SIGNALS:
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, self._listener(broker, worker, handler))

    def after_worker_boot(self, broker: Any, worker: Worker) -> None:
        if self._told:  # while it booted
            _begin_no_more(broker, worker)

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        _account_for(broker)
        if self._told_again:
            raise SystemExit(EXIT_TOLD_AGAIN)

    def _listener(self, broker: Any, worker: Worker, dramatiqs: Handler) -> Handler:
        def hear(number: int, frame: FrameType | None) -> None:
            is_the_same_stop = bool(self._told) and number not in self._told  # a reload that a stop overtakes
            self._told.add(number)
            if is_the_same_stop:
                return
            _begin_no_more(broker, worker)
            try:
                dramatiqs(number, frame)
            except SystemExit:  # what it does when it is told again
                self._told_again += 1
                then = self._hurry if self._told_again == 1 else self._end_now
                threading.Thread(target=then, args=(broker, worker), name="asyncworker-hurry", daemon=True).start()

        return hear

    def _hurry(self, broker: Any, worker: Worker) -> None:
        logger.warning(
            "told to stop again: what still runs is interrupted and goes back to its queue; this process ends within "
            "%d ms (ASYNCWORKER_STOP_TIMEOUT_MS)",
            self._limit_s * 1000,
        )
        ends = time.monotonic() + self._limit_s
        if (patience := getattr(broker, "patience", None)) is not None:
            patience.end_in(STORE_S)
        _interrupt_until(broker, ends - self._limit_s / 2)
        if killed := _kill_own():
            logger.warning("killed %d processes of browsers that did not close in time", killed)
        _interrupt_until(broker, ends)
        self._end_now(broker, worker)

    def _end_now(self, broker: Any, worker: Worker) -> None:
        """End this process, with what it still runs; its messages go back, and are not lost."""
        threading.Thread(target=_exit_in, args=(LAST_WORDS_S,), daemon=True).start()
        logger.error("this process ends with exit code %d before all has ended", EXIT_TOLD_AGAIN)
        _kill_own()
        scratch.remove_own()
        _account_for(broker)
        if hasattr(broker, "leave"):
            with contextlib.suppress(redis.RedisError, BrokerUnavailable):
                broker.leave(hasty(broker), queues=consumed_queues(broker, worker))
        os._exit(EXIT_TOLD_AGAIN)


def _begin_no_more(broker: Any, worker: Worker) -> None:
    broker.is_stopping = True  # its consumers hand out nothing more
    for thread in worker.workers:  # and what they have handed out waits, and goes back at the end of the stop
        thread.stop()


def _account_for(broker: Broker) -> None:
    """Close the rows of what sees no interrupt; it goes back all the same."""
    for each in broker.middleware:
        if isinstance(each, BrowserMiddleware):
            each.interrupt_all()


def _interrupt_until(broker: Broker, ends: float) -> None:
    """Interrupt each message that runs, once, as long as this process is there."""
    limits = [each for each in broker.middleware if isinstance(each, TimeLimit)]
    while time.monotonic() < ends:
        for each in limits:
            each.interrupt_all()
        time.sleep(LOOK_EVERY_S)


def _kill_own() -> int:
    mine = processes.new_token()
    return processes.kill(lambda token: (token.pid, token.born) == (mine.pid, mine.born))


def _exit_in(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(EXIT_TOLD_AGAIN)
