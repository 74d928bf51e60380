"""Losses: messages that a worker process had begun when it died, and those that kill theirs each time.

A loss uses up no retry. It is logged, counted in the message's option `losses`, its row in the ledger is closed as
`lost`, and `after_lose_message` of the middleware is called, all by the worker that has the message next. After
`max_losses` the message is dead-lettered: it will hardly end otherwise.

Who died beside the message that killed its process is counted, too, since no one can tell them apart. So the attempt
that could be a message's last loss runs alone in its process: lost then, it was the message itself.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import redis
from dramatiq import Broker, Message, MessageProxy
from dramatiq.middleware import Shutdown, SkipMessage

from asyncworker.accounting import LOSSES_OPTION, NOTED_LOSSES_OPTION, known_as, now_ms
from asyncworker.cancellations import is_cancelled
from asyncworker.ledger import Ledger, Outcome, Row
from asyncworker.middleware import Middleware, backlog_of, emit
from asyncworker.redelivery import count_losses

logger = logging.getLogger("asyncworker.worker")

#: The option of an actor that says how often its messages may be lost.
MAX_LOSSES_OPTION = "max_losses"

#: Who waits for the process to itself sees this often whether the process stops.
LOOK_S = 0.2


class TooManyLosses(SkipMessage):
    """A message was lost as often as it may be; it is dead-lettered."""


def add_losses(message: Message[Any], losses: int) -> None:
    """Count losses of a message in its options."""
    message.options[LOSSES_OPTION] = message.options.get(LOSSES_OPTION, 0) + losses


class Losses(Middleware):
    """Deals with messages that were lost, before their next attempt; the first of all middleware.

    Parameters:
        ledger: Has the rows of their earlier attempts.
        max_losses: How often a message may be lost, unless its actor says otherwise.
    """

    def __init__(self, ledger: Ledger, *, max_losses: int) -> None:
        self._ledger = ledger
        self._max_losses = max_losses
        self._gate = Gate()

    @property
    def actor_options(self) -> set[str]:
        return {MAX_LOSSES_OPTION}

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if getattr(message, "redelivered", False):
            self._look_for_losses(broker, message)
        losses = message.options.get(LOSSES_OPTION, 0)
        most = self._most(broker, message) if losses else 0
        may_begin = not is_cancelled(broker, message)  # else it is dropped when its row is open
        if losses:
            if losses > message.options.get(NOTED_LOSSES_OPTION, 0):
                self._note(broker, message, losses, most)
                message.options[NOTED_LOSSES_OPTION] = losses
            if losses >= most and may_begin:
                message.fail()
                raise TooManyLosses(
                    f"message {message.message_id} ({message.actor_name}) was lost {losses} times: the worker process "
                    f"died under it each time; it may be lost {most} times (ASYNCWORKER_MAX_LOSSES, or max_losses of "
                    "the actor)"
                )
        self._gate.enter(broker, alone=0 < losses == most - 1 and may_begin)
        if losses and hasattr(broker, "begin"):
            broker.begin(message)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._gate.leave()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._gate.leave()

    def _most(self, broker: Broker, message: MessageProxy) -> int:
        options = broker.get_actor(message.actor_name).options
        most: int = message.options.get(MAX_LOSSES_OPTION, options.get(MAX_LOSSES_OPTION, self._max_losses))
        return most

    def _look_for_losses(self, broker: Broker, message: MessageProxy) -> None:
        """Count the losses of a message where its broker does not."""
        most, error = self._most(broker, message), None
        if not (is_away := backlog_of(broker).is_away):
            try:
                count_losses(
                    self._ledger, message, most=most, gives_up=lambda: bool(getattr(broker, "is_stopping", False))
                )
            except redis.RedisError as refusal:
                is_away, error = True, refusal
        if is_away:
            logger.warning(
                "message %s (%s) is delivered again, and whether it was lost is not known: the ledger's store is away "
                "(%s)",
                message.message_id,
                message.actor_name,
                error,
            )

    def _note(self, broker: Broker, message: MessageProxy, losses: int, most: int) -> None:
        """Tell the ledger, the log and the hooks; where the ledger's store is away, it is told when it is back."""
        row, backlog, error = None, backlog_of(broker), None
        try:
            if not backlog.is_away:
                if is_noted(self._ledger, message):
                    return
                row = close_as_lost(self._ledger, message)
        except redis.RedisError as refusal:
            error = refusal
        if row is None:
            # Before the row of the attempt that begins now, which then waits behind it.
            later = message.copy()
            backlog.add((message.message_id, f"lost {losses}"), lambda: _close_later(self._ledger, later), error)
        logger.error(
            "message_id=%s actor=%s attempt=%s seed=%s outcome=lost phase=%s worker=%s losses=%d of %d: the worker "
            "process died under it%s",
            message.message_id,
            message.actor_name,
            row.attempt if row else None,
            row.seed if row else message.kwargs.get("seed"),
            row.phase if row else None,
            row.worker if row else None,
            losses,
            most,
            "; it is dead-lettered" if losses >= most else "",
        )
        emit(broker, "after_lose_message", message, losses=losses, row=row)


