"""What takes messages off a queue in a worker, at once and without losing any."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import redis
from dramatiq import ConnectionClosed, Message, MessageProxy
from dramatiq.brokers.redis import _RedisConsumer
from dramatiq.common import q_name
from dramatiq.errors import DecodeError

from asyncworker.errors import BrokerUnavailable
from asyncworker.middleware import emit_receive
from asyncworker.patience import patiently

logger = logging.getLogger("asyncworker.broker")

T = TypeVar("T")

#: An idle consumer looks for itself this often: a producer that is plain Dramatiq wakes no one.
POLL_S = 1.0


class WorkerConsumer(_RedisConsumer):
    """Dramatiq's consumer, woken by what comes instead of looking for it.

    Where its worker has no room it waits for a thread to become free; else it blocks in the store until it is woken,
    or until the next delayed message is due. Every failure of the store is a connection error, so that the worker
    tries it again.
    """

    broker: Any  # a WorkerBroker: what makes it stands below it in the map

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._freed = threading.Event()
        self._next_due_ms = -1
        #: What this worker holds of the queue, by id in the store; it outlives the consumer, which ends with each
        #: failure of the store.
        self._held: set[str] = self.broker.held(self.queue_name)
        #: Fetched and not handed out yet: (id, body).
        self._fetched: list[tuple[str, bytes | None]] = []

    def ack(self, message: MessageProxy) -> None:
        self._settle(message, self.broker.do_ack, "acknowledge a message")

    def nack(self, message: MessageProxy) -> None:
        self._settle(message, self.broker.do_nack, "reject a message")

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        self._give_back([message.options["redis_message_id"] for message in messages])

    def close(self) -> None:
        """Give back what was fetched and handed to no one."""
        held, self._fetched = self._fetched, []
        try:
            self._give_back([identifier for identifier, _ in held])
        except ConnectionClosed as error:
            logger.info("queue %r: %d messages are reclaimed later: %s", self.queue_name, len(held), error)

    def __next__(self) -> MessageProxy | None:
        while True:
            if not self._fetched:
                self._fetch()
            if not self._fetched:
                self._wait()
                return None
            message = self._read(*self._fetched.pop(0))
            if message is not None:
                emit_receive(self.broker, message)
                return message

    def _fetch(self) -> None:
        self._freed.clear()  # before the look at the room: one that is freed from here on ends the wait
        if (room := self._room()) <= 0:
            return
        # Others only ever take away from `held`, and only after the store has: so it is never less than there.
        held = len(self._held)
        answer = self._as_connection_error(lambda: self.broker.do_fetch(self.queue_name, room, held))
        self._next_due_ms, lost, *rest = answer
        self._fetched = [(identifier.decode(), body) for identifier, body in zip(rest[::2], rest[1::2], strict=True)]
        self._held.update(identifier for identifier, _ in self._fetched)
        if lost:
            known = list(self._held)
            count = self._as_connection_error(lambda: self.broker.do_reclaim(self.queue_name, *known))
            logger.warning(
                "queue %r: %d fetched messages had got lost on the way here; put back", self.queue_name, count
            )

    def _wait(self) -> None:
        if self._room() <= 0:
            self._freed.wait(POLL_S)
            return
        limit_s = POLL_S if self._next_due_ms < 0 else min(POLL_S, self._next_due_ms / 1000)
        if limit_s > 0:
            self._as_connection_error(lambda: self.broker.client.blpop(self.broker.wake_key(self.queue_name), limit_s))

    def _room(self) -> int:
        room: int = self.prefetch - len(self._held)
        return room

    def _read(self, identifier: str, body: bytes | None) -> MessageProxy | None:
        """The message in `body`; None when it is none: it is in the dead letters then."""
        if body is None:  # its id was in the queue, its body is gone: flushed meanwhile
            patiently(lambda: self.broker.do_ack(self.queue_name, identifier), "forget a flushed message")
            self._held.discard(identifier)
            return None
        try:
            message = Message.decode(body)
            reason = misfit(message)
        except DecodeError as error:
            reason = str(error.error)
        if reason is None:
            return MessageProxy(_undelayed(message, identifier))
        logger.error(
            "queue %r held a body that is no Dramatiq message (%s); it is in the dead letters as %s: %.200r",
            self.queue_name,
            reason,
            identifier,
            body,
        )
        patiently(lambda: self.broker.do_nack(self.queue_name, identifier), "reject a body")
        self._held.discard(identifier)
        return None

    def _settle(self, message: MessageProxy, command: Callable[[str, str], int], what: str) -> None:
        """Repeat an acknowledgement until it is taken: given up, the message would be run again."""
        identifier = message.options["redis_message_id"]
        tries = 0

        def settle() -> int:
            nonlocal tries
            tries += 1
            return self._as_connection_error(lambda: command(self.queue_name, identifier))

        try:
            was_ours = patiently(settle, what)
        finally:
            self._held.discard(identifier)
            self._freed.set()
        if not was_ours and tries == 1:  # of a repeated one the first may have been taken
            logger.warning(
                "message %s (%s) was no longer this worker's when it was done: the worker had been taken for dead, and "
                "another has it, or has run it too",
                message.message_id,
                message.actor_name,
            )

    def _give_back(self, identifiers: list[str]) -> None:
        if not identifiers:
            return
        # Known no more, whatever becomes of the command: what it does not give back is reclaimed by the next fetch.
        self._held.difference_update(identifiers)
        self._as_connection_error(lambda: self.broker.do_requeue(self.queue_name, *identifiers))

    def _as_connection_error(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except redis.RedisError as error:
            raise ConnectionClosed(f"{self.broker.where}: {error}") from error
        except BrokerUnavailable as error:
            raise ConnectionClosed(error) from error


def _undelayed(message: Message[Any], identifier: str) -> Message[Any]:
    """A message whose delay is over lies in its queue as it was delayed."""
    options = {name: value for name, value in message.options.items() if name != "eta"}
    # Its id in the store is the one that it was fetched by, whatever its body says.
    options["redis_message_id"] = identifier
    return Message(
        queue_name=q_name(message.queue_name),
        actor_name=message.actor_name,
        args=message.args,
        kwargs=message.kwargs,
        options=options,
        message_id=message.message_id,
        message_timestamp=message.message_timestamp,
    )


def misfit(message: Message[Any]) -> str | None:
    """Why a decoded body is still no message; None: it is one."""
    wanted = {
        "actor_name": str,
        "message_id": str,
        "queue_name": str,
        "kwargs": dict,
        "options": dict,
        "message_timestamp": int | float,
    }
    for name, kind in wanted.items():
        if not isinstance(getattr(message, name), kind):
            return f"its {name} is {getattr(message, name)!r}"
    return None
