"""A message is the same visitor on every attempt, and a worker says so when it is not."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Message, Worker

from asyncworker import Session, accounting, actor, cli, open_session, sending
from asyncworker.accounting import Accounting
from asyncworker.broker import make_redis_broker
from asyncworker.identity import Identity
from asyncworker.ledger import MemoryLedger, Outcome, Row
from asyncworker.middleware import BrowserMiddleware
from asyncworker.redis_broker import WorkerBroker
from asyncworker.sending import Sent
from asyncworker.session import Attempt
from asyncworker.settings import child_environment, load
from asyncworker.testing import FakeEngine, StubWorker, stub_worker
from tests.waiting import wait_until

Body = Callable[..., Any]


class StockEngine(FakeEngine):
    """A fake engine that shows every seed the same visitor."""

    async def identify(self, identity: Identity) -> Identity:
        return identity


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncworker")


def quick(body: Body, **options: Any) -> Any:
    """Declare `body` as an actor whose retries come at once."""
    given = {"max_retries": 3, "min_backoff": 1, "max_backoff": 2, "actor_name": "quick"} | options
    return actor(**given)(body)


async def nothing(session: Session, *, seed: int | None = None) -> str | None:
    return session.identity.digest


def digest_of(seed: int, drawn_by: str = "fake 1") -> str:
    engine = FakeEngine()
    engine.drawn_by = drawn_by
    step = engine.identify(Identity(seed))
    with pytest.raises(StopIteration) as ended:  # it waits for nothing
        step.send(None)
    return str(ended.value.value.digest)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "another visitor" in record.getMessage()]


def changed(seed: int, *, now: str = "fake 2", before: str = "fake 1") -> str:
    return (
        f"seed {seed} is another visitor now: {digest_of(seed, now)}, drawn by {now}; when the message first ran it "
        f"was {digest_of(seed, before)}, drawn by {before}"
    )


def test_a_retry_is_the_visitor_that_its_message_began_as(worker: StubWorker, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str | None] = []

    async def body(session: Session) -> str:
        seen.append(session.identity.digest)
        if session.attempt.number < 3:
            raise RuntimeError("not yet")
        return "done"

    message = quick(body).message(seed=42)
    assert worker.run(message) == "done"
    assert seen == [digest_of(42)] * 3
    rows = worker.rows(message)
    assert [(row.identity, row.drawn_by, row.identity_changed) for row in rows] == [(seen[0], "fake 1", False)] * 3
    assert warnings(caplog) == []


def test_a_run_after_a_crash_is_the_same_visitor(worker: StubWorker, caplog: pytest.LogCaptureFixture) -> None:
    async def body(session: Session) -> str:
        if session.attempt.number == 1:
            session.browser.crash()  # type: ignore[attr-defined]  # the fake one can
            await session.page.title()
        return "done"

    message = quick(body).message(seed=42)
    assert worker.run(message) == "done"
    rows = worker.rows(message)
    assert [row.outcome for row in rows] == ["crashed", "succeeded"]
    assert [(row.identity, row.identity_changed) for row in rows] == [(digest_of(42), False)] * 2
    assert warnings(caplog) == []


@pytest.mark.parametrize("crash", [False, True], ids=["retry", "crash"])
def test_another_visitor_on_a_later_attempt_is_warned_about_and_marked_each_time(
    worker: StubWorker, fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture, crash: bool
) -> None:
    async def body(session: Session) -> str:
        if session.attempt.number == 3:
            return "done"
        fake_engine.drawn_by = "fake 2"
        if crash:
            session.browser.crash()  # type: ignore[attr-defined]  # the fake one can
            await session.page.title()
        raise RuntimeError("not yet")

    message = quick(body).message(seed=42)
    assert worker.run(message) == "done"
    rows = worker.rows(message)
    assert [row.drawn_by for row in rows] == ["fake 1", "fake 2", "fake 2"]
    assert [row.identity_changed for row in rows] == [False, True, True]
    assert warnings(caplog) == [f"message {message.message_id} (quick): {changed(42)}"] * 2


def dead_letter_of(worker: StubWorker, body: Body, **options: Any) -> Message[Any]:
    """The message as an operator exports it: encoded, with what its run has written into it."""
    message = quick(body, max_retries=0).message_with_options(**options)
    with pytest.raises(RuntimeError):
        worker.run(message)
    (dead,) = worker.broker.dead_letters
    return Message.decode(json.loads(json.dumps(dead.encode().decode())).encode())


async def failing(session: Session) -> None:
    raise RuntimeError("given up")


@pytest.mark.parametrize("drawn_by", ["fake 1", "fake 2"])
def test_a_dead_letter_that_comes_back_to_another_worker_is_compared_with_its_first_run(
    drawn_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    with stub_worker() as first:
        dead = dead_letter_of(first, failing, kwargs={"seed": 42})
    engine = FakeEngine()
    engine.drawn_by = drawn_by
    with stub_worker(engine=engine) as second:
        quick(nothing)
        assert second.rows(dead) == []
        assert second.run(dead) == digest_of(42, drawn_by)
        (row,) = second.rows(dead)
    assert row.identity_changed is (drawn_by == "fake 2")
    assert warnings(caplog) == ([f"message {dead.message_id} (quick): {changed(42)}"] if row.identity_changed else [])


def test_a_message_that_meets_a_stock_engine_later_is_another_visitor(caplog: pytest.LogCaptureFixture) -> None:
    with stub_worker() as first:
        dead = dead_letter_of(first, failing, kwargs={"seed": 42})
    with stub_worker(engine=StockEngine()) as second:
        quick(nothing)
        assert second.run(dead) is None
        (row,) = second.rows(dead)
    assert (row.identity, row.identity_changed) == (None, True)
    (warning,) = warnings(caplog)
    assert "seed 42 is another visitor now: the one that a stock engine shows for every seed" in warning
    assert digest_of(42) in warning


def test_a_message_whose_seed_was_edited_is_another_visitor_by_intention(caplog: pytest.LogCaptureFixture) -> None:
    with stub_worker() as first:
        dead = dead_letter_of(first, failing, kwargs={"seed": 42})
    with stub_worker() as second:
        edited = replace(dead, kwargs={"seed": 43})
        again = dead_letter_of(second, failing, kwargs={"seed": 43}, **edited.options)
    assert again.options["identity_seed"] == 43
    assert again.options["identity_digest"] == digest_of(43)
    assert warnings(caplog) == []


def test_the_attempt_of_a_worker_that_was_killed_is_known_by_its_row(
    worker: StubWorker, fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Its message is delivered again as it was sent: without anything that the first attempt wrote into it."""
    fake_engine.drawn_by = "fake 2"
    message = quick(failing, max_retries=0).message(seed=42)
    begun = Row(message.message_id, 1, "quick", 42, "gone:7", 1_000, identity=digest_of(42), drawn_by="fake 1")
    worker.ledger.open(begun)
    with pytest.raises(RuntimeError):
        worker.run(message)
    assert worker.rows(message) == [begun, worker.rows(message)[1]]
    assert worker.rows(message)[1].identity_changed
    assert warnings(caplog) == [f"message {message.message_id} (quick): {changed(42)}"]
    assert worker.broker.dead_letters[0].options["identity_digest"] == digest_of(42)


