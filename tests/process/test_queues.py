"""The broker in the store, against a real server: in one place each, woken at once, delayed, recovered, shared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Broker, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis

from asyncworker import prefetch
from asyncworker.errors import BrokerUnavailable
from asyncworker.heartbeat import Heartbeat
from asyncworker.ledger import ClosedRow, MemoryLedger
from asyncworker.middleware import BrowserMiddleware
from asyncworker.redis_broker import WorkerBroker
from asyncworker.settings import load
from tests.stores import QUEUE, Store, consumer_of, identifier, message, silence, take
from tests.waiting import BUSY_S, wait_until


def test_a_message_goes_from_the_producer_to_the_consumer_and_is_forgotten_when_it_is_acknowledged(
    store: Store,
) -> None:
    producer, worker = store.ours(), store.ours()
    sent = producer.enqueue(message("a"))
    assert store.waiting() == [identifier(sent)]
    consumer = consumer_of(worker)
    received = take(consumer)
    assert (received.args, received.message_id) == (("a",), sent.message_id)
    assert store.waiting() == []
    assert store.fetched(worker) == {identifier(sent)}
    consumer.ack(received)
    wait_until(lambda: worker.do_qsize(QUEUE) == 0, "it was forgotten")
    assert store.fetched(worker) == set()


def test_an_idle_consumer_is_woken_by_a_message_and_no_other_is(store: Store) -> None:
    producer, workers = store.ours(), [store.ours() for _ in range(3)]
    came: list[Any] = []

    def idle(broker: WorkerBroker) -> None:
        consumer = consumer_of(broker)
        consumer.poll_s = 60.0  # it does not look for itself
        assert next(consumer) is None  # there is nothing
        found = next(consumer)
        came.append(found)
        if found is not None:
            consumer.ack(found)

    threads = [threading.Thread(target=idle, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    wait_until(lambda: _blocked(store) == 3, "all three are blocked")
    for number in range(1, 4):
        producer.enqueue(message(number))
        wait_until(lambda number=number: len(came) >= number, "the message came")  # type: ignore[misc]
        assert [each.args for each in came] == [(earlier,) for earlier in range(1, number + 1)]
        assert _blocked(store) == 3 - number, "the others sleep on"
    for thread in threads:
        thread.join()


def _blocked(store: Store) -> int:
    return int(store.client.info("clients")["blocked_clients"])


def test_a_message_of_a_plain_producer_is_found_by_looking(store: Store) -> None:
    sent = store.plain().enqueue(message("a"))
    assert take(consumer_of(store.ours())).message_id == sent.message_id


# --- a browser that is not up yet


class _Launching(BrowserMiddleware):
    """A worker's browser that is being launched until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__(load({}), ledger=MemoryLedger(), draw_seed=lambda: 1)
        self.asked = 0
        self.is_launching = True

    def keeps_waiting(self, broker: Broker, queue_name: str) -> bool:
        assert queue_name == QUEUE
        self.asked += 1
        return self.is_launching


def test_a_worker_whose_browser_is_being_launched_leaves_messages_to_others(store: Store) -> None:
    starting, browser = store.ours(), _Launching()
    starting.add_middleware(browser)
    consumer, other = consumer_of(starting), consumer_of(store.ours())
    sent = store.ours().enqueue(message("a"))
    assert next(consumer) is None
    assert store.waiting() == [identifier(sent)]
    assert take(other).message_id == sent.message_id
    again = store.ours().enqueue(message("b"))
    browser.is_launching = False
    assert take(consumer).message_id == again.message_id


def test_what_a_worker_has_fetched_when_its_browser_begins_to_be_launched_goes_back_uncounted(store: Store) -> None:
    starting, browser = store.ours(), _Launching()
    starting.add_middleware(browser)
    browser.is_launching = False
    consumer, other = consumer_of(starting), consumer_of(store.ours())
    assert next(consumer) is None  # now it blocks in the store
    fetching = threading.Thread(target=lambda: next(consumer))
    fetching.start()
    wait_until(lambda: _blocked(store) == 1, "it waits for a message")
    browser.is_launching = True
    sent = store.ours().enqueue(message("a"))
    fetching.join()
    assert store.fetched(starting) == set()
    received = take(other)
    assert received.message_id == sent.message_id
    assert "losses" not in received.options


# --- delays


def test_a_delayed_message_waits_in_the_store_until_it_is_due(store: Store) -> None:
    producer, consumer = store.ours(), consumer_of(store.ours())
    consumer.poll_s = 60.0  # it does not look for itself
    assert next(consumer) is None
    sent = producer.enqueue(message("a"), delay=700)
    due_at = sent.options["eta"]
    received = take(consumer, within_s=30)
    assert 0 <= current_millis() - due_at < BUSY_S * 1000
    assert (received.message_id, received.queue_name, received.args) == (sent.message_id, QUEUE, ("a",))
    assert "eta" not in received.options
    consumer.ack(received)
    wait_until(lambda: store.ours().do_qsize(QUEUE) == 0, "it was forgotten")


