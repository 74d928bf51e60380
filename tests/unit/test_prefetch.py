"""How many messages a worker takes before it has done those that it has."""

from __future__ import annotations

import pytest

from asyncworker.prefetch import MOST_AHEAD, SHORT_S, WEIGHT, Prefetch


class Worker:
    """A prefetch on a clock of its own."""

    def __init__(self, threads: int = 4) -> None:
        self.now_s = 0.0
        self.prefetch = Prefetch(threads, clock=lambda: self.now_s)
        self._number = 0

    def run(self, times: int, *, for_s: float) -> None:
        for _ in range(times):
            self._number += 1
            self.prefetch.hand_out(str(self._number))
            self.now_s += for_s
            self.prefetch.done(str(self._number))


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_worker_takes_as_many_messages_as_it_has_threads(worker: Worker) -> None:
    assert worker.prefetch.most == 4
    for number in range(4):
        assert worker.prefetch.may_hand_out()
        worker.prefetch.hand_out(str(number))
    assert not worker.prefetch.may_hand_out()


def test_a_worker_of_long_messages_never_takes_more(worker: Worker) -> None:
    worker.run(100, for_s=2 * SHORT_S)
    assert worker.prefetch.most == 4


def test_a_worker_of_short_messages_takes_more_and_more_up_to_a_bound(worker: Worker) -> None:
    mosts = []
    for _ in range(100):
        worker.run(1, for_s=SHORT_S / 2)
        mosts.append(worker.prefetch.most)
    assert mosts == sorted(mosts)
    assert mosts[0] == 4
    assert mosts[-1] == 4 + 4 * MOST_AHEAD


def test_a_worker_of_short_messages_hands_out_twice_as_many_as_it_has_threads(worker: Worker) -> None:
    worker.run(4, for_s=0)
    for number in range(100, 108):
        assert worker.prefetch.may_hand_out()
        worker.prefetch.hand_out(str(number))
    assert not worker.prefetch.may_hand_out()
    assert [worker.prefetch.done(str(number)) for number in range(100, 108)] == [False] * 3 + [True] * 5


@pytest.mark.parametrize("end", ["a long message", "threads that are held up"])
def test_more_is_taken_only_while_messages_are_short(worker: Worker, end: str) -> None:
    worker.run(100, for_s=0)
    if end == "a long message":
        worker.run(1, for_s=SHORT_S / WEIGHT)
    else:
        worker.prefetch.stuck()
    assert worker.prefetch.most == 4


def test_what_was_never_handed_out_counts_for_nothing(worker: Worker) -> None:
    worker.prefetch.done("given back")
    assert (worker.prefetch.most, worker.prefetch.out) == (4, 0)


def test_a_short_message_that_the_machine_held_up_makes_no_difference(worker: Worker) -> None:
    worker.run(100, for_s=SHORT_S / 4)
    most = worker.prefetch.most
    worker.run(1, for_s=2 * SHORT_S)
    assert worker.prefetch.most == most > 4


def test_how_long_a_message_waited_for_a_thread_does_not_count(worker: Worker) -> None:
    """Eight at once, one thread: the last has waited for seven."""
    for _ in range(20):
        identifiers = [str(number) for number in range(8)]
        for identifier in identifiers:
            worker.prefetch.hand_out(identifier)
        for identifier in identifiers:
            worker.now_s += SHORT_S / 2
            worker.prefetch.done(identifier)
    assert worker.prefetch.most == 4 + 4 * MOST_AHEAD
