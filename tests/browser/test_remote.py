"""The engine remote, on a browser and on a Playwright server that run elsewhere on this machine."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncworker.engines.finding import find
from asyncworker.errors import BrowserCrashed, LaunchFailed
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt
from asyncworker.settings import child_environment, load
from tests.site import BehaviourSite
from tests.waiting import wait_until

pytestmark = pytest.mark.needs_browser


@contextmanager
def browser_elsewhere() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A Chromium with a CDP address, as `http://127.0.0.1:<port>`."""
    found = find(load({}, engine="chromium"))
    assert found is not None
    executable = found.executable
    if executable is None:
        pytest.skip("the Chromium here is Playwright's own, whose path only Playwright knows")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            str(executable),
            "--headless",
            "--no-sandbox",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
        ]
        quiet = ["--disable-background-networking", "--disable-gpu", "--no-first-run"]
        with subprocess.Popen(
            [*command, *quiet, "about:blank"],
            env=child_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as browser:
            try:
                assert browser.stderr is not None
                for line in browser.stderr:
                    if address := re.search(r"ws://([\d.:]+)/", line):
                        yield f"http://{address.group(1)}", browser
                        break
            finally:
                _kill_session(browser)


def _kill_session(browser: subprocess.Popen[str]) -> None:
    import os
    import signal

    import psutil

    below = psutil.Process(browser.pid).children(recursive=True) if browser.poll() is None else []
    for process in below:
        process.kill()
    if browser.poll() is None:
        os.kill(browser.pid, signal.SIGKILL)
    browser.wait(30)


async def test_contexts_are_lent_of_a_browser_elsewhere_and_it_stays_when_we_close() -> None:
    with BehaviourSite() as site, browser_elsewhere() as (endpoint, browser):
        runtime = Runtime(load({}, engine="remote", endpoint=endpoint))
        try:
            for path in ("/cookie/set", "/cookie/get"):
                async with runtime.session(Attempt(seed=1)) as session:
                    await session.page.goto(f"{site.url}{path}")
                    text = await session.page.inner_text("p")
            assert text == "", "the cookie of one message was seen by the next"
        finally:
            await runtime.close()
        assert browser.poll() is None
        assert runtime.host.counts == {"browsers_launched": 1, "contexts_opened": 2, "contexts_closed": 2}


async def test_the_death_of_a_browser_elsewhere_is_a_crash() -> None:
    with browser_elsewhere() as (endpoint, browser):
        runtime = Runtime(load({}, engine="remote", endpoint=endpoint))
        try:
            with pytest.raises(BrowserCrashed):
                async with runtime.session(Attempt(seed=1)) as session:
                    _kill_session(browser)
                    await session.page.wait_for_selector("#never")
        finally:
            await runtime.close()


async def test_an_endpoint_where_nothing_answers_is_a_launch_that_failed_without_the_secret() -> None:
    runtime = Runtime(load({}, engine="remote", endpoint="ws://user:hunter2@127.0.0.1:9/x", launch_timeout_ms=5_000))
    try:
        with pytest.raises(LaunchFailed, match=r"no browser answers at ws://user:\*\*\*@127\.0\.0\.1:9/x") as caught:
            async with runtime.session(Attempt(seed=1)):
                pass
        assert "hunter2" not in str(caught.value)
    finally:
        await runtime.close()


def test_waiting_is_bounded() -> None:
    with pytest.raises(AssertionError, match="not within 10 ms"):
        wait_until(lambda: False, "never", timeout_ms=10)
