"""A store that is full, refuses half a command or was away: each message stays in one place, and no one dies of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import redis
from dramatiq.common import current_millis

from asyncworker.errors import BrokerUnavailable
from tests.stores import QUEUE, Store, away, consumer_of, identifier, message, silence, take
from tests.waiting import wait_until


@pytest.mark.parametrize("first_back", ["who was there before", "a newcomer", "one that fetches before it beats"])
def test_after_an_outage_no_one_is_taken_for_dead_before_everyone_could_be_heard(store: Store, first_back: str) -> None:
    producer, worker, busy = store.ours(), store.ours(), store.ours()
    producer.enqueue(message("held"))
    take(consumer_of(busy))
    for broker in (busy, worker):
        broker.recover(QUEUE)
    away(store, for_ms=40_000)
    first = store.ours() if first_back == "a newcomer" else worker
    if first_back.startswith("one that fetches"):
        assert next(consumer_of(first)) is None
    assert first.recover(QUEUE) == 0, "the store was away, and so was everyone"
    assert store.ours().recover(QUEUE) == 0, "and it is not back for long"
    busy.recover(QUEUE)
    store.client.delete("dramatiq:__away__")  # the time to be heard is over
    assert first.recover(QUEUE) == 0
    assert len(store.fetched(busy)) == 1


def test_who_is_not_heard_of_after_an_outage_either_is_dead(store: Store) -> None:
    producer, dead = store.ours(), store.ours()
    producer.enqueue(message("held"))
    take(consumer_of(dead))
    dead.recover(QUEUE)
    away(store, for_ms=2_000)
    newcomer = store.ours(heartbeat_timeout_ms=1_000)
    assert newcomer.recover(QUEUE) == 0
    wait_until(lambda: newcomer.recover(QUEUE) == 1, "what it held is run again")


def test_who_has_said_that_it_leaves_is_not_waited_for_after_an_outage(store: Store) -> None:
    producer, left = store.ours(), store.ours()
    producer.enqueue(message("held"))
    take(consumer_of(left))
    left.recover(QUEUE)
    away(store, for_ms=40_000)
    left.leave()
    assert store.ours().recover(QUEUE) == 1


def test_on_a_full_store_workers_go_on_since_they_make_room_and_only_producers_are_refused(store: Store) -> None:
    producer, worker, dead = store.ours(), store.ours(), store.ours()
    hasty = store.ours(send_timeout_ms=2_000)
    sent = [producer.enqueue(message(number)) for number in range(4)]
    delayed = producer.enqueue(message("late"), delay=1)
    take(consumer_of(dead, prefetch=1))
    dead.recover(QUEUE)
    silence(store, dead, for_ms=16_000)
    store.client.config_set("maxmemory", 1)
    with pytest.raises(BrokerUnavailable, match="it was not sent"):
        hasty.enqueue(message("refused"))
    assert worker.recover(QUEUE) == 1
    consumer = consumer_of(worker)
    received = [take(consumer) for _ in range(5)]
    assert [each.message_id for each in received] == [each.message_id for each in (*sent, delayed)]
    worker.do_rewrite(QUEUE, identifier(sent[0]), b"rewritten")
    consumer.requeue(received[3:4])
    assert store.waiting() == [identifier(sent[3])]
    worker.do_pause(QUEUE)
    worker.do_resume(QUEUE)
    for each in received[1:3]:
        consumer.ack(each)
    consumer.nack(received[0])
    wait_until(lambda: store.dead() == [identifier(sent[0])], "it is a dead letter")
    (died,) = [at for _, at in store.client.zrange(f"dramatiq:{QUEUE}.XQ", 0, -1, withscores=True)]
    assert worker.do_revive(QUEUE, identifier(sent[0]), int(died), sent[0].encode()) == [1]
    assert store.waiting() == [identifier(sent[3]), identifier(sent[0])]
    worker.leave()
    store.client.config_set("maxmemory", 0)


@pytest.mark.parametrize("foreign", [".XQ", ".XQ.msgs"])
def test_a_rejected_message_that_the_dead_letters_refuse_stays_where_it_is(store: Store, foreign: str) -> None:
    producer, worker = store.ours(), store.ours()
    sent = producer.enqueue(message("a"))
    take(consumer_of(worker))
    store.client.set(f"dramatiq:{QUEUE}{foreign}", "not ours")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        worker.do_nack(QUEUE, identifier(sent))
    assert store.fetched(worker) == {identifier(sent)}
    store.client.delete(f"dramatiq:{QUEUE}{foreign}")
    assert worker.do_nack(QUEUE, identifier(sent)) == 1
    assert (store.fetched(worker), store.dead(), worker.do_qsize(QUEUE)) == (set(), [identifier(sent)], 0)


@pytest.mark.parametrize("command", ["fetch", "requeue", "recover", "ring"])
def test_whatever_is_refused_half_way_a_message_is_not_taken_from_where_it_was(store: Store, command: str) -> None:
    producer, worker, dead = store.ours(), store.ours(), store.ours()
    sent = [producer.enqueue(message(number)) for number in range(3)]
    dead.do_fetch(QUEUE, 1, 0, 1)
    silence(store, dead, for_ms=16_000)
    if command != "fetch":  # that would have made its key
        worker.do_fetch(QUEUE, 1, 0, 1)
    delayed = producer.enqueue(message("late"), delay=1)
    wait_until(lambda: current_millis() > delayed.options["eta"], "it is due")
    before = _places(store)
    target = f"dramatiq:__acks__.{worker.broker_id}.{QUEUE}" if command == "fetch" else f"dramatiq:{QUEUE}"
    with _refused(store, target), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        if command == "fetch":
            worker.do_fetch(QUEUE, 5, 0, 5)
        elif command == "requeue":
            worker.do_requeue(QUEUE, identifier(sent[1]))
        elif command == "recover":
            worker.recover(QUEUE)
        else:
            worker.do_ring(QUEUE)
    assert _places(store) == before


@contextlib.contextmanager
def _refused(store: Store, key: str) -> Iterator[None]:
    """Another kind of value lies at the key, so that whatever is written there is refused."""
    was_there = store.client.exists(key)
    if was_there:
        store.client.rename(key, "aside")
    store.client.set(key, "not ours")
    yield
    store.client.delete(key)
    if was_there:
        store.client.rename("aside", key)


def _places(store: Store) -> list[str]:
    """Every message by every place where it is; a delayed one is in one place, whether or not it is moved."""
    found = store.waiting() + store.dead() + list(store.due())
    found += [each.decode() for each in store.client.lrange(f"dramatiq:{QUEUE}.DQ", 0, -1)]
    for key in store.client.keys("dramatiq:__acks__.*"):
        if store.client.type(key) == b"set":
            found += [each.decode() for each in store.client.smembers(key)]
    return sorted(found)


def test_a_delay_that_is_no_number_is_over_at_once_and_holds_no_other_message_up(store: Store) -> None:
    body = message("a", eta=float("nan")).encode()
    assert b"NaN" in body
    store.client.hset(f"dramatiq:{QUEUE}.DQ.msgs", "x", body)
    store.client.rpush(f"dramatiq:{QUEUE}.DQ", "x")
    store.ours().enqueue(message("good"))
    consumer = consumer_of(store.ours())
    assert sorted(take(consumer).args[0] for _ in range(2)) == ["a", "good"]


def test_what_is_done_and_cannot_be_settled_is_not_run_again_by_its_worker_and_takes_none_of_its_room(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    producer, worker = store.ours(), store.ours()
    first, second = [producer.enqueue(message(number)) for number in range(2)]
    consumer = consumer_of(worker, prefetch=1)
    store.client.set(f"dramatiq:{QUEUE}.XQ", "not ours")
    consumer.nack(take(consumer))
    wait_until(lambda: "refuses to settle" in caplog.text, "it was given up")
    received = take(consumer)
    assert received.message_id == second.message_id, "there is room"
    assert next(consumer) is None, "but no more than there was"
    consumer.ack(received)
    wait_until(lambda: store.fetched(worker) == {identifier(first)}, "the second was taken")
    assert next(consumer) is None
    assert (store.waiting(), store.fetched(worker)) == ([], {identifier(first)})


def test_what_was_done_by_a_thread_that_gave_up_what_follows_it_is_not_acknowledged_when_the_store_is_back(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    producer, worker = store.ours(), store.ours()
    first, _ = [producer.enqueue(message(number)) for number in range(2)]
    consumer = consumer_of(worker)
    received = [take(consumer) for _ in range(2)]
    worker.patience.end_in(0)
    assert not worker.patience.pause(1), "its result, say, was not taken"
    for each in received:
        consumer.ack(each)
    wait_until(lambda: store.fetched(worker) == {identifier(first)}, "the second was taken")
    assert f"message {first.message_id} (do) was done, but not what follows it" in caplog.text
    worker.leave()
    assert store.ours().recover(QUEUE) == 1
    assert store.waiting() == [identifier(first)]