def test_a_row_has_its_identity_while_the_attempt_still_runs(worker: StubWorker) -> None:
    seen: list[Row] = []

    async def body(session: Session) -> None:
        seen.extend(worker.ledger.rows(str(session.attempt.message_id)))

    worker.run(quick(body).message(seed=42))
    assert [(row.outcome, row.identity, row.drawn_by) for row in seen] == [("running", digest_of(42), "fake 1")]


@pytest.mark.parametrize(
    "options",
    [
        {"identity_digest": "aaaaaaaaaaaa"},
        {"identity_digest": 7, "identity_drawn_by": [], "identity_seed": {}},
        {"identity_digest": "a\nline of its own", "identity_drawn_by": "x", "identity_seed": 42},
    ],
    ids=["half of it", "wrong types", "two lines"],
)
def test_nonsense_in_a_message_breaks_nothing_and_is_replaced(
    worker: StubWorker, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dead = dead_letter_of(worker, failing, kwargs={"seed": 42}, **options)
    assert (dead.options["identity_digest"], dead.options["identity_drawn_by"]) == (digest_of(42), "fake 1")
    assert warnings(caplog) == []


def test_lines_of_the_log_say_which_visitor_it_was(worker: StubWorker, caplog: pytest.LogCaptureFixture) -> None:
    async def body(session: Session) -> None:
        session.log.info("at it")

    worker.run(quick(body).message(seed=42))
    (line,) = (record for record in caplog.records if record.getMessage().startswith("at it"))
    assert f" seed=42 identity={digest_of(42)} browser=1]" in line.getMessage()
    assert line.identity == digest_of(42)  # type: ignore[attr-defined]
    assert f" seed=42 identity={digest_of(42)} browser=1 outcome=succeeded ms=" in caplog.text


def test_a_stock_engine_draws_none_and_none_is_written_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def body(session: Session) -> None:
        session.log.info("at it")
        raise RuntimeError("given up")

    with stub_worker(engine=StockEngine()) as worker:
        dead = dead_letter_of(worker, body, kwargs={"seed": 42})
        (row,) = worker.rows(dead)
    assert (row.identity, row.drawn_by, row.identity_changed) == (None, None, False)
    assert not [name for name in dead.options if name.startswith("identity")]
    assert "identity" not in caplog.text
    assert " seed=42 browser=1 outcome=failed ms=" in caplog.text


def test_a_plain_actor_is_compared_by_the_session_of_the_seed_that_it_began_with(
    worker: StubWorker, fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []

    @dramatiq.actor(broker=worker.broker, min_backoff=1, max_backoff=2)
    async def plain() -> None:
        attempts.append(1)
        for seed in (7, 8) if len(attempts) == 1 else (8, 7):
            async with open_session(seed=seed):
                pass
        if len(attempts) == 1:
            fake_engine.drawn_by = "fake 2"
            raise RuntimeError("not yet")

    message = plain.message()
    worker.run(message)
    first, second = worker.rows(message)
    assert (first.identity, second.identity) == (digest_of(7), digest_of(7, "fake 2"))
    assert (first.identity_changed, second.identity_changed) == (False, True)
    assert warnings(caplog) == [f"message {message.message_id} (plain): {changed(7)}"]


# --- a store that does not take it


def test_a_store_that_refuses_the_identity_does_not_fail_the_attempt(
    worker: StubWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = worker.ledger.close

    def refusing(row: Row) -> None:
        if row.outcome is Outcome.running:
            raise redis.ConnectionError("away")
        close(row)

    monkeypatch.setattr(worker.ledger, "close", refusing)
    message = quick(nothing).message(seed=42)
    assert worker.run(message) == digest_of(42)
    assert worker.rows(message)[0].identity == digest_of(42)
    assert "is not in the ledger: away" in caplog.text


def test_a_store_that_hangs_does_not_hold_the_session_up(worker: StubWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    close, began = worker.ledger.close, threading.Event()

    def hanging(row: Row) -> None:
        if row.outcome is Outcome.running:
            assert began.wait(30), "the session waited for the store"
        close(row)

    async def body(session: Session) -> str:
        began.set()
        return "done"

    monkeypatch.setattr(accounting, "WRITE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(worker.ledger, "close", hanging)
    message = quick(body).message(seed=42)
    assert worker.run(message, timeout_ms=20_000) == "done"
    assert [(row.outcome, row.identity) for row in worker.rows(message)] == [("succeeded", digest_of(42))]


async def test_a_late_identity_does_not_open_a_closed_row_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger()
    account = Accounting(ledger)
    message: Any = dramatiq.MessageProxy(Message("default", "quick", (), {"seed": 42}, {}))
    begun = Row(message.message_id, 1, "quick", 42, "host:7", 1_000)
    row = account.begin(message, begun, at_once=True)
    entered, released = threading.Event(), threading.Event()
    write = account._write

    def slow(running: Any) -> None:
        entered.set()
        assert released.wait(30)
        write(running)

    monkeypatch.setattr(account, "_write", slow)
    identity = Identity(42, digest="8472c6ff5bfe", drawn_by="fake 1")
    attempt = Attempt(42, message.message_id, "quick", row.attempt)
    session = asyncio.ensure_future(account.session_began(attempt, 1, identity))
    assert await asyncio.to_thread(entered.wait, 10)
    assert account.close(Outcome.timed_out, None, at_ms=2_000)
    released.set()
    await session
    assert [(row.outcome, row.identity) for row in ledger.rows(message.message_id)] == [("timed_out", "8472c6ff5bfe")]


# --- the real store


@pytest.fixture
def store(state_dir: Path) -> WorkerBroker:
    broker = make_redis_broker(load({}, state_dir=state_dir))
    dramatiq.set_broker(broker)
    return broker


def test_a_dead_letter_in_the_store_carries_who_it_was_also_without_any_retry(store: WorkerBroker) -> None:
    (browser,) = (each for each in store.middleware if isinstance(each, BrowserMiddleware))
    browser._engine = FakeEngine()
    message = quick(failing, max_retries=0).send_with_options(kwargs={"seed": 42})
    client: Any = store.client
    worker = Worker(store, worker_timeout=50, worker_threads=1)
    worker.start()
    try:
        bodies = wait_until(lambda: client.hvals("dramatiq:default.XQ.msgs"), "the message is a dead letter")
    finally:
        worker.stop()
        client.close()
    dead: Message[Any] = Message.decode(bodies[0])
    assert dead.message_id == message.message_id
    assert dead.options["identity_seed"] == 42
    assert (dead.options["identity_digest"], dead.options["identity_drawn_by"]) == (digest_of(42), "fake 1")
    assert client.hlen("dramatiq:default.msgs") == 0
    client.close()


# --- `asyncworker send --wait`


@pytest.fixture
def sent(worker: StubWorker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Sends with the command, to the stub worker; returns what it printed and what it said beside that."""

    def send(message: Message[Any], capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
        enqueued = worker.broker.enqueue(message.copy(options={"store_results": True}))
        with monkeypatch.context() as patched:
            patched.setattr("os.environ", child_environment())
            patched.setattr(sys, "argv", ["asyncworker", "send", "quick", "--wait", *words])
            patched.setattr(sending, "send_message", lambda *_, **__: Sent(worker.broker, enqueued))
            with pytest.raises(SystemExit):
                cli.main()
        out, err = capsys.readouterr()
        return out, err

    return send


def test_who_waits_for_a_message_is_told_which_visitor_answered(
    sent: Callable[..., tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    actor = quick(nothing)
    out, err = sent(actor.message(seed=42), capsys, "--json")
    facts = json.loads(out)
    assert (facts["ok"], facts["result"], facts["seed"]) == (True, digest_of(42), 42)
    assert (facts["identity"], facts["drawn_by"], facts["identity_changed"]) == (digest_of(42), "fake 1", False)
    assert err == ""
    assert sent(actor.message(seed=42), capsys) == (f"{digest_of(42)}\n", "")


def test_who_waits_for_a_message_is_warned_when_another_visitor_answered(
    sent: Callable[..., tuple[str, str]], fake_engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(session: Session) -> str:
        if session.attempt.number == 1:
            fake_engine.drawn_by = "fake 2"
            raise RuntimeError("not yet")
        return "done"

    actor = quick(body)
    assert sent(actor.message(seed=42), capsys) == ("done\n", f"warning: {changed(42)}\n")
    fake_engine.drawn_by = "fake 1"
    out, _ = sent(actor.message(seed=42), capsys, "--json")
    facts = json.loads(out)
    assert (facts["identity"], facts["drawn_by"]) == (digest_of(42, "fake 2"), "fake 2")
    assert facts["identity_changed"] is True
