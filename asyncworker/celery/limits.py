"""Time limits of tasks: the soft one raises SoftTimeLimitExceeded in the body, the hard one ends it.

Celery's pools kill the process of a task whose time limit has passed. Here its body is interrupted, so that the
browser and the other tasks of the process go on. Where it does not end, since it is in a call to C or ignores it,
Celery is told all the same, and the watchdog replaces the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from celery.exceptions import SoftTimeLimitExceeded
from dramatiq import Broker

from asyncworker.celery.bodies import Body, HardLimit
from asyncworker.time_limit import TimeLimit

logger = logging.getLogger("asyncworker.celery")

#: Of the time that an interrupted body may take to end, it is waited so much before Celery is told without it.
TOLD_AFTER = 0.5

#: What waits for a deadline looks at least this often, in s.
LOOK_S = 1.0


@dataclass
class Limited:
    """A body with time limits.

    Attributes:
        on_soft: Called with the limit in s, before the body is interrupted.
        on_stuck: Called when the body does not end although it was interrupted for good.
    """

    body: Body
    soft_s: float | None
    hard_s: float | None
    on_soft: Callable[[float], None]
    on_stuck: Callable[[], None]
    began: float = field(default_factory=time.monotonic)
    steps: list[tuple[float, Callable[[], None]]] = field(default_factory=list)


class Limits:
    """The clock of a worker process; a thread that is started with the first limit.

    Parameters:
        cleanup_s: How long an interrupted body may take to end.
    """

    def __init__(self, broker: Broker, *, cleanup_s: float) -> None:
        self._watchdogs = next((each for each in broker.middleware if isinstance(each, TimeLimit)), None)
        self._cleanup_s = cleanup_s
        self._all: dict[int, Limited] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def begin(self, limited: Limited) -> None:
        soft, hard = limited.soft_s, limited.hard_s
        if soft is not None and (hard is None or soft < hard):
            limited.steps.append((limited.began + soft, lambda: self._soft(limited)))
        if hard is not None:
            limited.steps.append((limited.began + hard, lambda: self._hard(limited)))
        if limited.steps:
            with self._changed:
                self._all[id(limited)] = limited
                self._changed.notify()
                self._start()

    def end(self, limited: Limited) -> None:
        with self._changed:
            self._all.pop(id(limited), None)

    def stop(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def interrupted(self, limited: Limited) -> None:
        """A body was interrupted for good: where it does not end, Celery is told, and the process is replaced."""
        if self._watchdogs is not None:
            self._watchdogs.expect_end(limited.body.thread)
        with self._changed:
            self._all[id(limited)] = limited
            limited.steps = [(time.monotonic() + TOLD_AFTER * self._cleanup_s, lambda: self._stuck(limited))]
            self._changed.notify()
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="asyncworker-celery-limits", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_over:
                    return
                now = time.monotonic()
                due = [limited for limited in self._all.values() if limited.steps and limited.steps[0][0] <= now]
                if not due:
                    next_at = min((each.steps[0][0] for each in self._all.values() if each.steps), default=now + LOOK_S)
                    self._changed.wait(min(LOOK_S, max(0.0, next_at - now)))
                    continue
                steps = [limited.steps.pop(0)[1] for limited in due]
                for limited in due:
                    if not limited.steps:
                        del self._all[id(limited)]
            for step in steps:
                try:
                    step()
                except Exception:
                    logger.exception("a time limit could not be told; the others are")

    def _soft(self, limited: Limited) -> None:
        if limited.body.interrupt(SoftTimeLimitExceeded):
            limited.on_soft(limited.soft_s or 0.0)

    def _hard(self, limited: Limited) -> None:
        if limited.body.interrupt(HardLimit):
            self.interrupted(limited)

    def _stuck(self, limited: Limited) -> None:
        if limited.body.is_inside:
            limited.on_stuck()
