"""Messages that were begun by a worker process that died then: accounted for, limited, and told from bystanders."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.middleware import Shutdown

from asyncworker import Middleware, Session, actor
from asyncworker.ledger import Outcome, Row
from asyncworker.losses import Gate, TooManyLosses
from asyncworker.testing import StubWorker
from tests.waiting import wait_until


class Witness(Middleware):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Row | None]] = []

    def after_lose_message(self, broker: Any, message: Any, *, losses: int, row: Row | None) -> None:
        self.seen.append((message.message_id, losses, row))


def plain(body: Any, **options: Any) -> Any:
    return dramatiq.actor(max_retries=0, actor_name="plain", **options)(body)


def lost(message: Message[Any], times: int) -> Message[Any]:
    """The message as a worker has it after so many losses."""
    return message.copy(options={"losses": times})


def outcomes(worker: StubWorker, message: Message[Any]) -> list[str]:
    return [row.outcome for row in worker.rows(message)]


def test_the_row_of_the_attempt_that_was_lost_is_closed_and_the_loss_is_told(
    worker: StubWorker, caplog: pytest.LogCaptureFixture
) -> None:
    witness = Witness()
    worker.broker.add_middleware(witness)

    @actor(max_retries=0)
    async def number(session: Session, *, seed: int | None = None) -> int:
        return session.attempt.number

    message = number.message(seed=7)
    worker.ledger.open(Row(message.message_id, 0, "number", 7, "host:1", opened_ms=10, phase="code"))
    assert worker.run(lost(message, 1)) == 2
    assert outcomes(worker, message) == ["lost", "succeeded"]
    ((message_id, losses, row),) = witness.seen
    assert (message_id, losses) == (message.message_id, 1)
    assert row is not None
    assert (row.seed, row.worker, row.phase, row.attempt) == (7, "host:1", "code", 1)
    assert f"message_id={message_id} actor={number.actor_name} attempt=1 seed=7 outcome=lost " in caplog.text
    assert " phase=code worker=host:1 losses=1 of 3: " in caplog.text


def test_an_attempt_that_was_too_short_to_have_a_row_gets_one(worker: StubWorker) -> None:
    message = plain(lambda: "done").message()
    assert worker.run(lost(message, 1)) == "done"
    assert outcomes(worker, message) == ["lost", "succeeded"]


def test_the_row_of_an_attempt_says_that_its_page_was_ready(worker: StubWorker) -> None:
    seen: list[str | None] = []

    @actor(max_retries=0)
    async def look(session: Session) -> None:
        seen.extend(row.phase for row in worker.ledger.rows(session.attempt.message_id or ""))

    worker.run(look.message())
    assert seen == ["code"]


def test_a_message_that_was_lost_as_often_as_it_may_be_is_dead_lettered_and_not_run(worker: StubWorker) -> None:
    ran: list[int] = []
    message = plain(lambda: ran.append(1)).message()
    with pytest.raises(TooManyLosses, match=r"was lost 3 times.*ASYNCWORKER_MAX_LOSSES"):
        worker.run(lost(message, 3))
    assert ran == []
    assert outcomes(worker, message) == ["lost"]


def test_an_actor_says_how_often_its_messages_may_be_lost(worker: StubWorker) -> None:
    message = plain(lambda: "done", max_losses=1).message()
    with pytest.raises(TooManyLosses):
        worker.run(lost(message, 1))


def test_losses_use_up_no_retry(worker: StubWorker) -> None:
    attempts: list[int] = []

    def body() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise RuntimeError("not yet")
        return "done"

    message = dramatiq.actor(max_retries=2, min_backoff=1, max_backoff=2, actor_name="plain")(body).message()
    assert worker.run(lost(message, 2)) == "done"
    assert outcomes(worker, message) == ["lost", "failed", "failed", "succeeded"], "and a retry was not lost again"


def test_a_loss_is_told_once_also_when_the_worker_that_told_it_dies_before_it_begins(worker: StubWorker) -> None:
    witness = Witness()
    worker.broker.add_middleware(witness)
    message = plain(lambda: "done").message()
    row = worker.ledger.open(Row(message.message_id, 0, "plain", None, "host:1", opened_ms=10))
    worker.ledger.close(row.closed(Outcome.lost, 20))
    assert worker.run(lost(message, 1)) == "done"
    assert (witness.seen, outcomes(worker, message)) == ([], ["lost", "succeeded"])


def test_a_dead_letter_that_was_sent_again_is_lost_anew(worker: StubWorker) -> None:
    message = plain(lambda: "done").message()
    row = worker.ledger.open(Row(message.message_id, 0, "plain", None, "host:1", opened_ms=10))
    worker.ledger.close(row.closed(Outcome.lost, 20))
    again = message.copy(options={"losses": 1, "requeue_timestamp": 30})
    assert worker.run(again) == "done"
    assert outcomes(worker, message) == ["lost", "lost", "succeeded"]


class Slow:
    """An actor that ends when it is let go, and notes who runs beside it."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.running: set[str] = set()
        self.began: dict[str, set[str]] = {}

    def __call__(self, name: str, waits: bool) -> None:
        self.running.add(name)
        self.began[name] = set(self.running)
        assert not waits or self.let_go.wait(30)
        self.running.discard(name)


def test_the_attempt_that_could_be_the_last_loss_runs_alone_in_its_process(worker: StubWorker) -> None:
    slow = Slow()
    do = plain(slow)
    worker.broker.enqueue(do.message("first", True))
    wait_until(lambda: "first" in slow.began, "one runs")
    worker.broker.enqueue(lost(do.message("suspect", False), 2))
    gate = next(each for each in worker.broker.middleware if type(each).__name__ == "Losses")._gate
    wait_until(lambda: gate._alone is not None, "the suspect waits for it to end")
    worker.broker.enqueue(do.message("later", False))
    assert set(slow.began) == {"first"}
    slow.let_go.set()
    worker.join()
    assert slow.began["suspect"] == {"suspect"}
    assert set(slow.began) == {"first", "suspect", "later"}


def test_one_with_losses_left_runs_beside_others(worker: StubWorker) -> None:
    slow = Slow()
    do = plain(slow)
    worker.broker.enqueue(do.message("first", True))
    wait_until(lambda: "first" in slow.began, "one runs")
    worker.broker.enqueue(lost(do.message("lost once", False), 1))
    wait_until(lambda: "lost once" in slow.began, "another runs beside it")
    slow.let_go.set()
    worker.join()


def test_who_waits_to_be_alone_is_interrupted_when_the_process_stops_and_lets_others_in() -> None:
    gate, broker = Gate(), SimpleNamespace(is_stopping=False)
    gate.enter(broker, alone=False)
    raised: list[BaseException] = []

    def suspect() -> None:
        try:
            gate.enter(broker, alone=True)
        except Shutdown as error:
            raised.append(error)
        gate.leave()  # as the hook after the attempt does it

    thread = threading.Thread(target=suspect)
    thread.start()
    wait_until(lambda: gate._alone is not None, "it waits")
    broker.is_stopping = True
    thread.join(30)
    assert len(raised) == 1
    broker.is_stopping = False
    gate.leave()
    gate.enter(broker, alone=True)
    gate.leave()
