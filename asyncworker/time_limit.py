"""TimeLimit: an attempt's time limit, which begins when its page is open and ends with its code.

Dramatiq counts from when a thread takes the message: a launch, or the wait for a slot, would use up the time of the
code, and the error would not say so. What comes before the page is open has limits of its own (PhaseTimeout names the
phase), and so has what comes after the code. A plain actor's limit begins with its message, as Dramatiq's does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace

from dramatiq import Broker, MessageProxy, Worker
from dramatiq.middleware import Interrupt, Shutdown
from dramatiq.middleware import TimeLimit as DramatiqTimeLimit
from dramatiq.middleware.threading import raise_thread_exception

from asyncworker.browser import MOST_DEAD_BROWSERS
from asyncworker.middleware import SESSION_OPTION, BrowserMiddleware
from asyncworker.session import Attempt, current_attempt
from asyncworker.settings import Settings

logger = logging.getLogger("asyncworker.worker")

#: Time limits are checked this often. Dramatiq's default of a second is long beside a page that takes 0.1 s.
CHECK_MS = 100

#: What the phases before the page is open may take beyond the sum of their limits, before something is broken.
OPENING_GRACE_MS = 10_000


@dataclass(frozen=True)
class Overdue:
    """A message that does not end although its time limit has passed, and the thread that is at it."""

    message_id: str
    actor: str
    thread: int


@dataclass(eq=False)
class _Limit:
    """Of the message that a thread is at."""

    at: Overdue
    limit_ms: float
    ends: float = float("inf")
    has_session: bool = False
    is_interrupted: bool = False  # by a stop

    @property
    def thread(self) -> int:
        return self.at.thread


#: Of the message that the running thread, and the code that it has started on the loop, is at.
_current: ContextVar[_Limit | None] = ContextVar("asyncworker_time_limit", default=None)


class TimeLimit(DramatiqTimeLimit):
    """Interrupts the thread of an attempt whose time limit has passed.

    It stands near the end of the order: the hooks of the others, which may wait for a store that is away, are not
    interrupted.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(time_limit=settings.time_limit_ms, interval=CHECK_MS)
        self._opening_ms = opening_limit_ms(settings)
        self._cleanup_s = settings.cleanup_timeout_ms / 1000
        self._limits: dict[int, _Limit] = {}
        self._setting = threading.Lock()

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        for middleware in broker.middleware:
            if isinstance(middleware, BrowserMiddleware):
                middleware.runtime.on_ready = self.begin
                middleware.runtime.on_code_ended = self.end

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        actor = broker.get_actor(message.actor_name)
        limit_ms = message.options.get("time_limit") or actor.options.get("time_limit", self.time_limit)
        has_session = bool(actor.options.get(SESSION_OPTION))
        at = Overdue(message.message_id, message.actor_name, threading.get_ident())
        limit = _Limit(at, limit_ms, has_session=has_session)
        with self._setting:
            self._limits[limit.thread] = limit
        _current.set(limit)
        if has_session:
            self._set(limit, self._opening_ms)  # in case something of ours has no end
            return
        self._set(limit, limit_ms)
        if (attempt := current_attempt.get()) is not None:
            current_attempt.set(_with_deadline(attempt, limit_ms))

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: object = None, exception: BaseException | None = None
    ) -> None:
        try:
            self._forget()
        except Interrupt as late:  # the attempt has ended; let through, it would take what follows with it
            logger.debug("message %s had ended when it was interrupted: %r", message.message_id, late)
            self._forget()

    after_skip_message = after_process_message

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Interrupt the plain actors that outlast the stop; sessions are drained on their loop, with their contexts."""
        self.interrupt_all(lambda limit: not limit.has_session)
        ends = time.monotonic() + self._cleanup_s
        while time.monotonic() < ends and any(limit.is_interrupted for limit in list(self._limits.values())):
            time.sleep(CHECK_MS / 1000)

    def _forget(self) -> None:
        with self._setting:
            self._limits.pop(threading.get_ident(), None)
        _current.set(None)
        self.manager.remove_timeout(threading.get_ident())  # type: ignore[no-untyped-call]

    def begin(self, attempt: Attempt) -> Attempt:
        """Begin the limit of the attempt whose page is open, on the loop; gives it with its deadline."""
        limit = _current.get()
        if limit is None:  # code outside any message
            return attempt
        self._set(limit, limit.limit_ms)
        return _with_deadline(attempt, limit.limit_ms)

    def end(self, attempt: Attempt) -> None:
        """The attempt's code has ended, on the loop."""
        if (limit := _current.get()) is not None:
            self._set(limit, self._opening_ms)

    def expect_end(self, thread: int) -> None:
        """What a thread is at was cancelled: from now on it is overdue, if it does not end."""
        with self._setting:
            if (limit := self._limits.get(thread)) is not None:
                limit.ends = time.monotonic()

    @property
    def at_work(self) -> int:
        """How many threads are at a message."""
        return len(self._limits)

    def overdue(self, grace_ms: float) -> list[Overdue]:
        """The messages whose limit has passed so long ago, and which have not ended."""
        latest = time.monotonic() - grace_ms / 1000
        return [limit.at for limit in list(self._limits.values()) if limit.ends < latest]

    def interrupt_all(self, which: Callable[[_Limit], bool] = lambda limit: True) -> None:
        """Interrupt the threads that are at such a message, as a shutdown does; each message once."""
        with self._setting:
            for limit in self._limits.values():
                if not limit.is_interrupted and which(limit):
                    limit.is_interrupted = True
                    raise_thread_exception(limit.thread, Shutdown)  # type: ignore[no-untyped-call]

    def _set(self, limit: _Limit, limit_ms: float) -> None:
        with self._setting:
            # Code that was left behind must not touch the limit of the message that its thread is at by now.
            if self._limits.get(limit.thread) is limit:
                limit.ends = time.monotonic() + limit_ms / 1000
                self.manager.add_timeout(limit.thread, limit_ms)  # type: ignore[no-untyped-call]


def opening_limit_ms(settings: Settings) -> int:
    """The most that the phases before a session's code, and those after it, may take together."""
    tries = MOST_DEAD_BROWSERS + 1
    opening_ms = settings.browser_wait_ms + 2 * settings.context_timeout_ms
    return settings.browser_wait_ms + tries * opening_ms + settings.close_timeout_ms + OPENING_GRACE_MS


def _with_deadline(attempt: Attempt, limit_ms: float) -> Attempt:
    deadline = None if limit_ms == float("inf") else time.monotonic() + limit_ms / 1000
    return replace(attempt, deadline=deadline)
