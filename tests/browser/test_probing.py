"""A real Chromium that answers its protocol and loads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from asyncworker import processes
from asyncworker.health_server import local_page
from asyncworker.probing import Prober, State
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt
from asyncworker.settings import load
from tests.hung import network_processes, suspend
from tests.site import BehaviourSite
from tests.waiting import eventually

pytestmark = pytest.mark.needs_browser


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


@pytest.fixture
async def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runtime]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = load({}, engine="chromium", probe_interval_ms=500, probe_timeout_ms=2_000, close_timeout_ms=2_000)
    runtime = Runtime(settings)
    yield runtime
    await runtime.close()
    me = processes.new_token()
    assert not processes.tokens(lambda token: token.pid == me.pid)


@pytest.fixture
def local_url() -> Iterator[str]:
    page = local_page()
    assert page is not None
    server, url = page
    from asyncworker.health_server import Servers

    servers = Servers()
    servers.serve(server, "probe-page")
    yield url
    servers.stop()


def freeze_the_network() -> list[psutil.Process]:
    """Of this process's Chromiums."""
    me = processes.new_token()
    return suspend(network_processes(processes.carriers(lambda token: token.role == "browser" and token.pid == me.pid)))


async def test_a_browser_that_answers_and_finishes_no_navigation_is_replaced_and_messages_run_on_the_next_one(
    runtime: Runtime, site: BehaviourSite, local_url: str
) -> None:
    prober = Prober(runtime.host, runtime.settings, local_url=local_url)
    looking = asyncio.create_task(prober.run())
    async with runtime.session(Attempt(seed=1)) as session:
        await session.page.goto(site.product_url(1))
    await eventually(lambda: prober.last is not None and prober.last.failure is None, "a probe has passed")
    assert prober.standing.state is State.ready
    frozen = await asyncio.to_thread(freeze_the_network)
    assert frozen
    (generation,) = runtime.host.usable()
    context = await generation.launched.new_context(generation.identity, {})
    page = await context.new_page()
    assert await page.evaluate("1 + 1") == 2, "it answers its protocol"
    await eventually(lambda: prober.standing.state is State.sick, "it is noticed")
    await eventually(lambda: prober.standing.state is State.ready, "another one loads pages", timeout_ms=20_000)
    async with runtime.session(Attempt(seed=1)) as session:
        await session.page.goto(site.product_url(2))
        assert session.generation == 2
    await eventually(lambda: not any(processes.lives(one.pid) for one in frozen), "the first one is gone")
    looking.cancel()
    await asyncio.wait({looking})


async def test_a_probe_takes_a_browser_and_its_worker_a_fraction_of_a_second(runtime: Runtime, local_url: str) -> None:
    prober = Prober(runtime.host, runtime.settings, local_url=local_url)
    await runtime.host.warm(runtime.identity(1))
    prober.look()
    await eventually(lambda: prober.last, "the probe has ended")
    assert prober.last is not None
    assert prober.last.failure is None
    assert 0 < prober.last.ms < 2_000
