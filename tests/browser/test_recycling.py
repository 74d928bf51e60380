"""Recycling with a real Chromium and its driver, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncworker import processes
from asyncworker.errors import BrowserRecycled
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt
from asyncworker.settings import load
from tests.site import BehaviourSite
from tests.waiting import eventually

pytestmark = pytest.mark.needs_browser

Make = Callable[..., Runtime]

#: Memory that only a page's own process holds, until its context is closed.
HOARD = "(mb) => { window.hoard = Array.from({length: mb}, () => new Uint8Array(1e6).fill(1)); return hoard.length; }"


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a lock of its own
    made: list[Runtime] = []

    def make(**settings: Any) -> Runtime:
        made.append(Runtime(load({}, engine="chromium", **settings)))
        return made[-1]

    yield make
    for runtime in made:
        await runtime.close()
        counts = runtime.host.counts
        assert counts["contexts_opened"] == counts["contexts_closed"]
        assert counts["browsers_lost"] == 0
    assert mine("browser") == mine("driver") == set()


def mine(role: str) -> set[processes.Token]:
    me = processes.new_token()
    return processes.tokens(lambda token: token.role == role and token.pid == me.pid)


async def use(runtime: Runtime) -> int:
    async with runtime.session(Attempt(seed=1)) as session:
        return session.generation


async def recycled(runtime: Runtime, times: int = 1) -> None:
    await eventually(lambda: runtime.host.counts["browsers_recycled"] == times, f"{times} recycles")


async def test_a_page_that_fills_the_memory_of_its_own_process_has_its_browser_replaced_and_is_not_disturbed(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The browser's own process stays small: it is the page's that grows."""
    await use(plain := make())
    (generation,) = plain.host.usable()
    idle_mb = await generation.launched.memory_mb(0)
    limit_mb = round(idle_mb) + 250
    runtime = make(recycle_memory_mb=limit_mb)
    async with runtime.session(Attempt(seed=1)) as session:
        await runtime.host.recycler.look()
        assert runtime.host.counts["browsers_recycled"] == 0, "it is over the limit without a page's doing"
        assert await session.page.evaluate(HOARD, 400) == 400
        await runtime.host.recycler.look()
        await recycled(runtime)
        assert await use(runtime) == 2
        assert await session.page.evaluate("hoard.length") == 400
    await eventually(
        lambda: len(mine("browser")) == 2, "the first browser is closed; there is that of the other runtime"
    )
    assert f"ASYNCWORKER_RECYCLE_MEMORY_MB is {limit_mb}" in caplog.text


async def test_a_driver_is_replaced_with_its_browser_and_ends_with_its_last_context(make: Make) -> None:
    runtime = make(recycle_after=2)
    assert await use(runtime) == 1
    (first,) = mine("driver")
    async with runtime.session(Attempt(seed=1)) as session:
        assert session.generation == 1
        await recycled(runtime)
        assert len(mine("driver")) == 2
        assert await session.page.evaluate("1 + 1") == 2
    await eventually(lambda: first not in mine("driver"), "the first driver is gone")
    assert len(mine("driver")) == len(mine("browser")) == 1
    assert await use(runtime) == 2


async def test_a_browser_that_died_is_replaced_on_the_driver_that_is_there(make: Make) -> None:
    """A driver takes longer to start than a browser, and messages wait here."""
    runtime = make()
    await use(runtime)
    driver = mine("driver")
    for token in mine("browser"):
        await asyncio.to_thread(processes.kill_launch, token)
    await eventually(lambda: runtime.host.counts["browsers_lost"] == 1, "the crash is noticed")
    assert await use(runtime) == 2
    assert mine("driver") == driver
    runtime.host.counts["browsers_lost"] = 0


async def test_a_driver_that_dies_while_its_browser_ends_takes_only_that_one_with_it(
    make: Make, site: BehaviourSite
) -> None:
    runtime = make(recycle_after=1)
    with pytest.raises(Exception, match="died under this attempt"):
        async with runtime.session(Attempt(seed=1)) as session:
            (first,) = mine("driver")
            await recycled(runtime)
            await asyncio.to_thread(processes.kill_launch, first)
            await session.page.goto(f"{site.url}/never")
    async with runtime.session(Attempt(seed=1)) as session:
        await session.page.goto(site.product_url(1))
    assert runtime.host.counts["browsers_lost"] == 1
    runtime.host.counts["browsers_lost"] = 0


async def test_a_context_that_outlasts_the_limit_is_ended_and_all_of_its_browser_is_gone(
    make: Make, site: BehaviourSite
) -> None:
    runtime = make(recycle_after=1, recycle_drain_ms=200)
    with pytest.raises(BrowserRecycled, match="did not end within 200 ms"):
        async with runtime.session(Attempt(seed=1)) as session:
            (first,) = mine("browser")
            await session.page.goto(f"{site.url}/never")
    await eventually(lambda: first not in mine("browser"), "it is gone")
    assert await use(runtime) == 2


async def test_memory_is_that_of_all_processes_of_a_browser_and_its_driver_and_shared_memory_counts_once(
    make: Make,
) -> None:
    runtime = make()
    async with runtime.session(Attempt(seed=1)):
        (generation,) = runtime.host.usable()
        tokens = mine("browser") | mine("driver")
        tree = processes.carriers(lambda token: token in tokens)
        resident_mb = sum(process.memory_info().rss for process in tree) / 1e6
        driver_mb = sum(each.memory_info().rss for each in tree if "node" in each.name()) / 1e6
        shared_once_mb = await generation.launched.memory_mb(0)
        roughly_mb = await generation.launched.memory_mb(1e6)
    assert roughly_mb == pytest.approx(resident_mb, rel=0.15)
    assert driver_mb < shared_once_mb < 0.9 * resident_mb
    assert psutil.Process() not in tree
