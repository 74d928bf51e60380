"""Paced messages in the store: who waits in line, who is let go, and that none gets lost on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest

from asyncworker.limiter import Verdict
from asyncworker.pace import Pace, Terms, key_of
from asyncworker.redis_broker import WorkerBroker
from tests.stores import QUEUE, Store, consumer_of, identifier, silence, take
from tests.waiting import wait_until

SHOP, OTHER = "https://shop.example/", "https://other.example/"
KEY = key_of("shop.example")
LINE = f"dramatiq:__pace__:line:{KEY}"
PACE = Pace("1/h", jitter=0.0)


def declare(broker: WorkerBroker, name: str = "visit", queue: str = QUEUE, pace: Pace | None = PACE) -> Any:
    options = {} if pace is None else {"pace": pace}
    visit: Any = dramatiq.Actor(
        lambda url, number=0: None, broker=broker, actor_name=name, queue_name=queue, priority=0, options=options
    )

    async def with_session(session: Any, url: str, number: int = 0) -> None: ...

    visit.fn_async = with_session
    return visit


@pytest.fixture
def broker(store: Store) -> WorkerBroker:
    return store.ours()


@pytest.fixture
def visit(broker: WorkerBroker) -> Any:
    return declare(broker)


@pytest.fixture
def consumer(broker: WorkerBroker, visit: Any) -> Iterator[Any]:
    consumer = consumer_of(broker)
    yield consumer
    consumer.close()


def commit(broker: WorkerBroker, message: Any, pace: Pace = PACE) -> Verdict:
    return broker.limiter.commit(KEY, Terms.of(pace), member=broker.member(message), hold_ms=250).verdict


def in_line(store: Store) -> list[str]:
    return [member.decode().removeprefix(f"{QUEUE} ") for member in store.client.zrange(LINE, 0, -1)]


def spend(broker: WorkerBroker, pace: Pace = PACE) -> None:
    """Let the slot that is there now be taken."""
    assert broker.limiter.commit(KEY, Terms.of(pace), hold_ms=250).verdict is Verdict.go


def test_who_has_to_wait_is_in_line_and_in_no_workers_hands(
    store: Store, broker: WorkerBroker, visit: Any, consumer: Any
) -> None:
    spend(broker)
    sent = [visit.send(SHOP, number) for number in range(3)]
    other = visit.send(OTHER)
    assert take(consumer).message_id == other.message_id
    assert in_line(store) == [identifier(each) for each in sent]
    assert store.fetched(broker) == {identifier(other)}
    assert broker.do_qsize(QUEUE) == 4
    assert broker.do_overview(QUEUE, 60_000, 60_000)[2] == 3, "they wait"


def test_ten_thousand_of_a_slow_host_hold_no_other_up(store: Store, broker: WorkerBroker, visit: Any) -> None:
    spend(broker)
    broker.send_many([visit.message(SHOP, number) for number in range(10_000)])
    consumer = consumer_of(broker)
    last = visit.send(OTHER)
    began = time.monotonic()
    assert take(consumer).message_id == last.message_id
    took_s = time.monotonic() - began
    assert store.client.zcard(LINE) == 10_000
    assert took_s < 5, "on a machine that does other things, too; alone it takes a tenth of that"
    began = time.monotonic()
    quick = visit.send(OTHER.replace("other", "third"))
    assert take(consumer).message_id == quick.message_id
    assert time.monotonic() - began < 0.5
    consumer.close()


def test_a_line_begins_to_move_when_its_time_has_come_without_anyone_looking(
    store: Store, broker: WorkerBroker, visit: Any, consumer: Any
) -> None:
    pace = Pace("4/s", jitter=0.0)
    spend(broker, pace)
    spend_until = time.monotonic()
    broker.limiter.hold(KEY, for_ms=700)
    first, second = visit.send(SHOP, 1), visit.send(SHOP, 2)
    taken = take(consumer)
    assert taken.message_id == first.message_id
    assert 0.4 <= time.monotonic() - spend_until < 3
    assert commit(broker, taken, pace) is Verdict.go
    assert take(consumer).message_id == second.message_id


def test_a_message_that_is_put_off_is_first_in_line_again(
    store: Store, broker: WorkerBroker, visit: Any, consumer: Any
) -> None:
    visit.send(SHOP, 1)
    taken = take(consumer)
    behind = visit.send(SHOP, 2)
    wait_until(lambda: next(consumer) is None and store.client.zcard(LINE) == 1, "the second waits in line")
    broker.limiter.hold(KEY, for_ms=60_000, reason="429")
    assert commit(broker, taken) is Verdict.later
    for _ in range(2):  # also when it is said again
        broker.defer(taken, KEY)
        assert taken.was_settled is True
    consumer.ack(taken)
    assert in_line(store) == [identifier(taken), identifier(behind)]
    assert store.fetched(broker) == set()
    broker.limiter.release(KEY)
    again = take(consumer)
    assert (again.message_id, again.kwargs) == (taken.message_id, taken.kwargs)


@pytest.mark.parametrize("end", ["ack", "nack"])
def test_what_has_ended_holds_no_slot_and_the_next_goes_at_once(
    store: Store, broker: WorkerBroker, visit: Any, consumer: Any, end: str
) -> None:
    pace = Pace(max_concurrent=1)
    visit.send(SHOP, 1)
    taken = take(consumer)
    second = visit.send(SHOP, 2)
    assert commit(broker, taken, pace) is Verdict.go
    wait_until(lambda: next(consumer) is None and store.client.zcard(LINE) == 1, "the second waits in line")
    getattr(consumer, end)(taken)
    began = time.monotonic()
    assert take(consumer).message_id == second.message_id
    assert time.monotonic() - began < 0.9, "woken, not by its own next look"


def test_what_a_dead_worker_had_runs_at_once_elsewhere_and_frees_its_place(
    store: Store, broker: WorkerBroker, visit: Any, consumer: Any
) -> None:
    pace = Pace(max_concurrent=1)
    visit.send(SHOP, 1)
    taken = take(consumer)
    visit.send(SHOP, 2)
    assert commit(broker, taken, pace) is Verdict.go
    other = store.ours(heartbeat_timeout_ms=1_000)
    declare(other)
    elsewhere = consumer_of(other)
    wait_until(lambda: next(elsewhere) is None and store.client.zcard(LINE) == 1, "the second waits in line")
    silence(store, broker, for_ms=60_000)
    assert other.recover(QUEUE) == 1
    again = take(elsewhere)
    assert again.message_id == taken.message_id
    assert commit(other, again, pace) is Verdict.go
    assert store.client.zcard(LINE) == 1
    elsewhere.close()


def test_a_line_has_messages_of_several_queues_and_wakes_the_one_whose_turn_it_is(
    store: Store, broker: WorkerBroker, visit: Any, consumer: Any
) -> None:
    spend(broker)
    broker.declare_queue("other")
    elsewhere = declare(broker, "elsewhere", "other").send(SHOP)
    (other_consumer,) = [broker.consume("other", prefetch=1, timeout=1_000)]
    wait_until(lambda: next(other_consumer) is None and store.client.zcard(LINE) == 1, "it waits in line")
    visit.send(SHOP, 2)
    wait_until(lambda: next(consumer) is None and store.client.zcard(LINE) == 2, "so does this")
    broker.limiter.set_rate("shop.example", None)
    store.client.hset(f"dramatiq:__pace__:key:{KEY}", "start", 1)  # so long ago
    broker.limiter.release(KEY)
    broker.do_ring(QUEUE)
    assert store.client.llen("dramatiq:other.wake") == 1
    assert take(other_consumer).message_id == elsewhere.message_id
    other_consumer.close()


@pytest.mark.parametrize("how", ["cancel", "drop", "purge"])
def test_what_waits_in_line_can_be_cancelled_and_dropped(
    store: Store, broker: WorkerBroker, visit: Any, consumer: Any, how: str
) -> None:
    spend(broker)
    sent = visit.send(SHOP, 1)
    wait_until(lambda: next(consumer) is None and store.client.zcard(LINE) == 1, "it waits in line")
    if how == "cancel":
        assert broker.do_cancel(QUEUE, identifier(sent), 60_000, 60_000) == b"waiting"
    elif how == "drop":
        assert broker.do_drop_waiting(QUEUE, 10) == 1
    else:
        broker.flush(QUEUE)
    assert (store.client.zcard(LINE), broker.do_qsize(QUEUE)) == (0, 0)
    assert broker.limiter.next_due_ms() is None


def test_a_retry_is_paced_as_its_message_was(store: Store, broker: WorkerBroker, visit: Any, consumer: Any) -> None:
    visit.send(SHOP, 1)
    taken = take(consumer)
    assert commit(broker, taken) is Verdict.go
    taken.is_retrying = True
    retry = broker.enqueue(taken, delay=1)
    consumer.ack(taken)
    wait_until(lambda: next(consumer) is None and in_line(store) == [identifier(retry)], "it waits in line")
    (state,) = broker.limiter.states()
    assert (state.running, state.out, state.waiting) == (0, 0, 1)


def test_a_worker_that_knows_of_no_paces_takes_what_comes(store: Store, broker: WorkerBroker, visit: Any) -> None:
    spend(broker)
    sent = visit.send(SHOP, 1)
    other = store.ours()
    elsewhere = consumer_of(other)
    assert take(elsewhere).message_id == sent.message_id
    elsewhere.close()


def test_a_store_that_was_started_anew_lets_no_burst_through(store: Store, broker: WorkerBroker) -> None:
    """It may have lost its last second, which counts as used."""
    pace = Pace("600/m", jitter=0.0)
    spend(broker, pace)
    store.client.hset(f"dramatiq:__pace__:key:{KEY}", "run", "of another life")
    answer = broker.limiter.commit(KEY, Terms.of(pace), hold_ms=250, most_ms=5_000)
    assert answer.verdict is Verdict.go
    assert 900 < answer.wait_ms <= 1_201


def test_a_restart_is_noticed_once_also_by_who_has_to_wait_for_it(store: Store, broker: WorkerBroker) -> None:
    """Else each message that is let go would move the slot on, and none would ever take it."""
    pace = Pace("600/m", jitter=0.0)
    spend(broker, pace)
    store.client.hset(f"dramatiq:__pace__:key:{KEY}", "run", "of another life")
    waits = [broker.limiter.commit(KEY, Terms.of(pace), member=f"{QUEUE} {number}", hold_ms=250) for number in "ab"]
    assert [answer.verdict for answer in waits] == [Verdict.later, Verdict.later]
    assert waits[1].wait_ms <= waits[0].wait_ms
