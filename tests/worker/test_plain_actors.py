"""Actors without a session: their attempts are in the ledger, too, at no cost of a round trip for each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest

from asyncworker import accounting, open_session
from asyncworker.ledger import MemoryLedger, Outcome, Row
from asyncworker.testing import FakeEngine, StubWorker, stub_worker
from tests.waiting import wait_until


@pytest.fixture
def worker(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubWorker]:
    monkeypatch.setattr(accounting, "LATE_MS", 50)
    with stub_worker(engine=fake_engine) as worker:
        yield worker


def plain(body: Any, **options: Any) -> Any:
    return dramatiq.actor(max_retries=2, min_backoff=1, max_backoff=2, actor_name="plain", **options)(body)


def outcomes(worker: StubWorker, message: Any) -> list[str]:
    return [row.outcome for row in worker.rows(message)]


def test_each_attempt_is_a_row_once_it_has_ended(worker: StubWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(worker.ledger, MemoryLedger)
    monkeypatch.setattr(accounting, "LATE_MS", 60_000)
    monkeypatch.setattr(worker.ledger, "rows", lambda message_id: pytest.fail("asked the ledger while it ran"))
    attempts = []

    def body() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise RuntimeError("not yet")
        return "done"

    message = plain(body).message()
    assert worker.run(message) == "done"
    monkeypatch.undo()
    assert outcomes(worker, message) == ["failed", "failed", "succeeded"]
    assert [row.attempt for row in worker.rows(message)] == [1, 2, 3]


def test_an_attempt_that_runs_for_long_is_a_row_while_it_runs(worker: StubWorker) -> None:
    begun, released = threading.Event(), threading.Event()

    def body() -> None:
        begun.set()
        assert released.wait(30)

    message = plain(body).message()
    worker.broker.enqueue(message)
    assert begun.wait(30)
    wait_until(lambda: outcomes(worker, message) == [Outcome.running], "its row is open")
    released.set()
    worker.join()
    assert outcomes(worker, message) == ["succeeded"]


def test_a_session_knows_its_attempts_number_in_the_ledger(worker: StubWorker) -> None:
    """Losses have numbers, too, which a message does not know of."""
    seen: list[tuple[int, list[str]]] = []

    async def body() -> int:
        async with open_session(seed=7) as session:
            seen.append((session.attempt.number, [row.outcome for row in worker.ledger.rows(message.message_id)]))
            if session.attempt.number < 4:
                raise RuntimeError("not yet")
        return session.attempt.number

    message = plain(body).message()
    for number in (1, 2):
        worker.ledger.open(Row(message.message_id, number, "plain", None, "dead:1", number))
    assert worker.run(message) == 4
    assert [number for number, _ in seen] == [3, 4]
    assert seen[0][1] == ["running"] * 3
    assert outcomes(worker, message) == ["running", "running", "failed", "succeeded"]


def test_sessions_at_once_in_one_attempt_are_one_row(worker: StubWorker) -> None:
    async def body() -> list[int]:
        async def visit(seed: int) -> int:
            async with open_session(seed=seed) as session:
                return session.attempt.number

        return list(await asyncio.gather(*(visit(seed) for seed in range(3))))

    message = plain(body).message()
    assert worker.run(message) == [1, 1, 1]
    assert outcomes(worker, message) == ["succeeded"]
