"""What takes messages off a queue in a worker, and loses none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import redis
from dramatiq import ConnectionClosed, Message, MessageProxy
from dramatiq.brokers.redis import _RedisConsumer
from dramatiq.common import compute_backoff
from dramatiq.errors import DecodeError

from asyncworker.errors import BrokerUnavailable
from asyncworker.middleware import emit_receive
from asyncworker.patience import patiently

logger = logging.getLogger("asyncworker.broker")

T = TypeVar("T")


class WorkerConsumer(_RedisConsumer):
    """Dramatiq's consumer, with every failure of the store as a connection error, so that it is tried again.

    It also fetches as soon as a thread is free. Dramatiq's sleeps for a growing pause while its worker holds all it
    may, which with as many messages prefetched as there are threads leaves a thread without work for a tenth of
    a second and more after each message.
    """

    broker: Any  # a WorkerBroker: what makes it stands below it in the map

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._freed = threading.Event()

    def ack(self, message: MessageProxy) -> None:
        self._patiently(lambda: super(WorkerConsumer, self).ack(message))
        self._freed.set()

    def nack(self, message: MessageProxy) -> None:
        self._patiently(lambda: super(WorkerConsumer, self).nack(message))
        self._freed.set()

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        self._as_connection_error(lambda: super(WorkerConsumer, self).requeue(messages))

    def __next__(self) -> MessageProxy | None:
        while True:
            if not self.message_cache:
                self._fetch()
            if not self.message_cache:
                self._pause()
                return None
            self.misses = 0
            message = self._read(self.message_cache.pop(0))
            if message is not None:
                self.queued_message_ids.add(message.message_id)
                emit_receive(self.broker, message)
                return message

    def _pause(self) -> None:
        """Nothing came: wait for a thread to become free, where some are for a growing time only."""
        pause_ms = self.timeout
        if self._room() > 0:
            self.misses, pause_ms = compute_backoff(self.misses, max_backoff=self.timeout)
        if self._freed.wait(pause_ms / 1000):
            self.misses = 0

    def _room(self) -> int:
        room: int = self.prefetch - self.outstanding_message_count
        return room

    def _fetch(self) -> None:
        self._freed.clear()  # before the look at the room: one that is freed from here on ends the pause
        if (room := self._room()) > 0:
            self.message_cache = self._as_connection_error(lambda: self.broker.do_fetch(self.queue_name, room))

    def _read(self, body: bytes | None) -> MessageProxy | None:
        """The message in `body`; None when it is none: it is in the dead letters then."""
        if body is None:  # its id was in the queue, its body is gone: flushed meanwhile
            return None
        try:
            message = MessageProxy(Message.decode(body))
            reason = _misfit(message)
        except DecodeError as error:
            reason = str(error.error)
        if reason is None:
            return message
        self._reject_body(body, reason)
        return None

    def _patiently(self, work: Callable[[], None]) -> None:
        """Repeat an acknowledgement until it is taken: given up, the message would be run again."""
        patiently(lambda: self._as_connection_error(work), "acknowledge a message")

    def _as_connection_error(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except redis.RedisError as error:
            raise ConnectionClosed(f"{self.broker.where}: {error}") from error
        except BrokerUnavailable as error:
            raise ConnectionClosed(error) from error

    def _reject_body(self, body: bytes, reason: str) -> None:
        """Move a body that is no message to the dead letters, with its bytes as they came."""
        identifier = self._identify(body)
        logger.error(
            "queue %r held a body that is no Dramatiq message (%s); it is in the dead letters as %s: %.200r",
            self.queue_name,
            reason,
            identifier,
            body,
        )
        if identifier is not None:
            patiently(lambda: self.broker.do_nack(self.queue_name, identifier), "reject a body")

    def _identify(self, body: bytes) -> str | None:
        """The id under which this consumer fetched `body`: a fetch returns bodies only."""
        namespace = self.broker.namespace
        fetched = f"{namespace}:__acks__.{self.broker.broker_id}.{self.queue_name}"
        client: Any = self.broker.client
        identifiers = patiently(lambda: sorted(client.smembers(fetched)), "read what was fetched")
        if not identifiers:
            return None
        bodies = patiently(
            lambda: client.hmget(f"{namespace}:{self.queue_name}.msgs", identifiers), "read what was fetched"
        )
        matching = (identifier for identifier, other in zip(identifiers, bodies, strict=True) if other == body)
        found = next(matching, None)
        return found.decode() if found is not None else None


def _misfit(message: MessageProxy) -> str | None:
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
    if not isinstance(message.options.get("redis_message_id"), str):
        return "its options have no redis_message_id"
    return None
