"""What plain Dramatiq's Redis broker promises, ours does too; and either finds in the store what the other wrote."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Message, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from dramatiq.errors import QueueJoinTimeout

from asyncworker.settings import child_environment
from tests.stores import QUEUE, Store, message
from tests.waiting import wait_until
from tests.workers import Deployment

BOTH = ("plain", "ours")


@pytest.fixture(params=BOTH)
def broker(request: pytest.FixtureRequest, store: Store) -> RedisBroker:
    made: RedisBroker = getattr(store, request.param)()
    return made


def take(consumer: Any) -> Any:
    """The next message, waited for as a worker does."""
    return wait_until(lambda: next(consumer), "a message came")


@contextlib.contextmanager
def consuming(broker: RedisBroker, queue_name: str = QUEUE, *, prefetch: int = 1) -> Iterator[Any]:
    consumer = broker.consume(queue_name, prefetch=prefetch, timeout=100)
    yield consumer
    consumer.close()


@contextlib.contextmanager
def working(broker: RedisBroker, body: Callable[..., Any], *, threads: int = 1, **options: Any) -> Iterator[None]:
    """A worker whose only actor has this body."""
    dramatiq.actor(body, actor_name="do", broker=broker, queue_name=QUEUE, **options)
    worker = Worker(broker, worker_timeout=100, worker_threads=threads)
    worker.start()
    try:
        yield
    finally:
        worker.stop()


def test_what_is_enqueued_is_consumed_whole_and_forgotten_when_it_is_acknowledged(broker: RedisBroker) -> None:
    sent = broker.enqueue(Message(QUEUE, "do", ("a", 1), {"key": [None]}, {"option": "kept"}))
    assert broker.do_qsize(QUEUE) == 1
    with consuming(broker) as consumer:
        received = take(consumer)
        assert received.message_id == sent.message_id
        assert (received.args, received.kwargs, received.options["option"]) == (("a", 1), {"key": [None]}, "kept")
        assert received.message_timestamp == sent.message_timestamp
        consumer.ack(received)
        wait_until(lambda: broker.do_qsize(QUEUE) == 0, "it is forgotten")


def test_messages_are_consumed_in_the_order_of_their_sending(broker: RedisBroker) -> None:
    for number in range(10):
        broker.enqueue(message(number))
    with consuming(broker, prefetch=3) as consumer:
        order = []
        while len(order) < 10:
            received = take(consumer)
            order.append(received.args[0])
            consumer.ack(received)
    assert order == list(range(10))


def test_a_rejected_message_is_a_dead_letter_with_its_body(broker: RedisBroker, store: Store) -> None:
    sent, began = broker.enqueue(message("a")), current_millis()
    with consuming(broker) as consumer:
        consumer.nack(take(consumer))
        wait_until(lambda: broker.do_qsize(QUEUE) == 0, "it left the queue")
    ((identifier, died),) = store.client.zrange(f"dramatiq:{QUEUE}.XQ", 0, -1, withscores=True)
    body = store.client.hget(f"dramatiq:{QUEUE}.XQ.msgs", identifier)
    assert Message.decode(body).message_id == sent.message_id
    assert began - 1_000 <= died <= current_millis() + 1_000


def test_what_is_requeued_is_consumed_again(broker: RedisBroker) -> None:
    for number in range(3):
        broker.enqueue(message(number))
    with consuming(broker, prefetch=3) as consumer:
        received = [take(consumer) for _ in range(3)]
        consumer.requeue(received)
        assert broker.do_qsize(QUEUE) == 3
    with consuming(broker, prefetch=3) as consumer:
        again = [take(consumer) for _ in range(3)]
        assert sorted(each.args[0] for each in again) == [0, 1, 2]
        for each in again:
            consumer.ack(each)
        wait_until(lambda: broker.do_qsize(QUEUE) == 0, "all are forgotten")


def test_a_delayed_message_begins_when_it_is_due_and_not_before(broker: RedisBroker) -> None:
    began: list[float] = []
    with working(broker, lambda: began.append(time.time())):
        sent_at = time.time()
        broker.enqueue(message(), delay=400)
        wait_until(lambda: began, "it began")
        wait_until(lambda: broker.do_qsize(QUEUE) == 0, "it is done")
    assert len(began) == 1
    assert began[0] - sent_at >= 0.4


def test_joining_ends_when_everything_is_done(broker: RedisBroker) -> None:
    calls: list[int] = []
    with working(broker, calls.append, threads=2):
        for number in range(10):
            broker.enqueue(message(number))
        broker.join(QUEUE, timeout=20_000)
    assert sorted(calls) == list(range(10))


def test_joining_a_queue_that_does_not_become_empty_ends_with_an_error(broker: RedisBroker) -> None:
    broker.enqueue(message())
    with pytest.raises(QueueJoinTimeout):
        broker.join(QUEUE, timeout=200)


def test_a_failing_actor_is_retried_and_then_a_dead_letter(broker: RedisBroker, store: Store) -> None:
    calls: list[int] = []

    def body() -> None:
        calls.append(1)
        raise RuntimeError("told to")

    broker.add_middleware(dramatiq.middleware.Retries(min_backoff=10, max_backoff=20))
    with working(broker, body, max_retries=2):
        broker.enqueue(message())
        wait_until(store.dead, "it is a dead letter")
    assert (len(calls), len(store.dead()), broker.do_qsize(QUEUE)) == (3, 1, 0)


def test_flushing_drops_what_waits_and_is_delayed_and_leaves_other_queues(broker: RedisBroker) -> None:
    broker.declare_queue("other")
    for queue in (QUEUE, "other"):
        broker.enqueue(Message(queue, "do", (), {}, {}))
        broker.enqueue(Message(queue, "do", (), {}, {}), delay=60_000)
    broker.flush(QUEUE)
    assert broker.do_qsize(QUEUE) == 0
    with consuming(broker) as consumer:
        assert next(consumer) is None
    assert broker.do_qsize("other") >= 1
    broker.flush_all()
    assert broker.do_qsize("other") == 0


def test_queues_are_known_when_they_are_declared(broker: RedisBroker) -> None:
    broker.declare_queue("other")
    assert broker.get_declared_queues() == {QUEUE, "other"}
    dramatiq.actor(lambda: None, actor_name="third", broker=broker, queue_name="third")
    broker.enqueue(Message("third", "third", (), {}, {}))
    assert "third" in broker.get_declared_queues()


def test_the_keys_are_the_same(broker: RedisBroker, store: Store) -> None:
    waits, delayed = broker.enqueue(message("waits")), broker.enqueue(message("delayed"), delay=60_000)
    for queue, sent in ((QUEUE, waits), (f"{QUEUE}.DQ", delayed)):
        (identifier,) = store.client.lrange(f"dramatiq:{queue}", 0, -1)
        assert identifier.decode() == sent.options["redis_message_id"]
        (body,) = store.client.hvals(f"dramatiq:{queue}.msgs")
        stored = Message.decode(body)
        assert (stored.message_id, stored.queue_name) == (sent.message_id, queue)
    assert abs(delayed.options["eta"] - current_millis() - 60_000) < 10_000
    with consuming(broker) as consumer:
        take(consumer)
        held = store.client.smembers(f"dramatiq:__acks__.{broker.broker_id}.{QUEUE}")
        assert held == {waits.options["redis_message_id"].encode()}
        assert store.client.zscore("dramatiq:__heartbeats__", broker.broker_id) == pytest.approx(
            current_millis(), abs=10_000
        )


def test_messages_sent_by_many_threads_are_each_run_once(broker: RedisBroker) -> None:
    calls: list[int] = []
    with working(broker, calls.append, threads=4):
        senders = [
            threading.Thread(target=lambda first=first: [broker.enqueue(message(first + n)) for n in range(50)])
            for first in range(0, 200, 50)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        broker.join(QUEUE, timeout=30_000)
    assert sorted(calls) == list(range(200))


# --- beside a real worker process of the other kind

ACTORS = """
import time
from pathlib import Path

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

