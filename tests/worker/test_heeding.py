"""What a site says to a page is done for all workers: on the stub broker, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from asyncworker import Pace, Session, actor, open_session
from asyncworker.errors import DeclarationError, TooManyRequests
from asyncworker.pace import key_of
from asyncworker.testing import Document, FakeClock, FakeEngine, StubWorker, stub_worker
from tests.waiting import eventually, wait_until

SHOP, NEXT, OTHER = "https://shop.example/", "https://shop.example/2", "https://other.example/"
KEY, OTHER_KEY = key_of("shop.example"), key_of("other.example")

BUSY = Document("busy", status=429, headers={"retry-after": "20"})


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def worker(fake_engine: FakeEngine, clock: FakeClock) -> Iterator[StubWorker]:
    fake_engine.documents |= {SHOP: Document("shop"), NEXT: Document("next"), OTHER: Document("other")}
    with stub_worker(engine=fake_engine, clock=clock) as worker:
        yield worker


@pytest.fixture
def engine(worker: StubWorker) -> FakeEngine:
    assert isinstance(worker.engine, FakeEngine)
    return worker.engine


def outcomes(worker: StubWorker, message: Any) -> list[str]:
    return [str(row.outcome) for row in worker.rows(message)]


def state(worker: StubWorker, key: str = KEY) -> Any:
    limiter: Any = worker.broker.limiter
    return next(each for each in limiter.states() if each.key == key)


def titles(**options: Any) -> Any:
    async def title(session: Session, url: str, seed: int | None = None) -> str:
        await session.page.goto(url)
        return await session.page.title()

    return actor(**({"actor_name": "title", "pace": "60/m", "max_retries": 0, "store_results": True} | options))(title)


@pytest.mark.parametrize("status", [429, 503])
def test_an_answer_that_says_to_slow_down_holds_the_site_and_puts_the_message_off(
    worker: StubWorker, engine: FakeEngine, clock: FakeClock, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.INFO)
    engine.documents[SHOP] = Document("busy", status=status, headers={"retry-after": "20"})
    title = titles()
    message = title.send_with_options(args=(SHOP,), kwargs={"seed": 7}, on_failure="title")
    wait_until(lambda: outcomes(worker, message) == ["deferred"], "it is put off")
    assert worker.broker.limiter.held_ms(KEY) == 20_000
    assert (state(worker).reason, state(worker).slowed, state(worker).waiting) == (str(status), 1, 1)
    assert caplog.text.count("shop.example (direct) says to slow down") == 1
    assert "Traceback" not in caplog.text
    engine.documents[SHOP] = Document("shop")
    clock.advance(20)
    worker.join()
    assert message.get_result(backend=worker.broker.get_results_backend()) == "shop"
    assert [(str(row.outcome), row.seed) for row in worker.rows(message)] == [("deferred", 7), ("succeeded", 7)]
    assert worker.broker.dead_letters == []


def test_others_of_the_site_wait_and_those_of_another_go(worker: StubWorker, engine: FakeEngine) -> None:
    engine.documents[SHOP] = BUSY
    title = titles()
    refused = title.send(SHOP)
    wait_until(lambda: outcomes(worker, refused) == ["deferred"], "it is put off")
    waiting, other = title.send(NEXT), title.send(OTHER)
    wait_until(lambda: outcomes(worker, other) == ["succeeded"], "another site's runs")
    assert worker.rows(waiting) == []
    assert state(worker).waiting == 2


def test_code_that_catches_the_refusal_deals_with_it(worker: StubWorker, engine: FakeEngine) -> None:
    @actor(actor_name="brave", pace="60/m", max_retries=0, store_results=True)
    async def brave(session: Session, url: str) -> list[Any]:
        try:
            await session.page.goto(url)
        except TooManyRequests as refusal:
            await asyncio.sleep(0.3)  # longer than code without such a call may go on
            return [refusal.status, refusal.retry_after_ms, refusal.url, await session.page.title()]
        return []

    engine.documents[SHOP] = BUSY
    assert worker.run(brave.message(SHOP)) == [429, 20_000, SHOP, "busy"]
    assert worker.broker.limiter.held_ms(KEY) > 0


def test_a_refusal_after_a_click_ends_the_code(worker: StubWorker, engine: FakeEngine) -> None:
    ended: list[str] = []

    @actor(actor_name="click", pace="60/m", max_retries=0)
    async def click(session: Session, url: str) -> None:
        await session.page.goto(url)
        page: Any = session.page
        page.go_by_itself(NEXT)
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("cleanup")

    engine.documents[NEXT] = BUSY
    message = click.send(SHOP)
    wait_until(lambda: outcomes(worker, message) == ["deferred"], "it is put off")
    assert ended == ["cleanup"]


def test_code_that_ends_by_itself_on_a_refused_page_has_not_succeeded(worker: StubWorker, engine: FakeEngine) -> None:
    """Nor has code that fails there."""

    @actor(actor_name="hasty", pace="60/m", max_retries=0, store_results=True)
    async def hasty(session: Session, url: str, fails: bool) -> str:
        page: Any = session.page
        page.go_by_itself(url)
        if fails:
            raise RuntimeError("no price there")
        return "rubbish"

    engine.documents |= {SHOP: BUSY, OTHER: BUSY}
    messages = [hasty.send(SHOP, False), hasty.send(OTHER, True)]
    wait_until(lambda: [outcomes(worker, each) for each in messages] == [["deferred"]] * 2, "both are put off")


def test_an_actor_may_look_for_itself(worker: StubWorker, engine: FakeEngine) -> None:
    engine.documents |= {SHOP: BUSY, OTHER: Document("blocked", status=403)}
    own = titles(pace=Pace("60/m", slow_down_on=()))
    assert worker.run(own.message(SHOP)) == "busy"
    assert worker.broker.limiter.held_ms(KEY) == 0
    strict = titles(actor_name="strict", pace=Pace("60/m", slow_down_on=[403]))
    message = strict.send(OTHER)
    wait_until(lambda: outcomes(worker, message) == ["deferred"], "a status of its own counts")
    with pytest.raises(ValueError, match="200 is no status"):
        Pace("1/s", slow_down_on=[200])


def test_an_actor_without_a_pace_is_left_alone(worker: StubWorker, engine: FakeEngine) -> None:
    engine.documents[SHOP] = BUSY
    assert worker.run(titles(pace=None).message(SHOP)) == "busy"


def test_code_says_that_a_site_wants_less(worker: StubWorker, engine: FakeEngine, clock: FakeClock) -> None:
    """In words of its own, of its message's site or another one."""
    asks: list[dict[str, Any]] = [{"retry_after_ms": 7_000}, {}, {"url": OTHER, "retry_after_ms": 200}]

    @actor(actor_name="reads", pace="60/m", max_retries=0, store_results=True)
    async def reads(session: Session, url: str) -> str:
        if asks:
            raise TooManyRequests(**asks.pop(0))
        return "read"

    message = reads.send(SHOP)
    wait_until(lambda: outcomes(worker, message) == ["deferred"], "it is put off")
    assert worker.broker.limiter.held_ms(KEY) == 7_000
    clock.advance(7)
    wait_until(lambda: len(outcomes(worker, message)) == 2, "it runs again")
    wait_until(lambda: worker.broker.limiter.held_ms(KEY) == 5_000, "a back-off")
    clock.advance(5)
    wait_until(lambda: outcomes(worker, message) == ["deferred"] * 3, "it was another site")
    assert (worker.broker.limiter.held_ms(KEY), worker.broker.limiter.held_ms(OTHER_KEY)) == (0, 200)
    clock.advance(5)
    wait_until(lambda: outcomes(worker, message)[-1] == "succeeded", "it is run after that one's time")
    assert len(outcomes(worker, message)) == 4


