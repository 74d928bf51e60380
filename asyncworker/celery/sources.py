"""The broker that a bridge takes Celery's messages from: Redis or RabbitMQ, by kombu's connection to it.

A source gives each message out once, keeps it until it is acknowledged, and has it again when the bridge dies at any
point. Of kombu's own Redis consumer that is not true: it takes a message off its list in one step and notes in another
that it has it, so one that is killed in between loses it. Here a message moves from its list to one of the bridge's own
in a single step of the store.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

import kombu
import redis
from kombu.exceptions import OperationalError
from kombu.utils.json import loads

from asyncworker.errors import BrokerUnavailable, ConfigurationError, NotThere
from asyncworker.urls import SecretUrl

#: What a source raises when it is away, beside what kombu's transport says; ValueError is kombu's for a bad URL.
_AWAY = (OperationalError, redis.RedisError, OSError)

#: A source that does not answer for this long is away.
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0

#: Kombu's transports that are one of the two kinds.
_REDIS = ("redis", "rediss", "sentinel")
_AMQP = ("amqp", "amqps", "pyamqp")

#: Bridges, and what they hold, have keys in the source that begin so.
PREFIX = "asyncworker.bridge"

#: RabbitMQ has these in a message's properties, and a Celery message beside them.
_OUTSIDE = ("content_type", "content_encoding", "application_headers")

#: The most urgent priority is 0 here, and the least urgent is this.
LEAST = 9


@dataclass(frozen=True)
class Taken:
    """A message that was taken.

    Attributes:
        payload: It, as kombu's virtual transports have it; None when it cannot be read.
        receipt: What the source knows it by.
        publication: What its publisher gave to this one sending of it; empty where there is no such thing.
        may_be_known: It may have been taken before.
        problem: Why it cannot be read.
    """

    queue: str
    payload: dict[str, Any] | None
    receipt: Any
    publication: str = ""
    may_be_known: bool = True
    problem: str = ""


class Source(Protocol):
    """What both do; each raises BrokerUnavailable when the source does not answer."""

    where: str

    def take(self, most: int) -> list[Taken]:
        """Take so many messages at the most, and do not wait for any."""

    def acknowledge(self, taken: Sequence[Taken]) -> None:
        """These are safe elsewhere."""

    def is_drained(self) -> bool:
        """After `take` has given nothing: true when nothing is to come back from a bridge that has died."""

    def stay(self) -> None:
        """Say that this bridge lives."""

    def reopen(self) -> None:
        """After BrokerUnavailable: connect again, and have what was taken and not acknowledged in its queue."""

    def with_workers(self) -> int:
        """How many messages Celery's own workers hold, or have held when they died; as far as the source can say."""

    def close(self) -> None:
        """Give back what was taken and not acknowledged, to the end of its queue."""


def open_source(
    url: SecretUrl,
    queues: Sequence[str],
    *,
    options: Mapping[str, Any] | None = None,
    max_priority: int | None = None,
    lease_ms: int,
) -> Source:
    """Connect to a source.

    Parameters:
        options: The app's `broker_transport_options`.
        max_priority: With RabbitMQ, its queues' `x-max-priority`; None: they have none, and ignore priorities.
        lease_ms: A bridge that was not heard of for this long has died, and what it held is taken back.

    Raises:
        BrokerUnavailable: When it does not answer.
        ConfigurationError: When it is neither Redis nor RabbitMQ.
        NotThere: When RabbitMQ has no such queue.
    """
    scheme = url.value.partition("://")[0].partition("+")[0].lower()
    if scheme in _REDIS:
        return RedisSource(url, queues, options=options or {}, lease_ms=lease_ms)
    if scheme in _AMQP:
        return AmqpSource(url, queues, options=options or {}, max_priority=max_priority)
    raise ConfigurationError(
        f"--from {url}: messages are taken from {', '.join(f'{each}://' for each in (*_REDIS, *_AMQP))} as Celery has "
        "them in its broker_url, and from nothing else",
        name="--from",
    )


