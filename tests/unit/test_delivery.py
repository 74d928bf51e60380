"""Delivery: what is sent again, in which place, and what the producer is told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

from asyncworker.delivery import MOST_TOGETHER, Delivery, Item, Undelivered
from asyncworker.exchange import NotSent, Unanswered


class Scripted:
    """A store that says what a test wants: for each exchange its answers, or how it fails."""

    def __init__(self) -> None:
        self.script: list[list[Any] | BaseException] = []
        self.asked: list[list[tuple[Any, ...]]] = []
        self.left_s: list[float] = []

    def ask(self, commands: Sequence[tuple[Any, ...]], deadline: float) -> list[Any]:
        self.asked.append(list(commands))
        self.left_s.append(deadline - time.monotonic())
        answer = self.script.pop(0) if self.script else [1] * len(commands)
        if isinstance(answer, BaseException):
            raise answer from redis.ConnectionError("lost")
        return answer

    def slots(self, number: int) -> list[Any]:
        return [command[7] for command in self.asked[number]]


@pytest.fixture
def store() -> Scripted:
    return Scripted()


@pytest.fixture
def delivery(store: Scripted) -> Delivery:
    return Delivery(store, namespace="dramatiq", who="me", script="the text", sha="0")  # type: ignore[arg-type]


def items(count: int, queue: str = "q") -> list[Item]:
    return [Item(queue, f"{queue}{number}", b"body") for number in range(count)]


def send(delivery: Delivery, what: list[Item], *, within_s: float = 5.0) -> None:
    shipment = delivery.pack(what)
    try:
        delivery.send(shipment, time.monotonic() + within_s, kept_ms=1_000)
    finally:
        delivery.done(shipment)


def test_one_slot_serves_all_that_is_sent_after_each_other(store: Scripted, delivery: Delivery) -> None:
    for _ in range(3):
        send(delivery, items(1))
    assert len({store.slots(number)[0] for number in range(3)}) == 1


def test_what_goes_together_goes_in_one_exchange_by_queue_and_in_order(store: Scripted, delivery: Delivery) -> None:
    send(delivery, [Item("a", "1", b""), Item("b", "2", b""), Item("a", "3", b"")])
    ((first, second),) = store.asked
    assert (first[5], first[9::2]) == ("a", ("1", "3"))
    assert (second[5], second[9::2]) == ("b", ("2",))
    assert len(set(store.slots(0))) == 2


def test_a_large_shipment_holds_up_the_store_for_no_longer_than_a_small_one(
    store: Scripted, delivery: Delivery
) -> None:
    send(delivery, items(2 * MOST_TOGETHER + 1))
    (commands,) = store.asked
    assert [len(command[9::2]) for command in commands] == [MOST_TOGETHER, MOST_TOGETHER, 1]


def test_only_what_got_no_answer_is_sent_again_from_the_same_slot(store: Scripted, delivery: Delivery) -> None:
    store.script = [Unanswered([1])]
    send(delivery, items(1, "a") + items(1, "b"))
    assert [command[5] for command in store.asked[1]] == ["b"]
    assert store.slots(1) == store.slots(0)[1:]


@pytest.mark.parametrize(("within_s", "first_s"), [(20.0, 10.0), (0.8, 0.8)])
def test_a_try_waits_for_half_of_the_time_and_for_all_that_is_left_of_little(
    store: Scripted, delivery: Delivery, within_s: float, first_s: float
) -> None:
    store.script = [Unanswered([])]
    send(delivery, items(1), within_s=within_s)
    assert store.left_s[0] == pytest.approx(first_s, abs=0.3)
    assert store.left_s[1] < within_s


def test_the_slot_of_what_got_no_answer_is_used_by_nothing_else(store: Scripted, delivery: Delivery) -> None:
    store.script = [Unanswered([])]
    send(delivery, items(1))
    send(delivery, items(1))
    assert store.slots(0) == store.slots(1) != store.slots(2)


def test_a_store_that_has_forgotten_the_script_is_told_it(store: Scripted, delivery: Delivery) -> None:
    store.script = [[NoScriptError("NOSCRIPT No matching script")]]
    send(delivery, items(1))
    assert store.asked[1] == [("SCRIPT", "LOAD", "the text")]
    assert store.asked[0] == store.asked[2]


@pytest.mark.parametrize(
    ("answers", "may_be_sent", "tries"),
    [
        ([NotSent(), NotSent(), NotSent()], False, 2),
        ([Unanswered([]), NotSent(), NotSent()], True, 2),
        ([[OutOfMemoryError("OOM")], [OutOfMemoryError("OOM")], [OutOfMemoryError("OOM")]], False, 2),
        ([[ResponseError("NOPERM no")]], False, 1),
    ],
)
def test_what_passes_is_tried_again_in_time_and_the_producer_learns_what_is_known(
    store: Scripted, delivery: Delivery, answers: list[Any], may_be_sent: bool, tries: int
) -> None:
    store.script = list(answers)
    with pytest.raises(Undelivered) as caught:
        send(delivery, items(1), within_s=0.3)
    assert (caught.value.may_be_sent, len(store.asked)) == (may_be_sent, tries)
    assert isinstance(caught.value.__cause__, redis.RedisError)


def test_a_refusal_of_some_names_those_that_were_taken(store: Scripted, delivery: Delivery) -> None:
    store.script = [[1, ResponseError("WRONGTYPE")]]
    with pytest.raises(Undelivered) as caught:
        send(delivery, [Item("a", "1", b""), Item("b", "2", b""), Item("a", "3", b"")])
    assert (caught.value.taken, caught.value.may_be_sent) == ({0, 2}, False)
