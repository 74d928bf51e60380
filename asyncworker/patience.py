"""How a worker thread waits for a store that is away, full or loading."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import redis
from dramatiq import Broker, ConnectionClosed
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    DataError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from asyncworker.errors import BrokerUnavailable, UnfitBroker

logger = logging.getLogger("asyncworker.broker")

T = TypeVar("T")

#: The pause before the next try, in ms: doubled from the first to the last.
PAUSES_MS = (100, 5_000)

#: The pause of a producer, whose wait is bounded.
PAUSE_S = 0.2

#: What a store says that will not always say so, where redis-py has no class for it; a script's error and a
#: pipeline's have it behind other words.
PASSING = ("OOM", "used memory", "LOADING", "READONLY", "BUSY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "CLUSTERDOWN")
PASSING_TYPES = (OutOfMemoryError, ReadOnlyError, ClusterDownError, MasterDownError, TryAgainError, BusyLoadingError)

#: What it says to whom it does not let in, or not let do this, and what redis-py makes of it.
LOCKED_OUT = (
    "NOAUTH",
    "WRONGPASS",
    "NOPERM",
    "invalid password",
    "invalid username-password",
    "The user executing the script",
    "ACL failure in script",
)
LOCKED_OUT_TYPES = (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
)


class Patience:
    """How long the threads of a worker process wait for a store that is away: for ever, until it has to stop."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._ends_at = float("inf")
        self._thread = threading.local()

    def end_in(self, timeout_s: float) -> None:
        """Let who waits give up in so many seconds, or earlier if that was said before."""
        self._ends_at = min(self._ends_at, time.monotonic() + timeout_s)
        self._ending.set()

    def renew(self) -> None:
        """Wait for ever again."""
        self._ends_at = float("inf")
        self._ending.clear()

    @property
    def left_s(self) -> float:
        """Seconds until who waits gives up; infinite while the worker does not stop."""
        return max(0.0, self._ends_at - time.monotonic())

    def pause(self, pause_s: float) -> bool:
        """Wait before the next try; False when there is no time for one: this thread has given up."""
        if not self._ending.is_set():
            self._ending.wait(pause_s)
        elif self.left_s > 0:
            time.sleep(min(pause_s, self.left_s))
        else:
            self._thread.gave_up = True
            return False
        return True

    def gave_up(self) -> bool:
        """True when this thread has given up since it was asked last."""
        gave_up: bool = getattr(self._thread, "gave_up", False)
        self._thread.gave_up = False
        return gave_up


def patiently(work: Callable[[], T], what: str, patience: Patience | None = None) -> T:
    """Repeat `work` until the store takes it; an error that will not pass is raised.

    Parameters:
        patience: Of a worker that may have to stop meanwhile: the last error is raised then, and what the thread is at
            must not be acknowledged. None: for ever.

    In a worker thread only: what waits here holds its message, which then neither gets lost nor runs twice. So it also
    waits for a store that has locked this worker out, whose password may have been changed before the worker's, and
    says so each time.
    """
    pause_ms, longest_ms = PAUSES_MS
    while True:
        try:
            return work()
        except (redis.RedisError, BrokerUnavailable, ConnectionClosed) as error:
            is_locked_out = locked_out(error)
            if not (is_locked_out or passes(error)):
                raise
            level = logging.ERROR if is_locked_out else logging.WARNING
            if patience is not None and patience.left_s == 0:
                logger.error("could not %s (%s%s), and this worker has to stop", what, error, remedy(error))
            else:
                logger.log(level, "could not %s (%s%s); trying again in %d ms", what, error, remedy(error), pause_ms)
            if patience is None:
                time.sleep(pause_ms / 1000)
            elif not patience.pause(pause_ms / 1000):
                raise
            pause_ms = min(pause_ms * 2, longest_ms)


def passes(error: BaseException) -> bool:
    """True when the same command may succeed later by itself: the store is away, full, loading, busy or read-only."""
    if locked_out(error):
        return False
    cause = _cause(error)
    if isinstance(cause, PASSING_TYPES):
        return True
    if isinstance(cause, ResponseError):
        return any(word in str(cause) for word in PASSING)
    return not isinstance(cause, DataError)


def locked_out(error: BaseException) -> bool:
    """True when the store is there and refuses who asks, or will not do, until someone changes that."""
    cause = _cause(error)
    if isinstance(cause, (UnfitBroker, *LOCKED_OUT_TYPES)):
        return True
    return isinstance(cause, ResponseError) and any(word in str(cause) for word in LOCKED_OUT)


def remedy(error: BaseException) -> str:
    """What to do about an error, to be put behind it; empty where waiting helps."""
    if not locked_out(error) or isinstance(_cause(error), UnfitBroker) or "ACL SETUSER" in str(error):
        return ""  # or it is said already
    return (
        "; the store does not let this process do that: check the user and the password in ASYNCWORKER_BROKER_URL "
        "(or ASYNCWORKER_STORE_URL, where that is set), and what the store's ACL lets that user do"
    )


def _cause(error: BaseException) -> BaseException | None:
    return error if isinstance(error, redis.RedisError) else error.__cause__


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
