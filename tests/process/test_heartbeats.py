"""A worker that is alive never looks dead: busy, full, without traffic, or with a connection that hangs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import dramatiq
import pytest
from dramatiq import Worker

from asyncworker.heartbeat import EVERY_S, TIMES, Heartbeat, every_s
from asyncworker.redis_broker import WorkerBroker
from tests.stores import QUEUE, Store, message
from tests.waiting import BUSY_S, wait_until

TIMEOUT_MS = 1_000


@pytest.mark.parametrize("timeout_ms", [1_000, 2_000, 15_000, 600_000])
def test_a_worker_is_heard_of_several_times_within_the_timeout(timeout_ms: int) -> None:
    assert every_s(timeout_ms) <= EVERY_S
    assert timeout_ms / 1000 / every_s(timeout_ms) >= TIMES


@contextlib.contextmanager
def working(store: Store, body: Callable[[], None], *, threads: int = 1) -> Iterator[WorkerBroker]:
    """A worker of an actor with that body."""
    broker = store.ours(heartbeat_timeout_ms=TIMEOUT_MS)
    broker.add_middleware(Heartbeat())
    dramatiq.actor(body, actor_name="do", broker=broker, queue_name=QUEUE)
    worker = Worker(broker, worker_timeout=100, worker_threads=threads)
    worker.start()
    try:
        yield broker
    finally:
        worker.stop()


@pytest.mark.parametrize("messages", [0, 2, 12], ids=["without traffic", "all threads busy", "a full prefetch"])
def test_a_live_worker_never_looks_dead(store: Store, messages: int) -> None:
    over = threading.Event()
    begun = threading.Semaphore(0)

    def body() -> None:
        begun.release()
        over.wait(30)

    with working(store, body, threads=2) as broker:
        try:
            for _ in range(messages):
                broker.enqueue(message())
            for _ in range(min(messages, 2)):
                assert begun.acquire(timeout=30)
            wait_until(lambda: _heard_of(store, broker), "it was heard of")
            other, heard = store.ours(heartbeat_timeout_ms=int(BUSY_S * 1000)), set()
            for _ in range(3 * TIMES):  # three timeouts, by the worker's clock: this test may be late itself
                heard.add(wait_until(lambda: (at := _heard_of(store, broker)) not in heard and at, "it is heard of"))
                assert other.recover(QUEUE) == 0
        finally:
            over.set()
        wait_until(lambda: broker.do_qsize(QUEUE) == 0, "each is done")


def _heard_of(store: Store, broker: WorkerBroker) -> float | None:
    return store.client.zscore("dramatiq:__heartbeats__", broker.broker_id)  # type: ignore[return-value]