def test_a_consumer_learns_of_an_earlier_message_while_it_waits_for_a_later_one(store: Store) -> None:
    producer, consumer = store.ours(), consumer_of(store.ours())
    producer.enqueue(message("late"), delay=60_000)
    assert next(consumer) is None
    producer.enqueue(message("soon"), delay=200)
    assert take(consumer).args == ("soon",)
    assert len(store.due()) == 1


def test_a_delay_may_be_longer_than_seven_days(store: Store) -> None:
    sent = store.ours().enqueue(message("a"), delay=30 * 24 * 3_600_000)
    assert next(consumer_of(store.ours())) is None
    assert list(store.due()) == [identifier(sent)]


def test_what_a_plain_producer_has_delayed_is_served_when_it_is_due(store: Store) -> None:
    sent = store.plain().enqueue(message("a"), delay=300)
    received = take(consumer_of(store.ours()))
    assert (received.message_id, received.queue_name) == (sent.message_id, QUEUE)
    assert current_millis() >= sent.options["eta"]


def test_an_unreadable_delayed_body_is_due_at_once_and_a_dead_letter(store: Store) -> None:
    store.client.hset(f"dramatiq:{QUEUE}.DQ.msgs", "x", b"\xff no json")
    store.client.rpush(f"dramatiq:{QUEUE}.DQ", "x")
    consumer = consumer_of(store.ours())
    assert next(consumer) is None
    assert store.dead() == ["x"]
    good = store.ours().enqueue(message("good"))
    assert take(consumer).message_id == good.message_id


@pytest.mark.long
def test_delayed_messages_take_no_memory_of_a_worker_and_are_each_served_once(store: Store) -> None:
    producer = store.ours()
    sent = {producer.enqueue(message(number), delay=4_000 + number % 7).message_id for number in range(150)}
    consumers = [consumer_of(store.ours()) for _ in range(2)]
    for consumer in consumers:
        assert next(consumer) is None
        assert not consumer._fetched
    received: list[str] = []
    while len(received) < 150:
        for consumer in consumers:
            if (found := next(consumer)) is not None:
                received.append(found.message_id)
                consumer.ack(found)
    assert set(received) == sent
    assert len(received) == 150
    assert all(next(consumer) is None for consumer in consumers)


def test_a_delayed_message_begins_when_it_is_due_however_seldom_the_store_looks_at_its_clock(store: Store) -> None:
    store.client.config_set("hz", 1)  # a wait that ends in time there ends with the next second
    producer, consumer = store.ours(), consumer_of(store.ours())
    assert next(consumer) is None
    late_ms = []
    for _ in range(6):  # of which a busy machine does not delay each
        sent = producer.enqueue(message("a"), delay=300)
        consumer.ack(take(consumer))
        late_ms.append(current_millis() - sent.options["eta"])
    assert min(late_ms[1:]) < 300, "what waits for the next of its seconds is late by 700 ms from the second one on"


# --- death and recovery


def test_what_a_dead_worker_held_is_run_again_first(store: Store) -> None:
    producer, dead, alive = store.ours(), store.ours(), store.ours()
    held = producer.enqueue(message("held"))
    take(consumer_of(dead, prefetch=1))
    producer.enqueue(message("later"))
    silence(store, dead, for_ms=16_000)
    assert alive.recover(QUEUE) == 1
    received = take(consumer_of(alive))
    assert received.message_id == held.message_id
    assert store.client.zscore("dramatiq:__heartbeats__", dead.broker_id) is None


def test_a_worker_that_was_heard_of_in_time_keeps_what_it_holds(store: Store) -> None:
    producer, busy, other = store.ours(), store.ours(), store.ours()
    producer.enqueue(message("held"))
    take(consumer_of(busy))
    silence(store, busy, for_ms=14_000)
    assert other.recover(QUEUE) == 0
    busy.recover(QUEUE)  # its heartbeat
    assert other.recover(QUEUE) == 0
    assert len(store.fetched(busy)) == 1


def test_a_plain_worker_which_is_silent_while_busy_is_waited_for_longer(store: Store) -> None:
    plain, alive = store.plain(), store.ours()
    plain.enqueue(message("held"))
    assert next(plain.consume(QUEUE)) is not None
    silence(store, plain, for_ms=30_000)
    assert alive.recover(QUEUE) == 0
    silence(store, plain, for_ms=61_000)
    assert alive.recover(QUEUE) == 1


