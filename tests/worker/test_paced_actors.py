"""Paced actors on the stub broker, whose paces have a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest

from asyncworker import Pace, Session, actor
from asyncworker.errors import BudgetSpent, ConfigurationError, DeclarationError, InvalidArguments
from asyncworker.pace import Rate, key_of
from asyncworker.paced import Pacing
from asyncworker.settings import load
from asyncworker.testing import FakeClock, FakeEngine, StubWorker, stub_worker
from tests.waiting import wait_until

SHOP, OTHER = "https://shop.example/", "https://other.example/"
KEY = key_of("shop.example")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def worker(fake_engine: FakeEngine, clock: FakeClock) -> Iterator[StubWorker]:
    with stub_worker(engine=fake_engine, clock=clock) as worker:
        yield worker


def visiting(**options: Any) -> tuple[Any, list[str]]:
    """An actor that notes what it was sent to."""
    begun: list[str] = []

    async def visit(session: Session, url: str, number: int = 0) -> None:
        begun.append(f"{url}{number}")

    return actor(**({"actor_name": "visit", "max_retries": 0} | options))(visit), begun


def test_messages_of_a_host_begin_at_their_pace_in_order_and_those_of_another_at_once(
    worker: StubWorker, clock: FakeClock
) -> None:
    visit, begun = visiting(pace=Pace("1/10s", jitter=0.0))
    for number in range(3):
        visit.send(SHOP, number)
    wait_until(lambda: begun == [f"{SHOP}0"], "the first begins")
    visit.send(OTHER)
    wait_until(lambda: begun[1:] == [f"{OTHER}0"], "another host's does")
    state = next(state for state in worker.broker.limiter.states() if state.key == KEY)
    assert (state.waiting, state.rate) == (2, "1/10s")
    for number in (1, 2):
        clock.advance(10.05)
        wait_until(lambda number=number: begun[-1] == f"{SHOP}{number}", "the next does")  # type: ignore[misc]
    worker.join()
    assert len(begun) == 4


def test_a_message_that_is_put_off_has_used_up_no_retry_and_keeps_its_seed(
    worker: StubWorker, clock: FakeClock
) -> None:
    """It was let go, and then its site was held."""
    visit, begun = visiting(pace="600/m")
    limiter: Any = worker.broker.limiter
    arrive = limiter.arrive

    def arrive_and_hold(*arrivals: Any, **how: Any) -> Any:
        answer = arrive(*arrivals, **how)
        limiter.hold(KEY, for_ms=20_000, reason="429")
        limiter.arrive = arrive
        return answer

    limiter.arrive = arrive_and_hold
    message = visit.send_with_options(args=(SHOP,), kwargs={"seed": 7}, on_failure="visit")
    wait_until(lambda: [row.outcome for row in worker.rows(message)] == ["deferred"], "it is put off")
    assert begun == []
    clock.advance(20)
    worker.join()
    assert begun == [f"{SHOP}0"]
    assert [(row.outcome, row.seed) for row in worker.rows(message)] == [("deferred", 7), ("succeeded", 7)]
    assert worker.broker.dead_letters == []


def test_as_many_at_once_as_the_pace_says(worker: StubWorker) -> None:
    running, most = set[int](), 0

    @actor(pace=Pace(max_concurrent=2), actor_name="hold_on", max_retries=0)
    async def hold_on(session: Session, url: str, number: int) -> None:
        nonlocal most
        running.add(number)
        most = max(most, len(running))
        await asyncio.sleep(0.02)
        running.remove(number)

    for number in range(6):
        hold_on.send(SHOP, number)
    worker.join()
    assert most == 2


def test_code_waits_for_a_slot_for_each_further_url(worker: StubWorker, clock: FakeClock) -> None:
    @actor(pace=Pace("1/10s", jitter=0.0), actor_name="walk", max_retries=0, store_results=True)
    async def walk(session: Session, url: str) -> list[float]:
        begun = [clock.now]
        for further in (url, OTHER, url):
            await session.pace(further)
            begun.append(clock.now)
        with pytest.raises(ValueError, match="no http"):
            await session.pace("about:blank")
        return begun

    first, *further = worker.run(walk.message(SHOP))
    assert [round(at - first, 3) for at in further] == [10.05, 10.05, 20.1]


def test_what_is_counted_is_what_the_key_says(worker: StubWorker) -> None:
    begun: list[str] = []

    @actor(pace=Pace("1/h", key=lambda account: account), actor_name="login", max_retries=0)
    async def login(session: Session, url: str, account: str | None) -> None:
        begun.append(f"{account}")

    for account in ("a", "a", "b", None, None):
        login.send(SHOP, account)
    wait_until(lambda: sorted(begun) == ["None", "None", "a", "b"], "each account's first, and those of none")
    wait_until(lambda: sum(state.waiting for state in worker.broker.limiter.states()) == 1, "one waits")


def test_without_a_url_an_actor_is_counted_by_itself(worker: StubWorker) -> None:
    @actor(pace="1/h", actor_name="by_id", max_retries=0)
    async def by_id(session: Session, product: int) -> None: ...

    by_id.send(1)
    by_id.send(2)
    wait_until(lambda: [(s.subject, s.waiting) for s in worker.broker.limiter.states()] == [("by_id", 1)], "one waits")


def test_a_message_beyond_the_budget_is_a_dead_letter_where_the_pace_says_so(worker: StubWorker) -> None:
    visit, begun = visiting(pace=Pace(budget="1/day", over_budget="reject"), max_retries=3)
    worker.run(visit.message(SHOP))
    with pytest.raises(BudgetSpent, match=r"budget of 1 a day for shop\.example"):
        worker.run(visit.message(SHOP))
    assert len(begun) == 1


def test_a_rate_that_is_set_at_run_time_holds_for_those_who_wait(worker: StubWorker, clock: FakeClock) -> None:
    visit, begun = visiting(pace=Pace("1/h", jitter=0.0))
    visit.send(SHOP, 0)
    wait_until(lambda: len(begun) == 1, "the first begins")
    visit.send(SHOP, 1)
    wait_until(lambda: worker.broker.limiter.states()[0].waiting == 1, "the second waits")
    worker.broker.limiter.set_rate("shop.example", Rate.parse("1/s"))
    clock.advance(1.005)
    wait_until(lambda: len(begun) == 2, "and begins")
    worker.join()


def test_a_deployments_rules_hold_for_actors_without_a_pace(tmp_path: Path, fake_engine: FakeEngine) -> None:
    (tmp_path / "pace.toml").write_text('[pace."*.example"]\nrate = "1/h"\n[pace."other.example"]\nmax_concurrent = 1')
    settings = load({}, pace_file=tmp_path / "pace.toml")
    with stub_worker(engine=fake_engine, settings=settings, clock=FakeClock()) as worker:
        visit, begun = visiting()
        for url in (SHOP, SHOP, OTHER, OTHER, "https://elsewhere/", "https://elsewhere/"):
            visit.send(url)
        wait_until(lambda: len(begun) == 5, "all but the second of the shop begin")
        wait_until(lambda: sum(state.waiting for state in worker.broker.limiter.states()) == 1, "that waits")
        assert begun.count(f"{SHOP}0") == 1


def test_rules_that_cannot_be_are_refused_with_their_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml"):
        Pacing.of(load({}, pace_file=tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("[pace.x]\nrate = 'often'")
    with pytest.raises(ConfigurationError, match=r"bad\.toml.*'often' is no rate"):
        Pacing.of(load({}, pace_file=tmp_path / "bad.toml"))
    with pytest.raises(ConfigurationError, match="RabbitMQ"):
        load({}, broker_url="amqp://h", store_url="redis://h", pace_file=tmp_path / "bad.toml")


def test_the_exit_is_the_proxy_without_its_password() -> None:
    assert Pacing.of(load({}, proxy="http://me:secret@proxy:8080")).exit == "http://proxy:8080"
    assert Pacing.of(load({})).exit == "direct"


@pytest.mark.parametrize(
    ("pace", "said"),
    [
        ("often", "'often' is no rate"),
        (5, "pace=5"),
        (Pace(), "limits nothing"),
        (Pace("1/s", key=lambda nobody: nobody), "'nobody', which is none of its arguments: url, number"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused_where_it_is_declared(worker: StubWorker, pace: Any, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        visiting(pace=pace)


def test_a_pace_needs_a_session(worker: StubWorker) -> None:
    with pytest.raises(DeclarationError, match="no session"):
        dramatiq.actor(lambda: None, actor_name="plain", pace="1/s")


def test_a_key_that_cannot_be_made_is_the_senders_fault(worker: StubWorker) -> None:
    visit, _ = visiting(pace=Pace("1/s", key=lambda number: [number]))
    with pytest.raises(InvalidArguments, match="text, an integer or None"):
        worker.broker.pacing.subject_of(worker.broker, visit.message(SHOP, 3))


def test_a_message_has_its_pace_on_the_real_clock_too(fake_engine: FakeEngine) -> None:
    with stub_worker(engine=fake_engine) as worker:
        visit, begun = visiting(pace=Pace("20/s", jitter=0.0))
        began = time.monotonic()
        for number in range(5):
            visit.send(SHOP, number)
        worker.join()
        assert time.monotonic() - began >= 4 * 0.05
        assert len(begun) == 5