class RedisSource:
    """Celery's lists in Redis or Valkey, each priority of a queue a list.

    What a bridge holds of a list lies in a list of its own, `asyncworker.bridge.<id>:<list>`. The set
    `asyncworker.bridge` names all such; `asyncworker.bridge.<id>` is there while the bridge lives.
    """

    def __init__(self, url: SecretUrl, queues: Sequence[str], *, options: Mapping[str, Any], lease_ms: int) -> None:
        self.where = str(url)
        self._lease_ms = lease_ms
        self._id = f"{PREFIX}.{uuid4().hex}"
        bounds = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S}
        with _asking(self.where):
            self._connection = kombu.Connection(url.value, transport_options=bounds | dict(options))
            self._channel: Any = self._connection.channel()
        self._client: Any = redis.Redis(connection_pool=self._channel.pool, decode_responses=False)
        #: kombu restores what Celery's dead workers held; only who says after how long may know that they have died.
        self._restores = "visibility_timeout" in options
        prefix = self._channel.global_keyprefix
        # The most urgent of all queues first, as kombu's consumer does it.
        self._lists = {
            prefix + self._channel._q_for_pri(queue, step): queue
            for step in self._channel.priority_steps
            for queue in queues
        }
        self._announced: set[str] = set()
        #: What is held by bridges that have died just now is free when their leases are over.
        self._look_until = time.monotonic() + lease_ms / 1000
        self._looked_at = float("-inf")
        self.stay()
        self._try_out()

    def _try_out(self) -> None:
        try:
            with _asking(self.where):
                self._client.lmove(self._own(""), self._own(""), "LEFT", "RIGHT")
                self._lengths(self._lists)
        except BrokerUnavailable as error:
            if not isinstance(error.__cause__, redis.ResponseError):
                raise
            raise ConfigurationError(
                f"the source ({self.where}) cannot be used: {error.__cause__}; it has to be Redis 6.2 or later, or "
                "Valkey, and each --queue a list of Celery's",
                name="--from",
            ) from error

    def take(self, most: int) -> list[Taken]:
        self.stay()
        self._look_after_the_dead()
        taken: list[Taken] = []
        with _asking(self.where):
            for name, length in zip(self._lists, self._lengths(self._lists), strict=True):
                count = min(length, most - len(taken))
                if count > 0:
                    taken += [_read(self._lists[name], name, raw) for raw in self._claim(name, count)]
        return taken

    def _claim(self, name: str, count: int) -> list[bytes]:
        own = self._own(name)
        if own not in self._announced:
            self._client.sadd(PREFIX, own)
            self._announced.add(own)
        with self._client.pipeline(transaction=False) as pipe:
            for _ in range(count):
                pipe.lmove(name, own, "RIGHT", "LEFT")
            return [raw for raw in pipe.execute() if raw is not None]

    def acknowledge(self, taken: Sequence[Taken]) -> None:
        if not taken:
            return
        with _asking(self.where), self._client.pipeline(transaction=False) as pipe:
            for each in taken:
                name, raw = each.receipt
                pipe.lrem(self._own(name), 1, raw)
            pipe.execute()

    def is_drained(self) -> bool:
        if time.monotonic() >= self._look_until:
            return True
        with _asking(self.where):
            others = [name for name in self._held() if name not in self._announced]
            return not any(self._lengths(others))

    def with_workers(self) -> int:
        with _asking(self.where):
            return int(self._client.hlen(self._channel.global_keyprefix + self._channel.unacked_key))

    def stay(self) -> None:
        with _asking(self.where):
            self._client.set(self._id, "", px=self._lease_ms)

    def reopen(self) -> None:
        """redis-py connects by itself; an answer that did not come may have been of messages that were claimed."""
        self.stay()
        with _asking(self.where):
            for name in self._announced:
                self._give_back(name)

    def close(self) -> None:
        try:
            with _asking(self.where):
                for name in self._announced:
                    self._give_back(name, to_the_end=True)
                    self._client.srem(PREFIX, name)
                self._client.delete(self._id)
        finally:
            self._connection.release()

    def _look_after_the_dead(self) -> None:
        """Put back what bridges that have died held, several times in a lease."""
        if time.monotonic() < self._looked_at + self._lease_ms / 4000:
            return
        self._looked_at = time.monotonic()
        with _asking(self.where):
            for name in self._held():
                owner = name.partition(":")[0]
                if name not in self._announced and not self._client.exists(owner):
                    self._give_back(name)
                    self._client.srem(PREFIX, name)
            if self._restores:
                self._channel.qos.restore_visible(num=1_000, interval=1)

    def _give_back(self, name: str, *, to_the_end: bool = False) -> None:
        """The one that was taken first is the first again, unless what is given back should be the last."""
        target = name.partition(":")[2]
        while self._client.lmove(name, target, *(("RIGHT", "LEFT") if to_the_end else ("LEFT", "RIGHT"))) is not None:
            pass

    def _held(self) -> list[str]:
        return [_text(name) for name in self._client.smembers(PREFIX)]

    def _lengths(self, names: Sequence[str] | Mapping[str, str]) -> list[int]:
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.llen(name)
            return list(pipe.execute())

    def _own(self, name: str) -> str:
        return f"{self._id}:{name}"


