"""Keep a page from private hosts: loopback, link-local, private and reserved addresses.

A worker stands inside a network, and whoever can send it a message could otherwise read that network through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import anyio

from asyncworker.errors import UrlRefused
from asyncworker.guard import masked

if TYPE_CHECKING:
    from playwright.async_api import Page, Request, Response, Route, WebSocket

logger = logging.getLogger("asyncworker.guard")

#: The engine whose own protocol pauses every hop of a redirect.
CHROMIUM = "chromium"

#: How long the browser may take to say which address answered, once the actor has its result.
ANSWER_TIMEOUT_MS = 5_000

_EMBEDS_IPV4 = ipaddress.IPv6Network("64:ff9b::/96")  # NAT64: the last 32 bits are the address reached
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC = [
    (ipaddress.ip_network(network), kind)
    for network, kind in {
        "0.0.0.0/32": "the unspecified address",
        "0.0.0.0/8": "a reserved address",
        "10.0.0.0/8": "a private address",
        "100.64.0.0/10": "an address behind a carrier's NAT",
        "127.0.0.0/8": "a loopback address",
        "169.254.0.0/16": "a link-local address",
        "172.16.0.0/12": "a private address",
        "192.0.0.0/24": "a reserved address",
        "192.0.2.0/24": "an address for documentation",
        "192.88.99.0/24": "a reserved address",
        "192.168.0.0/16": "a private address",
        "198.18.0.0/15": "an address for benchmarks",
        "198.51.100.0/24": "an address for documentation",
        "203.0.113.0/24": "an address for documentation",
        "224.0.0.0/4": "a multicast address",
        "240.0.0.0/4": "a reserved address",
        "::/128": "the unspecified address",
        "::1/128": "a loopback address",
        "2001::/23": "a reserved address",  # with Teredo, whose addresses hide another one
        "2002::/16": "a reserved address",  # 6to4, the same
        "2001:db8::/32": "an address for documentation",
        "3fff::/20": "an address for documentation",
        "fc00::/7": "a private address",
        "fe80::/10": "a link-local address",
        "fec0::/10": "a private address",
        "ff00::/8": "a multicast address",
    }.items()
]


def private_kind(address: str) -> str | None:
    """What an IP address is instead of public, such as "a loopback address"; None: it is public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped
        if ip in _EMBEDS_IPV4:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        if inner is not None:
            return private_kind(str(inner))
    for network, kind in _NOT_PUBLIC:
        if ip in network:
            return kind
    return None if ip.version == 4 or ip in _PUBLIC_IPV6 else "a reserved address"


