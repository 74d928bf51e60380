"""Unique messages in the store: who holds a key, from when and until when."""

from __future__ import annotations

import asyncio
from typing import Any

import dramatiq
import pytest
from dramatiq import Message

from asyncworker import patience
from asyncworker.errors import InvalidArguments
from asyncworker.redis_broker import WorkerBroker
from tests.stores import QUEUE, Store, consumer_of, identifier, take
from tests.waiting import wait_until

KEYS = f"dramatiq:{QUEUE}.unique"


def declare(broker: WorkerBroker, **options: Any) -> dramatiq.Actor[..., Any]:
    return dramatiq.Actor(
        lambda url, depth=1: None,
        broker=broker,
        actor_name="crawl",
        queue_name=QUEUE,
        priority=0,
        options={"unique": "{url}"} | options,
    )


@pytest.fixture
def broker(store: Store) -> WorkerBroker:
    return store.ours()


@pytest.fixture
def crawl(broker: WorkerBroker) -> dramatiq.Actor[..., Any]:
    return declare(broker)


def test_another_message_with_the_key_is_the_first_one_and_other_keys_are_not(store: Store, crawl: Any) -> None:
    first, same, other = crawl.send("a"), crawl.send(url="a", depth=2), crawl.send("b")
    assert same.message_id == first.message_id != other.message_id
    assert store.waiting() == [identifier(first), identifier(other)]


def test_the_key_is_of_one_actor_and_of_all_its_producers(store: Store, crawl: Any) -> None:
    elsewhere = declare(store.ours())
    assert elsewhere.send("a").message_id == crawl.send("a").message_id
    other = dramatiq.Actor(
        lambda url: None,
        broker=crawl.broker,
        actor_name="other",
        queue_name=QUEUE,
        priority=0,
        options={"unique": "{url}"},
    )
    assert other.send("a").message_id != crawl.send("a").message_id


@pytest.mark.parametrize("end", ["ack", "nack"])
def test_the_key_is_free_when_the_message_has_ended(store: Store, broker: WorkerBroker, crawl: Any, end: str) -> None:
    first = crawl.send("a")
    consumer = consumer_of(broker)
    taken = take(consumer)
    assert crawl.send("a").message_id == first.message_id, "it runs"
    getattr(consumer, end)(taken)
    wait_until(lambda: broker.do_qsize(QUEUE) == 0, "it is settled")
    assert not store.client.hexists(KEYS, "k.crawl:a")
    assert crawl.send("a").message_id != first.message_id
    consumer.close()


def test_a_delayed_message_holds_its_key_from_when_it_is_sent(store: Store, broker: WorkerBroker, crawl: Any) -> None:
    first = crawl.send_with_options(args=("a",), delay=300)
    assert crawl.send("a").message_id == first.message_id
    assert crawl.send_with_options(args=("a",), delay=10).message_id == first.message_id
    consumer = consumer_of(broker)
    taken = take(consumer)
    assert taken.message_id == first.message_id
    assert crawl.send("a").message_id == first.message_id
    consumer.ack(taken)
    wait_until(lambda: broker.do_qsize(QUEUE) == 0, "it is settled")
    assert not store.client.exists(KEYS)
    consumer.close()


def test_of_what_is_sent_together_the_first_of_each_key_is_sent_and_the_order_stays(
    store: Store, broker: WorkerBroker, crawl: Any
) -> None:
    plain: Message[Any] = Message(QUEUE, "elsewhere", (), {}, {})
    sent = broker.send_many([crawl.message("a"), plain, crawl.message("a"), (crawl.message("b"), 60_000)])
    assert sent[2].message_id == sent[0].message_id
    assert store.waiting() == [identifier(sent[0]), identifier(sent[1])]
    assert broker.do_qsize(QUEUE) == 3
    assert crawl.send("b").message_id == sent[3].message_id


def test_a_send_from_a_loop_is_the_first_one_too(broker: WorkerBroker, crawl: Any) -> None:
    first = crawl.send("a")

    async def main() -> str:
        return (await broker.aenqueue(crawl.message("a"))).message_id

    assert asyncio.run(main()) == first.message_id


