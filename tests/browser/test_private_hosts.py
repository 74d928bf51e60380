"""`deny_private` in a real Chromium. Here 127.0.0.1 stands for a public host, 127.0.0.2 for a private one."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from urllib.parse import quote, urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Error, Page, async_playwright

from asyncworker.demo.site import Request, Response
from asyncworker.engines.finding import find
from asyncworker.errors import UrlRefused
from asyncworker.private_hosts import Hosts, deny_private
from asyncworker.settings import load
from tests.site import BehaviourSite

pytestmark = [pytest.mark.needs_browser, pytest.mark.asyncio(loop_scope="module")]


class Site(BehaviourSite):
    """`/readable` may be read by pages of any origin."""

    def respond(self, request: Request) -> Response:
        if request.path == "/readable":
            return Response("secret", headers={"Access-Control-Allow-Origin": "*"})
        return super().respond(request)


def forbidden(address: str) -> str | None:
    return "a forbidden address" if address in ("127.0.0.2", "::1") else None


async def rebinding(host: str) -> Sequence[str]:
    return ["127.0.0.1"]


@pytest.fixture
def public() -> Iterator[Site]:
    with Site(host="127.0.0.1") as site:
        yield site


@pytest.fixture
def private() -> Iterator[Site]:
    with Site(host="127.0.0.2") as site:
        yield site


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    found = find(load({"ASYNCWORKER_ENGINE": "chromium"}))
    assert found is not None, "no Chromium on this machine: `asyncworker doctor --install` finds or installs one"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=found.executable,
            # In Chromium the name is the private host's; in `rebinding` it is the public one's.
            args=["--no-sandbox", "--host-resolver-rules=MAP rebinding.test 127.0.0.2, MAP rebinding6.test [::1]"],
        )
        try:
            # From here on the browser has all its helper processes; each test has to end what it adds.
            page = await browser.new_page()
            await page.screenshot()
            await page.close()
            yield browser
        finally:
            await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    context = await browser.new_context()
    yield await context.new_page()
    await context.close()


@pytest.fixture(params=["every hop", "first hops"])
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Chromium's gate, and the one of other engines, which sees a redirect's first hop only."""
    if request.param == "first hops":
        monkeypatch.setattr("asyncworker.private_hosts.CHROMIUM", "none of these")
    return str(request.param)


@asynccontextmanager
async def watched(page: Page, url: str, *, proxied: bool = False) -> AsyncIterator[None]:
    hosts = Hosts(kind=forbidden, resolve=rebinding)
    async with asyncio.timeout(20), deny_private(page, url, hosts=hosts, proxied=proxied):
        await page.goto(url)
        yield


def html(site: Site, body: str) -> str:
    return f"{site.url}/html?body={quote(body)}"


def redirect(site: Site, to: str) -> str:
    return f"{site.url}/redirect?to={quote(to, safe='')}"


async def test_a_public_page_is_opened_and_read(page: Page, public: Site, gate: str) -> None:
    async with watched(page, redirect(public, public.product_url(3))):
        title = await page.text_content("h1")
    assert title == public.product(3).title


async def test_a_private_url_is_refused_before_the_page_is_touched(page: Page, private: Site) -> None:
    with pytest.raises(UrlRefused, match=r"127\.0\.0\.2: a forbidden address, and ASYNCWORKER_DENY_PRIVATE_HOSTS"):
        async with watched(page, private.url):
            pytest.fail("the block ran")
    assert page.url == "about:blank"
    assert not private.requests


async def test_a_redirect_to_a_private_host_is_refused(page: Page, public: Site, private: Site, gate: str) -> None:
    inner = redirect(public, f"{private.url}/status/200")
    with pytest.raises(UrlRefused) as caught:
        async with watched(page, redirect(public, inner)):
            await page.title()
    assert f"led to '{private.url}/status/200'" in str(caught.value)
    assert caught.value.url == f"{private.url}/status/200"
    if gate == "every hop":
        assert not private.requests


