"""The ladder on the fake engine: when a time limit begins, what a session that is over refuses, and slots come back."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Shutdown, TimeLimitExceeded
from dramatiq.middleware.threading import raise_thread_exception
from dramatiq.results import ResultMissing

from asyncworker import Session, actor, open_session
from asyncworker.errors import PhaseTimeout
from asyncworker.middleware import browsers_of
from asyncworker.runtime import AFTER_DEADLINE_MS, Runtime
from asyncworker.settings import load
from asyncworker.testing import FakeEngine, StubWorker, stub_worker
from asyncworker.time_limit import TimeLimit
from tests.waiting import BUSY_S, wait_until

Body = Callable[..., Any]


def once(body: Body, **options: Any) -> Any:
    """Declare `body` as an actor without retries."""
    return actor(**({"max_retries": 0, "actor_name": "once"} | options))(body)


def runtime_of(worker: StubWorker) -> Runtime:
    return browsers_of(worker.broker).runtime


def all_slots_are_back(worker: StubWorker) -> None:
    slots = runtime_of(worker).slots
    wait_until(lambda: slots.in_use == 0, f"of {slots.total} slots none is in use")


# --- when the time limit begins, and ends


@pytest.mark.parametrize("step", ["launch", "new_context", "new_page"])
def test_the_time_limit_begins_when_the_page_is_open(worker: StubWorker, fake_engine: FakeEngine, step: str) -> None:
    fake_engine.delays[step] = 0.8

    async def body(session: Session) -> tuple[float, float, float]:
        now = asyncio.get_running_loop().time()
        return session.attempt.deadline or 0, now, session.context.timeout_ms  # type: ignore[attr-defined]  # the fake one has it

    sent = time.monotonic()
    deadline, now, timeout_ms = worker.run(once(body, time_limit=20_000).message())
    assert sent + 0.8 <= deadline - 20 <= now, "it began after the step, and before the code"
    assert (deadline - now) * 1000 + AFTER_DEADLINE_MS - 1 <= timeout_ms <= 20_000 + AFTER_DEADLINE_MS


def test_the_time_limit_holds_from_the_open_page_on(worker: StubWorker, fake_engine: FakeEngine) -> None:
    fake_engine.delays["launch"] = 0.5
    began: list[float] = []

    async def body(session: Session) -> None:
        began.append(time.monotonic())
        await asyncio.sleep(60)

    with pytest.raises(TimeLimitExceeded):
        worker.run(once(body, time_limit=300).message())
    assert 0.3 <= time.monotonic() - began[0] < 0.3 + 1 + BUSY_S, "Dramatiq looks once a second"


def test_a_session_within_a_session_begins_no_limit_of_its_own(worker: StubWorker) -> None:
    async def body(session: Session) -> bool:
        async with open_session(seed=2) as inner:
            same = inner.attempt.deadline == session.attempt.deadline
        await asyncio.sleep(60 if session.attempt.deadline is None else 0)
        return same

    assert worker.run(once(body, time_limit=5_000).message())


def test_the_limit_of_a_plain_actor_begins_with_its_message(worker: StubWorker, fake_engine: FakeEngine) -> None:
    fake_engine.delays["launch"] = 60

    @dramatiq.actor(broker=worker.broker, max_retries=0, time_limit=300)
    async def opening() -> None:
        async with open_session(seed=1):
            pass

    began = time.monotonic()
    with pytest.raises(TimeLimitExceeded):
        worker.run(opening.message())
    assert time.monotonic() - began < 0.3 + 1 + BUSY_S


def test_an_interrupt_that_comes_when_the_code_has_ended_takes_nothing_of_what_follows_with_it(
    worker: StubWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = next(each for each in worker.broker.middleware if isinstance(each, TimeLimit))
    remove, late = limits.manager.remove_timeout, []

    def remove_late(thread: int) -> None:
        if not late:
            late.append(thread)
            raise_thread_exception(thread, Shutdown)  # type: ignore[no-untyped-call]
        remove(thread)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(limits.manager, "remove_timeout", remove_late)
    runs: list[int] = []

    @dramatiq.actor(broker=worker.broker, max_retries=1, min_backoff=1, max_backoff=2, store_results=True)
    def fail_once() -> str:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("the first time")
        return "done"

    assert worker.run(fail_once.message()) == "done"
    assert (len(runs), len(late), limits.at_work) == (2, 1, 0)


def test_a_failure_stays_what_it_is_when_the_context_closes_beyond_the_limit(
    worker: StubWorker, fake_engine: FakeEngine
) -> None:
    fake_engine.delays["close_context"] = 1

    async def body(session: Session) -> None:
        raise RuntimeError("the code's own")

    message = once(body, time_limit=300).message()
    with pytest.raises(RuntimeError, match="the code's own"):
        worker.run(message)
    assert [row.outcome for row in worker.rows(message)] == ["failed"]


# --- phases


@pytest.mark.parametrize(("step", "phase"), [("new_context", "context"), ("new_page", "context"), ("launch", "launch")])
def test_a_step_that_hangs_is_named_and_not_the_actors_code(fake_engine: FakeEngine, step: str, phase: str) -> None:
    async def body(session: Session) -> None: ...

    fake_engine.delays[step] = math.inf
    settings = load({}, context_timeout_ms=700, browser_wait_ms=700, launch_timeout_ms=1_500, close_timeout_ms=500)
    with stub_worker(engine=fake_engine, settings=settings) as worker:
        with pytest.raises(PhaseTimeout) as caught:
            worker.run(once(body, time_limit=300).message())
        all_slots_are_back(worker)
    assert caught.value.phase == phase


def test_a_message_that_gets_no_slot_is_told_so(fake_engine: FakeEngine) -> None:
    settings = load({}, slots=1, browser_wait_ms=300)
    with stub_worker(engine=fake_engine, settings=settings, threads=2) as worker:

        @dramatiq.actor(broker=worker.broker, max_retries=0)
        async def opening() -> None:
            async with open_session(seed=1), open_session(seed=1):
                pass

        with pytest.raises(PhaseTimeout, match="1 of 1 are in use") as caught:
            worker.run(opening.message())
        all_slots_are_back(worker)
    assert caught.value.phase == "wait"


# --- a session that is over


def test_code_that_catches_everything_and_calls_again_is_refused_and_gives_its_slot_back(
    fake_engine: FakeEngine,
) -> None:
    let_go, said = threading.Event(), []

    async def body(session: Session) -> None:
        page, context, browser = session.page, session.context, session.browser
        calls: list[Callable[[], Any]] = [
            lambda: session.page.title(),
            lambda: page.title(),
            lambda: session.context.new_page(),
            lambda: context.new_page(),
            lambda: session.browser.new_context(),
            browser.new_context,
            browser.new_page,
            browser.close,
            browser.browser_type.launch,
        ]
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            said.append("cancelled")
        while not let_go.is_set():
            for call in calls:
                try:
                    await call()
                    said.append("went through")
                except BaseException as error:  # as code in the field does
                    said.append(type(error).__name__)

    async def fine(session: Session) -> int:
        return session.generation

    settings = load({}, cleanup_timeout_ms=500, stop_timeout_ms=300, slots=2)
    with stub_worker(engine=fake_engine, settings=settings, threads=2) as worker:
        stubborn = once(body, time_limit=200)
        for _ in range(4):  # twice as many as there are slots
            with pytest.raises(TimeLimitExceeded):
                worker.run(stubborn.message())
        all_slots_are_back(worker)
        assert worker.run(once(fine, actor_name="fine").message()) == 1
        wait_until(lambda: said.count("SessionOver") > 4 * 9, "each is refused again and again")
        let_go.set()
    assert set(said) == {"cancelled", "SessionOver", "CancelledError"}
    assert fake_engine.browser_type.launches == 0
    assert len(fake_engine.browsers) == 1
    assert all(context.closed for context in fake_engine.contexts)


def test_a_task_that_is_left_behind_and_never_stops_calling_leaves_the_loop_to_others(worker: StubWorker) -> None:
    let_go = threading.Event()
    tasks = []

    async def call_on(session: Session) -> None:
        while not let_go.is_set():
            try:
                await session.page.title()
            except Exception:
                continue

    async def body(session: Session) -> None:
        tasks.append(asyncio.create_task(call_on(session)))
        await asyncio.sleep(0)

    async def fine(session: Session) -> str:
        return "fine"

    worker.run(once(body).message())
    try:
        assert worker.run(once(fine, actor_name="fine").message()) == "fine"
    finally:
        let_go.set()


def test_what_the_code_opens_while_its_session_ends_is_closed(worker: StubWorker, fake_engine: FakeEngine) -> None:
    async def body(session: Session) -> None:
        fake_engine.delays["new_context"] = 3
        opening = asyncio.ensure_future(session.browser.new_context())
        try:
            await asyncio.shield(opening)
        finally:
            await asyncio.wait({opening})
            opening.exception()

    with pytest.raises(TimeLimitExceeded):
        worker.run(once(body, time_limit=1_500).message())
    assert len(fake_engine.contexts) == 2
    wait_until(lambda: all(context.closed for context in fake_engine.contexts), "both are closed")
    all_slots_are_back(worker)


def test_a_stop_under_code_that_calls_on_is_an_interruption_and_no_failure(fake_engine: FakeEngine) -> None:
    async def body(session: Session) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await session.page.title()

    with stub_worker(engine=fake_engine, settings=load({}, stop_timeout_ms=200)) as worker:
        message = once(body, max_retries=1).message()
        worker.broker.enqueue(message)
        wait_until(lambda: fake_engine.contexts and fake_engine.contexts[0].pages, "it runs")
        worker.worker.stop(timeout=200)
    assert [row.outcome for row in worker.rows(message)] == ["interrupted"]


# --- closing


def test_a_result_is_there_before_its_context_has_closed_whose_slot_is_held_so_long(fake_engine: FakeEngine) -> None:
    async def body(session: Session) -> list[bool]:
        return [context.closed for context in fake_engine.contexts]

    def there(message: dramatiq.Message[Any]) -> bool:
        with contextlib.suppress(ResultMissing):
            message.get_result(backend=worker.broker.get_results_backend())
            return True
        return False

    with stub_worker(engine=fake_engine, settings=load({}, slots=1), threads=1) as worker:
        fake_engine.delays["close_context"] = BUSY_S
        one = once(body)
        message = one.message_with_options(store_results=True)
        worker.broker.enqueue(message)
        wait_until(lambda: there(message), "the result is stored")
        assert (fake_engine.contexts[0].closed, runtime_of(worker).slots.in_use) == (False, 1)
        assert worker.run(one.message()) == [True, False]


def test_a_close_that_never_ends_fails_no_message_and_its_slot_comes_back(fake_engine: FakeEngine) -> None:
    async def body(session: Session) -> int:
        return session.generation

    with stub_worker(engine=fake_engine, settings=load({}, close_timeout_ms=300, slots=1), threads=1) as worker:
        fake_engine.delays["close_context"] = math.inf
        assert worker.run(once(body).message()) == 1
        all_slots_are_back(worker)
        fake_engine.delays.clear()
        assert worker.run(once(body, actor_name="next").message()) == 2


def test_a_context_that_records_is_closed_before_the_result_which_may_name_the_file(
    worker: StubWorker, fake_engine: FakeEngine
) -> None:
    closed: list[bool] = []

    async def body(session: Session) -> str:
        return "video.webm"

    message = once(body, context_options={"record_video_dir": "."}).message_with_options(store_results=True)
    fake_engine.delays["close_context"] = 0.3
    worker.broker.enqueue(message)
    message.get_result(backend=worker.broker.get_results_backend(), block=True, timeout=10_000)
    closed += [context.closed for context in fake_engine.contexts]
    assert closed == [True]


def test_the_counts_of_a_worker_say_how_many_slots_it_has_and_that_none_is_in_use_at_the_end(
    fake_engine: FakeEngine,
) -> None:
    async def body(session: Session) -> dict[str, int]:
        return runtime_of(worker).counts()

    with stub_worker(engine=fake_engine, settings=load({}, slots=3)) as worker:
        counts = worker.run(once(body).message())
        assert (counts["slots"], counts["slots_in_use"]) == (3, 1)
    (counts,) = worker.ledger.counts().values()
    assert (counts["slots"], counts["slots_in_use"]) == (3, 0)
