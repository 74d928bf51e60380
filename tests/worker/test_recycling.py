"""Recycling on the fake engine: when a browser is replaced, what its messages notice, and what it may cost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncworker.browser import BrowserHost
from asyncworker.errors import BrowserRecycled
from asyncworker.identity import Identity
from asyncworker.recycling import RETRY_S
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt
from asyncworker.settings import load
from asyncworker.testing import FakeClock, FakeEngine
from asyncworker.turn import Turn
from tests.waiting import eventually

SEED = Identity(seed=1)


class Scene:
    """A host with a clock of its own and a lock of its own."""

    def __init__(self, directory: Path, engine: FakeEngine | None = None, **settings: Any) -> None:
        self.engine = engine or FakeEngine()
        self.clock = FakeClock()
        self.lock = directory / "recycle.lock"
        self.host = BrowserHost(self.engine, load({}, **settings), clock=self.clock, turn=Turn(self.lock))

    async def use(self, identity: Identity = SEED) -> int:
        async with self.host.context(identity) as lease:
            await asyncio.sleep(0)
            return lease.generation.number

    def generation(self, identity: Identity = SEED) -> int:
        return self.host._live[self.engine.launch_key(identity)].number

    async def replaced_by(self, number: int, identity: Identity = SEED) -> None:
        await eventually(lambda: self.generation(identity) == number, f"browser {number} has taken over")

    async def ended(self, number: int) -> None:
        await eventually(lambda: not self.engine.browsers[number - 1].alive, f"browser {number} is closed")

    @property
    def recycled(self) -> int:
        return self.host.counts["browsers_recycled"]


@contextlib.asynccontextmanager
async def scene(directory: Path, engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Scene]:
    scene = Scene(directory, engine, **settings)
    yield scene
    await scene.host.close()
    assert not any(browser.alive for browser in scene.engine.browsers)
    assert scene.host.counts["contexts_opened"] == scene.host.counts["contexts_closed"]
    assert not scene.lock.exists(), "the turn was not given back"


# when


async def test_after_so_many_contexts_the_next_browser_takes_over_and_the_old_one_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with scene(tmp_path, recycle_after=3) as here:
        assert [await here.use() for _ in range(3)] == [1, 1, 1]
        await here.replaced_by(2)
        await here.ended(1)
        assert await here.use() == 2
        assert (here.recycled, here.host.counts["browsers_launched"]) == (1, 2)
    assert "browser 1 is recycled (3 contexts, ASYNCWORKER_RECYCLE_AFTER is 3)" in caplog.text


async def test_contexts_that_code_opens_itself_count_too(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_after=3) as here:
        async with here.host.context(SEED) as lease:
            await lease.browser.new_context()
            await lease.browser.new_page()
        await here.replaced_by(2)


async def test_a_browser_over_its_age_is_replaced_at_the_end_of_a_message_or_when_it_is_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with scene(tmp_path, recycle_age_ms=60_000) as here:
        await here.use()
        here.clock.advance(59)
        assert await here.use() == 1
        assert here.recycled == 0
        here.clock.advance(1)
        await here.host.recycler.look()
        await here.replaced_by(2)
        await here.ended(1)
    assert "browser 1 is recycled (60000 ms old, ASYNCWORKER_RECYCLE_AGE_MS is 60000)" in caplog.text


async def test_a_browser_over_its_memory_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with scene(tmp_path, recycle_memory_mb=500) as here:
        await here.use()
        here.engine.browsers[0].memory_mb = 500
        await here.host.recycler.look()
        assert here.recycled == 0
        here.engine.browsers[0].memory_mb = 501
        await here.host.recycler.look()
        await here.replaced_by(2)
        await here.ended(1)
    assert "browser 1 is recycled (501 MB after 1 contexts, ASYNCWORKER_RECYCLE_MEMORY_MB is 500)" in caplog.text
    assert "raise the limit" in caplog.text


async def test_a_browser_that_is_over_its_memory_before_its_first_context_is_not_replaced_by_another_such(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, recycle_memory_mb=500) as here:
        await here.host.warm(SEED)
        here.engine.browsers[0].memory_mb = 900
        await here.host.recycler.look()
        assert here.host.counts == {"browsers_launched": 1}


async def test_browsers_are_looked_at_by_themselves(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_memory_mb=500, recycle_check_ms=5) as here:
        await here.use()
        here.engine.browsers[0].memory_mb = 501
        here.clock.advance(1)
        await here.replaced_by(2)


async def test_zero_is_never(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_after=0, recycle_age_ms=0, recycle_memory_mb=0) as here:
        for _ in range(50):
            here.clock.advance(1e6)
            await here.use()
            here.engine.browsers[0].memory_mb = 1e6
            await here.host.recycler.look()
        assert here.host.counts["browsers_launched"] == 1


# what messages notice


async def test_two_hundred_messages_are_one_launch_and_one_for_each_recycle(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_after=20) as here:
        slots = asyncio.Semaphore(4)

        async def message() -> int:
            async with slots:
                return await here.use()

        used = await asyncio.gather(*(message() for _ in range(200)))
        counts = here.host.counts
        assert counts["contexts_opened"] == 200
        assert counts["browsers_launched"] <= 1 + counts["browsers_recycled"]
        assert counts["browsers_recycled"] >= 5
        assert set(used) <= set(range(1, counts["browsers_launched"] + 1))


async def test_a_long_message_goes_on_while_the_next_browser_takes_all_others_and_then_its_browser_ends(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, recycle_age_ms=60_000) as here:
        async with here.host.context(SEED) as lease:
            here.clock.advance(61)
            await here.host.recycler.look()
            await here.replaced_by(2)
            assert [await here.use() for _ in range(3)] == [2, 2, 2]
            assert len(here.engine.browsers[0].contexts) == 1
            assert await lease.page.title() == ""
            assert here.engine.browsers[0].alive
        await here.ended(1)


async def test_messages_use_the_old_browser_until_the_next_one_is_up(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_after=1) as here:
        await here.host.warm(SEED)
        here.engine.delays["launch"] = math.inf
        await here.use()
        await eventually(lambda: here.engine.begun["launch"] == 2, "the next one is launched")
        assert [await here.use() for _ in range(3)] == [1, 1, 1]
        launch = here.host._launches[None]
        launch.cancel()
        await asyncio.wait({launch})


async def test_a_next_browser_that_does_not_come_up_fails_no_message_and_is_tried_again_later(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_after=2) as here:
        await here.use()
        here.engine.fail_launches = 1
        for _ in range(10):
            assert await here.use() == 1
        assert here.engine.begun["launch"] == 2
        assert here.recycled == 0
        assert not here.lock.exists(), "others have their turn meanwhile"
        here.clock.advance(RETRY_S)
        assert await here.use() == 1
        await here.replaced_by(2)
        assert here.recycled == 1


async def test_a_browser_that_dies_while_the_next_one_is_launched_is_one_launch(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_after=1) as here:
        await here.host.warm(SEED)
        here.engine.delays["launch"] = 0.05
        await here.use()
        await eventually(lambda: here.engine.begun["launch"] == 2, "the next one is launched")
        here.engine.browsers[0].crash()
        assert await here.use() == 2
        assert here.engine.begun["launch"] - here.recycled <= 2
        assert here.host.counts["browsers_lost"] == 1


async def test_a_guest_that_no_one_asks_for_is_closed_and_not_launched_anew(tmp_path: Path) -> None:
    async with scene(tmp_path, FakeEngine(one_identity_each=True), recycle_age_ms=60_000) as here:
        here.host.home = 1
        await here.use(SEED)
        await here.use(Identity(seed=2))
        here.clock.advance(61)
        here.host.home = 3
        await here.host.recycler.look()
        await here.ended(1)
        await eventually(lambda: here.recycled == 1, "it is counted")
        assert here.host.counts["browsers_launched"] == 2


async def test_the_next_browser_shares_nothing_with_the_old_one(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_after=1) as here:
        await here.use()
        await here.ended(1)
        assert here.engine.renewed[0] is here.engine.browsers[0]


# how many


async def test_where_one_browser_is_all_that_may_be_up_a_long_message_blocks_no_one_while_it_is_replaced(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, max_browsers=1, browser_wait_ms=500, recycle_after=1) as here:
        async with here.host.context(SEED):
            await here.replaced_by(2)
            for _ in range(5):
                assert await here.use() == 2
            assert sum(browser.alive for browser in here.engine.browsers) == 2
        await here.ended(1)


async def test_where_one_browser_is_all_that_may_be_up_identities_go_on_taking_turns_while_it_is_replaced(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(one_identity_each=True)
    async with scene(tmp_path, engine, max_browsers=1, browser_wait_ms=2_000, recycle_after=1) as here:
        assert here.recycled == 0
        async with here.host.context(SEED):
            await here.replaced_by(2)
            for seed in (2, 3, 1, 2):
                await here.use(Identity(seed=seed))
                assert sum(browser.alive for browser in engine.browsers) <= 2
            assert engine.browsers[0].alive


async def test_a_full_browser_is_replaced_too_and_those_that_wait_for_it_take_the_next_one(tmp_path: Path) -> None:
    engine = FakeEngine(max_contexts=1)
    async with scene(tmp_path, engine, max_browsers=1, recycle_after=1, browser_wait_ms=2_000) as here:
        assert here.recycled == 0
        async with here.host.context(SEED):
            assert await here.use() == 2


async def test_one_browser_of_a_process_is_replaced_at_a_time(tmp_path: Path) -> None:
    engine = FakeEngine(one_identity_each=True)
    async with scene(tmp_path, engine, recycle_age_ms=60_000) as here:
        async with here.host.context(SEED), here.host.context(Identity(seed=2)):
            here.clock.advance(61)
            await here.host.recycler.look()
            await here.replaced_by(3)
            await here.host.recycler.look()
            assert here.host.counts["browsers_launched"] == 3
        await here.ended(1)
        await here.host.recycler.look()
        await here.ended(2)


async def test_while_another_process_recycles_a_browser_serves_on_until_its_turn_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = Turn(tmp_path / "recycle.lock")
    async with scene(tmp_path, recycle_after=2) as here:
        assert other.take(60_000)
        assert [await here.use() for _ in range(10)] == [1] * 10
        other.give_back()
        assert await here.use() == 1
        await here.replaced_by(2)
        await here.ended(1)
    assert caplog.text.count("is due to be recycled") == 1


# the limit


async def test_contexts_that_outlast_the_limit_are_ended_with_an_error_that_says_so(tmp_path: Path) -> None:
    runtime = Runtime(load({}, recycle_after=1, recycle_drain_ms=50), engine=(engine := FakeEngine()))
    runtime.host.recycler._turn = Turn(tmp_path / "recycle.lock")
    with pytest.raises(BrowserRecycled, match="did not end within 50 ms"):
        async with runtime.session(Attempt(seed=1)):
            await asyncio.sleep(60)
    assert runtime.host.counts["browsers_lost"] == 0
    async with runtime.session(Attempt(seed=1)) as session:
        assert session.generation == 2
    assert not engine.browsers[0].alive
    await runtime.close()
    assert runtime.host.counts["contexts_opened"] == runtime.host.counts["contexts_closed"]


async def test_unless_it_is_set_the_limit_is_longer_than_the_time_limit_of_every_attempt(tmp_path: Path) -> None:
    settings = load({}, recycle_after=1, time_limit_ms=1_000, cleanup_timeout_ms=1_000, close_timeout_ms=1_000)
    runtime = Runtime(settings, engine=FakeEngine())
    runtime.host.recycler._turn = Turn(tmp_path / "recycle.lock")
    now = asyncio.get_running_loop().time()
    async with runtime.session(Attempt(seed=1, deadline=now + 7_200)) as session:
        limit_ms = runtime.host.recycler._drain_ms(session._lease.generation)
        assert limit_ms == pytest.approx(7_202_000, abs=1_000)
        await eventually(lambda: runtime.host.counts["browsers_recycled"], "it is replaced")
    async with runtime.session(Attempt(seed=1)) as session:
        assert runtime.host.recycler._drain_ms(session._lease.generation) == 3_000
    await runtime.close()


async def test_a_host_that_is_closed_while_a_browser_is_replaced_closes_both(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_after=1) as here:
        await here.host.warm(SEED)
        here.engine.delays["launch"] = 0.1
        await here.use()
        await eventually(lambda: here.engine.begun["launch"] == 2, "the next one is launched")
        await here.host.close()
        assert [browser.alive for browser in here.engine.browsers] == [False, False]
        assert here.recycled == 1, "each launch but the first is one"