def test_who_comes_back_from_the_dead_cannot_acknowledge_what_another_has(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    producer, stopped, other = store.ours(), store.ours(), store.ours()
    producer.enqueue(message("held"))
    late, taken_by = consumer_of(stopped), consumer_of(other)
    received = take(late)
    silence(store, stopped, for_ms=16_000)
    other.recover(QUEUE)
    again = take(taken_by)
    late.ack(received)
    wait_until(lambda: "no longer this worker's" in caplog.text, "it was told so")
    assert len(store.fetched(other)) == 1
    assert other.do_qsize(QUEUE) == 1
    taken_by.ack(again)
    wait_until(lambda: other.do_qsize(QUEUE) == 0, "the other's was taken")


def test_an_answer_that_was_lost_on_the_way_is_noticed_and_its_messages_are_put_back(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    producer, worker = store.ours(), store.ours()
    sent = [producer.enqueue(message(number)) for number in range(3)]
    consumer = consumer_of(worker)
    worker.do_fetch(QUEUE, 2, 0, 2)  # taken in the store; no one here has heard of it
    received = [take(consumer) for _ in range(3)]
    assert {each.message_id for each in received} == {each.message_id for each in sent}
    assert "got lost on the way here" in caplog.text
    for each in received:
        consumer.ack(each)
    wait_until(lambda: worker.do_qsize(QUEUE) == 0, "all were forgotten")


def test_a_full_store_takes_what_is_done_which_makes_room(store: Store) -> None:
    producer, worker = store.ours(), store.ours()
    sent = [producer.enqueue(message(number)) for number in range(3)]
    consumer = consumer_of(worker)
    first, second, _ = [take(consumer) for _ in range(3)]
    store.client.config_set("maxmemory", 1)
    consumer.ack(first)
    consumer.nack(second)
    wait_until(lambda: store.fetched(worker) == {identifier(sent[2])}, "both were taken")
    assert store.dead() == [identifier(sent[1])]
    worker.settling.put(ClosedRow("asyncworker:attempts:m", 0, "{}"))
    consumer.ack(second)  # any that goes after the row
    store.client.config_set("maxmemory", 0)
    wait_until(lambda: store.client.lrange("asyncworker:attempts:m", 0, -1) == [b"{}"], "the row was taken later")


def test_a_row_that_is_written_again_is_one_row(store: Store) -> None:
    broker = store.ours()
    for _ in range(2):
        assert broker.do_settle("", "ack", 0, 60_000, 1_000, "asyncworker:attempts:m", 0, "first") == []
    for _ in range(2):
        assert broker.do_settle("", "ack", 0, 60_000, 1_000, "asyncworker:attempts:m", 0, "next") == []
    assert store.client.lrange("asyncworker:attempts:m", 0, -1) == [b"first", b"next"]
    assert store.client.pttl("asyncworker:attempts:m") > 0


def test_a_row_of_another_kind_of_key_keeps_no_message_from_being_settled(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    producer, worker = store.ours(), store.ours()
    producer.enqueue(message("a"))
    consumer = consumer_of(worker)
    received = take(consumer)
    store.client.set("asyncworker:attempts:m", "no list")
    for number in (0, 1):
        worker.settling.put(ClosedRow("asyncworker:attempts:m", number, "{}"))
    consumer.ack(received)
    wait_until(lambda: worker.do_qsize(QUEUE) == 0, "it was forgotten")
    assert worker.settling.stop()
    assert caplog.text.count("refuses a row of asyncworker:attempts:m: WRONGTYPE") == 2


def test_a_consumer_that_ends_gives_back_what_it_handed_to_no_one(store: Store) -> None:
    producer, worker = store.ours(), store.ours()
    sent = [producer.enqueue(message(number)) for number in range(3)]
    consumer = consumer_of(worker)
    first = take(consumer)
    consumer.close()
    assert store.waiting() == [identifier(each) for each in sent[1:]]
    assert store.fetched(worker) == {identifier(first)} == {first.options["redis_message_id"]}


def test_an_enqueue_that_is_repeated_is_one_message(store: Store) -> None:
    broker = store.ours()
    assert broker.do_enqueue(QUEUE, "1", message("a").encode()) == 1
    assert broker.do_enqueue(QUEUE, "1", message("a").encode()) == 0
    assert store.waiting() == ["1"]


def test_a_producer_is_told_within_its_bound_that_nothing_was_sent() -> None:
    client = redis.Redis(unix_socket_path="/nowhere/at/all.sock")
    broker = WorkerBroker(client=client, where="nowhere", send_timeout_ms=600)
    broker.declare_queue(QUEUE)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="it was not sent") as caught:
        broker.enqueue(message("a"))
    assert 0.3 < time.monotonic() - began < 0.6 + BUSY_S
    assert caught.value.sent is False
    client.close()


# --- beside plain Dramatiq, in both directions


@pytest.fixture
def served(store: Store) -> Iterator[Callable[[RedisBroker], list[Any]]]:
    """Start a worker of a broker; returns what its actor `do` was called with."""
    workers: list[Worker] = []

    def serve(broker: RedisBroker) -> list[Any]:
        calls: list[Any] = []
        dramatiq.actor(lambda value: calls.append(value), actor_name="do", broker=broker, queue_name=QUEUE)
        worker = Worker(broker, worker_timeout=100, worker_threads=2)
        worker.start()
        workers.append(worker)
        return calls

    yield serve
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize(("sender", "server"), [("ours", "plain"), ("plain", "ours"), ("ours", "ours")])
def test_messages_delayed_or_not_go_between_ours_and_plain_dramatiq(
    store: Store, served: Callable[[RedisBroker], list[Any]], sender: str, server: str
) -> None:
    producer: RedisBroker = getattr(store, sender)()
    calls = served(getattr(store, server)())
    for number in range(20):
        producer.enqueue(message(number))
        producer.enqueue(message(100 + number), delay=200)
    wait_until(lambda: len(calls) == 40, "all were run")
    assert sorted(calls) == [*range(20), *range(100, 120)]
    wait_until(lambda: store.plain().do_qsize(QUEUE) == 0, "nothing is left")


def test_a_worker_is_heard_of_while_all_its_threads_are_busy_and_its_end_is_known_at_once(store: Store) -> None:
    broker = store.ours(heartbeat_timeout_ms=2_000)
    broker.add_middleware(Heartbeat())
    begun, over = threading.Event(), threading.Event()

    def body() -> None:
        begun.set()
        over.wait(30)

    dramatiq.actor(body, actor_name="do", broker=broker, queue_name=QUEUE)
    worker = Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    try:
        broker.enqueue(message())
        assert begun.wait(30)
        heard = set()
        for _ in range(7):  # a timeout, by the worker's clock: this test may be late itself
            heard.add(wait_until(lambda: (at := _heard_at(store, broker)) not in heard and at, "it is heard of"))
        over.set()
        wait_until(lambda: broker.do_qsize(QUEUE) == 0, "it is done")
    finally:
        over.set()
        worker.stop()


def _heard_at(store: Store, broker: WorkerBroker) -> float | None:
    return store.client.zscore("dramatiq:__heartbeats__", broker.broker_id)  # type: ignore[return-value]


def test_of_more_rows_than_may_be_the_oldest_are_forgotten_with_what_is_settled(store: Store) -> None:
    broker = store.ours()

    def settle(number: int, row: str) -> None:
        broker.do_settle("", "ack", 0, 60_000, 3, f"asyncworker:attempts:{number}", 0, row)

    for number in range(5):
        settle(number, "row")
    kept = {key.decode() for key in store.client.scan_iter("asyncworker:attempts:*")}
    assert kept == {f"asyncworker:attempts:{number}" for number in (2, 3, 4)}
    assert store.client.llen("asyncworker:attempts") == 3
    for attempt in range(2, 5):
        settle(4, f"row {attempt}")
    assert store.client.lrange("asyncworker:attempts:4", 0, -1) == [b"", b"row 2", b"row 3", b"row 4"]
    assert set(store.client.scan_iter("asyncworker:attempts*")) == {b"asyncworker:attempts", b"asyncworker:attempts:4"}


# --- fetching ahead


def test_a_worker_of_short_messages_takes_several_with_one_round_trip(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "SHORT_S", 60)  # however busy this machine is
    producer, worker = store.ours(), store.ours()
    for number in range(60):
        producer.enqueue(message(number))
    consumer = consumer_of(worker, prefetch=2)
    received, ahead = [], []
    while len(received) < 20:
        each = take(consumer)
        received.append(each.args[0])
        ahead.append(len(consumer._fetched))
        consumer.ack(each)
    assert received == list(range(20))
    assert max(ahead) > consumer.prefetch, "more were taken than could be begun"


def test_what_was_taken_ahead_goes_back_when_the_threads_are_held_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "SHORT_S", 60)  # however busy this machine is
    producer, worker, idle = store.ours(), store.ours(), store.ours()
    for number in range(60):
        producer.enqueue(message(number))
    consumer, other = consumer_of(worker, prefetch=2), consumer_of(idle, prefetch=60)
    for _ in range(20):
        consumer.ack(take(consumer))
    held = [take(consumer) for _ in range(4)]  # these run for long; each thread has one more waiting

    def went_back() -> bool:
        assert next(consumer) is None, "no more are handed out"
        return store.fetched(worker) == {identifier(each) for each in held}

    wait_until(went_back, "the others went back")
    assert take(other).args[0] == held[-1].args[0] + 1, "they went to the front"
    assert next(consumer) is None
    assert store.fetched(worker) == {identifier(each) for each in held}, "and stay there while the threads are held up"
