"""A real Dramatiq worker on the stub broker and the fake engine: attempts, outcomes, retries, limits, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import TimeLimitExceeded

from asyncworker import Session, actor, open_session
from asyncworker.engines.capabilities import Capability
from asyncworker.errors import BrowserCrashed, ExitDrifted, LaunchFailed, RefusedMessage, Unsupported
from asyncworker.ledger import Outcome
from asyncworker.settings import load
from asyncworker.testing import Document, FakeEngine, StubWorker, stub_worker
from tests.waiting import wait_until

URL = "https://shop.example/"
Body = Callable[..., Any]


@pytest.fixture
def worker(fake_engine: FakeEngine) -> Iterator[StubWorker]:
    fake_engine.documents[URL] = Document(title="Shop")
    with stub_worker(engine=fake_engine) as worker:
        yield worker


def quick(body: Body, **options: Any) -> Any:
    """Declare `body` as an actor whose retries come at once."""
    given = {"max_retries": 3, "min_backoff": 1, "max_backoff": 2, "actor_name": "quick"} | options
    return actor(**given)(body)


def outcomes(worker: StubWorker, message: Any) -> list[Outcome]:
    return [row.outcome for row in worker.rows(message)]


def test_an_attempt_that_fails_is_retried_with_its_seed_and_numbered(worker: StubWorker) -> None:
    async def body(session: Session, *, seed: int | None = None) -> tuple[int, int | None]:
        if session.attempt.number < 3:
            raise RuntimeError("not yet")
        return session.attempt.number, seed

    message = quick(body).message(seed=11)
    assert worker.run(message) == [3, 11]
    assert outcomes(worker, message) == ["failed", "failed", "succeeded"]
    assert {row.seed for row in worker.rows(message)} == {11}
    assert worker.rows(message)[0].error == "RuntimeError: not yet"


def test_crashes_use_up_no_retry_but_not_for_ever(worker: StubWorker) -> None:
    async def body(session: Session) -> None:
        session.browser.crash()  # type: ignore[attr-defined]  # the fake one can
        await asyncio.sleep(60)

    message = quick(body, max_retries=1).message()
    with pytest.raises(BrowserCrashed):
        worker.run(message, timeout_ms=60_000)
    assert outcomes(worker, message) == ["crashed"] * 7  # 5 for free, then the attempt, and its retry


def test_an_exit_that_changes_uses_up_no_retry_and_is_deferred(worker: StubWorker) -> None:
    async def body(session: Session) -> int:
        if session.attempt.number == 1:
            raise ExitDrifted("the exit changed")
        return session.attempt.number

    message = quick(body, max_retries=1).message()
    assert worker.run(message) == 2
    assert outcomes(worker, message) == ["deferred", "succeeded"]
    assert message.options.get("retries") is None


def test_what_the_engine_cannot_do_refuses_the_message_without_a_retry(fake_engine: FakeEngine) -> None:
    fake_engine.capabilities = fake_engine.capabilities - {Capability.har}

    async def body(session: Session) -> None:
        raise AssertionError("it ran")

    with stub_worker(engine=fake_engine) as worker:
        message = quick(body, context_options={"record_har_path": "x.har"}).message()
        with pytest.raises(Unsupported, match="ASYNCWORKER_ENGINE"):
            worker.run(message)
        assert outcomes(worker, message) == ["rejected"]


def test_an_actors_context_options_are_those_of_its_session(worker: StubWorker) -> None:
    async def body(session: Session) -> Any:
        return session.context.options["viewport"]  # type: ignore[attr-defined]  # the fake one has them

    viewport = {"width": 400, "height": 300}
    assert worker.run(quick(body, context_options={"viewport": viewport}).message()) == viewport


def test_an_actor_that_wants_no_retry_gets_none_after_a_crash_either(worker: StubWorker) -> None:
    async def body(session: Session) -> None:
        session.browser.crash()  # type: ignore[attr-defined]  # the fake one can
        await session.page.title()

    message = quick(body, max_retries=0).message()
    with pytest.raises(BrowserCrashed):
        worker.run(message)
    assert outcomes(worker, message) == ["crashed"]


def test_a_refused_message_is_given_up_at_once(worker: StubWorker) -> None:
    async def body(session: Session) -> None:
        raise RefusedMessage("never; send another")

    message = quick(body).message()
    with pytest.raises(RefusedMessage, match="never"):
        worker.run(message)
    assert outcomes(worker, message) == ["rejected"]


def test_the_time_limit_is_raised_as_itself_after_the_cleanup_and_before_the_retry(worker: StubWorker) -> None:
    seen: list[str] = []

    async def body(session: Session) -> str:
        seen.append(f"begin {session.attempt.number}")
        if session.attempt.number == 2:
            return "done"
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1.5)
            seen.append("cleaned up")
        return "never"

    message = quick(body, time_limit=1_000).message()
    assert worker.run(message) == "done"
    assert seen == ["begin 1", "cleaned up", "begin 2"]
    assert outcomes(worker, message) == ["timed_out", "succeeded"]


def test_a_time_limit_that_is_expected_is_not_retried(worker: StubWorker) -> None:
    async def body(session: Session) -> None:
        await asyncio.sleep(60)

    message = quick(body, time_limit=200, throws=TimeLimitExceeded).message()
    with pytest.raises(TimeLimitExceeded):
        worker.run(message)
    assert outcomes(worker, message) == ["timed_out"]


def test_cleanup_that_never_ends_costs_its_budget_and_not_the_slot(fake_engine: FakeEngine) -> None:
    let_go = threading.Event()

    async def body(session: Session) -> None:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    settings = load({}, cleanup_timeout_ms=300, stop_timeout_ms=300)
    with stub_worker(engine=fake_engine, settings=settings, threads=1) as worker:
        stubborn = quick(body, time_limit=200, max_retries=0).message()
        with pytest.raises(TimeLimitExceeded):
            worker.run(stubborn)

        async def fine(session: Session) -> str:
            return "fine"

        assert worker.run(quick(fine, actor_name="fine").message()) == "fine"
        let_go.set()


def test_a_broken_engine_fails_the_message_and_is_retried(worker: StubWorker, fake_engine: FakeEngine) -> None:
    async def body(session: Session) -> str:
        return "up"

    fake_engine.fail_launches = 1
    message = quick(body).message()
    assert worker.run(message) == "up"
    assert outcomes(worker, message) == ["failed", "succeeded"]
    assert (worker.rows(message)[0].error or "").startswith(LaunchFailed.__name__)


def test_threads_are_trimmed_to_slots_and_prefetch_equals_them(fake_engine: FakeEngine) -> None:
    async def body(session: Session) -> None: ...

    quick(body)
    for threads, settings, expected in [
        (8, load({}), 4),
        (2, load({}), 2),
        (8, load({}, slots=6), 6),
        (3, load({}, slots=6), 3),
    ]:
        with stub_worker(engine=FakeEngine(), settings=settings, threads=threads) as worker:
            assert (worker.worker.worker_threads, worker.worker.queue_prefetch) == (expected, expected)
            assert len(worker.worker.workers) == expected
    with stub_worker(engine=FakeEngine(max_contexts=3), threads=8) as worker:
        assert worker.worker.worker_threads == 3


def test_a_worker_without_session_actors_keeps_its_threads_and_prefetches_as_many(fake_engine: FakeEngine) -> None:
    with stub_worker(engine=fake_engine, actors=(), threads=8) as worker:

        @dramatiq.actor(broker=worker.broker)
        def plain(left: int) -> int:
            return left + 1

        assert (worker.worker.worker_threads, worker.worker.queue_prefetch) == (8, 8)
        assert worker.run(plain.message(1)) == 2
    assert fake_engine.browsers == []


def test_never_more_contexts_than_slots_whoever_opens_them(fake_engine: FakeEngine) -> None:
    most = 0

    async def body(session: Session) -> None:
        nonlocal most
        most = max(most, sum(not context.closed for context in fake_engine.contexts))
        await asyncio.sleep(0.01)

    async def opening() -> None:
        async with open_session(seed=3) as session:
            await body(session)

    with stub_worker(engine=fake_engine, settings=load({}, slots=2), threads=8) as worker:
        session_actor = quick(body)
        plain = dramatiq.actor(actor_name="opening", broker=worker.broker)(opening)
        for _ in range(10):
            session_actor.send()
            plain.send()
        worker.join()
    assert 1 <= most <= 2
    assert len(fake_engine.browsers) == 1


def test_a_message_of_a_producer_that_knows_no_seeds_keeps_the_one_it_was_given(worker: StubWorker) -> None:
    async def body(session: Session, *, seed: int | None = None) -> int | None:
        if session.attempt.number == 1:
            raise RuntimeError("once")
        return seed

    quick(body)
    message: dramatiq.Message[Any] = dramatiq.Message("default", "quick", (), {}, {})
    assert worker.run(message) == 1
    assert [row.seed for row in worker.rows(message)] == [1, 1]


def test_pipelines_and_callbacks_are_dramatiqs(worker: StubWorker) -> None:
    done: list[Any] = []

    async def first(session: Session, number: int) -> int:
        return number + 1

    async def second(session: Session, number: int) -> int:
        return number * 10

    @dramatiq.actor(broker=worker.broker)
    def note(message: Any, result: Any) -> None:
        done.append(result)

    one = quick(first, actor_name="first", store_results=True)
    two = quick(second, actor_name="second", store_results=True)
    pipe = one.message(1) | two.message_with_options(on_success=note)
    pipe.run()
    wait_until(lambda: done, "the callback was called")
    assert done == [20]


def test_a_stop_waits_for_what_runs_and_closes_the_browser(fake_engine: FakeEngine) -> None:
    ended: list[bool] = []

    async def body(session: Session) -> None:
        await asyncio.sleep(0.5)
        ended.append(True)

    with stub_worker(engine=fake_engine) as worker:
        quick(body).send()
        wait_until(lambda: fake_engine.contexts, "it runs")
    assert ended == [True]
    assert [browser.alive for browser in fake_engine.browsers] == [False]
    assert worker.broker.dead_letters == []


def test_an_overdue_shutdown_cancels_what_runs_after_the_stop_timeout(fake_engine: FakeEngine) -> None:
    cancelled: list[bool] = []

    async def body(session: Session) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)

    began = time.monotonic()
    with stub_worker(engine=fake_engine, settings=load({}, stop_timeout_ms=200)) as worker:
        quick(body).send()
        wait_until(lambda: fake_engine.contexts, "it runs")
        worker.worker.stop(timeout=200)
    assert cancelled == [True]
    assert time.monotonic() - began < 20
    assert fake_engine.contexts[0].closed


def test_whoever_waits_for_a_message_in_a_test_finds_its_context_closed(
    worker: StubWorker, fake_engine: FakeEngine
) -> None:
    fake_engine.delays["close_context"] = 0.3  # which is later than its result

    async def body(session: Session) -> None: ...

    worker.run(quick(body).message())
    (context,) = fake_engine.contexts
    assert context.closed
