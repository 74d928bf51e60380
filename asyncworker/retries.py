"""Retries: which failures are the code's, and when a message is run again."""

from __future__ import annotations

import logging
from typing import Any

from dramatiq import Broker, MessageProxy
from dramatiq.middleware import Callbacks as DramatiqCallbacks
from dramatiq.middleware import Retries as DramatiqRetries
from dramatiq.middleware import Shutdown

from asyncworker.at_most_once import BEGUN_BY_OPTION, BEGUN_OPTION
from asyncworker.cancellations import Cancelled, as_cancelled
from asyncworker.errors import (
    BrowserCrashed,
    BrowserRecycled,
    ExitDrifted,
    PaceDeferred,
    PageCrashed,
    RefusedMessage,
    StaleAttempt,
    TooManyRequests,
)
from asyncworker.middleware import emit
from asyncworker.settling import RETRYING

logger = logging.getLogger("asyncworker.worker")

#: A message whose browser died is run again this soon, doubled each time, this often; then it uses up retries.
CRASH_BACKOFF_MS = 250
MAX_CRASHES = 5

#: A message whose site says to slow down, and that has no line to wait in, is run again after this, doubled each time.
SLOW_DOWN_MS, MOST_SLOW_DOWN_MS = 5_000, 600_000

#: An interrupted message is run again after this: threads of the stopping worker still take what is there at once.
AFTER_SHUTDOWN_MS = 3_000


def defer(broker: Any, message: MessageProxy, key: str) -> None:
    """Have a message wait in the line of a pace key again, where it was; nothing of it was run."""
    for option in (BEGUN_OPTION, BEGUN_BY_OPTION):
        message.options.pop(option, None)
    broker.defer(message, key)


class Callbacks(DramatiqCallbacks):
    """Dramatiq's callbacks; what is cancelled or put off is no failure and no success, and has none."""

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        if not isinstance(as_cancelled(broker, message, exception), Cancelled | PaceDeferred):
            super().after_process_message(broker, message, result=result, exception=exception)


class Retries(DramatiqRetries):
    """Dramatiq's retries, but a message that can never succeed is dead-lettered at once."""

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        if isinstance(as_cancelled(broker, message, exception), Cancelled):
            return  # neither retried nor a dead letter
        if isinstance(exception, TooManyRequests) and (exception.line is None or BEGUN_OPTION in message.options):
            self._put_off(broker, message, exception)
            return
        if isinstance(exception, PaceDeferred):
            logger.debug("message %s waits in line again: %s", message.message_id, exception)
            defer(broker, message, exception.key or "")
            return
        if isinstance(exception, RefusedMessage):
            logger.error("message %s is dead-lettered: %s", message.message_id, exception)
            message.fail()
            return
        if isinstance(exception, StaleAttempt):
            logger.warning("message %s is not retried from here: %s", message.message_id, exception)
            return
        setattr(message, RETRYING, True)  # until this hook ends: what others enqueue is another message
        try:
            if self._is_innocent(broker, message, exception):
                self._enqueue_again(broker, message, exception)
            else:
                super().after_process_message(broker, message, result=result, exception=exception)
        finally:
            setattr(message, RETRYING, False)
        if exception is not None and not message.failed:
            emit(broker, "after_retry_message", message, exception=exception)

    def _put_off(self, broker: Broker, message: MessageProxy, exception: TooManyRequests) -> None:
        """Run a message again after the time that its site asks for; one at most once is not."""
        if BEGUN_OPTION in message.options:
            message.fail()
            return
        times = message.options["slowed_down"] = message.options.get("slowed_down", 0) + 1
        back_off_ms = min(MOST_SLOW_DOWN_MS, SLOW_DOWN_MS * 2 ** min(times - 1, 10))
        delay_ms = round(exception.wait_ms or exception.asked_ms or back_off_ms)
        logger.info(
            "message %s is run again in %d ms, with all its retries: %s", message.message_id, delay_ms, exception
        )
        setattr(message, RETRYING, True)
        try:
            broker.enqueue(message, delay=delay_ms)  # type: ignore[arg-type]  # as Dramatiq does
        finally:
            setattr(message, RETRYING, False)

    def _is_innocent(self, broker: Broker, message: MessageProxy, exception: BaseException | None) -> bool:
        """A crash, a recycle, a changed exit or a shutdown is not the code's failure.

        It uses up no retry, if there are any. A shutdown is no retry at all: the message goes back to its queue.
        """
        options = broker.get_actor(message.actor_name).options
        throws = message.options.get("throws") or options.get("throws")
        if throws and isinstance(exception, throws):
            return False
        if isinstance(exception, Shutdown):
            return BEGUN_OPTION not in message.options  # one at most once
        max_retries = message.options.get("max_retries", options.get("max_retries", self.max_retries))
        if max_retries == 0:
            return False
        if isinstance(exception, BrowserRecycled):
            return True
        blameless = BrowserCrashed | PageCrashed | ExitDrifted
        return isinstance(exception, blameless) and message.options.get("crashes", 0) < MAX_CRASHES

    def _enqueue_again(self, broker: Broker, message: MessageProxy, exception: BaseException | None) -> None:
        if isinstance(exception, Shutdown):
            delay_ms = AFTER_SHUTDOWN_MS
        elif isinstance(exception, BrowserRecycled):
            delay_ms = CRASH_BACKOFF_MS
        else:
            crashes = message.options["crashes"] = message.options.get("crashes", 0) + 1
            delay_ms = CRASH_BACKOFF_MS * 2 ** (crashes - 1)
        logger.info("message %s is run again in %d ms; it used up no retry", message.message_id, delay_ms)
        broker.enqueue(message, delay=delay_ms)  # type: ignore[arg-type]  # as Dramatiq does: a proxy of a Message
