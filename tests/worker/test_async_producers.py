"""Sending and awaiting from an event loop in the users' tests: on a stub broker, with a real worker."""

from __future__ import annotations

import asyncio

import dramatiq
import pytest
from dramatiq.results import ResultFailure, ResultTimeout

from asyncworker import Session, SessionActor, actor, aresult, get_broker
from asyncworker.errors import InvalidArguments
from asyncworker.producing import SentMessage
from asyncworker.testing import Document, FakeEngine, StubWorker
from tests.waiting import loop_watched

URL = "https://shop.example/"


@pytest.fixture
def title(stub_worker: StubWorker, fake_engine: FakeEngine) -> SessionActor[..., str]:
    fake_engine.documents[URL] = Document(title="Shop")

    @actor(actor_name="title", store_results=True, max_retries=0)
    async def title(session: Session, url: str, *, seed: int | None = None) -> str:
        await session.page.goto(url)
        return await session.page.title()

    return title


async def test_an_actor_is_sent_to_and_its_result_awaited_on_the_loop(title: SessionActor[..., str]) -> None:
    async with loop_watched() as watch:
        sent = await title.asend(URL, seed=7)
        assert isinstance(sent, SentMessage)
        assert await sent.aresult(timeout_ms=30_000) == "Shop"
        assert await aresult(title.send(URL), timeout_ms=30_000) == "Shop"
        assert await (await title.asend_with_options(args=(URL,), delay=1)).aresult(timeout_ms=30_000) == "Shop"
    assert watch.longest_s < 0.3
    assert (sent.kwargs, sent.get_result()) == ({"seed": 7}, "Shop")


async def test_a_plain_actor_is_sent_to_by_its_broker(stub_worker: StubWorker) -> None:
    @dramatiq.actor(broker=stub_worker.broker, store_results=True, max_retries=0)
    def double(number: int) -> int:
        return 2 * number

    assert await (await get_broker().aenqueue(double.message(2))).aresult(timeout_ms=30_000) == 4
    sent = await get_broker().asend_many([double.message(3), (double.message(4), 1)])
    assert await asyncio.gather(*(each.aresult(timeout_ms=30_000) for each in sent)) == [6, 8]


async def test_a_failure_and_a_limit_are_raised_as_dramatiq_does(title: SessionActor[..., str]) -> None:
    with pytest.raises(ResultFailure):
        await (await title.asend("https://elsewhere.example/")).aresult(timeout_ms=30_000)
    sent = await title.asend_with_options(args=(URL,), delay=60_000)
    with pytest.raises(ResultTimeout):
        await sent.aresult(timeout_ms=60)


async def test_wrong_arguments_are_refused_before_anything_is_sent(title: SessionActor[..., str]) -> None:
    with pytest.raises(InvalidArguments):
        await title.asend()
    assert (await title.amessage(URL)).kwargs["seed"] is not None
