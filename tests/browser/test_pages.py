"""The shipped actors' functions, in sessions of the real runtime on a real Chromium."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from playwright.async_api import Error

from actors import pages
from asyncworker import Session
from asyncworker.engines.finding import find
from asyncworker.errors import InvalidArguments, PathRefused, RefusedMessage, UrlRefused
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt
from asyncworker.settings import Settings, load
from tests.site import BehaviourSite
from tests.waiting import BUSY_S

pytestmark = [pytest.mark.needs_browser, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite(products=12) as site:
        yield site


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    settings = load({"ASYNCWORKER_ENGINE": "chromium"}, output_dir=tmp_path_factory.mktemp("output"))
    assert find(settings) is not None, "no Chromium on this machine: `asyncworker doctor --install` gets one"
    runtime = Runtime(settings)
    try:
        # From here on the browser has all its helper processes; each test has to end what it adds.
        async with runtime.session(Attempt(seed=7)) as session:
            await session.page.screenshot()
        yield runtime
    finally:
        await runtime.close()


@pytest_asyncio.fixture(loop_scope="module")
async def session(runtime: Runtime) -> AsyncIterator[Session]:
    async with runtime.session(Attempt(seed=7)) as session:
        yield session


@asynccontextmanager
async def session_with(runtime: Runtime, **changes: Any) -> AsyncIterator[Session]:
    """A session of a deployment with other settings."""
    async with runtime.session(Attempt(seed=7)) as session:
        session.settings = Settings(**(runtime.settings.model_dump() | changes))
        yield session


def html(site: BehaviourSite, body: str) -> str:
    return f"{site.url}/html?body={quote(body)}"


class CountedPage:
    """Counts the calls that go to the page."""

    def __init__(self, session: Session) -> None:
        self.calls: list[str] = []
        for name in ("goto", "evaluate", "title", "text_content", "wait_for_selector", "wait_for_function"):
            setattr(session.page, name, self._counted(name, getattr(session.page, name)))

    def _counted(self, name: str, call: Any) -> Any:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return await call(*args, **kwargs)

        return counted


# scrape


async def test_scrape_reads_what_a_script_fills_in_with_one_call_to_the_page(
    session: Session, site: BehaviourSite
) -> None:
    page = CountedPage(session)
    product = site.product(4)
    fields = {"title": "h1", "price": ".price", "maker": ".maker"}
    found = await pages.scrape.fn_async(session, site.product_url(4), fields)
    assert found == {"title": product.title, "price": product.price, "maker": f"by {product.maker}"}
    assert list(found) == list(fields)
    assert page.calls == ["goto", "evaluate"]


async def test_scrape_waits_no_longer_than_the_last_field_takes(session: Session, site: BehaviourSite) -> None:
    started = time.monotonic()
    await pages.scrape.fn_async(session, site.product_url(1), {"price": ".price"}, timeout_ms=30_000)
    assert time.monotonic() - started < 1 + BUSY_S


@pytest.mark.parametrize(
    "change",
    [
        "target.textContent = 'late'",
        "target.firstChild.data = 'late'",
        "target.append(Object.assign(document.createElement('b'), {textContent: 'late'}))",
        "target.outerHTML = '<i id=new class=target>late</i>'",
        "target.className = 'other'; document.querySelector('#hidden').className = 'target'",
        "document.documentElement.innerHTML = '<body><p class=target>late</p>'",
        "document.open(); document.write('<p class=target>late</p>'); document.close()",
    ],
)
async def test_scrape_sees_a_field_however_it_appears(session: Session, site: BehaviourSite, change: str) -> None:
    body = f"""<p class=target> </p><p id=hidden>late</p><script>setTimeout(() => {{
        const target = document.querySelector('.target'); {change}}}, 100)</script>"""
    found = await pages.scrape.fn_async(session, html(site, body), {"it": ".target"}, timeout_ms=30_000)
    assert found == {"it": "late"}


async def test_scrape_sees_a_late_attribute_and_gives_it_as_written(session: Session, site: BehaviourSite) -> None:
    body = """<a class=next href="">more</a><script>setTimeout(() => {
        document.querySelector('a').setAttribute('href', '/page/2')}, 100)</script>"""
    fields = {"next": "a.next::attr(href)", "text": "a.next"}
    assert await pages.scrape.fn_async(session, html(site, body), fields) == {"next": "/page/2", "text": "more"}


async def test_scrape_gives_text_on_one_line_and_takes_any_name_for_a_field(
    session: Session, site: BehaviourSite
) -> None:
    body = "<h1>\n  Two\n\t <b>words</b>  </h1><h1>other</h1>"
    names = {"__proto__": "h1", "a b": "h1", "": "h1"}
    found = await pages.scrape.fn_async(session, html(site, body), names)
    assert found == dict.fromkeys(names, "Two words")


async def test_scrape_waits_for_the_first_match_and_not_for_another_that_is_there_already(
    session: Session, site: BehaviourSite
) -> None:
    body = """<p class=price></p><aside><p class=price>$1</p></aside><script>setTimeout(() => {
        document.querySelector('.price').textContent = '$7'}, 100)</script>"""
    assert await pages.scrape.fn_async(session, html(site, body), {"price": ".price"}) == {"price": "$7"}


async def test_scrape_goes_on_with_the_page_that_an_interstitial_leads_to(
    session: Session, site: BehaviourSite
) -> None:
    body = f"<p>Just a moment</p><script>setTimeout(() => {{ location = '{site.product_url(2)}' }}, 150)</script>"
    found = await pages.scrape.fn_async(session, html(site, body), {"title": "h1", "price": ".price"})
    assert found == {"title": site.product(2).title, "price": site.product(2).price}


async def test_missing_fields_are_named_with_the_url_and_the_status(session: Session, site: BehaviourSite) -> None:
    fields = {"title": "title", "price": ".price", "stock": ".stock"}
    with pytest.raises(pages.FieldsMissing) as caught:
        await pages.scrape.fn_async(session, f"{site.url}/status/503", fields, timeout_ms=200)
    assert caught.value.missing == ["price", "stock"]
    assert f"{site.url}/status/503 (HTTP status 503) did not show price, stock in 200 ms" in str(caught.value)
    assert not isinstance(caught.value, RefusedMessage)  # so it is retried


async def test_a_page_that_never_yields_is_given_up_after_the_timeout(runtime: Runtime, site: BehaviourSite) -> None:
    async with asyncio.timeout(30), runtime.session(Attempt(seed=7)) as session:
        body = (
            "<p>x</p><script>setTimeout(() => { for (const end = Date.now() + 8000; Date.now() < end;); }, 20)</script>"
        )
        with pytest.raises(pages.FieldsMissing, match="price"):
            await pages.scrape.fn_async(session, html(site, body), {"price": ".price"}, timeout_ms=300)


@pytest.mark.parametrize("selector", ["", "h1[", "::attr(href)", "h1::text", ":has-text('x')", "//h1"])
async def test_a_selector_that_is_no_css_is_refused_at_once_and_named(
    session: Session, site: BehaviourSite, selector: str
) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidArguments) as caught:
        await pages.scrape.fn_async(session, site.list_url, {"good": "h1", "bad": selector}, timeout_ms=30_000)
    assert f"bad: {selector!r}" in str(caught.value)
    assert "good" not in str(caught.value)
    assert time.monotonic() - started < 1 + BUSY_S


@pytest.mark.parametrize("fields", [{}, [], ["h1"], "h1", None, {"title": None}, {"title": 3}])
async def test_fields_that_are_no_mapping_to_selectors_are_refused_without_a_request(
    session: Session, site: BehaviourSite, fields: Any
) -> None:
    with pytest.raises(InvalidArguments, match="mapping of name to CSS selector"):
        await pages.scrape.fn_async(session, site.list_url, fields)
    assert session.page.url == "about:blank"


@pytest.mark.parametrize("timeout_ms", [0, -1, 1.5, True, "10", None, 10**12])
async def test_a_timeout_that_is_none_is_refused(session: Session, site: BehaviourSite, timeout_ms: Any) -> None:
    with pytest.raises(InvalidArguments, match="timeout_ms is an integer from 1 to 600000"):
        await pages.scrape.fn_async(session, site.list_url, {"title": "h1"}, timeout_ms=timeout_ms)


# title, links, screenshot


async def test_title_is_the_pages_title(session: Session, site: BehaviourSite) -> None:
    assert await pages.title.fn_async(session, site.product_url(5)) == f"{site.product(5).title} – Holm Goods"


async def test_links_are_absolute_once_each_and_in_order(session: Session, site: BehaviourSite) -> None:
    page = CountedPage(session)
    body = f"""<base href="{site.url}/deep/er/"><a href="b">1</a><a href="../a?x=1#y">2</a><a href="b">again</a>
    <a href="mailto:a@b.c">mail</a><a href="javascript:void 0">script</a><a>none</a><a href="">here</a>
    <a href="https://other.example/">3</a><map><area href="/area"></map><a href="http://[bad">bad</a>
    <svg><a href="/svg"><text>svg</text></a></svg>"""
    assert await pages.links.fn_async(session, html(site, body)) == [
        f"{site.url}/deep/er/b",
        f"{site.url}/deep/a?x=1#y",
        f"{site.url}/deep/er/",
        "https://other.example/",
        f"{site.url}/area",
        f"{site.url}/svg",
    ]
    assert page.calls == ["goto", "evaluate"]


async def test_the_list_page_gives_the_products(session: Session, site: BehaviourSite) -> None:
    found = await pages.links.fn_async(session, site.list_url)
    assert found == [site.list_url, *(site.product_url(number) for number in range(1, 13))]


def size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


async def test_a_screenshot_is_written_below_the_output_directory(session: Session, site: BehaviourSite) -> None:
    written = await pages.screenshot.fn_async(session, site.list_url, "shots/list.png")
    assert Path(written) == session.settings.output_dir / "shots" / "list.png"
    window = session.page.viewport_size
    assert window is not None
    assert size(Path(written)) == (window["width"], window["height"])


async def test_a_full_page_is_higher_than_the_window_and_a_jpg_is_a_jpeg(session: Session, site: BehaviourSite) -> None:
    whole = await pages.screenshot.fn_async(session, site.list_url, "whole.png", full_page=True)
    assert size(Path(whole))[1] > 800
    jpeg = await pages.screenshot.fn_async(session, site.list_url, "list.JPG")
    assert Path(jpeg).read_bytes().startswith(b"\xff\xd8\xff")


@pytest.mark.parametrize("path", ["../a.png", "/tmp/a.png", "link/a.png", "a\0.png"])
async def test_a_screenshots_path_that_leads_out_is_refused_before_the_page_is_opened(
    session: Session, site: BehaviourSite, path: str, tmp_path: Path
) -> None:
    link = session.settings.output_dir / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path)
    with pytest.raises(PathRefused):
        await pages.screenshot.fn_async(session, site.list_url, path)
    assert session.page.url == "about:blank"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["", "a", "a.html", "a.png/", None, 3])
async def test_a_screenshot_is_named_as_a_picture(session: Session, site: BehaviourSite, path: Any) -> None:
    with pytest.raises(RefusedMessage):
        await pages.screenshot.fn_async(session, site.list_url, path)
    assert session.page.url == "about:blank"


# every actor

CALLS: dict[str, Callable[[Session, Any], Awaitable[object]]] = {
    "scrape": lambda session, url: pages.scrape.fn_async(session, url, {"title": "h1"}),
    "title": lambda session, url: pages.title.fn_async(session, url),
    "links": lambda session, url: pages.links.fn_async(session, url),
    "screenshot": lambda session, url: pages.screenshot.fn_async(session, url, "refused.png"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("url", ["file:///etc/passwd", "chrome://crash", "javascript:1", "example.com", "", 7, None])
async def test_a_url_that_the_settings_do_not_allow_is_never_opened(session: Session, name: str, url: Any) -> None:
    with pytest.raises(UrlRefused):
        await CALLS[name](session, url)
    assert session.page.url == "about:blank"
    assert not (session.settings.output_dir / "refused.png").exists()


@pytest.mark.parametrize("name", CALLS)
async def test_private_hosts_are_refused_when_the_settings_deny_them(
    runtime: Runtime, site: BehaviourSite, name: str
) -> None:
    before = site.requests.copy()
    async with session_with(runtime, deny_private_hosts=True) as session:
        for url in (site.list_url, site.list_url.replace("127.0.0.1", "2130706433")):
            with pytest.raises(UrlRefused, match="a loopback address, and ASYNCWORKER_DENY_PRIVATE_HOSTS is on"):
                await CALLS[name](session, url)
    assert site.requests == before


async def test_a_scheme_that_the_settings_add_is_opened(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<title>from a file</title>")
    async with session_with(runtime, allowed_schemes=("file",)) as session:
        assert await pages.title.fn_async(session, (tmp_path / "a.html").as_uri()) == "from a file"


async def test_a_page_that_does_not_load_is_playwrights_own_error(session: Session, site: BehaviourSite) -> None:
    session.page.set_default_navigation_timeout(300)
    with pytest.raises(Error, match="Timeout 300ms exceeded"):
        await pages.title.fn_async(session, f"{site.url}/never")


async def test_every_actor_stores_results_and_has_a_time_limit() -> None:
    for name in CALLS:
        actor = getattr(pages, name)
        assert actor.actor_name == f"pages.{name}"
        assert actor.options["store_results"] is True
        assert actor.options["max_retries"] == 3
        assert actor.options["time_limit"] == 60_000
