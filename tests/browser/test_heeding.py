"""What a site says to the pages of a real browser is heard: stock Chromium, and the client of the patched Firefox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from asyncworker.errors import TooManyRequests
from asyncworker.memory_limiter import MemoryLimiter
from asyncworker.pace import DIRECT, Pace, host_of, key_of
from asyncworker.pacer import Pacer
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt, Session
from asyncworker.settings import load
from tests.site import BehaviourSite, Request, Response, page
from tests.standin.fixtures import standin

__all__ = ["standin"]  # a fixture, used by its name

pytestmark = pytest.mark.needs_browser

#: How fast the site's clock is.
FAST_S = 420


class PoliteSite(BehaviourSite):
    """Beside the others: /busy (429 until a date of its own clock), /frame and /link (which hold or lead to it)."""

    def respond(self, request: Request) -> Response:
        match request.path:
            case "/busy":
                until = formatdate(time.time() + FAST_S + 20, usegmt=True)
                return page("busy", status=429, headers={"Retry-After": until})
            case "/frame":
                return Response('<!doctype html><title>frame</title><iframe src="/busy"></iframe>')
            case "/link":
                return Response(f'<!doctype html><title>link</title><a href="{request.query["to"]}">on</a>')
        return super().respond(request)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[PoliteSite]:
    at_its_clock = lambda *_: formatdate(time.time() + FAST_S, usegmt=True)  # noqa: E731 -- a method's stead
    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", at_its_clock)
    with PoliteSite() as site:
        yield site


@pytest.fixture
def limiter() -> MemoryLimiter:
    return MemoryLimiter(lambda: time.monotonic_ns() // 1_000)


@pytest.fixture(params=["chromium", "invisible"])
async def runtime(request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
    if request.param == "invisible":
        request.getfixturevalue("standin")
    runtime = Runtime(load({}, engine=request.param, locale="en-US", timezone="UTC", humanize=False))
    yield runtime
    await runtime.close()


@asynccontextmanager
async def session(
    runtime: Runtime, limiter: MemoryLimiter, url: str, *, pace: str = "600/m", navigations: bool = False
) -> AsyncIterator[Session]:
    own = Pace(pace, jitter=0.0)
    pacer = Pacer(
        limiter,
        key=key_of(str(host_of(url))),
        pace=own,
        member="queue message",
        pace_of=lambda host: own,
        exit_=DIRECT,
        counts_by_message=False,
        seed=1,
        hold_ms=250,
        navigations=navigations,
    )
    async with runtime.session(Attempt(seed=42, pacer=pacer)) as session:
        yield session


def state(limiter: MemoryLimiter) -> Any:
    (state,) = limiter.states()
    return state


async def test_a_page_that_is_refused_says_so_and_its_site_is_held_by_its_own_clock(
    runtime: Runtime, limiter: MemoryLimiter, site: PoliteSite
) -> None:
    async def visit() -> None:
        async with session(runtime, limiter, site.url) as one:
            await one.page.goto(f"{site.url}/busy")

    with pytest.raises(TooManyRequests) as refused:
        await visit()
    assert (refused.value.status, refused.value.url) == (429, f"{site.url}/busy")
    assert (refused.value.retry_after_ms, refused.value.key) in [
        (ms, key_of(str(host_of(site.url))))
        for ms in (19_000, 20_000, 21_000)  # the seconds of two dates
    ]
    assert 17_000 < limiter.held_ms(refused.value.key) <= 21_000


async def test_a_redirect_is_refused_where_it_ends_and_other_statuses_are_not(
    runtime: Runtime, limiter: MemoryLimiter, site: PoliteSite
) -> None:
    async with session(runtime, limiter, site.url) as one:
        await one.page.goto(f"{site.url}/status/404")
        with pytest.raises(TooManyRequests, match="429"):
            await one.page.goto(f"{site.url}/redirect?to=/busy")
        await asyncio.sleep(0.3)  # the code has dealt with it, and goes on
    assert state(limiter).slowed == 1


async def test_chromium_counts_a_click_and_each_step_of_a_redirect_and_a_frame_is_no_page(
    limiter: MemoryLimiter, site: PoliteSite
) -> None:
    runtime = Runtime(load({}, engine="chromium"))
    try:
        async with session(runtime, limiter, site.url, pace="50/s", navigations=True) as one:
            await one.page.goto(f"{site.url}/frame")  # in the message's slot, which it has of `begin`
            assert state(limiter).used == 1
            await one.page.goto(f"{site.url}/link?to=/redirect?to=/cookie/get")
            assert state(limiter).used == 2
            await one.page.click("a")
            await one.page.wait_for_url("**/cookie/get")
            await one.page.reload()
            await one.page.go_back()
        assert limiter.held_ms(state(limiter).key) == 0
        asked = [path for path in site.requests.elements() if path not in ("/favicon.ico", "/busy")]
        # What is shown again out of the browser's memory has a slot, and no request.
        assert len(asked) <= state(limiter).used == 6
    finally:
        await runtime.close()


async def test_chromium_ends_the_code_after_a_click_that_is_refused_also_in_a_new_page(
    limiter: MemoryLimiter, site: PoliteSite
) -> None:
    runtime = Runtime(load({}, engine="chromium"))

    async def click(how: str) -> None:
        async with session(runtime, limiter, site.url) as one:
            await one.page.goto(f"{site.url}/link?to=/busy")
            await one.page.evaluate(how)
            await asyncio.sleep(10)

    try:
        for how in ('document.querySelector("a").click()', 'void open("/busy")'):
            with pytest.raises(TooManyRequests, match="answered 429"):
                await click(how)
            limiter.release(state(limiter).key)
    finally:
        await runtime.close()
