"""What is done is told to the store together, once, and until it is taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis

from asyncworker import patience, settling
from asyncworker.ledger import ClosedRow
from asyncworker.settling import Done, Settled, Settling
from tests.waiting import wait_until

ROW = ClosedRow("key", 1, "{}")


class Store:
    """What a store is told, and how it answers."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool, list[str], list[ClosedRow]]] = []
        self.answers: list[Settled | Exception] = []
        self.is_open = threading.Event()
        self.is_open.set()

    def settle(self, queue_name: str, rejected: bool, identifiers: list[str], rows: list[ClosedRow]) -> Settled:
        self.told.append((queue_name, rejected, identifiers, rows))
        assert self.is_open.wait(30)
        answer = self.answers.pop(0) if self.answers else Settled([True] * len(identifiers), [])
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(patience, "PAUSES_MS", (1, 2))
    return Store()


@pytest.fixture
def desk(store: Store) -> Iterator[Settling]:
    desk = Settling(store.settle)
    yield desk
    store.is_open.set()
    assert desk.stop()


class Message:
    """A message that is done, and what its worker was told of it."""

    def __init__(self, identifier: str, *, queue: str = "default", rejected: bool = False) -> None:
        self.taken: list[bool | None] = []
        self.refused: list[bool] = []
        self.done = Done(
            queue, identifier, f"message {identifier}", rejected, self.taken.append, lambda: self.refused.append(True)
        )


def test_what_is_done_while_the_store_is_told_of_the_last_goes_with_the_next(store: Store, desk: Settling) -> None:
    store.is_open.clear()
    desk.put(Message("first").done)
    wait_until(lambda: store.told, "the store is told of the first")
    for number in range(3):
        desk.put(ClosedRow("key", number, "{}"))
        desk.put(Message(str(number)).done)
    store.is_open.set()
    assert desk.stop()
    assert [told[2] for told in store.told] == [["first"], ["0", "1", "2"]]
    assert [row.number for row in store.told[1][3]] == [0, 1, 2]


def test_where_more_than_one_was_done_the_next_waits_a_moment_for_more(
    store: Store, desk: Settling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "PAUSE_S", 1.0)
    store.is_open.clear()
    desk.put(Message("first").done)
    wait_until(lambda: store.told, "the store is told of the first")
    messages = [Message(str(number)) for number in range(4)]
    for message in messages[:2]:
        desk.put(message.done)
    store.is_open.set()
    wait_until(lambda: messages[1].taken, "the store has taken two together")
    for message in messages[2:]:
        desk.put(message.done)
    wait_until(lambda: messages[3].taken, "and has taken two more")
    assert [told[2] for told in store.told] == [["first"], ["0", "1"], ["2", "3"]]


def test_one_that_was_done_alone_has_none_wait(store: Store, desk: Settling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "PAUSE_S", 3_600.0)
    for number in range(3):
        message = Message(str(number))
        desk.put(message.done)
        wait_until(lambda message=message: message.taken, "it is taken")  # type: ignore[misc]


def test_queues_and_dead_letters_are_told_of_apart_and_rows_go_first(store: Store, desk: Settling) -> None:
    store.is_open.clear()
    desk.put(Message("first").done)
    wait_until(lambda: store.told, "the store is told of the first")
    desk.put(ROW)
    desk.put(Message("1").done)
    desk.put(Message("2", rejected=True).done)
    desk.put(Message("3", queue="other").done)
    desk.put(Message("4").done)
    store.is_open.set()
    assert desk.stop()
    assert store.told[1:] == [
        ("default", False, ["1", "4"], [ROW]),
        ("default", True, ["2"], []),
        ("other", False, ["3"], []),
    ]


def test_a_store_that_is_away_is_told_again_until_it_takes_it(store: Store, desk: Settling) -> None:
    store.answers = [redis.ConnectionError("away"), redis.ConnectionError("away")]
    message = Message("1")
    desk.put(message.done)
    wait_until(lambda: message.taken, "it was taken")
    assert message.taken == [True]
    assert [told[2] for told in store.told] == [["1"]] * 3


