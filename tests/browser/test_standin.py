"""The stand-in engine under the real client: what it can do, and that its faults are as the real client meets them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from asyncworker import processes
from asyncworker.engines import storage_state
from asyncworker.settings import leave_invisible_core_alone
from tests.site import BehaviourSite
from tests.standin import Standin
from tests.standin.fixtures import standin
from tests.waiting import BUSY_S, eventually, wait_until

__all__ = ["standin"]  # a fixture, used by its name


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


def client(seed: int = 42, **options: Any) -> Any:
    leave_invisible_core_alone()
    from invisible_playwright.async_api import InvisiblePlaywright

    said = {"headless": True, "humanize": False, "locale": "en-US", "timezone": "UTC", **options}
    return InvisiblePlaywright(seed=seed, **said)


@asynccontextmanager
async def launched(standin: Standin, seed: int = 42, **options: Any) -> AsyncIterator[tuple[Any, psutil.Process]]:
    async with client(seed, **options) as browser:
        process = psutil.Process(standin.launches()[-1]["pid"])
        yield browser, process
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # a test that ends here with a wedged engine need not wait for it


def html(body: str) -> str:
    return "data:text/html," + body


class Errors:
    """The client's error classes, imported when used."""

    def __getattr__(self, name: str) -> type[Exception]:
        from invisible_playwright import async_api

        found: type[Exception] = getattr(async_api, name)
        return found


errors = Errors()


def test_the_sealed_engine_is_found_where_production_looks(standin: Standin) -> None:
    from invisible_core import ensure_binary
    from invisible_core.download import engine_status

    there, described = engine_status()
    assert there, described
    assert ensure_binary() == standin.executable


async def test_each_tree_is_found_though_the_process_has_used_another(standin: Standin) -> None:
    async with launched(standin):
        pass
    assert len(standin.launches()) == 1


async def test_launch_and_close_take_well_under_a_second_and_are_logged(standin: Standin) -> None:
    started = time.monotonic()
    async with client() as browser:
        assert (browser.version, browser.is_connected()) == ("151.0", True)
        context = await browser.new_context()
        await context.new_page()
        await context.close()
    assert time.monotonic() - started < 1 + BUSY_S
    events = [record["event"] for record in standin.log()]
    assert events == ["launched", "ready", "context opened", "page opened", "page closed", "context closed", "closing"]
    assert standin.log("closing")[0]["code"] == 0