def is_noted(ledger: Ledger, message: Message[Any] | MessageProxy) -> bool:
    """Whether the ledger has these losses already: a worker that died after it had noted them never began."""
    since_ms, noted = message.options.get("requeue_timestamp", 0), 0
    for row in reversed(ledger.rows(message.message_id)):
        if row.outcome is not Outcome.lost or (row.closed_ms or 0) < since_ms:
            break
        noted += 1
    losses: int = message.options[LOSSES_OPTION] - message.options.get(NOTED_LOSSES_OPTION, 0)
    return noted >= losses


def _close_later(ledger: Ledger, message: Message[Any]) -> None:
    """May be repeated."""
    if not is_noted(ledger, message):
        close_as_lost(ledger, message)


def close_as_lost(ledger: Ledger, message: Message[Any] | MessageProxy) -> Row:
    """Close the row of the attempt that was lost; where it had none, which is so if it was short, it gets one."""
    rows, at_ms = ledger.rows(message.message_id), now_ms()
    if rows and rows[-1].outcome is Outcome.running:
        row = rows[-1]
    else:
        seed = message.kwargs.get("seed", rows[-1].seed if rows else None)
        row = ledger.open(
            Row(
                message_id=message.message_id,
                attempt=0,
                actor=known_as(message),
                seed=seed if isinstance(seed, int) else None,
                worker="",
                opened_ms=at_ms,
            )
        )
    row = row.closed(Outcome.lost, at_ms)
    ledger.close(row)
    return row


class Gate:
    """Lets the attempts of a process in: many at once, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone: int | None = None
        self._entered = threading.local()

    def enter(self, broker: Any, *, alone: bool) -> None:
        """Wait until this thread's attempt may begin.

        Raises:
            Shutdown: When the process stops meanwhile.
        """
        with self._changed:
            self._entered.is_inside = False
            if alone:
                self._wait_while(broker, lambda: self._alone is not None)
                self._alone = threading.get_ident()
                try:
                    self._wait_while(broker, lambda: self._inside > 0)
                except BaseException:
                    self._alone = None
                    self._changed.notify_all()
                    raise
            else:
                self._wait_while(broker, lambda: self._alone is not None)
            self._inside += 1
            self._entered.is_inside = True

    def leave(self) -> None:
        """This thread's attempt has ended; nothing happens if it was not let in."""
        if not getattr(self._entered, "is_inside", False):
            return
        with self._changed:
            self._entered.is_inside = False
            self._inside -= 1
            if self._alone == threading.get_ident():
                self._alone = None
            if self._alone is not None or self._inside == 0:
                self._changed.notify_all()

    def _wait_while(self, broker: Any, is_closed: Any) -> None:
        while is_closed():
            if getattr(broker, "is_stopping", False):
                raise Shutdown("the worker process is shutting down")
            self._changed.wait(LOOK_S)
