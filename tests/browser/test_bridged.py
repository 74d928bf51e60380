"""The work of real pages through invisible_playwright's real client, on the stand-in with a Chromium behind."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from actors import pages
from asyncworker import processes
from asyncworker.errors import BrowserCrashed, PageCrashed
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt, Session
from asyncworker.settings import load
from tests.site import BehaviourSite
from tests.standin import Standin
from tests.standin.fixtures import bridged_standin  # noqa: F401 -- a fixture
from tests.waiting import eventually, wait_until

pytestmark = pytest.mark.needs_browser

VIEWPORT = {"width": 800, "height": 600}


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite(products=12) as site:
        yield site


@contextlib.asynccontextmanager
async def runtime_of(engine: str, output_dir: Path, **settings: Any) -> AsyncIterator[Runtime]:
    places = {"locale": "en-US", "timezone": "UTC", "launch_timeout_ms": 20_000, "close_timeout_ms": 5_000}
    runtime = Runtime(load({}, engine=engine, output_dir=output_dir, **(places | settings)))
    try:
        yield runtime
    finally:
        await runtime.close()


@pytest.fixture
async def runtime(bridged_standin: Standin, tmp_path: Path) -> AsyncIterator[Runtime]:  # noqa: F811 -- the fixture
    async with runtime_of("invisible", tmp_path / "output", humanize=False) as runtime:
        yield runtime


@pytest.fixture
async def session(runtime: Runtime) -> AsyncIterator[Session]:
    async with runtime.session(Attempt(seed=7)) as session:
        yield session


def html(site: BehaviourSite, body: str) -> str:
    return f"{site.url}/html?body={quote(body)}"


def chromium_of(standin: Standin) -> psutil.Process:
    return psutil.Process(standin.log("chromium")[-1]["child"])


# --- the shipped actors


async def everything(session: Session, site: BehaviourSite) -> dict[str, Any]:
    """What each shipped actor gives of the shop."""
    product, shop = site.product_url(4), site.list_url
    fields = {"title": "h1", "price": ".price", "maker": ".maker", "next": "a::attr(href)"}
    picture = await pages.screenshot.fn_async(session, product, "product.png", full_page=True)
    photo = await pages.screenshot.fn_async(session, shop, "shop.jpg")
    return {
        "scrape": await pages.scrape.fn_async(session, product, fields),
        "title": await pages.title.fn_async(session, product),
        "status": await pages.title.fn_async(session, f"{site.url}/status/404"),
        "redirect": await pages.title.fn_async(session, f"{site.url}/redirect?to={shop}"),
        "links": await pages.links.fn_async(session, shop),
        "size": size_of(Path(picture).read_bytes()),
        "photo": Path(photo).read_bytes()[:3],
    }


def size_of(picture: bytes) -> tuple[int, int]:
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


async def test_the_shipped_actors_give_what_they_give_on_chromium(
    runtime: Runtime, site: BehaviourSite, tmp_path: Path
) -> None:
    options = {"viewport": VIEWPORT, "device_scale_factor": 1}
    async with runtime.session(Attempt(seed=7), context_options=options) as session:
        bridged = await everything(session, site)
    async with (
        runtime_of("chromium", tmp_path / "chromium") as chromium,
        chromium.session(Attempt(seed=7), context_options=options) as session,
    ):
        assert bridged == await everything(session, site)
    product = site.product(4)
    assert bridged["scrape"]["title"] == product.title
    assert bridged["scrape"]["price"] == product.price
    assert bridged["title"].startswith(product.title)
    assert len(bridged["links"]) >= 12
    assert bridged["size"][0] == 800
    assert bridged["photo"] == b"\xff\xd8\xff"


# --- the work of a page


FORM = """<label>Name <input id=name></label><label><input type=checkbox id=agree> I agree</label>
<select id=size><option>S<option>L</select><p id=said></p><div style="height: 3000px"></div>
<button onclick="said.textContent = [document.querySelector('#name').value, agree.checked, size.value]">Send</button>
"""


async def test_a_form_is_found_by_role_filled_and_sent(session: Session, site: BehaviourSite) -> None:
    await session.page.goto(html(site, FORM))
    page = session.page
    await page.get_by_label("Name").fill("Ada")
    await page.get_by_label("Name").press_sequentially(" L!")
    await page.get_by_role("checkbox", name="I agree").check()
    await page.locator("#size").select_option("L")
    await page.get_by_role("button", name="Send").click()  # far below what the window shows
    assert await page.inner_text("#said") == "Ada L!,true,L"


async def test_a_click_waits_until_its_target_can_be_clicked(session: Session, site: BehaviourSite) -> None:
    await session.page.goto(html(site, """<button disabled onclick="this.textContent = 'clicked'">wait</button>
        <script>setTimeout(() => { document.querySelector('button').disabled = false }, 150)</script>"""))  # fmt: skip
    await session.page.click("button")
    assert await session.page.inner_text("button") == "clicked"


async def test_a_covered_target_is_not_clicked(session: Session, site: BehaviourSite) -> None:
    await session.page.goto(html(site, """<button onclick="this.textContent = 'clicked'">under</button>
        <div style="position: fixed; inset: 0"></div>"""))  # fmt: skip
    with pytest.raises(Exception, match=r"would have landed elsewhere \(<div>"):
        await session.page.click("button", timeout=400)
    assert await session.page.inner_text("button") == "under"


async def test_what_a_script_brings_is_waited_for(session: Session, site: BehaviourSite) -> None:
    await session.page.goto(html(site, """<script>
        setTimeout(() => { document.body.innerHTML = '<b>late</b>'; history.pushState({}, '', '/moved') }, 100);
        setTimeout(() => { window.done = {at: 'last'} }, 200)</script>"""))  # fmt: skip
    page = session.page
    found = await page.wait_for_selector("b")
    assert found is not None
    assert await found.inner_text() == "late"
    await page.wait_for_url("**/moved")
    handle = await page.wait_for_function("() => window.done")
    assert await handle.json_value() == {"at": "last"}


async def test_a_link_a_reload_and_the_history_lead_on(session: Session, site: BehaviourSite) -> None:
    page = session.page
    await page.goto(site.list_url)
    async with page.expect_navigation():
        await page.locator("a[href*='/products/']").first.click()
    assert "/products/" in page.url
    there = page.url
    await page.go_back()
    assert page.url == site.list_url
    await page.go_forward()
    assert page.url == there
    response = await page.reload()
    assert response is not None
    assert (response.status, page.url) == (200, there)


async def test_a_frame_is_read_and_clicked(session: Session, site: BehaviourSite) -> None:
    inner = html(site, "<button onclick=\"this.textContent = 'clicked'\">inside</button>")
    await session.page.goto(html(site, f"<p>above</p><iframe src='{inner}'></iframe>"))
    button = session.page.frame_locator("iframe").get_by_role("button")
    await button.click()
    assert await button.inner_text() == "clicked"
    assert len(session.page.frames) == 2


async def test_a_dialog_and_a_file_input_are_answered(session: Session, site: BehaviourSite, tmp_path: Path) -> None:
    page = session.page
    page.on("dialog", lambda dialog: dialog.accept())
    await page.goto(html(site, """<input type=file>
        <button onclick="this.textContent = confirm('sure?')">ask</button>"""))  # fmt: skip
    await page.click("button")
    assert await page.inner_text("button") == "true"
    (tmp_path / "given.txt").write_text("given")
    await page.set_input_files("input", tmp_path / "given.txt")
    assert await page.evaluate("document.querySelector('input').files[0].text()") == "given"


async def test_init_scripts_run_before_the_pages_own_in_their_order(session: Session, site: BehaviourSite) -> None:
    await session.context.add_init_script("window.seen = ['context']")
    await session.page.add_init_script("window.seen.push('page')")
    await session.page.goto(html(site, "<p></p><script>document.querySelector('p').textContent = seen</script>"))
    assert await session.page.inner_text("p") == "context,page"


async def test_a_page_meets_the_identity_of_the_seed(runtime: Runtime, site: BehaviourSite) -> None:
    async with runtime.session(Attempt(seed=7), context_options={"viewport": VIEWPORT}) as session:
        await session.page.goto(f"{site.url}/headers")
        sent = await session.page.inner_text("p")
        told = await session.page.evaluate("[navigator.userAgent, navigator.language, innerWidth, innerHeight]")
        place = await session.page.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone")
    assert "Firefox/" in told[0]
    assert told[0] in sent
    assert (told[1:], place) == (["en-US", 800, 600], "UTC")


async def test_a_route_answers_refuses_and_changes_requests(session: Session, site: BehaviourSite) -> None:
    page = session.page
    await page.route("**/answered", lambda route: route.fulfill(status=418, body="<title>of the route</title>"))
    await session.context.route("**/products/*", lambda route: route.abort("connectionrefused"))
    await page.route("**/headers", lambda route: route.continue_(headers={**route.request.headers, "x-extra": "1"}))
    response = await page.goto(f"{site.url}/answered")
    assert response is not None
    assert (response.status, await page.title()) == (418, "of the route")
    with pytest.raises(Exception, match="NS_ERROR_CONNECTION_REFUSED"):
        await page.goto(site.product_url(1))
    await page.goto(f"{site.url}/redirect?to={site.url}/headers")
    assert "x-extra" not in await page.inner_text("p")  # a further hop, as in Firefox
    await page.goto(f"{site.url}/headers")
    assert "x-extra: 1" in await page.inner_text("p")
    assert site.requests["/answered"] + site.requests["/products/1"] == 0


async def test_what_a_page_throws_and_logs_is_told(session: Session, site: BehaviourSite) -> None:
    page = session.page
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    await page.goto(
        html(site, "<script>console.log('hello', 3); setTimeout(() => { throw new Error('bad') })</script>")
    )
    await eventually(lambda: len(said) == 2, "both are told")
    assert said[0] == "hello 3"
    assert "bad" in said[1]
    with pytest.raises(Exception, match="Error: boom"):
        await page.evaluate("() => { throw new Error('boom') }")


# --- storage


async def test_a_saved_state_is_restored_in_another_session(runtime: Runtime, site: BehaviourSite) -> None:
    async with runtime.session(Attempt(seed=7)) as session:
        await session.page.goto(f"{site.url}/cookie/set")
        await session.page.evaluate(
            """() => {
            localStorage.setItem('token', 'val"ue');
            localStorage.setItem('key', '1');
            localStorage.setItem('other', '2') }"""
        )
        state = await session.context.storage_state()
    assert [(cookie["name"], cookie["value"]) for cookie in state["cookies"]] == [("visitor", "seen")]
    (origin,) = state["origins"]
    assert origin["origin"] == site.url
    assert sorted(item["name"] for item in origin["localStorage"]) == ["key", "other", "token"]
    async with runtime.session(Attempt(seed=7), context_options={"storage_state": state}) as session:
        await session.page.goto(f"{site.url}/cookie/get")
        assert await session.page.inner_text("p") == "visitor=seen"
        assert await session.page.evaluate("() => localStorage.getItem('token')") == 'val"ue'


async def test_what_the_site_removed_is_not_put_back_beside_what_it_kept(runtime: Runtime, site: BehaviourSite) -> None:
    items = [{"name": "key", "value": "1"}, {"name": "other", "value": "2"}]
    saved = {"origin": site.url, "localStorage": items}
    async with runtime.session(Attempt(seed=7), context_options={"storage_state": {"origins": [saved]}}) as session:
        page = session.page
        await page.goto(f"{site.url}/headers")
        assert await page.evaluate("() => localStorage.getItem('key')") == "1"
        await page.evaluate("() => localStorage.removeItem('key')")
        await page.goto(f"{site.url}/cookie/get")
        assert await page.evaluate("() => localStorage.getItem('key')") is None
        other = await session.context.new_page()
        await other.goto(f"{site.url}/cookie/get")
        assert await other.evaluate("() => localStorage.getItem('key')") is None
        assert await other.evaluate("() => localStorage.getItem('other')") == "2"


async def test_contexts_share_nothing(runtime: Runtime, site: BehaviourSite) -> None:
    async with runtime.session(Attempt(seed=7)) as one, runtime.session(Attempt(seed=7)) as other:
        assert one.browser is other.browser
        await one.page.goto(f"{site.url}/cookie/set")
        await one.page.evaluate("() => localStorage.setItem('key', 'value')")
        await other.page.goto(f"{site.url}/cookie/get")
        assert await other.page.inner_text("p") == ""
        assert await other.page.evaluate("() => localStorage.length") == 0
        await one.page.goto(f"{site.url}/cookie/get")
        assert await one.page.inner_text("p") == "visitor=seen"


# --- crashes, and what is left


async def test_the_death_of_the_chromium_behind_is_a_crash_of_the_browser(
    runtime: Runtime,
    bridged_standin: Standin,  # noqa: F811 -- the fixture
    site: BehaviourSite,
) -> None:
    with pytest.raises(BrowserCrashed):
        async with runtime.session(Attempt(seed=7)) as session:
            chromium_of(bridged_standin).kill()
            await session.page.goto(f"{site.url}/never")
    assert bridged_standin.log("closing")[0]["code"] == 7
    async with runtime.session(Attempt(seed=7)) as session:
        await session.page.goto(site.list_url)
        assert session.generation == 2


async def test_a_crashed_renderer_is_a_crash_of_the_page_and_the_browser_lives_on(
    runtime: Runtime, site: BehaviourSite
) -> None:
    with pytest.raises(PageCrashed):
        async with runtime.session(Attempt(seed=7)) as session:
            await session.page.goto("about:crashcontent")
    async with runtime.session(Attempt(seed=7)) as session:
        await session.page.goto(site.list_url)
        assert session.generation == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_chromium_ends_with_the_bridge_and_leaves_no_file(
    bridged_standin: Standin,  # noqa: F811 -- the fixture
    tmp_path: Path,
    site: BehaviourSite,
    how: signal.Signals,
) -> None:
    async with runtime_of("invisible", tmp_path / "output", humanize=False) as runtime:
        with pytest.raises(BrowserCrashed):
            async with runtime.session(Attempt(seed=7)) as session:
                chromium = chromium_of(bridged_standin)
                family = [chromium, *chromium.children(recursive=True)]
                assert len(family) > 2
                os.kill(bridged_standin.launches()[0]["pid"], how)
                await session.page.goto(f"{site.url}/never")
        await eventually(lambda: not any(processes.lives(one.pid) for one in family), "all of Chromium has ended")
    left = Path(tempfile.gettempdir())
    assert left == bridged_standin.temporary_directory
    wait_until(lambda: not list(left.iterdir()), "no file is left")


@pytest.mark.parametrize(("address", "code"), [("about:crashparent", -signal.SIGSEGV), ("about:exit?3", 3)])
async def test_a_bridge_that_ends_itself_is_a_crash_and_takes_chromium_with_it(
    runtime: Runtime,
    bridged_standin: Standin,  # noqa: F811 -- the fixture
    address: str,
    code: int,
) -> None:
    with pytest.raises(BrowserCrashed):
        async with runtime.session(Attempt(seed=7)) as session:
            chromium = chromium_of(bridged_standin)
            await session.page.goto(address)
    await eventually(lambda: not processes.lives(chromium.pid), "Chromium has ended")
    assert [record["code"] for record in bridged_standin.log("closing")] == [code]


async def test_all_of_chromium_is_found_by_the_launchs_token(
    runtime: Runtime,
    bridged_standin: Standin,  # noqa: F811 -- the fixture
) -> None:
    async with runtime.session(Attempt(seed=7)):
        token = bridged_standin.launches()[0]["token"]
        assert token is not None
        found = {process.pid for process in processes.carriers(lambda one: str(one) == token)}
        chromium = chromium_of(bridged_standin)
        assert {chromium.pid, *(one.pid for one in chromium.children(recursive=True))} <= found
