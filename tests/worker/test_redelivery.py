"""Whether a message that is delivered again was lost, by what the ledger knows."""

from __future__ import annotations

import threading
import time
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Message

from asyncworker import redelivery
from asyncworker.ledger import Beat, MemoryLedger, Outcome, Row
from asyncworker.losses import Losses
from asyncworker.redelivery import count_losses, is_alive
from asyncworker.testing import FakeEngine, stub_worker
from tests.waiting import BUSY_S, wait_until

LOST, FAILED, RUNNING = Outcome.lost, Outcome.failed, Outcome.running


@pytest.fixture
def book() -> MemoryLedger:
    return MemoryLedger()


def message(**options: Any) -> Message[Any]:
    return Message("default", "do", (), {}, options)


def attempted(book: MemoryLedger, message: Message[Any], *outcomes: Outcome) -> Row:
    """Rows with these outcomes; returns the last."""
    for number, outcome in enumerate(outcomes):
        row = book.open(Row(message.message_id, 0, "do", None, "host:1", opened_ms=1_000 + number))
        if outcome is not RUNNING:
            book.close(row.closed(outcome, 2_000))
    return row


def losses(message: Message[Any]) -> tuple[int, int]:
    """How often it was lost, and how many of these are in the ledger."""
    return message.options["losses"], message.options["noted_losses"]


@pytest.mark.parametrize(
    ("outcomes", "carried", "expected"),
    [
        ([], 0, (0, 0)),  # was only fetched
        ([FAILED], 0, (0, 0)),  # it ended, and could not be acknowledged
        ([RUNNING], 0, (1, 0)),
        ([LOST, RUNNING], 0, (2, 1)),
        ([LOST, LOST, RUNNING], 0, (3, 2)),
        ([LOST, FAILED, LOST, RUNNING], 1, (3, 2)),  # a retry says what was before it
        ([LOST], 0, (1, 1)),  # whoever has noted the loss died before it began
        ([LOST, LOST, LOST], 0, (2, 2)),  # given up, and sent again by hand: fetched ahead since
    ],
)
def test_losses_are_those_in_a_row_before_and_the_attempt_whose_row_is_open(
    book: MemoryLedger, outcomes: list[Outcome], carried: int, expected: tuple[int, int]
) -> None:
    again = message(**({"losses": carried, "noted_losses": carried} if carried else {}))
    if outcomes:
        attempted(book, again, *outcomes)
    count_losses(book, again, most=3)
    assert losses(again) == expected


def test_an_attempt_whose_worker_goes_on_saying_that_it_lives_is_not_lost(book: MemoryLedger) -> None:
    """Its connection to the broker broke, and no more."""
    again = message()
    row = attempted(book, again, RUNNING)
    book.beat(row.worker, Beat(500, 1_000))
    threading.Timer(0.3, lambda: book.beat(row.worker, Beat(500, 2_000))).start()
    count_losses(book, again, most=3)
    assert losses(again) == (0, 0)


def test_an_attempt_is_lost_when_what_its_worker_said_last_has_lapsed(
    book: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = attempted(book, message(), RUNNING)
    monkeypatch.setattr("asyncworker.ledger.BEAT_MS", 400)
    book.beat(row.worker, Beat(500, 1_000))
    began = time.monotonic()
    assert not is_alive(book, row)
    assert time.monotonic() - began >= 0.3


def test_a_worker_that_has_the_name_of_the_dead_one_does_not_live_in_its_place(book: MemoryLedger) -> None:
    row = attempted(book, message(), RUNNING)
    book.beat(row.worker, Beat(born_ms=row.opened_ms + 1, at_ms=2_000))
    assert not is_alive(book, row)


def test_who_has_to_stop_waits_for_no_answer_and_takes_nothing_for_lost(
    book: MemoryLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncworker.ledger.BEAT_MS", 60_000)
    row = attempted(book, message(), RUNNING)
    book.beat(row.worker, Beat(500, 1_000))
    began = time.monotonic()
    assert is_alive(book, row, gives_up=lambda: True)
    assert time.monotonic() - began < redelivery.LOOK_S + BUSY_S


def test_a_message_runs_although_no_one_can_say_whether_it_was_lost(
    fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(MemoryLedger):
        def rows(self, message_id: str) -> list[Row]:
            raise redis.ConnectionError("away")

    monkeypatch.setattr(dramatiq.broker, "global_broker", None)
    ran: list[int] = []
    with stub_worker(engine=fake_engine) as worker:
        (each,) = (each for each in worker.broker.middleware if isinstance(each, Losses))
        each._ledger = Away()
        monkeypatch.setattr(dramatiq.MessageProxy, "redelivered", True, raising=False)
        actor = dramatiq.actor(actor_name="plain", max_retries=0)(lambda: ran.append(1))
        worker.broker.enqueue(actor.message())
        wait_until(lambda: ran, "it ran")
        worker.join()
    assert "whether it was lost is not known" in caplog.text