async def resolved(host: str) -> list[str]:
    """Every address that this machine resolves a host to; none when it does not resolve."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in found]


class Hosts:
    """Which hosts are public; each name is resolved once.

    Parameters:
        kind: Judges one address; None: it is public.
        resolve: Gives all addresses of a name.
    """

    def __init__(
        self,
        *,
        kind: Callable[[str], str | None] = private_kind,
        resolve: Callable[[str], Awaitable[Sequence[str]]] = resolved,
    ) -> None:
        self._kind = kind
        self._resolve = resolve
        self._known: dict[str, str | None] = {}

    async def objection(self, url: str) -> str | None:
        """What is wrong with where a URL leads; None: every address of its host is public, or it has none."""
        try:
            parts = urlsplit(url)
        except ValueError:
            return "its host does not parse"
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            return None
        host = unicodedata.normalize("NFKC", unquote(parts.hostname)).replace("\u3002", ".").lower().rstrip(".")
        if host in self._known:
            return self._known[host]
        addresses = _spelt_out(host) or await self._resolve(host)
        objections = [f"{host} is {address}: {kind}" for address in addresses if (kind := self._kind(address))]
        objection = objections[0] if objections else None
        if addresses:  # a name that does not resolve now may do so in a moment
            self._known[host] = objection
        return objection

    def objection_to_answer(self, address: str) -> str | None:
        """What is wrong with the address that answered a request; Chromium writes one of IPv6 in brackets."""
        try:
            kind = self._kind(address.strip("[]"))
        except ValueError:
            kind = "no address that can be read"
        return f"{address} answered: {kind}" if kind else None


def _spelt_out(host: str) -> list[str] | None:
    """The address that a host *is*, in any spelling that browsers take: 127.1, 0x7f000001, 2130706433, ::1."""
    if host == "localhost" or host.endswith(".localhost"):
        return ["127.0.0.1"]  # browsers do not ask for these names
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host.partition("%")[0]))]
    with contextlib.suppress(OSError, UnicodeError):
        return [socket.inet_ntoa(socket.inet_aton(host))]
    return None


@contextlib.asynccontextmanager
async def deny_private(
    page: Page, url: str, *, proxied: bool = False, hosts: Hosts | None = None
) -> AsyncIterator[None]:
    """While the block runs, keep `page` from private hosts; end the block when it got an answer from one.

    Enter it before `page.goto(url)`, on a page that is still empty, and leave it with the result in hand. It
    costs a round trip for every request of the page, and these hold:

    - The result never holds what a private host said. Of each response the address is looked at that the browser
      met, whatever the name resolved to here (so a rebinding name is found): over redirects, of frames, workers
      and popups. The first private one ends the block with `UrlRefused`. A web socket has no address to look at:
      its name is judged, so a rebinding one is not found.
    - The page itself is never a private one: neither `url`, nor where it redirects to, nor where its script
      goes next. `UrlRefused`, too.
    - Other requests of the page to private hosts are blocked, and the page goes on without them: public sites
      do scan loopback.

    What can still *reach* a private host, unanswered as far as the result goes: with engines other than
    Chromium, a redirect's further hops; with Chromium, requests of popups; with any, a name that changes its
    address in between, and the opening of a connection or a web socket. With a proxy (`proxied`) the addresses
    are the proxy's: URLs are then judged by their names as they resolve here, and a rebinding name is not found.

    Browsers do not report what service workers, shared workers and WebTransport fetch, so the page has none of
    them. WebRTC and a worker's WebTransport are not looked at: they speak to servers made for them only.

    The blocks stay when this one ends, until the context is closed.

    Raises:
        UrlRefused: As above.
        TimeoutError: When the browser did not say who answered.
    """
    hosts = hosts or Hosts()
    if (objection := await hosts.objection(url)) is not None:
        raise _refusal(url, objection, start=url)
    watch = _Watch(page, url, hosts, proxied=proxied)
    try:
        await watch.begin()
        with watch.scope:
            yield
            await watch.settle()
    except Exception as error:
        if watch.refused is not None:
            raise watch.refused from error
        raise
    finally:
        watch.end()
    if watch.refused is not None:
        raise watch.refused


#: Browsers do not report what these fetch, so a page must not have them.
_NO_HIDDEN_FETCHES = """
delete self.SharedWorker;
delete self.WebTransport;
if (self.Navigator) delete Navigator.prototype.serviceWorker;
"""


class _Watch:
    """The two halves of `deny_private`: a gate before each request, and a witness of each answer."""

    def __init__(self, page: Page, url: str, hosts: Hosts, *, proxied: bool) -> None:
        self.scope = anyio.CancelScope()
        self.refused: UrlRefused | None = None
        self._page = page
        self._url = url
        self._hosts = hosts
        self._proxied = proxied
        self._gates: set[asyncio.Task[None]] = set()
        self._witnesses: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        context = self._page.context
        context.on("response", self._on_response)
        context.on("page", self._on_page)
        self._on_page(self._page)
        await context.add_init_script(_NO_HIDDEN_FETCHES)
        browser = context.browser
        if browser is not None and browser.browser_type.name == CHROMIUM:
            await self._gate_every_hop()
        else:
            # Playwright does not route a redirect's further hops.
            await context.route("**/*", self._on_route)

    def end(self) -> None:
        context = self._page.context
        context.remove_listener("response", self._on_response)
        context.remove_listener("page", self._on_page)
        for task in self._witnesses:
            task.cancel()

    async def settle(self) -> None:
        """Wait until every answer so far is judged.

        Raises:
            TimeoutError: When the browser did not say who answered.
        """
        if not self._witnesses:
            return
        _, unknown = await asyncio.wait(tuple(self._witnesses), timeout=ANSWER_TIMEOUT_MS / 1000)
        if unknown:
            raise TimeoutError(
                f"the browser did not say in {ANSWER_TIMEOUT_MS} ms which addresses answered {masked(self._url)}, "
                "so its result is not used; ASYNCWORKER_DENY_PRIVATE_HOSTS asks for them"
            )

    def _refuse(self, url: str, objection: str) -> None:
        if self.refused is None:
            self.refused = _refusal(url, objection, start=self._url)
            self.scope.cancel()

    # The gate

    async def _gate_every_hop(self) -> None:
        """Chromium's own Fetch domain pauses each hop of a redirect; Playwright's routing pauses the first."""
        cdp = await self._page.context.new_cdp_session(self._page)
        main_frame = (await cdp.send("Target.getTargetInfo"))["targetInfo"]["targetId"]

        async def judge(event: dict[str, Any]) -> None:
            url, request = event["request"]["url"], {"requestId": event["requestId"]}
            objection = await self._hosts.objection(url)
            if objection is None:
                await cdp.send("Fetch.continueRequest", request)
                return
            if event["resourceType"] == "Document" and event["frameId"] == main_frame:
                self._refuse(url, objection)
            await cdp.send("Fetch.failRequest", request | {"errorReason": "AccessDenied"})

        cdp.on("Fetch.requestPaused", lambda event: _keep(self._gates, judge(event)))
        await cdp.send("Fetch.enable", {"patterns": [{"urlPattern": "http*"}]})

    async def _on_route(self, route: Route) -> None:
        request = route.request
        objection = await self._hosts.objection(request.url)
        if objection is None:
            await route.fallback()
            return
        if request.is_navigation_request() and self._is_main(request):
            self._refuse(request.url, objection)
        await route.abort("accessdenied")

    def _is_main(self, request: Request) -> bool:
        try:
            return request.frame == self._page.main_frame
        except Exception:  # noqa: BLE001 -- a popup's first request has no frame yet; each library has its own Error
            return False

    # The witness

    def _on_page(self, page: Page) -> None:
        page.on("websocket", self._on_websocket)

    def _on_response(self, response: Response) -> None:
        _keep(self._witnesses, self._judge_answer(response))

    async def _judge_answer(self, response: Response) -> None:
        address = None if self._proxied else await _address(response)
        if address is not None:
            objection = self._hosts.objection_to_answer(address)
        else:
            objection = await self._hosts.objection(response.url)
        if objection is not None:
            self._refuse(response.url, objection)

    def _on_websocket(self, websocket: WebSocket) -> None:
        # Nobody tells the address behind a web socket, so its name is judged, as soon as it says something.
        async def judge() -> None:
            if (objection := await self._hosts.objection(websocket.url)) is not None:
                self._refuse(websocket.url, objection)

        websocket.on("framereceived", lambda _: _keep(self._witnesses, judge()))


async def _address(response: Response) -> str | None:
    """Who answered; None: not known, as for what came from no network, and for a popup that is closed again."""
    try:
        server = await response.server_addr()
    except Exception:  # noqa: BLE001 -- each library has its own Error
        return None
    return (server["ipAddress"] or None) if server is not None else None


def _refusal(url: str, objection: str, *, start: str) -> UrlRefused:
    subject = f"{masked(url)!r} is not opened" if url == start else f"{masked(start)!r} led to {masked(url)!r}"
    return UrlRefused(
        f"{subject}: {objection}, and ASYNCWORKER_DENY_PRIVATE_HOSTS is on; send the URL of a public host",
        url=masked(url),
    )


def _keep(tasks: set[asyncio.Task[None]], judgement: Coroutine[Any, Any, None]) -> None:
    """Run a judgement in a task of its own, from an event's callback."""
    task = asyncio.ensure_future(judgement)
    tasks.add(task)

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Mostly of a page that was closed meanwhile; a request that nobody judged stays paused.
            logger.debug("a request was not judged: %s", error)

    task.add_done_callback(ended)
