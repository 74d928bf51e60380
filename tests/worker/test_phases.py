"""The phases of an attempt: how long it was in each, where it ended, and what is written when the store is away."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import dramatiq
import pytest
import redis

from asyncworker import Session, actor, open_session
from asyncworker.backlog import Backlog
from asyncworker.errors import PhaseTimeout
from asyncworker.ledger import MemoryLedger, Outcome, Row
from asyncworker.losses import Losses
from asyncworker.middleware import BrowserMiddleware, browsers_of
from asyncworker.phases import Phase, Phases
from asyncworker.settings import load
from asyncworker.testing import FakeEngine, StubWorker, stub_worker
from tests.waiting import wait_until

#: By how much the phases may be longer than the attempt that they make up: each is rounded, and so are its two ends.
ROUNDED_MS = 10


def only_row(worker: StubWorker, message: Any) -> Row:
    (row,) = wait_until(lambda: worker.rows(message), "its row")
    return row


def test_a_row_has_the_time_of_each_phase_and_the_close_comes_behind(
    worker: StubWorker, fake_engine: FakeEngine
) -> None:
    fake_engine.delays |= {"launch": 0.2, "new_context": 0.1, "new_page": 0.1, "close_context": 0.6}

    @actor(max_retries=0)
    async def visit(session: Session) -> None:
        await asyncio.sleep(0.3)

    message = visit.message()
    worker.run(message)
    row = only_row(worker, message)
    assert (row.outcome, row.phase, len(row.phases)) == ("succeeded", "code", 4), "stored before the close"
    closed = wait_until(lambda: only_row(worker, message).phases_ms.get("close"), "the close's time")
    assert closed >= 600
    phases = row.phases_ms
    assert phases["launch"] >= 200
    assert phases["context"] >= 200
    assert phases["code"] >= 300
    assert sum(phases.values()) <= (row.took_ms or 0) + ROUNDED_MS, "none is part of another"


def test_opening_a_page_that_hangs_is_the_phase_context_in_the_error_and_in_the_row(fake_engine: FakeEngine) -> None:
    fake_engine.delays["new_page"] = math.inf
    settings = load({}, context_timeout_ms=300, close_timeout_ms=300)
    with stub_worker(engine=fake_engine, settings=settings) as worker:

        @actor(max_retries=0, time_limit=150)
        async def visit(session: Session) -> None: ...

        message = visit.message()
        with pytest.raises(PhaseTimeout, match="opened no page within 300 ms") as caught:
            worker.run(message)
        row = only_row(worker, message)
    assert (caught.value.phase, row.phase) == ("context", "context")
    assert row.phases_ms["code"] == 0
    assert row.phases_ms["context"] >= 300


def test_a_plain_actor_is_in_its_code_but_for_the_session_that_it_opens(
    worker: StubWorker, fake_engine: FakeEngine
) -> None:
    fake_engine.delays["new_context"] = 0.2

    @dramatiq.actor(broker=worker.broker, max_retries=0)
    async def opening() -> None:
        async with open_session(seed=1), open_session(seed=1):
            pass

    message = opening.message()
    worker.run(message)
    row = only_row(worker, message)
    phases = row.phases_ms
    assert phases["context"] >= 200
    assert phases["code"] >= 200, "the second one is part of the code"
    assert sum(time_ms for phase, time_ms in phases.items() if phase != "close") <= (row.took_ms or 0) + ROUNDED_MS


def test_a_running_attempt_tells_the_ledger_its_phase_while_it_runs(fake_engine: FakeEngine) -> None:
    fake_engine.delays["new_context"] = math.inf
    settings = load({}, context_timeout_ms=60_000, close_timeout_ms=300, stop_timeout_ms=300)
    with stub_worker(engine=fake_engine, settings=settings) as worker:

        @actor(max_retries=0)
        async def visit(session: Session) -> None: ...

        message = visit.message()
        worker.broker.enqueue(message)
        assert wait_until(lambda: worker.rows(message), "its row")[0].phase in ("wait", "launch", "context")
        wait_until(lambda: worker.rows(message)[0].phase == "context", "the phase")
        assert worker.rows(message)[0].outcome is Outcome.running
        worker.worker.stop(timeout=300)


def test_phases_are_counted_by_a_clock_and_the_close_is_unknown_until_it_has_ended() -> None:
    now = [0.0]
    phases = Phases(clock=lambda: now[0])
    for phase, seconds in ((Phase.launch, 1), (Phase.wait, 2), (Phase.context, 3), (Phase.code, 4)):
        now[0] += seconds
        phases.enter(phase)
    now[0] += 5
    phases.pause()
    phases.begin_close()
    assert phases.ms() == (1_000 + 3_000, 2_000, 4_000, 5_000)
    assert (phases.at, phases.reached) == (Phase.close, Phase.code)
    now[0] += 6
    phases.end_close()
    assert phases.ms()[4] == 6_000


class Away(MemoryLedger):
    """A ledger whose store may be away, and which may take a row and not say so."""

    is_away = False
    takes_silently = False

    def open(self, row: Row) -> Row:
        if self.takes_silently:
            super().open(row)
        self._ask()
        return super().open(row)

    def close(self, row: Row) -> None:
        self._ask()
        super().close(row)

    def rows(self, message_id: str) -> list[Row]:
        self._ask()
        return super().rows(message_id)

    def _ask(self) -> None:
        if self.is_away:
            raise redis.ConnectionError("away")


def use(worker: StubWorker, ledger: MemoryLedger) -> BrowserMiddleware:
    """Have a worker that runs keep its account in another ledger."""
    browsers = browsers_of(worker.broker)
    (losses,) = (each for each in worker.broker.middleware if isinstance(each, Losses))
    worker.ledger = browsers.ledger = browsers._accounting._ledger = losses._ledger = ledger
    return browsers


@pytest.mark.parametrize("takes_silently", [False, True])
def test_messages_are_run_while_the_ledgers_store_is_away_and_their_rows_are_written_in_order_afterwards(
    worker: StubWorker, caplog: pytest.LogCaptureFixture, takes_silently: bool
) -> None:
    away = Away()
    browsers = use(worker, away)
    away.is_away, away.takes_silently = True, takes_silently

    @actor(max_retries=1, min_backoff=1, max_backoff=2)
    async def visit(session: Session) -> int:
        if not done:
            done.append(1)
            raise RuntimeError("the first time")
        return 1

    done: list[int] = []
    message = visit.message()
    assert worker.run(message) == 1
    away.is_away = away.takes_silently = False
    wait_until(lambda: len(worker.rows(message)) == 2, "both rows")
    told = "the ledger's store takes rows again: 2 were written, 0 were dropped"
    wait_until(lambda: told in caplog.text, "nothing waits")
    assert not browsers.backlog.is_away
    assert [(row.attempt, row.outcome) for row in worker.rows(message)] == [(1, "failed"), (2, "succeeded")]
    assert caplog.text.count("the ledger's store does not take rows") == 1


def test_of_more_rows_than_may_be_kept_the_oldest_are_dropped_counted_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    written: list[int] = []
    backlog = Backlog(most=2)
    for number in (1, 2, 3, 4):
        backlog.add(number, lambda number=number: written.append(number))  # type: ignore[misc]
    backlog.add(3, lambda: written.append(33))
    assert (backlog.dropped, backlog.is_away) == (2, True)
    assert caplog.text.count("the oldest are dropped") == 1
    assert backlog.write()
    assert (written, backlog.is_away) == ([33, 4], False)


def test_a_row_that_is_open_in_a_ledger_that_writes_behind_is_closed_behind_what_was_noted_before(
    worker: StubWorker,
) -> None:
    """Else the note, which still waits to be written, would open it again."""

    class Behind(Away):
        writes_behind = True

        def __init__(self) -> None:
            super().__init__()
            self.behind: list[Row] = []

        def close(self, row: Row) -> None:
            self.behind.append(row)

        def note(self, row: Row, *, at_any_cost: bool = False) -> None:
            self.behind.append(row)

    ledger = Behind()
    browsers = use(worker, ledger)

    @actor(max_retries=0)
    async def visit(session: Session) -> None:
        ledger.is_away = True
        browsers.backlog.add("another attempt", lambda: ledger.rows("any"))
        browsers._accounting.record_late(at_ms=2**53)

    message = visit.message()
    worker.broker.enqueue(message)
    worker.join()
    ledger.is_away = False
    assert [row.outcome for row in ledger.behind][-2:] == ["running", "succeeded"]
    wait_until(lambda: not browsers.backlog.is_away, "nothing waits")
    assert [row.outcome for row in worker.rows(message)] == ["running"], "nothing was written past what waits"


def test_a_loss_is_told_while_the_ledgers_store_is_away_and_is_in_the_ledger_when_it_is_back(
    worker: StubWorker, caplog: pytest.LogCaptureFixture
) -> None:
    away = Away()
    browsers = use(worker, away)

    @actor(max_retries=0)
    async def visit(session: Session, *, seed: int | None = None) -> int:
        return 1

    message = visit.message(seed=7)
    away.open(Row(message.message_id, 0, visit.actor_name, 7, "host:1", opened_ms=10, phase="code"))
    away.is_away = True
    assert worker.run(message.copy(options={"losses": 1})) == 1, "it waits for no store"
    assert f"message_id={message.message_id} actor={visit.actor_name} attempt=None seed=7 outcome=lost" in caplog.text
    away.is_away = False
    told = "the ledger's store takes rows again: 2 were written, 0 were dropped"
    wait_until(lambda: told in caplog.text, "nothing waits")
    assert not browsers.backlog.is_away
    assert [(row.outcome, row.worker == "host:1") for row in worker.rows(message)] == [
        ("lost", True),
        ("succeeded", False),
    ]
