"""RabbitMQ as the source of a bridge."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import kombu

from asyncworker.celery.sources import AWAY, CONNECT_TIMEOUT_S, Taken, asking
from asyncworker.errors import BrokerUnavailable, NotThere
from asyncworker.urls import SecretUrl

#: RabbitMQ has these in a message's properties, and a Celery message beside them.
_OUTSIDE = ("content_type", "content_encoding", "application_headers")

#: The most urgent priority is 0 here, and the least urgent is this.
LEAST = 9


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
        with asking(self.where):
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
        with asking(self.where, self._errors):
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
        with asking(self.where, self._errors):
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
        with suppress(*AWAY, *self._connection.connection_errors, *self._connection.channel_errors):
            self._connection.release()