def test_without_a_pace_a_message_is_put_off_by_itself(worker: StubWorker) -> None:
    asked: list[int] = []

    @actor(actor_name="plain", max_retries=0, store_results=True)
    async def plain(session: Session) -> str:
        asked.append(session.seed)
        if len(asked) < 3:
            raise TooManyRequests(retry_after_ms=20)
        return "read"

    message = plain.message()
    assert worker.run(message) == "read"
    assert outcomes(worker, message) == ["deferred", "deferred", "succeeded"]
    assert len(set(asked)) == 1


def test_a_message_at_most_once_is_not_put_off_when_it_has_begun(worker: StubWorker, engine: FakeEngine) -> None:
    engine.documents[SHOP] = BUSY
    message = titles(delivery="at_most_once").message(SHOP)
    with pytest.raises(TooManyRequests):
        worker.run(message)
    assert outcomes(worker, message) == ["failed"]


def test_after_successes_a_site_has_its_rate_again_step_by_step(
    worker: StubWorker, engine: FakeEngine, clock: FakeClock
) -> None:
    limiter: Any = worker.broker.limiter
    for _ in range(2):
        limiter.hold(KEY, for_ms=1, slows=True)
    clock.advance(1)
    title = titles(pace=Pace("60/m", jitter=0.0))
    halvings = []
    for number in range(21):
        message = title.send(SHOP)
        wait_until(lambda message=message: outcomes(worker, message) == ["succeeded"], f"{number}")  # type: ignore[misc]
        worker.join()
        wait_until(lambda number=number: state(worker).slowed == 2 - min(number + 1, 20) // 10, "it is told")  # type: ignore[misc]
        halvings.append(state(worker).slowed)
        clock.advance(5)
    assert halvings == [2] * 9 + [1] * 10 + [0] * 2


# --- navigations


def walks(pages: list[str], **options: Any) -> Any:
    async def walk(session: Session, url: str) -> None:
        for page in pages:
            await session.page.goto(page)
        return []

    return actor(
        **({"actor_name": "walk", "pace": Pace("1/10s", jitter=0.0), "max_retries": 0, "store_results": True} | options)
    )(walk)


def test_each_navigation_waits_for_its_slot_by_itself(worker: StubWorker, clock: FakeClock) -> None:
    """But the message's first, whose slot was taken before its code began."""
    walk = walks([SHOP, NEXT, OTHER, "data:,", SHOP], navigations=True)
    worker.run(walk.message(SHOP))
    assert round(clock.now, 2) == 20.1
    assert (state(worker).used, state(worker, OTHER_KEY).used) == (3, 1)


def test_without_the_option_only_the_message_waits(worker: StubWorker, clock: FakeClock) -> None:
    worker.run(walks([SHOP, NEXT, SHOP]).message(SHOP))
    assert clock.now == 0
    assert state(worker).used == 1


def test_what_a_page_does_by_itself_is_counted_so_that_the_next_waits_for_it(
    worker: StubWorker, clock: FakeClock
) -> None:
    @actor(actor_name="follow", pace=Pace("1/10s", jitter=0.0), navigations=True, max_retries=0)
    async def follow(session: Session, url: str) -> None:
        await session.page.goto(url)
        page: Any = session.page
        page.go_by_itself(NEXT)  # a click
        await eventually(lambda: worker.broker.limiter.states()[0].used == 2, "it is counted")
        assert clock.now == 0
        await session.page.goto(url)

    worker.run(follow.message(SHOP))
    assert round(clock.now, 2) == 20.1


def test_a_page_that_code_opens_itself_is_heeded_too(worker: StubWorker, engine: FakeEngine) -> None:
    @actor(actor_name="second", pace="60/m", max_retries=0)
    async def second(session: Session, url: str) -> None:
        page = await session.context.new_page()
        await page.goto(url)

    engine.documents[SHOP] = BUSY
    message = second.send(SHOP)
    wait_until(lambda: outcomes(worker, message) == ["deferred"], "it is put off")


def test_a_second_session_of_an_attempt_is_heeded_too(worker: StubWorker, engine: FakeEngine) -> None:
    @actor(actor_name="nested", pace="60/m", max_retries=0)
    async def nested(session: Session, url: str) -> None:
        async with open_session(seed=9) as other:
            await other.page.goto(url)

    engine.documents[SHOP] = BUSY
    message = nested.send(SHOP)
    wait_until(lambda: outcomes(worker, message) == ["deferred"], "it is put off")


def test_navigations_without_a_pace_are_refused_at_declaration(worker: StubWorker) -> None:
    with pytest.raises(DeclarationError, match="navigations=True and no pace"):
        titles(pace=None, navigations=True)