def test_the_retry_of_a_message_takes_its_key_over(
    broker: WorkerBroker, crawl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = crawl.send("a")
    consumer = consumer_of(broker)
    taken = take(consumer)
    token = patience._after_attempt.set(True)
    broker.enqueue(taken, delay=60_000)
    patience._after_attempt.reset(token)
    consumer.ack(taken)
    wait_until(lambda: broker.do_qsize(QUEUE) == 1, "the first attempt is settled")
    assert crawl.send("a").message_id == first.message_id
    assert broker.do_qsize(QUEUE) == 1
    consumer.close()


def test_a_dead_letter_that_is_put_back_takes_its_key_again_unless_another_has_it(
    store: Store, broker: WorkerBroker, crawl: Any
) -> None:
    consumer = consumer_of(broker)
    letters = []
    for _ in range(2):
        letters.append(crawl.send("a"))
        consumer.nack(take(consumer))
        wait_until(lambda: len(store.dead()) == len(letters), "it is a dead letter")
    for letter in letters:
        key = identifier(letter)
        died = store.client.zscore(f"dramatiq:{QUEUE}.XQ", key)
        assert broker.do_revive(QUEUE, key, died, letter.encode()) == [1]
    assert crawl.send("a").message_id == letters[0].message_id
    for _ in letters:
        consumer.ack(take(consumer))
    wait_until(lambda: broker.do_qsize(QUEUE) == 0, "they are settled")
    assert not store.client.exists(KEYS)
    consumer.close()


def test_nothing_is_left_of_keys_whose_messages_were_dropped_or_discarded(
    store: Store, broker: WorkerBroker, crawl: Any
) -> None:
    crawl.send("a")
    crawl.send_with_options(args=("b",), delay=60_000)
    assert [broker.do_drop_waiting(QUEUE, 10), broker.do_drop_delayed(QUEUE, 10)] == [1, 1]
    dead = crawl.send("c")
    consumer = consumer_of(broker)
    consumer.nack(take(consumer))
    wait_until(store.dead, "it is a dead letter")
    died = store.client.zscore(f"dramatiq:{QUEUE}.XQ", identifier(dead))
    assert broker.do_discard(QUEUE, identifier(dead), died) == [1]
    assert not store.client.exists(KEYS)
    consumer.close()


def test_what_has_ended_in_a_way_that_no_one_told_holds_no_key(store: Store, crawl: Any) -> None:
    first = crawl.send("a")
    store.client.hdel(f"dramatiq:{QUEUE}.msgs", identifier(first))  # as a worker of plain Dramatiq acknowledges
    assert crawl.send("a").message_id != first.message_id


def test_a_send_that_is_repeated_since_its_answer_got_lost_is_answered_as_before(
    store: Store, broker: WorkerBroker
) -> None:
    words = ("slot", 60_000, 0, "u.1", "body", "crawl:a", "m1", "u.2", "body", "crawl:a", "m2")
    answer = [b"", b"m1"]
    assert broker.do_send_unique(QUEUE, *words) == answer
    store.client.delete(f"dramatiq:{QUEUE}", f"dramatiq:{QUEUE}.msgs")  # run, and forgotten
    assert broker.do_send_unique(QUEUE, *words) == answer
    assert store.waiting() == []


def test_arguments_that_make_no_key_are_refused_where_they_are_sent(store: Store, crawl: Any) -> None:
    with pytest.raises(InvalidArguments, match="the unique key of a message for crawl cannot be made"):
        crawl.send()
    wrong = declare(store.ours(), unique=lambda url: [url])
    with pytest.raises(InvalidArguments, match=r"is \['a'\]; it is a text, an integer or None"):
        wrong.send("a")


def test_a_key_of_none_is_no_key(store: Store) -> None:
    crawl = declare(store.ours(), unique=lambda url: None)
    assert crawl.send("a").message_id != crawl.send("a").message_id
