"""What type-checks. Never run: mypy checks it, and `assert_type` is an error where the type is another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import dramatiq
from dramatiq import Message
from playwright.async_api import Browser, BrowserContext, ElementHandle, Page, Response

from asyncworker import (
    Attempt,
    SentMessage,
    Session,
    SessionActor,
    Settings,
    actor,
    aresult,
    get_broker,
    open_session,
)
from asyncworker.errors import BrokerUnavailable
from asyncworker.middleware import Middleware
from asyncworker.testing import Document, FakeEngine, StubWorker, stub_worker


@actor
async def bare(session: Session, url: str, *, seed: int | None = None) -> str:
    return await session.page.title()


@actor()
async def called(session: Session, url: str) -> int:
    return len(url)


@actor(store_results=True, max_retries=3, time_limit=60_000, queue_name="pages", priority=10, identity="message")
async def scrape(
    session: Session, url: str, fields: dict[str, str], *, timeout_ms: int = 10_000, seed: int | None = None
) -> dict[str, str]:
    return fields


@actor(identity="deployment", on_success=bare)
async def nothing(session: Session) -> None: ...


# --- sending

assert_type(bare.send("https://example.com"), Message[str])
assert_type(bare.send("https://example.com", seed=42), Message[str])
assert_type(bare.send("https://example.com", seed=None), Message[str])
assert_type(bare.send(url="https://example.com"), Message[str])
assert_type(called.send("https://example.com"), Message[int])
assert_type(scrape.send("https://example.com", {"title": "h1"}), Message[dict[str, str]])
assert_type(scrape.send("https://example.com", {"title": "h1"}, timeout_ms=5_000, seed=7), Message[dict[str, str]])
assert_type(nothing.send(), Message[None])

assert_type(bare.message("https://example.com", seed=42), Message[str])
assert_type(bare.send_with_options(args=("https://example.com",), kwargs={"seed": 42}, delay=5_000), Message[str])
assert_type(bare.message_with_options(args=("https://example.com",), max_retries=0), Message[str])

# --- from an event loop


async def producer() -> None:
    assert_type(await bare.asend("https://example.com"), SentMessage[str])
    assert_type(await bare.asend("https://example.com", seed=42), SentMessage[str])
    assert_type(await scrape.asend("https://example.com", {"title": "h1"}, timeout_ms=5), SentMessage[dict[str, str]])
    assert_type(await nothing.asend(), SentMessage[None])
    assert_type(await bare.asend_with_options(args=("https://example.com",), delay=5_000), SentMessage[str])
    assert_type(await bare.amessage("https://example.com"), Message[str])
    assert_type(await (await bare.asend("https://example.com")).aresult(timeout_ms=500), str)
    assert_type((await called.asend("https://example.com")).get_result(), int)
    assert_type(await aresult(called.send("https://example.com"), timeout_ms=500), int)
    message: Message[str] = await bare.asend("https://example.com")
    assert_type(await get_broker().aenqueue(plain_actor.message("https://example.com"), delay=500), SentMessage[str])
    assert_type(await get_broker().asend_many([message, (called.message(""), 500)]), list[SentMessage[Any]])
    assert_type(get_broker().send_many([message, (called.message(""), 500)]), list[Message[Any]])
    try:
        await get_broker().asend_many([message])
    except BrokerUnavailable as error:
        assert_type(error.sent, bool | None)
        await get_broker().asend_many(error.untaken or [])


# --- results

assert_type(bare.send("https://example.com").get_result(block=True, timeout=60_000), str)
assert_type(scrape.message("https://example.com", {}).get_result(), dict[str, str])
pipeline: dramatiq.pipeline = bare.message("https://example.com") | called.message_with_options()


# --- an actor is a Dramatiq actor, and its function stays at hand

plain: dramatiq.Actor[..., str] = bare
every: list[SessionActor[..., Any]] = [bare, called, scrape, nothing]


async def by_hand(session: Session) -> None:
    assert_type(await bare.fn_async(session, "https://example.com", seed=42), str)
    assert_type(await scrape.fn_async(session, "https://example.com", {}), dict[str, str])
    assert_type(await asyncio.create_task(called.fn_async(session, "https://example.com")), int)


# --- a session gives Playwright's own objects


async def playwright(session: Session) -> None:
    assert_type(session.page, Page)
    assert_type(session.context, BrowserContext)
    assert_type(session.browser, Browser)
    assert_type(await session.page.goto("https://example.com", wait_until="domcontentloaded"), Response | None)
    assert_type(await session.page.query_selector("h1"), ElementHandle | None)
    assert_type(await session.page.locator("h1").first.inner_text(), str)
    assert_type(await session.context.new_page(), Page)
    assert_type(await session.page.screenshot(full_page=True), bytes)


async def other_facts(session: Session) -> None:
    assert_type(session.seed, int)
    assert_type(session.identity.seed, int)
    assert_type(session.attempt, Attempt)
    assert_type(session.attempt.number, int)
    assert_type(session.settings, Settings)
    assert_type(session.random.randint(1, 6), int)
    session.log.info("seen %s", session.page.url)


@dramatiq.actor
async def plain_actor(url: str) -> str:
    async with open_session(seed=7) as session:
        assert_type(session, Session)
        return await session.page.title()


assert_type(plain_actor.send("https://example.com"), Message[str])

# --- hooks, brokers, tests


class Counting(Middleware):
    def after_receive_message(self, broker: dramatiq.Broker, message: dramatiq.MessageProxy) -> None: ...


get_broker().add_middleware(Counting())


def in_a_test(stub: StubWorker, engine: FakeEngine) -> None:
    engine.documents["https://example.com"] = Document(title="Example Domain")
    assert_type(stub.run(bare.message("https://example.com")), str)


def with_a_worker() -> Iterator[StubWorker]:
    with stub_worker() as worker:
        yield worker


async def sessions() -> AsyncIterator[Session]:
    async with open_session() as session:
        yield session