@pytest.mark.parametrize("repeated", [False, True])
def test_whose_message_it_was_is_known_only_where_nothing_was_repeated(
    store: Store, desk: Settling, repeated: bool
) -> None:
    store.answers = [redis.ConnectionError("away")] * repeated + [Settled([False], [])]
    message = Message("1")
    desk.put(message.done)
    wait_until(lambda: message.taken, "it was taken")
    assert message.taken == [None if repeated else False]


@pytest.mark.parametrize("error", [redis.ResponseError("WRONGTYPE no set"), ValueError("unexpected")], ids=str)
def test_what_a_store_refuses_for_good_is_said_and_the_next_is_settled(
    store: Store, desk: Settling, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    store.answers = [error]
    first, second = Message("first"), Message("second")
    desk.put(first.done)
    wait_until(lambda: first.refused, "it was given up")
    desk.put(second.done)
    wait_until(lambda: second.taken, "it was taken")
    assert (first.taken, second.taken, second.refused) == ([], [True], [])
    assert "refuses to settle messages of the queue 'default'" in caplog.text
    assert "first" in caplog.text


def test_a_worker_that_is_locked_out_waits_to_be_let_in_and_says_what_to_do(
    store: Store, desk: Settling, caplog: pytest.LogCaptureFixture
) -> None:
    store.answers = [redis.ResponseError("NOPERM no permission"), Settled([True], [])]
    message = Message("first")
    desk.put(message.done)
    wait_until(lambda: message.taken, "it was taken once the worker was let in")
    assert "check the user and the password in ASYNCWORKER_BROKER_URL" in caplog.text


def test_a_row_that_a_full_store_refuses_waits_and_holds_no_message_up(
    store: Store, desk: Settling, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "REFUSED_AGAIN_S", 0.01)
    refused = [(ROW, "OOM command not allowed")]
    store.answers = [Settled([True], []), Settled([True], refused), Settled([], refused)]
    store.is_open.clear()
    desk.put(Message("first").done)
    wait_until(lambda: store.told, "the store is told of the first")
    message = Message("1")
    desk.put(ROW)
    desk.put(message.done)
    store.is_open.set()
    wait_until(lambda: message.taken == [True], "the message was taken")
    wait_until(lambda: len(store.told) >= 4, "the row was told of until it was taken")
    assert desk.stop()
    assert [told[3] for told in store.told] == [[], [ROW], [ROW], [ROW]]
    assert caplog.text.count("refuses rows") == 1


def test_a_row_that_is_refused_for_good_is_said_and_forgotten(
    store: Store, desk: Settling, caplog: pytest.LogCaptureFixture
) -> None:
    store.answers = [Settled([], [(ROW, "WRONGTYPE Operation against a key")])]
    desk.put(ROW)
    wait_until(lambda: "refuses a row of key: WRONGTYPE" in caplog.text, "it was said")
    assert desk.stop()
    assert len(store.told) == 1


def test_a_worker_that_stops_waits_for_the_store_but_not_for_ever(
    store: Store, desk: Settling, caplog: pytest.LogCaptureFixture
) -> None:
    store.is_open.clear()
    message = Message("1")
    desk.put(message.done)
    wait_until(lambda: store.told, "the store is told")
    assert not desk.stop(0.05)
    assert "these messages are run again: message 1" in caplog.text
    store.is_open.set()
    wait_until(lambda: message.taken == [True], "it was taken after all")


def test_what_comes_after_a_stop_is_settled_too(store: Store, desk: Settling) -> None:
    assert desk.stop(), "there is nothing to stop"
    desk.put(Message("1").done)
    assert desk.stop()
    desk.put(Message("2").done)
    assert desk.stop()
    assert [told[2] for told in store.told] == [["1"], ["2"]]