class AmqpSource:
    """Celery's queues in RabbitMQ, which gives what is not acknowledged to others when the connection ends.

    Messages are asked for, not subscribed to: those that are left here unread would else use up what a consumer may
    have without acknowledging it.
    """

    def __init__(
        self, url: SecretUrl, queues: Sequence[str], *, options: Mapping[str, Any], max_priority: int | None
    ) -> None:
        self.where = str(url)
        self._url = url
        self._options = dict(options)
        self._queues = tuple(queues)
        self._max_priority = max_priority
        self._empty_looks = 0
        self._connect()

    def _connect(self) -> None:
        with _asking(self.where):
            self._connection = kombu.Connection(
                self._url.value, connect_timeout=CONNECT_TIMEOUT_S, transport_options=self._options
            )
            self._connection.connect()
            self._errors = (*self._connection.connection_errors, *self._connection.channel_errors)
            for queue in self._queues:
                self._check(queue)
            self._channel: Any = self._connection.channel()
            self._channel.auto_decode = False  # the body stays the bytes that were sent

    def _check(self, queue: str) -> None:
        channel = self._connection.channel()
        try:
            channel.queue_declare(queue, passive=True)
        except self._connection.channel_errors as error:
            if getattr(error, "code", None) != 404:
                raise BrokerUnavailable(f"the source ({self.where}) refuses the queue {queue!r}: {error}") from error
            self._release()
            raise NotThere(
                f"the source ({self.where}) has no queue {queue!r}; `rabbitmqctl list_queues` says which it has, and "
                "--queue names one",
                name=queue,
            ) from None
        channel.close()

    def take(self, most: int) -> list[Taken]:
        taken: list[Taken] = []
        with _asking(self.where, self._errors):
            for queue in self._queues:
                while len(taken) < most and (message := self._channel.basic_get(queue)) is not None:
                    taken.append(self._read(queue, message))
        self._empty_looks = 0 if taken else self._empty_looks + 1
        return taken

    def _read(self, queue: str, message: Any) -> Taken:
        info, properties = message.delivery_info, dict(message.properties)
        redelivered = bool(info.get("redelivered"))
        content_type, encoding, headers = (properties.pop(name, None) for name in _OUTSIDE)
        body = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
        priority = properties.pop("priority", 0)
        if self._max_priority is not None:
            # RabbitMQ's greatest is its most urgent, and one without is its least.
            properties["priority"] = LEAST - min(priority, self._max_priority) * LEAST // self._max_priority
        properties |= {
            "body_encoding": "base64",
            "delivery_info": {"exchange": info.get("exchange", ""), "routing_key": info.get("routing_key", queue)},
            "delivery_tag": str(uuid4()),
        }
        payload = {
            "body": base64.b64encode(body).decode(),
            "content-type": content_type,
            "content-encoding": encoding,
            "headers": headers or {},
            "properties": properties,
        }
        return Taken(queue, payload, info["delivery_tag"], may_be_known=redelivered)

    def acknowledge(self, taken: Sequence[Taken]) -> None:
        with _asking(self.where, self._errors):
            for each in taken:
                self._channel.basic_ack(each.receipt)

    def is_drained(self) -> bool:
        """The server has seen the end of a connection that was cut when it was asked twice."""
        return self._empty_looks > 1

    def with_workers(self) -> int:
        return 0  # it gives them to others as soon as a worker has died

    def stay(self) -> None:
        """The connection says so."""

    def reopen(self) -> None:
        self._release()
        self._connect()

    def close(self) -> None:
        self._release()

    def _release(self) -> None:
        with suppress(*_AWAY, *self._connection.connection_errors, *self._connection.channel_errors):
            self._connection.release()


def _read(queue: str, name: str, raw: bytes) -> Taken:
    receipt = (name, raw)
    try:
        payload = loads(raw.decode())
        if not isinstance(payload, dict) or not isinstance(payload.get("properties"), dict) or "body" not in payload:
            raise ValueError("it is no message of kombu's: there are no properties, or no body")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        shown = raw[:60].decode(errors="replace")
        return Taken(queue, None, receipt, problem=f"{shown!r}: {error}")
    return Taken(queue, payload, receipt, publication=str(payload["properties"].get("delivery_tag") or ""))


class _asking:  # noqa: N801 -- reads as what it is: `with _asking(…):`
    """Turns what a source raises when it is away into one error of ours, without its URL's password."""

    def __init__(self, where: str, errors: tuple[type[BaseException], ...] = ()) -> None:
        self._where, self._errors = where, (*_AWAY, *errors)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and isinstance(error, self._errors):
            raise BrokerUnavailable(f"the source ({self._where}) does not answer: {error}", url=self._where) from error


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
