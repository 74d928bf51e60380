"""Cancelling on the fake engine: what a cancelled message ends with, whatever it is at."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.brokers.stub import StubBroker
from dramatiq.results import ResultFailure

import asyncworker
from asyncworker import Cancellation, Session, actor
from asyncworker.cancellations import Cancelled
from asyncworker.cancelling import Found, cancel_many
from asyncworker.errors import ConfigurationError, SessionOver
from asyncworker.middleware import BrowserMiddleware, Middleware
from asyncworker.settings import load
from asyncworker.testing import FakeEngine, StubWorker, stub_worker
from tests.waiting import BUSY_S, wait_until

#: Far longer than any test waits for what is cancelled.
LONG_S = 60


@pytest.fixture(autouse=True)
def fresh_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dramatiq.broker, "global_broker", None)


@pytest.fixture
def worker(fake_engine: FakeEngine) -> Iterator[StubWorker]:
    settings = load({}, cleanup_timeout_ms=1_000, close_timeout_ms=1_000)
    with stub_worker(engine=fake_engine, settings=settings) as worker:
        yield worker


@pytest.fixture
def began() -> threading.Event:
    return threading.Event()


def cancelled_once_begun(worker: StubWorker, message: Message[Any], began: threading.Event) -> Cancellation:
    worker.broker.enqueue(message.copy(options={"store_results": True}))
    assert began.wait(30)
    # A plain actor's row is opened after a second, by which a broker without places knows that it runs.
    wait_until(lambda: worker.rows(message), "it has its row")
    return asyncworker.cancel(message)


def has_ended_as_cancelled(worker: StubWorker, message: Message[Any]) -> None:
    worker.join(message.queue_name)
    with pytest.raises(ResultFailure, match="Cancelled") as caught:
        message.get_result(backend=worker.broker.get_results_backend())
    assert caught.value.orig_exc_type == "Cancelled"
    (row,) = worker.rows(message)
    assert (row.outcome, (row.error or "").split(":")[0]) == ("rejected", "Cancelled")
    assert worker.broker.dead_letters == []


def slots_are_free(worker: StubWorker) -> None:
    runtime = next(each for each in worker.broker.middleware if isinstance(each, BrowserMiddleware)).runtime
    wait_until(lambda: runtime.slots.in_use == 0, "no slot is in use")


# --- what runs


def test_a_running_session_is_cancelled_its_context_closed_and_it_is_not_retried(
    worker: StubWorker, fake_engine: FakeEngine, began: threading.Event
) -> None:
    cleaned = threading.Event()

    async def body(session: Session) -> None:
        began.set()
        try:
            await asyncio.sleep(LONG_S)
        finally:
            cleaned.set()

    message = actor(max_retries=5, min_backoff=1, actor_name="sleeping")(body).message()
    answer = cancelled_once_begun(worker, message, began)
    assert (answer.found, answer.is_cancelled, answer.outcome) == (Found.running, True, "rejected")
    assert (answer.took_ms or 0) < 3_000 + BUSY_S * 1000
    assert cleaned.is_set()
    has_ended_as_cancelled(worker, message)
    slots_are_free(worker)


def test_code_that_catches_everything_and_calls_again_is_refused_launches_nothing_and_gives_its_slot_back(
    worker: StubWorker, fake_engine: FakeEngine, began: threading.Event
) -> None:
    said: list[str] = []
    ends = threading.Event()

    async def body(session: Session) -> None:
        launch = session.browser.browser_type.launch
        began.set()
        with contextlib.suppress(BaseException):
            await asyncio.sleep(LONG_S)
        while not ends.is_set():
            for call in (lambda: session.page.goto("https://x.example/"), session.context.new_page, launch):
                try:
                    await call()
                    said.append("went through")
                except BaseException as error:
                    said.append(type(error).__name__)

    message = actor(max_retries=5, min_backoff=1, actor_name="stubborn")(body).message()
    answer = cancelled_once_begun(worker, message, began)
    assert (answer.found, answer.is_cancelled) == (Found.running, True)
    has_ended_as_cancelled(worker, message)
    slots_are_free(worker)
    refused = len(said)
    wait_until(lambda: len(said) > refused + 2, "it goes on calling")
    ends.set()
    assert set(said) <= {"SessionOver", "CancelledError"}
    assert SessionOver.__name__ in said
    assert (fake_engine.begun["launch"], fake_engine.browser_type.launches) == (1, 0)


def test_plain_async_code_is_cancelled(worker: StubWorker, began: threading.Event) -> None:
    @dramatiq.actor(broker=worker.broker, max_retries=5)
    async def plain() -> None:
        began.set()
        await asyncio.sleep(LONG_S)

    message = plain.message()
    assert cancelled_once_begun(worker, message, began).is_cancelled
    has_ended_as_cancelled(worker, message)


def test_a_message_at_most_once_is_cancelled_and_no_dead_letter(worker: StubWorker, began: threading.Event) -> None:
    @dramatiq.actor(broker=worker.broker, delivery="at_most_once")
    async def paying() -> None:
        began.set()
        await asyncio.sleep(LONG_S)

    message = paying.message()
    assert cancelled_once_begun(worker, message, began).is_cancelled
    has_ended_as_cancelled(worker, message)


def test_synchronous_code_is_interrupted_between_two_instructions(worker: StubWorker, began: threading.Event) -> None:
    @dramatiq.actor(broker=worker.broker, max_retries=5)
    def computing() -> None:
        began.set()
        ends = time.monotonic() + LONG_S
        while time.monotonic() < ends:
            pass

    message = computing.message()
    assert cancelled_once_begun(worker, message, began).is_cancelled
    has_ended_as_cancelled(worker, message)


def test_a_message_whose_code_fails_when_it_is_cancelled_is_still_neither_retried_nor_dead(
    worker: StubWorker, began: threading.Event
) -> None:
    @dramatiq.actor(broker=worker.broker, max_retries=0)
    def failing() -> None:
        began.set()
        try:
            while True:
                time.sleep(0.01)
        except Cancelled:
            raise RuntimeError("the code's own") from None

    message = failing.message()
    assert cancelled_once_begun(worker, message, began).is_cancelled
    has_ended_as_cancelled(worker, message)
    assert "the code's own" in (worker.rows(message)[0].error or "")


def test_others_of_the_same_worker_go_on(worker: StubWorker, began: threading.Event) -> None:
    others_end = threading.Event()

    @actor(store_results=True, max_retries=0)
    async def sleeping(session: Session, which: str) -> str:
        began.set()
        while which == "cancelled" or not others_end.is_set():
            await asyncio.sleep(0.01)
        return which

    other = sleeping.send("other")
    wait_until(lambda: worker.rows(other), "the other runs")
    began.clear()
    assert cancelled_once_begun(worker, sleeping.message("cancelled"), began).is_cancelled
    others_end.set()
    assert other.get_result(block=True, timeout=10_000) == "other"


def test_a_step_that_a_cancelled_attempt_holds_is_open_for_the_next(worker: StubWorker, began: threading.Event) -> None:
    async def body(session: Session, sleeps: bool) -> str:
        async with session.once("pay", 7) as step:
            if sleeps:
                began.set()
                await asyncio.sleep(LONG_S)
            return "done before" if step.done else "did it"

    paying = actor(max_retries=0, actor_name="paying")(body)
    assert cancelled_once_begun(worker, paying.message(True), began).is_cancelled
    assert worker.run(paying.message(False)) == "did it"
    assert worker.run(paying.message(False)) == "done before"


def test_the_unique_key_of_a_cancelled_message_is_free(worker: StubWorker, began: threading.Event) -> None:
    async def body(session: Session, url: str, sleeps: bool = True) -> str:
        began.set()
        await asyncio.sleep(LONG_S if sleeps else 0)
        return url

    crawl = actor(max_retries=0, actor_name="crawl", unique="{url}")(body)
    first = crawl.message("a")
    assert cancelled_once_begun(worker, first, began).is_cancelled
    worker.join()
    assert worker.run(crawl.message("a", sleeps=False)) == "a"


# --- the end, and before


def test_one_that_succeeds_before_its_worker_hears_of_it_has_succeeded(
    worker: StubWorker, began: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncworker.interrupts.EVERY_S", LONG_S)
    goes_on = threading.Event()

    @actor(store_results=True, max_retries=0)
    async def ending(session: Session) -> str:
        began.set()
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        return "done"

    message = ending.send()
    assert began.wait(30)
    assert asyncworker.cancel(message, wait_ms=0).found is Found.running
    goes_on.set()
    worker.join()
    assert message.get_result() == "done"
    answer = asyncworker.cancel(message)
    assert (answer.found, answer.is_cancelled, answer.outcome) == (Found.ended, False, "succeeded")


def test_one_that_fails_when_its_worker_has_heard_and_not_told_it_yet_is_not_retried(
    worker: StubWorker, began: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    @actor(store_results=True, max_retries=5, min_backoff=1)
    async def failing(session: Session) -> None:
        began.set()
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        raise RuntimeError

    monkeypatch.setattr("asyncworker.interrupts._is_in_code", lambda thread: False)
    message = failing.send()
    assert began.wait(30)
    asyncworker.cancel(message, wait_ms=0)
    worker.broker.cancellations.look()
    goes_on.set()
    has_ended_as_cancelled(worker, message)


def test_one_that_waits_is_dropped_when_a_worker_takes_it_and_no_hook_takes_it_for_a_failure(
    worker: StubWorker,
) -> None:
    retried: list[str] = []
    ran: list[str] = []

    class Hooks(Middleware):
        def after_retry_message(self, broker: Any, message: Any, *, exception: BaseException) -> None:
            retried.append(message.message_id)

    worker.broker.add_middleware(Hooks())

    @actor(max_retries=5, min_backoff=1, on_failure="told", on_success="told")
    async def waiting(session: Session) -> None:
        ran.append("waiting")

    @dramatiq.actor(broker=worker.broker, actor_name="told")
    def told(*_: object) -> None:
        ran.append("told")

    message = waiting.message()
    answer = asyncworker.cancel(message)
    assert (answer.found, answer.is_cancelled) == (Found.noted, True)
    worker.broker.enqueue(message.copy(options={"store_results": True}))
    has_ended_as_cancelled(worker, message)
    assert (ran, retried) == ([], [])


def test_cancelling_again_says_that_it_was_and_changes_nothing(worker: StubWorker, began: threading.Event) -> None:
    async def body(session: Session) -> None:
        began.set()
        await asyncio.sleep(LONG_S)

    message = actor(max_retries=0, actor_name="sleeping")(body).message()
    cancelled_once_begun(worker, message, began)
    rows = worker.rows(message)
    again = asyncworker.cancel(message)
    assert (again.found, again.is_cancelled, again.outcome) == (Found.ended, True, "rejected")
    assert worker.rows(message) == rows


def test_what_follows_in_a_pipeline_does_not_run_and_who_waits_for_it_is_told(
    worker: StubWorker, began: threading.Event
) -> None:
    ran: list[str] = []

    @actor(store_results=True, max_retries=0)
    async def first(session: Session) -> str:
        began.set()
        await asyncio.sleep(LONG_S)
        return "first"

    @actor(store_results=True, max_retries=0)
    async def second(session: Session, what: str) -> None:
        ran.append(what)

    pipe = first.message() | second.message()
    pipe.run()
    assert began.wait(30)
    wait_until(lambda: worker.rows(pipe.messages[0]), "it has its row")
    assert asyncworker.cancel(pipe.messages[0]).is_cancelled
    with pytest.raises(ResultFailure, match="Cancelled"):
        pipe.get_result(block=True, timeout=10_000)
    worker.join()
    assert ran == []


async def test_it_can_be_awaited_and_several_are_answered_in_order(worker: StubWorker, began: threading.Event) -> None:
    async def body(session: Session) -> None:
        began.set()
        await asyncio.sleep(LONG_S)

    sleeping = actor(max_retries=0, actor_name="sleeping")(body)
    message = sleeping.send()
    await asyncio.to_thread(began.wait, 10)
    answer = await asyncworker.acancel(message)
    assert (answer.message_id, answer.is_cancelled) == (message.message_id, True)
    ids = ["b", message.message_id, "a", "b"]
    several = await asyncio.to_thread(cancel_many, ids)
    assert [each.message_id for each in several] == ids


def test_a_broker_without_a_store_says_what_to_do() -> None:
    broker = StubBroker(middleware=[])
    with pytest.raises(ConfigurationError, match="has no store by which workers hear"):
        asyncworker.cancel("some", broker=broker)
