"""Probes on the fake engine: what the browsers of a process say of it, and which of them is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncworker.browser import BrowserHost
from asyncworker.identity import Identity
from asyncworker.probing import Prober, State
from asyncworker.settings import load
from asyncworker.testing import Document, FakeClock, FakeEngine
from asyncworker.turn import Turn
from tests.waiting import eventually

SEED = Identity(seed=1)

SHOP = "https://shop.example/"

INTERVAL_S = 60


class Scene:
    """A prober that looks when it is told to, by a clock of its own."""

    def __init__(self, directory: Path, engine: FakeEngine | None, local_url: str | None, **settings: Any) -> None:
        self.engine = engine or FakeEngine()
        self.engine.documents[SHOP] = Document(title="Shop")
        self.clock = FakeClock()
        values = {"probe_interval_ms": INTERVAL_S * 1000, "probe_timeout_ms": 50, "close_timeout_ms": 100} | settings
        self.host = BrowserHost(
            self.engine, load({}, **values), clock=self.clock, turn=Turn(directory / "recycle.lock")
        )
        self.host.home = self.engine.launch_key(SEED)
        self.prober = Prober(self.host, load({}, **values), home=lambda: SEED, local_url=local_url)

    async def message(self, url: str | None = SHOP, identity: Identity = SEED) -> int:
        async with self.host.context(identity) as lease:
            if url is not None:
                await lease.page.goto(url)
            return lease.generation.number

    def state(self) -> State:
        self.prober.look()
        return self.prober.standing.state

    @property
    def reason(self) -> str:
        return self.prober.standing.reason

    async def probed(self) -> bool:
        """Look; when that begins a probe, or what comes of it, wait for its end and look again."""
        self.prober.look()
        began = self.prober._working is not None
        await eventually(lambda: self.prober._working is None, "the probe has ended")
        if began:
            self.prober.standing = self.prober._stand()
        return began

    async def pass_interval(self) -> bool:
        self.clock.advance(INTERVAL_S)
        return await self.probed()


@contextlib.asynccontextmanager
async def scene(
    directory: Path, engine: FakeEngine | None = None, local_url: str | None = None, **settings: Any
) -> AsyncIterator[Scene]:
    scene = Scene(directory, engine, local_url, **settings)
    yield scene
    scene.engine.delays.clear()
    await scene.host.close()
    assert not any(browser.alive for browser in scene.engine.browsers)
    assert scene.host.counts["contexts_opened"] == scene.host.counts["contexts_closed"]


# states


async def test_a_worker_without_a_browser_is_ready_and_none_is_launched_to_probe_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        for _ in range(3):
            assert not await here.pass_interval()
        assert (here.state(), here.reason) == (State.ready, "no browser is up; the next message launches one")
        assert here.engine.browsers == []


async def test_a_worker_that_is_to_have_its_browser_at_boot_is_starting_until_that_has_shown_a_page(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, warm=True) as here:
        assert here.state() is State.starting
        await here.host.warm(SEED)
        here.prober.standing = here.prober._stand()
        assert here.prober.standing.state is State.starting
        assert here.reason == "its browser is up, and was not yet seen to finish a navigation"
        assert await here.probed()
        assert (here.prober.standing.state, here.prober.standing.generation) == (State.ready, 1)


async def test_with_warm_a_browser_that_died_with_no_message_on_it_is_launched_again_and_without_it_not(
    tmp_path: Path,
) -> None:
    for warm, launches in ((True, 2), (False, 1)):
        async with scene(tmp_path, warm=warm) as here:
            await here.message()
            here.state()
            here.engine.browsers[0].crash()
            await here.probed()
            await here.pass_interval()
            assert len(here.engine.browsers) == launches


async def test_a_worker_whose_browser_takes_long_to_launch_is_starting_and_says_for_how_long(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.engine.delays["launch"] = 0.2
        message = asyncio.create_task(here.message())
        await eventually(lambda: here.engine.begun["launch"], "it is being launched")
        assert here.state() is State.starting
        here.clock.advance(15)
        assert here.state() is State.starting
        assert here.reason == "its browser is being launched, for 15000 ms so far"
        assert await message == 1
        assert here.state() is State.ready


async def test_a_launch_that_fails_makes_the_worker_sick_with_its_error_until_one_succeeds(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.engine.fail_launches = 2
        for number in (1, 2):
            with contextlib.suppress(Exception):
                await here.message()
            assert here.state() is State.sick
            assert here.reason.startswith(f"launch {number} in a row failed: the fake browser was told not to start")
        assert len(here.clock.sleeps) == 1, "the second launch came after a pause"
        await here.message()
        assert here.state() is State.ready


async def test_a_worker_whose_engine_is_missing_is_sick(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.prober.engine_problem = "this worker has no browser: run `asyncworker doctor`"
        assert (here.state(), here.reason) == (State.sick, here.prober.engine_problem)


async def test_a_recycled_browser_does_not_make_a_ready_worker_starting(tmp_path: Path) -> None:
    async with scene(tmp_path, recycle_after=2) as here:
        await here.message()
        assert here.state() is State.ready
        await here.message()
        await eventually(lambda: here.host.counts["browsers_recycled"] == 1, "the next one has taken over")
        here.prober.standing = here.prober._stand()
        assert (here.prober.standing.state, here.prober.standing.generation) == (State.ready, 2)


# when a page is loaded


async def test_a_page_that_a_message_has_loaded_is_proof_enough_for_an_interval(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        await here.message()
        assert not await here.probed()
        here.clock.advance(INTERVAL_S - 1)
        await here.message()
        here.clock.advance(INTERVAL_S - 1)
        assert not await here.probed()
        here.clock.advance(1)
        assert await here.probed()
        assert here.prober.last is not None
        assert here.prober.last.failure is None


async def test_a_message_that_loads_nothing_proves_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        await here.message(url=None)
        assert here.state() is State.starting
        assert await here.probed()
        assert here.prober.standing.state is State.ready


async def test_a_probe_counts_as_no_message_and_does_not_make_a_browser_used(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        await here.message()
        used_at = here.host.usable()[0].used_at
        assert await here.pass_interval()
        assert here.host.usable()[0].used_at == used_at
        assert here.host.counts["contexts_opened"] == 1
        assert here.host.usable()[0].contexts == 1, "it is not recycled for its probes"
        assert [context.closed for context in here.engine.contexts] == [True, True]


async def test_a_browser_that_serves_as_many_as_it_can_is_not_probed(tmp_path: Path) -> None:
    async with scene(tmp_path, FakeEngine(max_contexts=1)) as here:
        async with here.host.context(SEED) as lease:
            await lease.page.goto(SHOP)
            assert not await here.pass_interval()
        assert await here.probed()


async def test_an_interval_of_zero_is_no_probe_and_a_browser_that_is_up_is_ready(tmp_path: Path) -> None:
    async with scene(tmp_path, probe_interval_ms=0) as here:
        await here.message(url=None)
        assert not await here.pass_interval()
        assert (here.state(), here.reason) == (State.ready, "its browser is up")


async def test_where_the_local_page_cannot_be_reached_from_the_first_a_data_url_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path, local_url="http://127.0.0.1:1/") as here:
        await here.host.warm(SEED)
        assert await here.probed()
        assert here.prober.standing.state is State.ready
        assert await here.pass_interval()
        assert caplog.text.count("probes load a data: URL from now on") == 1


async def test_a_local_page_that_was_loaded_once_and_then_fails_is_a_failed_probe(tmp_path: Path) -> None:
    async with scene(tmp_path, local_url="http://127.0.0.1:1/") as here:
        here.engine.documents["http://127.0.0.1:1/"] = Document(title="asyncworker")
        await here.host.warm(SEED)
        assert await here.probed()
        del here.engine.documents["http://127.0.0.1:1/"]
        assert await here.pass_interval()
        assert here.prober.last is not None
        assert "FakeTimeoutError" in (here.prober.last.failure or "")


# a browser that loads nothing


async def test_a_browser_that_answers_and_finishes_no_navigation_is_sick_within_two_probes_and_replaced(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as here:
        await here.message()
        here.engine.delays["navigation"] = math.inf
        assert await here.pass_interval()
        assert here.prober.standing.state is State.ready, "one probe may fail"
        assert await here.probed()
        assert (here.prober.standing.state, here.prober.standing.generation) == (State.sick, 2)
        assert here.reason == "browser 1 finished no navigation within 50 ms (ASYNCWORKER_PROBE_TIMEOUT_MS)"
        await eventually(lambda: not here.engine.browsers[0].alive, "the first browser is gone")
        here.engine.delays.clear()
        assert await here.probed()
        assert here.prober.standing.state is State.ready
        assert await here.message() == 2
        counts = here.host.counts
        assert (counts["browsers_launched"], counts["browsers_recycled"]) == (2, 1)


async def test_messages_on_a_browser_that_is_replaced_for_it_go_on_and_others_take_the_next_one(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, max_browsers=1) as here:
        async with here.host.context(SEED) as lease:
            await lease.page.goto(SHOP)
            here.engine.delays["navigation"] = math.inf
            await here.pass_interval()
            await here.probed()
            here.engine.delays.clear()
            assert await here.message() == 2
            assert here.engine.browsers[0].alive
        await eventually(lambda: not here.engine.browsers[0].alive, "it ends with its last context")


async def test_a_page_that_a_message_loads_between_two_failed_probes_keeps_the_browser(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        await here.message()
        for _ in range(4):
            here.engine.delays["navigation"] = math.inf
            assert await here.pass_interval()
            here.engine.delays.clear()
            assert await here.message() == 1
            assert not await here.probed()
        assert here.state() is State.ready


async def test_a_browser_that_opens_no_page_is_replaced_too(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        await here.message()
        here.engine.delays["new_page"] = math.inf
        await here.pass_interval()
        await here.probed()
        assert here.prober.standing.state is State.sick
        assert here.reason == "browser 1 opened no page within 50 ms (ASYNCWORKER_PROBE_TIMEOUT_MS)"


async def test_browsers_none_of_which_loads_a_page_are_replaced_with_longer_and_longer_pauses(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        await here.message()
        here.engine.delays["navigation"] = math.inf
        launches = []
        for _ in range(20):
            await here.pass_interval()
            await here.probed()
            launches.append(here.host.counts["browsers_launched"])
        assert here.prober.standing.state is State.sick
        assert 4 <= launches[-1] <= 7, launches


async def test_a_browser_that_dies_under_its_probe_is_none_that_failed_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        await here.message()
        here.engine.delays["navigation"] = math.inf
        here.clock.advance(INTERVAL_S)
        here.prober.look()
        await eventually(lambda: here.engine.begun["navigation"] == 2, "the probe is on its way")
        here.engine.browsers[0].crash()
        await eventually(lambda: here.prober._working is None, "the probe has ended")
        assert here.state() is State.ready
        assert here.host.counts["browsers_recycled"] == 0
        here.engine.delays.clear()
        assert await here.message() == 2


async def test_a_guest_that_no_one_waits_for_is_ended_and_not_launched_again(tmp_path: Path) -> None:
    async with scene(tmp_path, FakeEngine(one_identity_each=True)) as here:
        here.host.home = 7
        await here.message()
        here.engine.delays["navigation"] = math.inf
        await here.pass_interval()
        await here.probed()
        assert here.state() is State.ready
        assert here.host.counts["browsers_launched"] == 1
