"""Sessions on a real Chromium, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from asyncworker import processes
from asyncworker.ending import Interruption, current_interruption
from asyncworker.errors import BrowserCrashed, LaunchFailed, PageCrashed, SessionOver
from asyncworker.runtime import AFTER_DEADLINE_MS, Runtime, open_session
from asyncworker.session import Attempt
from asyncworker.settings import load
from tests.chromium import executable
from tests.site import BehaviourSite
from tests.waiting import eventually

pytestmark = pytest.mark.needs_browser


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    runtime = Runtime(load({}, engine="chromium"))
    yield runtime
    await runtime.close()
    assert runtime.host.counts["contexts_opened"] == runtime.host.counts["contexts_closed"]
    assert runtime.slots.in_use == 0


def mine() -> set[processes.Token]:
    me = processes.new_token()
    return processes.tokens(lambda token: token.role == "browser" and token.pid == me.pid)


async def test_a_session_gives_what_the_seed_derives_the_same_each_time(runtime: Runtime) -> None:
    numbers = []
    for _ in range(2):
        async with runtime.session(Attempt(seed=42)) as session:
            numbers.append([session.random.random() for _ in range(3)])
            assert (session.seed, session.identity.seed, session.generation) == (42, 42, 1)
    assert numbers[0] == numbers[1]


async def test_locale_and_time_zone_of_the_settings_are_the_contexts(site: BehaviourSite) -> None:
    runtime = Runtime(load({}, engine="chromium", locale="de-DE", timezone="Asia/Tokyo"))
    try:
        async with runtime.session(Attempt(seed=1)) as session:
            await session.page.goto(f"{site.url}/cookie/get")
            zone = "Intl.DateTimeFormat().resolvedOptions().timeZone"
            assert await session.page.evaluate(f"[navigator.language, {zone}]") == ["de-DE", "Asia/Tokyo"]
    finally:
        await runtime.close()


async def test_a_session_that_is_over_refuses_every_use(runtime: Runtime) -> None:
    async with runtime.session(Attempt(seed=1, message_id="m", actor="pages.title")) as session:
        pass
    for name in ("page", "context", "browser"):
        with pytest.raises(SessionOver, match=r"message m \(pages\.title\) is over"):
            getattr(session, name)


async def test_what_code_kept_of_a_session_that_is_cancelled_from_outside_is_refused_and_launches_nothing(
    runtime: Runtime, site: BehaviourSite
) -> None:
    interruption = Interruption()
    current_interruption.set(interruption)  # this test's own context
    async with runtime.session(Attempt(seed=1, message_id="m", actor="pages.title")) as session:
        page, context, browser = session.page, session.context, session.browser
        second = await context.new_page()
        await page.goto(f"{site.url}/cookie/get")
        locator = page.locator("p")
        interruption.tell("TimeLimitExceeded")
        calls = [
            lambda: session.page.goto(f"{site.url}/cookie/get"),
            lambda: page.title(),
            lambda: second.title(),
            lambda: context.new_page(),
            lambda: browser.new_context(),
            lambda: browser.new_page(),
            lambda: browser.close(),
            lambda: browser.browser_type.launch(),
            lambda: context.browser.browser_type.launch(),  # type: ignore[union-attr]
        ]
        for call in calls:
            with pytest.raises(SessionOver, match=r"message m \(pages\.title\) is over \(TimeLimitExceeded\)"):
                await call()
        await eventually(lambda: runtime.slots.in_use == 0, "its slot is back, although its code goes on")
        with pytest.raises(Exception, match="has been closed"):
            await locator.inner_text()
        with pytest.raises(SessionOver):
            async with runtime.session(Attempt(seed=2)):
                pass
        assert len(mine()) == 1
    assert browser.is_connected()


async def test_a_crash_ends_code_that_waits_for_something_else_and_no_other_error_of_its_own(runtime: Runtime) -> None:
    with pytest.raises(BrowserCrashed) as caught:
        async with runtime.session(Attempt(seed=1)):
            (token,) = mine()
            await asyncio.to_thread(processes.kill_launch, token)
            await asyncio.sleep(60)
    assert caught.value.generation == 1
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_crash_in_a_call_is_named_with_the_call_as_its_cause(runtime: Runtime, site: BehaviourSite) -> None:
    with pytest.raises(BrowserCrashed) as caught:
        async with runtime.session(Attempt(seed=1)) as session:
            loading = asyncio.create_task(session.page.goto(f"{site.url}/never"))
            await asyncio.sleep(0)
            (token,) = mine()
            await asyncio.to_thread(processes.kill_launch, token)
            await loading
    assert type(caught.value.__cause__).__name__ == "TargetClosedError"


async def test_a_crashed_page_is_named_and_the_browser_lives_on(runtime: Runtime) -> None:
    for _ in range(2):
        with pytest.raises(PageCrashed):
            async with runtime.session(Attempt(seed=1)) as session:
                await session.page.goto("chrome://crash")
    assert runtime.host.counts["browsers_launched"] == 1


async def test_a_page_that_the_code_closed_itself_is_no_crash(runtime: Runtime) -> None:
    with pytest.raises(Exception, match="has been closed") as caught:
        async with runtime.session(Attempt(seed=1)) as session:
            await session.page.close()
            await session.page.title()
    assert type(caught.value).__name__ == "TargetClosedError"


async def test_waits_are_never_longer_than_what_is_left_of_the_message(runtime: Runtime, site: BehaviourSite) -> None:
    deadline = asyncio.get_running_loop().time() + 2
    async with runtime.session(Attempt(seed=1, deadline=deadline)) as session:
        with pytest.raises(Exception, match=r"Timeout \d+ms exceeded") as caught:
            await session.page.goto(f"{site.url}/never")
    limit_ms = int(re.search(r"Timeout (\d+)ms", str(caught.value))[1])  # type: ignore[index]
    assert limit_ms <= 2_000 + AFTER_DEADLINE_MS


async def test_a_page_with_a_beforeunload_trap_is_closed(runtime: Runtime, site: BehaviourSite) -> None:
    async with runtime.session(Attempt(seed=1)) as session:
        await session.page.goto(f"{site.url}/beforeunload")
        await session.page.click("p")


async def test_a_page_whose_script_never_yields_is_closed_too(runtime: Runtime, site: BehaviourSite) -> None:
    async with runtime.session(Attempt(seed=1)) as session:
        await session.page.goto(f"{site.url}/spin")
        with pytest.raises(Exception, match="Timeout"):
            await session.page.wait_for_selector("#never", timeout=500)
    async with runtime.session(Attempt(seed=1)) as session:
        await session.page.goto(f"{site.url}/cookie/get")
    assert runtime.host.counts["browsers_launched"] == 1


async def test_an_executable_that_is_no_browser_is_a_launch_that_failed_and_leaves_nothing() -> None:
    runtime = Runtime(load({}, engine="chromium", executable_path="/bin/true", launch_timeout_ms=10_000))
    try:
        with pytest.raises(LaunchFailed, match="asyncworker doctor"):
            async with runtime.session(Attempt(seed=1)):
                pass
        assert mine() == set()
    finally:
        await runtime.close()


async def test_a_browser_that_never_answers_is_a_launch_that_failed_in_time(tmp_path) -> None:  # type: ignore[no-untyped-def]
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    runtime = Runtime(load({}, engine="chromium", executable_path=str(silent), launch_timeout_ms=1_500))
    try:
        with pytest.raises(LaunchFailed):
            async with runtime.session(Attempt(seed=1)):
                pass
        assert mine() == set()
    finally:
        await runtime.close()


@pytest.mark.parametrize("kills", [1, 2])
async def test_a_browser_that_is_killed_while_it_starts_is_launched_once_more(
    kills: int, tmp_path: Path, site: BehaviourSite
) -> None:
    chromium = await asyncio.to_thread(executable)
    killed = tmp_path / "killed"
    script = tmp_path / "browser"
    script.write_text(
        f"""#!/bin/sh
