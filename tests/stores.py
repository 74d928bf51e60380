"""Brokers of several processes' kind on one server, and where messages lie there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis

from asyncworker import embedded
from asyncworker.consumer import WorkerConsumer
from asyncworker.redis_broker import WorkerBroker

QUEUE = "default"


class Store:
    """A server with brokers of several processes' kind on it; each has connections of its own."""

    def __init__(self, state_dir: Path) -> None:
        embedded.ensure(state_dir)
        self.path = str(embedded.socket_path(state_dir))
        self.client: Any = self.connect()
        self._clients = [self.client]
        self._brokers: list[WorkerBroker] = []

    def connect(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=self.path, socket_timeout=10)

    def ours(self, **options: Any) -> WorkerBroker:
        broker = WorkerBroker(client=self._keep(self.connect()), where="the test's store", **options)
        broker.declare_queue(QUEUE)
        self._brokers.append(broker)
        return broker

    def plain(self) -> RedisBroker:
        broker = RedisBroker(client=self._keep(self.connect()), middleware=[])
        broker.declare_queue(QUEUE)
        return broker

    def close(self) -> None:
        for broker in self._brokers:
            broker.alarm.stop()
            broker.settling.stop()
        for client in self._clients:
            client.close()

    def _keep(self, client: redis.Redis) -> redis.Redis:
        self._clients.append(client)
        return client

    # where messages are

    def waiting(self) -> list[str]:
        return [each.decode() for each in self.client.lrange(f"dramatiq:{QUEUE}", 0, -1)]

    def due(self) -> dict[str, float]:
        return {key.decode(): at for key, at in self.client.zrange(f"dramatiq:{QUEUE}.DQ.due", 0, -1, withscores=True)}

    def fetched(self, broker: RedisBroker) -> set[str]:
        return {each.decode() for each in self.client.smembers(f"dramatiq:__acks__.{broker.broker_id}.{QUEUE}")}

    def dead(self) -> list[str]:
        return [each.decode() for each in self.client.zrange(f"dramatiq:{QUEUE}.XQ", 0, -1)]


def message(*args: Any, **options: Any) -> Message[Any]:
    return Message(QUEUE, "do", args, {}, options)


def identifier(sent: Message[Any]) -> str:
    found: str = sent.options["redis_message_id"]
    return found


def consumer_of(broker: WorkerBroker, *, prefetch: int = 8) -> WorkerConsumer:
    consumer = broker.consume(QUEUE, prefetch=prefetch, timeout=1_000)
    assert isinstance(consumer, WorkerConsumer)
    return consumer


def take(consumer: WorkerConsumer, *, within_s: float = 10) -> Any:
    """The next message, waited for as a worker does."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = next(consumer)
        if found is not None:
            return found
    raise AssertionError("no message came")


def silence(store: Store, broker: RedisBroker, *, for_ms: int) -> None:
    """Let a broker have been heard of last so long ago."""
    store.client.zadd("dramatiq:__heartbeats__", {broker.broker_id: current_millis() - for_ms})


def away(store: Store, *, for_ms: int) -> None:
    """Let the store not have been reached by anyone for so long."""
    at = current_millis() - for_ms
    store.client.set("dramatiq:__beat__", at)
    for broker_id in store.client.zrange("dramatiq:__heartbeats__", 0, -1):
        store.client.zadd("dramatiq:__heartbeats__", {broker_id: at})
