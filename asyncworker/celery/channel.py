"""The channel of the transport: tasks go to the broker of this package, all else goes as with kombu's Redis transport.

All else is remote control, its replies, and events, which Celery sends by fanout and topic exchanges.
"""

from __future__ import annotations

import re
from typing import Any

import redis
from kombu.transport import redis as kombu_redis

from asyncworker.celery import names
from asyncworker.celery.delivery import current_delivery
from asyncworker.celery.envelope import enveloped
from asyncworker.celery.stores import broker_of, store_of
from asyncworker.errors import AsyncworkerError, BrokerUnavailable
from asyncworker.producing import sending_for
from asyncworker.redis_broker import WorkerBroker

#: Queues that are no tasks': of remote control, its replies, events, and replies of the result backend rpc://.
_NOT_TASKS = re.compile(r".*\.pidbox$|^celeryev\b.*|^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")

#: Without a time limit of the connection, a publisher's one try takes so long at the most.
CONNECT_TIMEOUT_S = 4.0


class Channel(kombu_redis.Channel):
    """kombu's Redis channel, but for tasks."""

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        if not _is_task(queue, message):
            super()._put(queue, message, **kwargs)
            return
        broker = broker_of(self._url)
        one, delay = enveloped(message, queue)
        at = current_delivery.get()
        if at is not None and at.broker is broker and at.hold(one, delay):
            return
        try:
            with sending_for(broker, self._try_ms):
                broker.enqueue(one, delay=delay)
        except BrokerUnavailable as error:
            raise redis.ConnectionError(str(error)) from error  # kombu's own: it tries again, then OperationalError
        except AsyncworkerError as error:
            raise redis.ResponseError(str(error)) from error

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        if (message.get("headers") or {}).get("task"):
            raise redis.ResponseError(
                f"the task {message['headers']['task']} is sent to the fanout exchange {exchange!r}, which has each "
                "worker run it: that is not supported on asyncworker://; send it to a queue of each worker's own"
            )
        super()._put_fanout(exchange, message, routing_key, **kwargs)

    def basic_consume(self, queue: str, *args: Any, **kwargs: Any) -> Any:
        if not _NOT_TASKS.match(queue) and queue not in self.auto_delete_queues:
            raise NotImplementedError(
                f"the tasks of the queue {queue!r} are run by `dramatiq asyncworker.actors` with "
                "ASYNCWORKER_CELERY_APP set, not by a Celery worker: one cannot take messages from asyncworker://"
            )
        return super().basic_consume(queue, *args, **kwargs)

    def _size(self, queue: str) -> int:
        if _NOT_TASKS.match(queue):
            return int(super()._size(queue))
        broker = broker_of(self._url)
        if not isinstance(broker, WorkerBroker):
            return 0
        client: Any = broker.client
        with client.pipeline(transaction=False) as pipe:
            for name in names.all_steps(queue):
                pipe.llen(f"{broker.namespace}:{name}")
            return sum(pipe.execute())

    def _purge(self, queue: str) -> int:
        if _NOT_TASKS.match(queue):
            return int(super()._purge(queue))
        size, broker = self._size(queue), broker_of(self._url)
        for name in names.all_steps(queue):
            broker.flush(name)
        return size

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return not _NOT_TASKS.match(queue) or bool(super()._has_queue(queue, **kwargs))

    def _get_pool(self, asynchronous: bool = False) -> Any:
        """Connections as all of this package has them: to a socket, with TLS, by sentinels, as the URL says."""
        pool = store_of(self._url).connection_pool
        self.keyprefix_fanout: str = self.keyprefix_fanout.format(db=pool.connection_kwargs.get("db", 0))
        if asynchronous:
            pool.connection_class = _watched(pool.connection_class, self)
        return pool

    @property
    def _url(self) -> str | None:
        url: str | None = self.connection.client.hostname
        return url

    @property
    def _try_ms(self) -> int:
        return int(1000 * (self.connection.client.connect_timeout or CONNECT_TIMEOUT_S))


def _is_task(queue: str, message: dict[str, Any]) -> bool:
    return bool((message.get("headers") or {}).get("task")) or not _NOT_TASKS.match(queue)


def _watched(connection_class: type[Any], channel: Channel) -> type[Any]:
    """A class of connections whose end kombu's poller hears of, as kombu's own are."""

    class Watched(connection_class):
        def disconnect(self, *args: Any, **kwargs: Any) -> None:
            super().disconnect(*args, **kwargs)
            if channel._registered:
                channel._on_connection_disconnect(self)

    return Watched