async def test_a_redirect_through_a_private_host_is_refused(page: Page, public: Site, private: Site, gate: str) -> None:
    with pytest.raises(UrlRefused):
        async with watched(page, redirect(public, redirect(private, public.list_url))):
            await page.title()


async def test_a_script_that_moves_the_page_to_a_private_host_ends_the_wait_at_once(
    page: Page, public: Site, private: Site, gate: str
) -> None:
    body = f"<script>setTimeout(() => {{ location = '{private.url}/status/200' }}, 50)</script>"
    with pytest.raises(UrlRefused, match="led to"):
        async with watched(page, html(public, body)):
            await asyncio.sleep(60)
    assert not private.requests


@pytest.mark.parametrize(
    "body",
    [
        "<img src='{private}/status/200' onerror='done()'>",
        "<iframe src='{private}/status/200'></iframe><script>setTimeout(done, 200)</script>",
        "<script>fetch('{private}/readable').then(r => r.text()).then(t => document.title = t, done)</script>",
        "<script>new Worker(URL.createObjectURL(new Blob([\"fetch('{private}/readable').then(r => r.text())"
        '.catch(String).then(postMessage)"]))).onmessage = done</script>',
    ],
    ids=["img", "iframe", "fetch", "worker"],
)
async def test_a_pages_own_request_to_a_private_host_is_blocked_and_the_page_goes_on(
    page: Page, public: Site, private: Site, gate: str, body: str
) -> None:
    body = "<script>const done = () => { document.title = 'went on' }</script>" + body
    async with watched(page, html(public, body.replace("{private}", private.url))):
        await page.wait_for_function("document.title")
        title = await page.title()
    assert title == "went on"
    assert not private.requests


@pytest.mark.parametrize(
    "body",
    [
        "<img src='{there}'>",
        "<iframe src='{there}'></iframe>",
        "<script>fetch('{there}').then(r => r.text()).then(t => document.title = t)</script>",
        "<script>new Worker(URL.createObjectURL(new Blob([\"fetch('{there}').then(r => r.text())"
        '.catch(String).then(postMessage)"]))).onmessage = (m) => { document.title = m.data }</script>',
    ],
    ids=["img", "iframe", "fetch", "worker"],
)
async def test_an_answer_from_a_private_host_never_reaches_the_result(
    page: Page, public: Site, private: Site, body: str
) -> None:
    """Over a name that is public when it is looked up here and private when the browser does."""
    port = urlsplit(private.url).port
    body = body.replace("{there}", f"http://rebinding.test:{port}/readable")
    with pytest.raises(UrlRefused, match=r"127\.0\.0\.2 answered: a forbidden address"):
        async with watched(page, html(public, body)):
            await page.wait_for_function("document.title", polling=50)  # a page behind its popup draws no frames
    assert private.requests["/readable"] == 1  # or nothing was proved


async def test_a_rebinding_name_is_refused_as_the_page_itself(page: Page, private: Site, gate: str) -> None:
    port = urlsplit(private.url).port
    with pytest.raises(UrlRefused, match="answered"):
        async with watched(page, f"http://rebinding.test:{port}/readable"):
            await page.title()


async def test_a_name_that_rebinds_to_an_ipv6_address_is_refused(page: Page) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nsecret")
        await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UrlRefused, match=r"\[::1\] answered"):
            async with watched(page, f"http://rebinding6.test:{port}/"):
                await page.title()


async def test_a_result_in_hand_waits_until_the_browser_has_said_who_answered(page: Page, private: Site) -> None:
    port = urlsplit(private.url).port
    url = f"http://rebinding.test:{port}/readable"
    with pytest.raises(UrlRefused, match="answered"):
        async with deny_private(page, url, hosts=Hosts(kind=forbidden, resolve=rebinding)):
            await page.goto(url, wait_until="commit")