async def test_the_log_tells_identities_apart_and_shows_the_token(standin: Standin) -> None:
    for seed in (42, 42, 7):
        async with client(seed, extra_args=["--other"]):
            pass
    first, again, other = standin.launches()
    assert first["prefs"] == again["prefs"] != other["prefs"]
    assert first["pid"] != again["pid"]
    assert first["hw_seed"] == again["hw_seed"] is not None
    assert "--other" in first["argv"]
    assert first["client_token"]
    assert first["token"] is None
    text = str(processes.new_token())
    environment = os.environ | standin.environment | {processes.VARIABLE: text}  # noqa: TID251 -- a test's own
    subprocess.run(
        [standin.executable], env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    assert standin.launches()[-1]["token"] == text


async def test_a_page_is_fetched_and_read(standin: Standin, site: BehaviourSite) -> None:
    async with launched(standin) as (browser, _):
        page = await browser.new_page()
        response = await page.goto(f"{site.url}/status/503?retry_after=3")
        assert (response.status, response.headers["retry-after"]) == (503, "3")
        assert (await page.title(), page.url) == ("status 503", f"{site.url}/status/503?retry_after=3")
        assert await page.locator("p").inner_text() == "status 503"
        assert "<p>status 503</p>" in await page.content()
        assert b"<p>status 503</p>" in await response.body()
        moved = await page.goto(f"{site.url}/redirect?to={site.url}/cookie/get")
        assert (moved.status, page.url) == (200, f"{site.url}/cookie/get")


async def test_simple_selectors_read_a_page(standin: Standin) -> None:
    async with launched(standin) as (browser, _):
        page = await browser.new_page()
        await page.goto(html("<ul id=list class='a b'><li>one<li title=second>t<b>w</b>o</ul><p hidden>no</p>"))
        assert await page.locator("ul.b > li".replace(" >", "")).count() == 2
        assert await page.inner_text("#list") == "one\ntwo"
        assert await page.locator("li").nth(1).text_content() == "two"
        assert await page.get_attribute("li[title]", "title") == "second"
        assert [await page.is_visible("#list"), await page.is_visible("p")] == [True, False]
        assert await page.locator("li").all_inner_texts() == ["one", "two"]
        assert await (await page.wait_for_selector("b")).inner_text() == "w"
        assert await page.locator("section").count() == 0
        with pytest.raises(errors.Error, match="strict mode violation"):
            await page.locator("li").inner_text()
        with pytest.raises(errors.Error, match="does not know the selector"):
            await page.locator("li:first-child").count()


async def test_some_javascript_is_evaluated_and_the_rest_is_refused(standin: Standin) -> None:
    async with launched(standin) as (browser, _):
        page = await browser.new_page()
        await page.goto(html("<title>T</title><h1>H</h1>"))
        assert await page.evaluate('{"a": [1, true, null, "x"]}') == {"a": [1, True, None, "x"]}
        assert await page.evaluate("() => document.title") == "T"
        assert await page.evaluate("document.querySelector('h1').textContent") == "H"
        assert await page.evaluate("([a, b]) => a + b", [1, 2]) == 3
        assert "Firefox/151.0" in await page.evaluate("navigator.userAgent")
        assert await page.evaluate("location.href") == page.url
        assert await page.locator("h1").evaluate("e => e.tagName") == "H1"
        await page.set_content("<title>U</title>")
        assert await page.title() == "U"
        with pytest.raises(errors.Error, match="Error: boom"):
            await page.evaluate("() => { throw new Error('boom'); }")
        with pytest.raises(errors.Error, match="does not run"):
            await page.evaluate("() => { for (;;) {} }")


async def test_cookies_are_sent_set_read_and_cleared_for_each_context(standin: Standin, site: BehaviourSite) -> None:
    async with launched(standin) as (browser, _):
        one, other = [await browser.new_context() for _ in range(2)]
        await one.add_cookies([{"name": "given", "value": "1", "url": site.url}])
        page, elsewhere = await one.new_page(), await other.new_page()
        await page.goto(f"{site.url}/cookie/set")
        assert {cookie["name"]: cookie["value"] for cookie in await one.cookies()} == {"given": "1", "visitor": "seen"}
        await page.goto(f"{site.url}/cookie/get")
        assert await page.inner_text("p") == "given=1; visitor=seen" == await page.evaluate("document.cookie")
        await elsewhere.goto(f"{site.url}/cookie/get")
        assert await elsewhere.inner_text("p") == ""
        await page.evaluate("document.cookie = 'mine=2'")
        assert "mine" in {cookie["name"] for cookie in await one.cookies(site.url)}
        await one.clear_cookies()
        assert await one.cookies() == []


async def test_local_storage_is_kept_for_each_context_and_origin(standin: Standin, site: BehaviourSite) -> None:
    async with launched(standin) as (browser, _):
        one, other = [await browser.new_context() for _ in range(2)]
        page, elsewhere = await one.new_page(), await other.new_page()
        for each in (page, elsewhere):
            await each.goto(f"{site.url}/headers")
        await page.evaluate("() => localStorage.setItem('key', 'value')")
        await page.goto(f"{site.url}/cookie/get")
        assert await page.evaluate("() => localStorage.getItem('key')") == "value"
        assert await page.evaluate("JSON.stringify(localStorage)") == '{"key":"value"}'
        assert await elsewhere.evaluate("() => localStorage.getItem('key')") is None


async def test_the_package_restores_local_storage_into_a_context(standin: Standin, site: BehaviourSite) -> None:
    saved = {"origin": site.url, "localStorage": [{"name": "kept", "value": "it's"}]}
    elsewhere = {"origin": "http://elsewhere.example", "localStorage": [{"name": "other", "value": "1"}]}
    async with launched(standin) as (browser, _):
        context = await browser.new_context()
        await storage_state.restore(context, {"origins": [elsewhere, saved]})
        await context.add_init_script("localStorage.setItem('simple', 'run')")
        page = await context.new_page()
        await page.goto(f"{site.url}/headers")
        assert await page.evaluate("() => Object.entries(localStorage)") == [["kept", "it's"], ["simple", "run"]]
        await page.evaluate("() => localStorage.setItem('kept', 'changed')")
        await page.goto(f"{site.url}/cookie/get")
        assert await page.evaluate("() => localStorage.getItem('kept')") == "changed"


async def test_a_screenshot_is_a_png_of_one_pixel(standin: Standin) -> None:
    async with launched(standin) as (browser, _):
        taken = await (await browser.new_page()).screenshot()
    assert taken[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", taken[16:24]) == (1, 1)


async def test_a_slow_page_blocks_no_other(standin: Standin, site: BehaviourSite) -> None:
    async with launched(standin) as (browser, _):
        slow, quick = [await browser.new_page() for _ in range(2)]
        waiting = asyncio.ensure_future(slow.goto(f"{site.url}/never"))
        await eventually(lambda: standin.log("navigating"), "the slow page is being fetched")
        for _ in range(3):
            await quick.goto(f"{site.url}/headers")
        assert not waiting.done()
        await slow.goto(f"{site.url}/headers")  # another navigation takes its place
        with pytest.raises(errors.Error, match="interrupted by another navigation"):
            await waiting


async def test_no_proxy_of_the_environment_is_used(standin: Standin, site: BehaviourSite) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        async with launched(standin) as (browser, _):
            assert (await (await browser.new_page()).goto(f"{site.url}/headers")).status == 200


async def test_an_address_where_nobody_listens_is_an_error(standin: Standin) -> None:
    async with launched(standin) as (browser, _):
        page = await browser.new_page()
        with pytest.raises(errors.Error, match="NS_ERROR_CONNECTION_REFUSED"):
            await page.goto("http://127.0.0.1:9/")
        with pytest.raises(errors.Error, match="NS_ERROR_UNKNOWN_PROTOCOL"):
            await page.goto("gopher://here/")
        await page.goto(html("<title>after</title>"))
        assert await page.title() == "after"


async def test_a_kill_while_idle_is_announced_by_nothing(standin: Standin) -> None:
    async with launched(standin) as (browser, process):
        page = await browser.new_page()
        heard: list[str] = []
        browser.on("disconnected", lambda _: heard.append("disconnected"))
        process.kill()
        await eventually(lambda: not processes.lives(process.pid), "the engine is dead")
        with pytest.raises(errors.Error):
            await page.title()
        assert (browser.is_connected(), heard) == (True, [])
    assert heard == ["disconnected"]


@pytest.mark.parametrize(("address", "code"), [("about:crashparent", -signal.SIGSEGV), ("about:exit?3", 3)])
async def test_an_engine_that_ends_itself_fails_what_is_in_flight(standin: Standin, address: str, code: int) -> None:
    async with launched(standin) as (browser, process):
        page, other = [await browser.new_page() for _ in range(2)]
        hanging = asyncio.ensure_future(other.goto("about:hang"))
        await eventually(lambda: standin.log("navigating"), "the goto is in flight")
        with pytest.raises(errors.TargetClosedError):
            await page.goto(address)
        with pytest.raises(errors.TargetClosedError):
            await hanging
        await eventually(lambda: not processes.lives(process.pid), "the engine is dead")
    assert standin.log("closing")[0]["code"] == code
    assert not list(standin.directory.rglob("core*"))


async def test_crashed_content_fires_crash_and_the_browser_lives(standin: Standin) -> None:
    async with launched(standin) as (browser, _):
        page, other = [await browser.new_page() for _ in range(2)]
        crashed = asyncio.Event()
        page.on("crash", lambda _: crashed.set())
        with pytest.raises(errors.TimeoutError):
            await page.goto("about:crashcontent", timeout=300)
        await asyncio.wait_for(crashed.wait(), 30)
        await other.goto(html("<title>alive</title>"))
        assert (await other.title(), browser.is_connected()) == ("alive", True)
        await page.close()


async def test_a_page_that_hangs_costs_its_goto_the_timeout(standin: Standin) -> None:
    async with launched(standin) as (browser, _):
        page = await browser.new_page()
        with pytest.raises(errors.TimeoutError):
            await page.goto("about:hang", timeout=200)
        await page.close()
        await browser.new_page()


async def test_a_muted_method_is_never_answered_until_a_new_browser(standin: Standin) -> None:
    async with launched(standin) as (browser, process):
        await browser.new_context()
        standin.faults(mute=["Browser.createBrowserContext"])
        waiting = asyncio.ensure_future(browser.new_context())
        assert not (await asyncio.wait({waiting}, timeout=0.3))[0]
        assert len(standin.log("context opened")) == 1
        process.kill()
        with pytest.raises(errors.TargetClosedError):
            await waiting
    standin.faults()
    async with launched(standin) as (browser, _):
        await browser.new_context()


async def test_an_engine_ends_on_a_message_when_told(standin: Standin) -> None:
    async with launched(standin) as (browser, process):
        page = await browser.new_page()
        standin.faults(exit_on={"Page.navigate": -int(signal.SIGKILL)})
        with pytest.raises(errors.TargetClosedError):
            await page.goto(html("x"))
        await eventually(lambda: not processes.lives(process.pid), "the engine is dead")


async def test_a_slow_start_is_slow(standin: Standin) -> None:
    standin.faults(start_delay_ms=600)
    async with launched(standin):
        launched_at, ready_at = (standin.log(event)[0]["at"] for event in ("launched", "ready"))
    assert ready_at - launched_at >= 0.6


@pytest.mark.parametrize("fault", [{"start_delay_ms": 60_000}, {"never_ready": True}])
async def test_a_launch_that_is_not_ready_ends_when_its_engine_is_killed(
    standin: Standin, fault: dict[str, Any]
) -> None:
    standin.faults(**fault)
    starting = client()
    entering = asyncio.ensure_future(starting.__aenter__())
    await eventually(lambda: standin.launches(), "the engine was launched")
    assert not entering.done()
    os.kill(standin.launches()[0]["pid"], signal.SIGKILL)
    with pytest.raises(errors.Error):
        await entering


@pytest.mark.parametrize("fault", [{"start_delay_ms": 60_000}, {"never_ready": True}, {"mute": ["*"]}, {}])
def test_the_engine_ends_with_the_process_that_launched_it(standin: Standin, fault: dict[str, Any]) -> None:
    standin.faults(**fault)
    environment = os.environ | standin.environment  # noqa: TID251 -- a test's own
    script = (
        "import os, subprocess, sys\n"
        "taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # 3 and 4, for one\n"
        "read, _write = os.pipe(); _other, out = os.pipe()\n"
        "os.dup2(read, 3); os.dup2(out, 4)\n"
        "subprocess.Popen([sys.argv[1]], pass_fds=(3, 4), stdout=subprocess.DEVNULL)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, standin.executable], stdin=subprocess.PIPE, env=environment, close_fds=True
    )
    wait_until(lambda: standin.launches(), "the engine was launched")
    pid = standin.launches()[0]["pid"]
    assert processes.lives(pid)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not processes.lives(pid), "the engine ended with its parent")


async def test_an_engine_that_ends_at_its_start_fails_the_launch(standin: Standin) -> None:
    standin.faults(exit_at_start=9, says_at_start="no display, said the stand-in")
    with pytest.raises(errors.Error) as caught:
        await client().__aenter__()
    # The client may see the end of the output before that of the process, and then writes to it.
    text = str(caught.value)
    quoted = "code : 9" in text and "no display, said the stand-in" in text
    assert quoted or "Broken pipe" in text or "the pipe" in text, text


async def test_a_lingering_child_outlives_a_killed_engine_and_has_its_environment(standin: Standin) -> None:
    standin.faults(linger_ms=500)
    async with launched(standin) as (_, process):
        child = psutil.Process(standin.log("lingering")[0]["child"])
        assert child.environ()["INVPW_SESSION_TOKEN"] == standin.launches()[0]["client_token"]
        child.suspend()  # so that it does not end before it is looked at
        process.kill()
        await eventually(lambda: not processes.lives(process.pid), "the engine is dead")
        assert processes.lives(child.pid)
        child.resume()
        await eventually(lambda: not processes.lives(child.pid), "the child ends, too")


async def test_a_close_waits_for_the_lingering_child(standin: Standin) -> None:
    standin.faults(linger_ms=700)
    async with client():
        child = standin.log("lingering")[0]["child"]
        started = time.monotonic()
    assert time.monotonic() - started >= 0.7
    assert not processes.lives(child)


async def test_a_stopped_engine_answers_nothing_and_goes_on_when_continued(standin: Standin) -> None:
    async with launched(standin) as (browser, process):
        page = await browser.new_page()
        process.suspend()
        waiting = asyncio.ensure_future(page.title())
        assert not (await asyncio.wait({waiting}, timeout=0.2))[0]
        process.resume()
        assert await waiting == ""


def test_an_unknown_fault_is_refused(standin: Standin) -> None:
    with pytest.raises(ValueError, match="no such fault: slow_start; there are exit_at_start"):
        standin.faults(slow_start=1)
