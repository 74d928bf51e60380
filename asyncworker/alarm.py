"""Alarm: has delayed messages begin when they are due, to the millisecond.

A consumer that blocks in the store cannot look for itself then, and the store ends a wait in its own time: only with
the next of its ticks, up to 100 ms late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis

from asyncworker.errors import BrokerUnavailable

logger = logging.getLogger("asyncworker.broker")


class Alarm:
    """A thread of a worker process that rings for a queue at a time; it begins with the first that is set.

    Parameters:
        ring: Has the store serve what is due in a queue; called on the thread.
    """

    def __init__(self, ring: Callable[[str], object]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def set(self, queue_name: str, at_s: float) -> None:
        """Ring for a queue at this time of the monotonic clock; an earlier one that is set already stays."""
        with self._changed:
            self._due[queue_name] = min(at_s, self._due.get(queue_name, at_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="asyncworker-alarm", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            thread, self._thread = self._thread, None
            self._due.clear()
            self._changed.notify()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (queue_name := self._next()) is not None:
            try:
                self._ring(queue_name)
            except (redis.RedisError, BrokerUnavailable) as error:  # its consumer looks again, and is told the same
                logger.info("queue %r: no one could be woken for what is due: %s", queue_name, error)

    def _next(self) -> str | None:
        """Wait for the queue whose time has come; None: the thread shall end."""
        me = threading.current_thread()
        with self._changed:
            while self._thread is me:
                if not self._due:
                    self._changed.wait()
                    continue
                queue_name = min(self._due, key=self._due.__getitem__)
                left_s = self._due[queue_name] - time.monotonic()
                if left_s <= 0:
                    del self._due[queue_name]
                    return queue_name
                self._changed.wait(left_s)
        return None