echo >> '{killed}'
[ $(wc -l < '{killed}') -le {kills} ] && kill -KILL $$
exec '{chromium}' "$@"
"""
    )
    script.chmod(0o755)
    runtime = Runtime(load({}, engine="chromium", executable_path=script))
    expected = pytest.raises(LaunchFailed) if kills == 2 else contextlib.nullcontext()
    try:
        with expected:
            async with runtime.session(Attempt(seed=1)) as session:
                await session.page.goto(f"{site.url}/cookie/get")
        assert len(killed.read_text()) == 2
    finally:
        await runtime.close()
    assert mine() == set()


async def test_open_session_outside_a_worker_has_a_browser_of_its_own_and_closes_it(
    monkeypatch: pytest.MonkeyPatch, site: BehaviourSite
) -> None:
    monkeypatch.setenv("ASYNCWORKER_ENGINE", "chromium")
    async with open_session(seed=7) as session:
        await session.page.goto(f"{site.url}/cookie/get")
        assert session.seed == 7
        assert len(mine()) == 1
    assert mine() == set()


async def test_log_lines_of_a_session_carry_message_attempt_seed_and_browser(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="asyncworker"):
        async with runtime.session(Attempt(seed=9, message_id="m", actor="pages.title", number=2)) as session:
            session.log.info("hello")
    (record,) = [record for record in caplog.records if "hello" in record.getMessage()]
    said = record.getMessage()
    for fact in ("message_id=m", "actor=pages.title", "attempt=2", "seed=9", "browser=1"):
        assert fact in said
