"""Celery's two log lines for a task that goes well, as many as a worker writes of its own attempts."""

from __future__ import annotations

import logging
import time

from celery.app import trace

from asyncworker.attempt_log import LINES

#: Who writes them, and how such a line begins.
LOGGERS = ("celery.worker.strategy", "celery.app.trace")


class Sparing(logging.Filter):
    """Lets so many in a second pass; at the level DEBUG all. What fails or is retried has its line always.

    Writing lines costs a worker of short tasks more than running them, and its attempts are summed up already.
    """

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg not in (trace.LOG_RECEIVED, trace.LOG_SUCCESS):
            return True
        if (second := int(time.monotonic())) != self._second:
            self._second, self._lines = second, 0
        self._lines += 1  # threads may do this at once; a line more makes no difference
        return self._lines <= 2 * LINES or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


def spare() -> None:
    """Have Celery's loggers of this process spare such lines."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, Sparing) for each in logger.filters):
            logger.addFilter(Sparing())
