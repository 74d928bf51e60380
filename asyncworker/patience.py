"""How a worker thread waits for a store that is away, full or loading."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import redis
from dramatiq import Broker, ConnectionClosed
from redis.exceptions import DataError, OutOfMemoryError, ReadOnlyError, ResponseError

from asyncworker.errors import BrokerUnavailable

logger = logging.getLogger("asyncworker.broker")

T = TypeVar("T")

#: The pause before the next try, in ms: doubled from the first to the last.
PAUSES_MS = (100, 5_000)

#: The pause of a producer, whose wait is bounded.
PAUSE_S = 0.2

#: What a store says that will not always say so; in a pipeline it stands behind the command's number.
PASSING = ("OOM", "used memory", "LOADING", "READONLY", "BUSY", "MASTERDOWN", "MISCONF", "CLUSTERDOWN", "TRYAGAIN")


def patiently(work: Callable[[], T], what: str) -> T:
    """Repeat `work` until the store takes it; an error that will not pass is raised.

    In a worker thread only: what waits here holds its message, which then neither gets lost nor runs twice.
    """
    pause_ms, longest_ms = PAUSES_MS
    while True:
        try:
            return work()
        except (redis.RedisError, BrokerUnavailable, ConnectionClosed) as error:
            if not passes(error):
                raise
            logger.warning("could not %s (%s); trying again in %d ms", what, error, pause_ms)
            time.sleep(pause_ms / 1000)
            pause_ms = min(pause_ms * 2, longest_ms)


def passes(error: BaseException) -> bool:
    """True when the same command may succeed later: the store is away, full, loading or read-only."""
    cause = error if isinstance(error, redis.RedisError) else error.__cause__
    if isinstance(cause, OutOfMemoryError | ReadOnlyError):
        return True
    if isinstance(cause, ResponseError):
        return any(word in str(cause) for word in PASSING)
    return not isinstance(cause, DataError)


#: True in a worker thread while the hooks after an attempt run.
_after_attempt: ContextVar[bool] = ContextVar("asyncworker_after_attempt", default=False)


class PatientAfterAttempts(Broker):
    """A broker that knows when it is asked to enqueue what follows an attempt: that is lost unless it is enqueued."""

    @property
    def is_after_attempt(self) -> bool:
        return _after_attempt.get()

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        if signal != "process_message":
            super().emit_after(signal, *args, **kwargs)
            return
        token = _after_attempt.set(True)
        try:
            super().emit_after(signal, *args, **kwargs)
        finally:
            _after_attempt.reset(token)