dramatiq.set_broker(RedisBroker(client=redis.Redis(unix_socket_path={path!r})))


@dramatiq.actor(queue_name="noted", max_retries=0)
def note(path, number):
    if number < 0:
        raise ValueError("told to")
    with Path(path).open("a") as file:
        file.write(f"{{number}} {{time.time()}}\\n")
"""


@contextlib.contextmanager
def plain_worker(store: Store, directory: Path) -> Iterator[None]:
    """The command `dramatiq` with plain Dramatiq's own broker."""
    (directory / "plainly.py").write_text(ACTORS.format(path=store.path))
    script = Path(sys.executable).with_name("dramatiq")
    with (directory / "plain.log").open("wb") as log:
        command = subprocess.Popen(
            [str(script), "plainly", "-p", "1", "-t", "2"],
            cwd=directory,
            env=child_environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        command.terminate()
        command.wait(20)


@pytest.fixture
def worker(request: pytest.FixtureRequest, store: Store, state_dir: Path) -> Iterator[None]:
    """A worker process that is plain Dramatiq's, or ours."""
    if request.param == "plain":
        with plain_worker(store, state_dir):
            yield
        return
    deployment = Deployment(state_dir)
    with deployment.worker("-p", "1", "-t", "2", "-Q", "noted") as running:
        yield
        assert running.stop() == 0
    deployment.broker.close()
    deployment.broker.client.close()


@pytest.mark.parametrize(("sender", "worker"), [("plain", "ours"), ("ours", "plain")], indirect=["worker"])
def test_what_one_sends_a_worker_process_of_the_other_runs_once_in_time_and_its_dead_letters_are_read(
    store: Store, state_dir: Path, sender: str, worker: None
) -> None:
    producer: RedisBroker = getattr(store, sender)()
    notes, sent_at = state_dir / "notes", time.time()

    def send(number: int, delay: int | None = None) -> Message[Any]:
        return producer.enqueue(Message("noted", "note", (str(notes), number), {}, {}), delay=delay)

    for number in range(20):
        send(number)
        send(100 + number, delay=1_500)
    failing = send(-1) if sender == "ours" else producer.enqueue(Message("noted", "note", (str(notes),), {}, {}))
    lines = wait_until(
        lambda: notes.exists() and len(found := notes.read_text().splitlines()) == 40 and found, "all were run"
    )
    times = {int(number): float(at) for number, at in (line.split() for line in lines)}
    assert sorted(times) == [*range(20), *range(100, 120)]
    assert all(at - sent_at >= 1.5 for number, at in times.items() if number >= 100), "not before they were due"
    other: RedisBroker = getattr(store, "ours" if sender == "plain" else "plain")()
    for broker in (producer, other):
        wait_until(lambda broker=broker: broker.do_qsize("noted") == 0, "nothing is left")  # type: ignore[misc]
    (body,) = wait_until(lambda: store.client.hvals("dramatiq:noted.XQ.msgs"), "one is a dead letter")
    assert Message.decode(body).message_id == failing.message_id
    assert len(notes.read_text().splitlines()) == 40
