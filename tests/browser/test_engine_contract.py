"""What every engine does, on the fake one, a real Chromium, and invisible_playwright's client on the stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncworker import processes
from asyncworker.browser import BrowserHost
from asyncworker.engines import Engine, create
from asyncworker.errors import BrowserCrashed, ForkedBrowser, LaunchFailed, PageCrashed, PhaseTimeout
from asyncworker.identity import Identity
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt
from asyncworker.settings import Settings, child_environment, load
from asyncworker.testing import Document, FakeEngine
from tests.site import BehaviourSite
from tests.standin import Standin
from tests.standin.fixtures import standin
from tests.waiting import BUSY_S, eventually, loop_watched

__all__ = ["standin"]

#: What froze a loop did so for 3.5 s or more; a busy machine alone does for some tenths of a second.
LONGEST_FREEZE_S = 2.0

SEED = Identity(seed=1, locale="de-DE", timezone="Europe/Berlin")
OTHER_SEED = Identity(seed=2, locale="de-DE", timezone="Europe/Berlin")

FAST = {"context_timeout_ms": 3_000, "close_timeout_ms": 3_000, "launch_timeout_ms": 20_000}


@dataclass
class Subject:
    """An engine under test and how to hurt it."""

    name: str
    settings: Settings
    engine: Engine
    standin: Standin | None = None
    hosts: list[BrowserHost] = field(default_factory=list)

    @property
    def fake(self) -> FakeEngine:
        assert isinstance(self.engine, FakeEngine)
        return self.engine

    def host(self, **settings: Any) -> BrowserHost:
        host = BrowserHost(self.engine, self.settings.model_copy(update=settings))
        self.hosts.append(host)
        return host

    def tokens(self) -> set[processes.Token]:
        """Of the browsers that are up."""
        me = processes.new_token()
        return processes.tokens(lambda token: token.role == "browser" and token.pid == me.pid)

    async def crash(self) -> None:
        """SIGKILL every browser."""
        if self.name == "fake":
            for browser in self.fake.browsers:
                browser.crash()
        for token in self.tokens():
            await asyncio.to_thread(processes.kill_launch, token)

    async def crash_page(self, page: Any) -> None:
        if self.name == "fake":
            page.crash()
            await asyncio.sleep(60)
        await page.goto("chrome://crash" if self.name == "chromium" else "about:crashcontent")

    def wedge(self) -> list[int]:
        """Every browser stops answering; the pids that were stopped."""
        if self.name == "fake":
            self.fake.delays.update(new_context=math.inf, page=math.inf, close_context=math.inf)
        tokens = self.tokens()
        pids = [process.pid for process in processes.carriers(lambda token: token in tokens)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a helper process that ended between the look and the signal
                os.kill(pid, signal.SIGSTOP)
        return pids


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


@pytest.fixture(params=["fake", pytest.param("chromium", marks=pytest.mark.needs_browser), "invisible"])
async def subject(
    request: pytest.FixtureRequest, site: BehaviourSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Subject]:
    name = request.param
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))  # of what is launched; the stand-in brings its own
    built: Standin | None = request.getfixturevalue("standin") if name == "invisible" else None
    if name == "fake":
        engine: Engine = FakeEngine()
        engine.documents[site.product_url(1)] = Document(title="Linen Vase No. 1")
        settings = load({}, **FAST)
    else:
        settings = load({}, engine=name, locale=SEED.locale, timezone=SEED.timezone, **FAST)
        engine = create(settings)
    subject = Subject(name, settings, engine, built)
    yield subject
    for host in subject.hosts:
        await host.close()
    await engine.close()
    assert subject.tokens() == set()
    await eventually(lambda: not list(temporary.iterdir()), f"no temporary directory is left in {temporary}")


@pytest.fixture(autouse=True)
async def loop_is_served() -> AsyncIterator[None]:
    """No test here may freeze the loop, whatever it does to the browser."""
    async with loop_watched() as loop:
        yield
    assert loop.longest_s < LONGEST_FREEZE_S, f"the loop was not served for {loop.longest_s:.1f} s"


async def test_a_context_has_an_open_page_that_shows_what_a_site_says(subject: Subject, site: BehaviourSite) -> None:
    host = subject.host()
    async with host.context(SEED) as lease:
        await lease.page.goto(site.product_url(1))
        assert "No. 1" in await lease.page.title()
    assert host.counts == {"browsers_launched": 1, "contexts_opened": 1, "contexts_closed": 1}


async def test_contexts_share_nothing(subject: Subject, site: BehaviourSite) -> None:
    host = subject.host()
    async with host.context(SEED) as first, host.context(SEED) as second:
        assert first.browser is second.browser
        await first.context.add_cookies([{"name": "visitor", "value": "seen", "url": site.url}])
        assert len(await first.context.cookies()) == 1
        assert await second.context.cookies() == []
    async with host.context(SEED) as third:
        assert await third.context.cookies() == []


async def test_a_crash_while_idle_is_noticed_and_the_next_message_gets_a_new_browser(subject: Subject) -> None:
    host = subject.host()
    async with host.context(SEED):
        pass
    await subject.crash()
    await eventually(lambda: host.counts["browsers_lost"] == 1, "the crash is noticed")
    async with host.context(SEED) as lease:
        assert lease.generation.number == 2


async def test_a_crash_in_flight_ends_every_message_as_crashed_and_is_one_relaunch(
    subject: Subject, site: BehaviourSite
) -> None:
    runtime = Runtime(subject.settings, engine=subject.engine)
    subject.hosts.append(runtime.host)
    if subject.name == "fake":
        subject.fake.delays["page"] = math.inf
    waiting = 0

    async def message() -> None:
        nonlocal waiting
        async with runtime.session(Attempt(seed=1)) as session:
            waiting += 1
            await session.page.goto(f"{site.url}/never")

    messages = [asyncio.create_task(message()) for _ in range(3)]
    await eventually(lambda: waiting == 3, "every message is in its call")
    await subject.crash()
    outcomes = await asyncio.gather(*messages, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BrowserCrashed] * 3
    async with runtime.session(Attempt(seed=1)) as session:
        assert session.generation == 2
    assert runtime.host.counts["browsers_launched"] == 2


async def test_a_crash_of_one_page_is_that_messages_alone_and_the_browser_lives_on(
    subject: Subject, site: BehaviourSite
) -> None:
    runtime = Runtime(subject.settings, engine=subject.engine)
    subject.hosts.append(runtime.host)
    async with runtime.session(Attempt(seed=1)) as other:
        with pytest.raises(PageCrashed):
            async with runtime.session(Attempt(seed=1)) as session:
                await subject.crash_page(session.page)
        await other.page.goto(site.product_url(1))
        assert "No. 1" in await other.page.title()
    async with runtime.session(Attempt(seed=1)) as session:
        assert session.generation == 1


async def test_a_wedged_browser_costs_a_message_its_limit_and_is_replaced(
    subject: Subject, site: BehaviourSite
) -> None:
    limit_ms = 500 if subject.name == "fake" else 4_000  # which a browser that is well needs on a busy machine
    host = subject.host(context_timeout_ms=limit_ms, close_timeout_ms=limit_ms)
    async with host.context(SEED):
        pass
    stopped = subject.wedge()
    with pytest.raises(PhaseTimeout) as caught:
        async with host.context(SEED):
            raise AssertionError("a wedged browser opened a context")
    assert (caught.value.phase, caught.value.generation) == ("context", 1)
    if subject.name == "fake":
        subject.fake.delays.clear()
    async with host.context(SEED) as lease:
        assert lease.generation.number == 2
        await lease.page.goto(site.product_url(1))
    await eventually(lambda: not any(processes.lives(pid) for pid in stopped), "the wedged browser is gone")


async def test_a_browser_that_wedges_under_a_message_is_killed_when_its_context_does_not_close(
    subject: Subject, site: BehaviourSite
) -> None:
    host = subject.host(close_timeout_ms=500)
    stopped: list[int] = []
    with pytest.raises(TimeoutError):
        async with host.context(SEED) as lease:
            stopped = subject.wedge()
            async with asyncio.timeout(0.3):
                await lease.page.goto(site.product_url(1))
    if subject.name == "fake":
        subject.fake.delays.clear()
    async with host.context(SEED) as lease:
        assert lease.generation.number == 2
    await eventually(lambda: not any(processes.lives(pid) for pid in stopped), "the wedged browser is gone")


async def test_a_cancelled_launch_leaves_nothing(subject: Subject) -> None:
    if subject.standin is not None:
        subject.standin.faults(never_ready=True)
    if subject.name == "fake":
        subject.fake.delays["launch"] = math.inf
    launching = asyncio.create_task(subject.engine.launch(SEED))
    if subject.name == "fake":
        await eventually(lambda: subject.fake.begun["launch"], "the launch has begun")
    else:
        await eventually(subject.tokens, "the browser's process is there")
    launching.cancel()
    with pytest.raises((asyncio.CancelledError, LaunchFailed)):
        await launching
    await subject.engine.close()
    await eventually(lambda: not subject.tokens(), "no process of it is left")


async def test_closing_does_not_wait_for_a_process_that_outlives_its_browser(subject: Subject) -> None:
    host = subject.host(close_timeout_ms=2_000)
    if subject.standin is not None:
        subject.standin.faults(linger_ms=60_000)
    async with host.context(SEED):
        pass
    helper: subprocess.Popen[bytes] | None = None
    if subject.name == "chromium":
        (token,) = subject.tokens()
        helper = subprocess.Popen(["sleep", "60"], env=child_environment(**{processes.VARIABLE: str(token)}))
    began = time.monotonic()
    await host.close()
    assert time.monotonic() - began < 2 + BUSY_S
    assert subject.tokens() == set()
    if helper is not None:
        assert helper.wait(timeout=30) == -signal.SIGKILL


async def test_several_identities_are_served_at_once_and_none_ends_with_another(
    subject: Subject, site: BehaviourSite
) -> None:
    host = subject.host(max_browsers=2)
    async with host.context(SEED) as first:
        async with host.context(OTHER_SEED) as second:
            assert (first.generation is second.generation) == (subject.name != "invisible")
            await second.page.goto(site.product_url(1))
        await first.page.goto(site.product_url(1))
        assert "No. 1" in await first.page.title()
    assert host.counts["browsers_launched"] == (2 if subject.name == "invisible" else 1)


async def test_a_fork_is_refused_and_ends_nothing_of_its_parents(subject: Subject, site: BehaviourSite) -> None:
    host = subject.host()
    async with host.context(SEED) as lease:
        child = os.fork()
        if child == 0:
            try:
                host.context(SEED).__aenter__().send(None)
            except ForkedBrowser:
                os._exit(7)
            finally:
                os._exit(1)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        await lease.page.goto(site.product_url(1))
        assert lease.generation.lost is None


async def test_launches_leave_no_process_thread_or_descriptor_behind(subject: Subject, site: BehaviourSite) -> None:
    async def cycle(*, crashing: bool) -> None:
        host = subject.host()
        async with host.context(SEED) as lease:
            await lease.page.goto(site.product_url(1))
        if crashing:
            await subject.crash()
            await eventually(lambda: host.counts["browsers_lost"] == 1, "the crash is noticed")
        await host.close()

    def held() -> tuple[Counter[str], int]:
        threads = Counter(thread.name.rstrip("0123456789_-") for thread in threading.enumerate())
        # The stand-in's fixture keeps the pipe of each engine's output until the end of the test.
        kept = len(subject.standin.launches()) if subject.standin is not None else 0
        return threads, psutil.Process().num_fds() - kept

    await cycle(crashing=False)
    before = held()
    for crashing in (False, True):
        await cycle(crashing=crashing)
    await eventually(lambda: _no_more(before, held()), f"no more threads and descriptors than {before}")


def _no_more(before: tuple[Counter[str], int], now: tuple[Counter[str], int]) -> bool:
    """The loop's own pool may grow up to its size."""
    names = {name for name in now[0] if not name.startswith("asyncio")}
    return all(now[0][name] <= before[0][name] for name in names) and now[1] <= before[1]


async def test_a_browser_that_has_had_its_contexts_is_replaced_beside_a_message_that_goes_on(
    subject: Subject, site: BehaviourSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the lock is
    host = subject.host(recycle_after=1, recycle_memory_mb=0, max_browsers=1)
    async with host.context(SEED) as lease:
        await eventually(lambda: host.counts["browsers_recycled"] == 1, "the next one has taken over")
        async with host.context(SEED) as other:
            assert other.generation.number == 2
        await lease.page.goto(site.product_url(1))
        assert "No. 1" in await lease.page.title()
    await eventually(lambda: lease.generation.ending is not None and lease.generation.ending.done(), "it has ended")
    assert host.counts["browsers_lost"] == 0