async def test_a_popups_answer_from_a_private_host_is_refused(page: Page, public: Site, private: Site) -> None:
    body = f"<title>x</title><script>window.open('{private.url}/readable')</script>"
    with pytest.raises(UrlRefused):
        async with watched(page, html(public, body)):
            await asyncio.sleep(60)


@asynccontextmanager
async def greeting_web_socket(host: str) -> AsyncIterator[str]:
    """A server that says `secret` to every web socket."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        key = next(line.split(": ")[1] for line in head.splitlines() if line.startswith("Sec-WebSocket-Key"))
        digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        accept = f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}"
        writer.write(f"HTTP/1.1 101 Hello\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{accept}\r\n\r\n".encode())
        writer.write(b"\x81\x06secret")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, host, 0)
    async with server:
        yield "ws://{}:{}/".format(*server.sockets[0].getsockname())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
@pytest.mark.parametrize("where", ["page", "worker", "iframe", "popup"])
async def test_what_a_private_host_says_over_a_web_socket_never_reaches_the_result(
    page: Page, public: Site, host: str, where: str
) -> None:
    async with greeting_web_socket(host) as there:
        script = f"new WebSocket('{there}').onmessage = (m) => SAY(m.data)"
        in_frame = script.replace("SAY", "parent.document.title = ")
        in_popup = html(public, f"<script>{script.replace('SAY', 'opener.document.title = ')}</script>")
        body = {
            "page": f"<script>{script.replace('SAY', 'document.title = ')}</script>",
            "worker": f"<script>new Worker(URL.createObjectURL(new Blob([`{script.replace('SAY', 'postMessage')}`])))"
            ".onmessage = (m) => { document.title = m.data }</script>",
            "iframe": f'<iframe srcdoc="<script>{in_frame}</script>"></iframe>',
            "popup": f'<script>open("{in_popup}")</script>',
        }[where]
        refusal = pytest.raises(UrlRefused, match=f"led to '{there}'") if host == "127.0.0.2" else nullcontext()
        with refusal:
            async with watched(page, html(public, body)):
                await page.wait_for_function("document.title", polling=50)  # a page behind its popup draws no frames
                assert await page.title() == "secret"


async def test_what_browsers_do_not_report_is_not_there(page: Page, public: Site) -> None:
    probe = """
    const frame = document.body.appendChild(document.createElement('iframe'));
    document.title = [self, frame.contentWindow].map((it) => [
      'SharedWorker' in it, 'WebTransport' in it, 'serviceWorker' in it.navigator,
    ].join()).join(' ')
    """
    async with watched(page, html(public, f"<body><script>{probe}</script>")):
        assert await page.title() == "false,false,false false,false,false"


async def test_with_a_proxy_the_names_are_judged_and_not_the_proxys_address(
    page: Page, private: Site, public: Site
) -> None:
    """Seen from the page, 127.0.0.2 is the proxy here: it answers for a name that is public."""
    port = urlsplit(private.url).port
    async with watched(page, f"http://rebinding.test:{port}/readable", proxied=True):
        assert await page.text_content("body") == "secret"
    with pytest.raises(UrlRefused):
        async with watched(page, redirect(public, private.url), proxied=True):
            pass


async def test_errors_of_the_page_pass_through_untouched(page: Page, public: Site, gate: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    with pytest.raises(Error, match="ERR_CONNECTION_REFUSED"):
        async with watched(page, f"http://127.0.0.1:{port}/"):
            pytest.fail("the block ran")
    with pytest.raises(LookupError, match="mine"):
        async with watched(page, public.list_url):
            raise LookupError("mine")


async def test_a_cancelled_block_is_cancelled_and_no_listener_is_left(page: Page, public: Site) -> None:
    async def work() -> None:
        async with watched(page, public.list_url):
            reached.set()
            await asyncio.sleep(60)

    reached = asyncio.Event()
    task = asyncio.ensure_future(work())
    await asyncio.wait_for(reached.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert page.context._impl_obj.listeners("response") == []
    assert page.context._impl_obj.listeners("page") == []
