"""What is done rides with what its thread begins next, or is settled by itself soon."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis

from asyncworker import riding
from asyncworker.ledger import ClosedRow
from asyncworker.riding import Riding
from asyncworker.settling import Done, Settled
from tests.waiting import wait_until

ROW = ClosedRow("key", 0, "{}")


class Message:
    """A message that is done, and what its worker was told of it."""

    def __init__(self, identifier: str, *, queue: str = "tasks", rejected: bool = False) -> None:
        self.taken: list[bool | None] = []
        self.done = Done(queue, identifier, identifier, rejected, self.taken.append, lambda: None)


@pytest.fixture
def settled() -> list[ClosedRow | Done]:
    return []


@pytest.fixture
def desk(settled: list[ClosedRow | Done], monkeypatch: pytest.MonkeyPatch) -> Iterator[Riding]:
    """A desk at which what has no ride waits until the test is over, unless the test lets it go."""
    monkeypatch.setattr(riding, "WAIT_S", 3_600.0)
    desk = Riding(settled.append)
    yield desk
    desk.stop()


def begin(desk: Riding, queue: str = "tasks", *, settled: Settled | None = None, tries: int = 1) -> list[str]:
    """Begin a message in this thread; returns what rode along."""
    with desk.ride(queue) as ride:
        ride.tries = tries
        ride.settled = settled or Settled([True] * len(ride.riders), [])
        return [*ride.identifiers, *(row.key for row in ride.rows)]


def test_what_a_thread_has_done_goes_with_what_it_begins_next(desk: Riding, settled: list[ClosedRow | Done]) -> None:
    first = Message("first")
    assert begin(desk) == []
    desk.put(ROW)
    desk.put(first.done)
    assert first.taken == []
    assert begin(desk) == ["first", "key"]
    assert first.taken == [True]
    assert begin(desk) == settled == []


def test_a_thread_whose_message_began_without_a_ride_has_none_for_its_end(
    desk: Riding, settled: list[ClosedRow | Done]
) -> None:
    done = Message("done").done
    desk.put(ROW)
    desk.put(done)
    assert settled == [ROW, done]
    begin(desk)
    thread = threading.Thread(target=lambda: desk.put(ROW))
    thread.start()
    thread.join()
    assert settled == [ROW, done, ROW]


def test_only_what_is_of_the_same_queue_rides(desk: Riding) -> None:
    begin(desk)
    desk.put(Message("done").done)
    assert begin(desk, "others") == []
    assert begin(desk) == ["done"]


def test_a_dead_letter_and_a_row_that_was_opened_do_not_ride_nor_what_comes_after(
    desk: Riding, settled: list[ClosedRow | Done]
) -> None:
    dead, done, opened = Message("dead", rejected=True).done, Message("done").done, ClosedRow("key", 2, "{}")
    begin(desk)
    desk.put(ROW)
    desk.put(dead)
    begin(desk)
    desk.put(opened)
    desk.put(done)
    assert settled == [ROW, dead, opened, done]
    assert begin(desk) == []


def test_who_gets_off_is_settled_rows_first(desk: Riding, settled: list[ClosedRow | Done]) -> None:
    done = Message("done").done
    begin(desk)
    desk.put(ROW)
    desk.get_off()
    desk.put(done)
    assert settled == [ROW, done]


def test_what_finds_no_ride_in_time_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(riding, "WAIT_S", 0.001)
    settled: list[ClosedRow | Done] = []
    desk, done = Riding(settled.append), Message("done").done
    for _ in range(2):  # its thread ends between them
        begin(desk)
        desk.put(ROW)
        desk.put(done)
        wait_until(lambda: settled == [ROW, done], "both are settled")
        wait_until(lambda: desk._looking is None, "no one looks any more")
        settled.clear()


def test_the_riders_of_a_ride_that_fails_and_of_a_worker_that_stops_are_settled(
    desk: Riding, settled: list[ClosedRow | Done]
) -> None:
    done = Message("done").done

    def fail() -> None:
        with desk.ride("tasks"):
            raise redis.ConnectionError

    begin(desk)
    desk.put(ROW)
    desk.put(done)
    with pytest.raises(redis.ConnectionError):
        fail()
    assert settled == [ROW, done]
    begin(desk)
    desk.put(done)
    desk.stop()
    assert settled == [ROW, done, done]


@pytest.mark.parametrize(("was_ours", "tries", "told"), [(True, 2, True), (False, 1, False), (False, 2, None)])
def test_whose_a_message_was_is_not_known_when_it_was_not_taken_by_a_repeated_ride(
    desk: Riding, was_ours: bool, tries: int, told: bool | None
) -> None:
    message = Message("done")
    begin(desk)
    desk.put(message.done)
    begin(desk, settled=Settled([was_ours], []), tries=tries)
    assert message.taken == [told]


def test_a_row_that_is_refused_is_tried_again_without_a_ride(desk: Riding, settled: list[ClosedRow | Done]) -> None:
    begin(desk)
    desk.put(ROW)
    desk.put(Message("done").done)
    begin(desk, settled=Settled([True], [(ROW, "OOM")]))
    assert settled == [ROW]
