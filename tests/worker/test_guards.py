"""`unique`, `delivery` and `session.once` on a stub worker, and what is refused where an actor is declared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware, TimeLimitExceeded

from asyncworker import Session, actor
from asyncworker.broker import middleware_in_order
from asyncworker.errors import BrowserCrashed, DeclarationError, StaleAttempt, UnknownOutcome
from asyncworker.ledger import MemoryLedger
from asyncworker.session import current_attempt
from asyncworker.settings import load
from asyncworker.testing import StubWorker, stub_worker


@pytest.fixture
def worker() -> Iterator[StubWorker]:
    with stub_worker() as worker:
        yield worker


def test_the_attempts_of_a_message_have_growing_fences_and_one_step(worker: StubWorker) -> None:
    fences = []

    @actor(max_retries=2, min_backoff=1, max_backoff=2)
    async def count(session: Session, key: str) -> Any:
        fences.append(session.attempt.fence)
        async with session.once("count", key) as step:
            if not step.done:
                step.value = len(fences)
        if len(fences) < 3:
            raise RuntimeError("after the step")
        return step.value

    assert worker.run(count.message("k")) == 1
    assert worker.run(count.message("k")) == 1, "another message with the key"
    assert fences == sorted(set(fences))
    assert len(fences) == 4


def test_a_plain_actor_has_a_fence_too(worker: StubWorker) -> None:
    @dramatiq.actor
    def tell() -> int:
        attempt = current_attempt.get()
        assert attempt is not None
        return attempt.fence

    first, second = worker.run(tell.message()), worker.run(tell.message())
    assert 0 < first < second


def test_a_stale_attempt_is_not_retried_from_where_it_is(worker: StubWorker) -> None:
    ran = []

    @dramatiq.actor
    def stale() -> None:
        ran.append(1)
        raise StaleAttempt

    message = stale.send()
    worker.join()
    assert (len(ran), worker.broker.dead_letters) == (1, [])
    assert [row.outcome for row in worker.rows(message)] == ["failed"]


@pytest.mark.parametrize("error", [BrowserCrashed(), TimeLimitExceeded(), RuntimeError()])
def test_an_actor_at_most_once_is_not_run_again_after_anything(worker: StubWorker, error: Exception) -> None:
    ran = []

    @actor(delivery="at_most_once")
    async def pay(session: Session) -> None:
        ran.append(1)
        raise error

    pay.send()
    worker.join()
    (dead,) = worker.broker.dead_letters
    assert (len(ran), type(dead._exception)) == (1, type(error))


def test_what_has_begun_elsewhere_is_an_unknown_outcome(worker: StubWorker) -> None:
    @dramatiq.actor(delivery="at_most_once")
    def pay() -> None:
        pytest.fail("it had begun")

    pay.send_with_options(begun_ms=1_700_000_000_000, begun_by="host:7")
    worker.join()
    (dead,) = worker.broker.dead_letters
    assert isinstance(dead._exception, UnknownOutcome)
    assert "began at 2023-11-14 22:13:20 UTC on host:7" in str(dead._exception)


def test_unique_messages_are_there_once_and_free_their_key_after_their_retries(worker: StubWorker) -> None:
    released, ran = threading.Event(), []

    @actor(unique=lambda url: url.lower(), max_retries=1, min_backoff=1, max_backoff=2)
    async def crawl(session: Session, url: str) -> None:
        ran.append(url)
        while not released.is_set():
            await session.page.wait_for_timeout(1)
        if len(ran) == 1:
            raise RuntimeError("once")

    first, same, other = crawl.send("A"), crawl.send("a"), crawl.send("b")
    assert same.message_id == first.message_id != other.message_id
    released.set()
    worker.join()
    assert sorted(ran)[-1] == "b"
    assert len(ran) == 3
    assert crawl.send("a").message_id != first.message_id
    worker.join()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delivery": "exactly_once"}, "delivery='exactly_once' of title is none of at_least_once, at_most_once"),
        ({"delivery": "at_most_once", "max_retries": 3}, "leave max_retries out"),
        ({"delivery": "at_most_once", "retry_when": lambda *_: True}, "leave retry_when out"),
        ({"unique": "{address}"}, "asks for 'address', which is none of its arguments: url"),
        ({"unique": "{url"}, "unique='{url' of title: "),
        ({"unique": lambda address: address}, "asks for 'address'"),
        ({"unique": True}, "unique=True of title is neither a text"),
    ],
)
def test_guards_that_cannot_work_are_refused_where_they_are_declared(
    worker: StubWorker, options: dict[str, Any], said: str
) -> None:
    async def title(session: Session, url: str) -> None: ...

    with pytest.raises(DeclarationError, match=said):
        actor(actor_name="title", **options)(title)
    assert "title" not in worker.broker.actors


@pytest.mark.parametrize("options", [{"unique": "{url}"}, {"delivery": "at_most_once"}])
def test_a_broker_that_cannot_guard_refuses_the_actor_and_names_what_can(options: dict[str, Any]) -> None:
    broker = StubBroker(middleware=_middleware())

    with pytest.raises(DeclarationError, match=r"needs Redis or Valkey as the broker.*`session\.once"):

        @dramatiq.actor(broker=broker, **options)
        def title(url: str) -> None: ...


def _middleware() -> list[Middleware]:
    return middleware_in_order(load({}), ledger=MemoryLedger(), results=None, draw_seed=lambda: 1)  # type: ignore[arg-type]
