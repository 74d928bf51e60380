"""A clock without time, and an engine without a browser whose pages answer from documents and record their calls."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from asyncworker.engines import Fault, Launched
from asyncworker.engines.capabilities import Capability, check_options
from asyncworker.errors import LaunchFailed
from asyncworker.identity import Identity


class FakeClock:
    """Time that passes only when something sleeps on it, or by `advance`."""

    def __init__(self) -> None:
        self.now = 0.0
        #: Every sleep asked for, in seconds.
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeBrowserError(Exception):
    """What a fake page raises where a real one would say that its target is closed."""


class FakeTimeoutError(Exception):
    """What a fake page raises where a real one would time out: no document, or no such selector."""


@dataclass(frozen=True)
class Document:
    """What a fake page shows at a URL: a title, a text for each selector, and a value for each script.

    Attributes:
        headers: Of the answer, by their names in lower case.
    """

    title: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class FakeResponse:
    """The answer to a page that was sent somewhere."""

    def __init__(self, page: FakePage, url: str, document: Document) -> None:
        self.url = url
        self.status = document.status
        self.ok = 200 <= document.status < 300
        self.headers = dict(document.headers)
        self.frame = SimpleNamespace(page=page, parent_frame=None)
        self.request = SimpleNamespace(is_navigation_request=lambda: True)


class _Emitter:
    """The event methods that the runtime uses of Playwright's objects."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[Callable[..., Any]]] = {}

    def on(self, event: str, listener: Callable[..., Any]) -> None:
        self._listeners.setdefault(event, []).append(listener)

    def remove_listener(self, event: str, listener: Callable[..., Any]) -> None:
        self._listeners[event].remove(listener)

    def emit(self, event: str, *facts: Any) -> None:
        for listener in list(self._listeners.get(event, ())):
            listener(*facts)


class FakePage(_Emitter):
    """A page that answers from its engine's documents and records its calls in `calls`."""

    def __init__(self, context: FakeContext) -> None:
        super().__init__()
        self.context = context
        self.url = "about:blank"
        self.calls: list[tuple[Any, ...]] = []
        self._closed = False
        self._document = Document()

    async def goto(self, url: str, **options: Any) -> FakeResponse | None:
        await self._call("goto", url)
        await self.context.browser.engine.pass_time("navigation")
        return self.go_by_itself(url)

    def go_by_itself(self, url: str) -> FakeResponse | None:
        """Let the page show another document, as after a click on a link."""
        documents, response = self.context.browser.engine.documents, None
        if url.startswith("data:"):
            self._document = Document(title=url.partition("<title>")[2].partition("</title>")[0])
        elif url not in documents:
            raise FakeTimeoutError(f"no document for {url}; set fake_engine.documents[{url!r}]")
        else:
            self._document = documents[url]
            response = FakeResponse(self, url, self._document)
            self.context.emit("response", response)
        self.url = url
        self.emit("domcontentloaded", self)
        return response

    async def title(self) -> str:
        await self._call("title")
        return self._document.title

    async def inner_text(self, selector: str, **options: Any) -> str:
        await self._call("inner_text", selector)
        if selector not in self._document.texts:
            raise FakeTimeoutError(f"{self.url} has no {selector}; give its Document texts={{{selector!r}: ...}}")
        return self._document.texts[selector]

    async def evaluate(self, expression: str, arg: Any = None) -> Any:
        await self._call("evaluate", expression)
        return self._document.values.get(expression)

    async def screenshot(self, **options: Any) -> bytes:
        await self._call("screenshot")
        return b"\x89PNG\r\n\x1a\n"

    async def close(self, **options: Any) -> None:
        if not self._closed:
            self._closed = True
            self.emit("close", self)

    def is_closed(self) -> bool:
        return self._closed

    def crash(self) -> None:
        """Let the page's renderer die; the browser lives on."""
        self.emit("crash", self)

    async def _call(self, *call: Any) -> None:
        self.calls.append(call)
        await self.context.browser.engine.pass_time("page")
        if self._closed or self.context.closed or not self.context.browser.is_connected():
            raise FakeBrowserError("Target page, context or browser has been closed")


class FakeContext(_Emitter):
    """A context; `pages` are its pages, `options` what it was opened with."""

    def __init__(self, browser: FakeBrowser, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.browser = browser
        self.options = dict(options)
        self.pages: list[FakePage] = []
        self._cookies: list[Any] = []
        self.timeout_ms: float | None = None
        self.closed = False

    async def new_page(self) -> FakePage:
        await self.browser.engine.pass_time("new_page")
        self.browser.check()
        if self.closed:
            raise FakeBrowserError("Target page, context or browser has been closed")
        page = FakePage(self)
        self.pages.append(page)
        self.emit("page", page)
        return page

    async def close(self, **options: Any) -> None:
        await self.browser.engine.pass_time("close_context")
        self.closed = True

    async def add_cookies(self, cookies: list[Any]) -> None:
        self._cookies.extend(cookies)

    async def cookies(self) -> list[Any]:
        return list(self._cookies)

    def set_default_timeout(self, timeout: float) -> None:
        self.timeout_ms = timeout

    def set_default_navigation_timeout(self, timeout: float) -> None:
        """Recorded as `set_default_timeout` is."""


class FakeBrowserType:
    """What code finds at `browser.browser_type`; launches by it are counted, and are the engine's no longer."""

    def __init__(self) -> None:
        self.launches = 0

    async def launch(self, **options: Any) -> None:
        self.launches += 1


class FakeBrowser(_Emitter):
    """A browser without a process, in the shape that engines launch; `crash()` ends it as SIGKILL would."""

    pid: int | None = None

    def __init__(self, engine: FakeEngine, identity: Identity) -> None:
        super().__init__()
        self.engine = engine
        self.identity = identity
        self.browser: Any = self
        self.contexts: list[FakeContext] = []
        self.alive = True
        #: Calls that were cancelled and still hold the browser up, as invisible_playwright's do.
        self.abandoned = 0
        #: What its processes would hold.
        self.memory_mb = 0.0
        self._open = self.new_context
        self._lost: Callable[[str], None] | None = None

    def is_connected(self) -> bool:
        return self.alive

    def check(self) -> None:
        if not self.alive:
            raise FakeBrowserError("Target page, context or browser has been closed")

    def crash(self) -> None:
        """Let the browser die."""
        self.alive = False
        callback, self._lost = self._lost, None
        if callback is not None:
            callback("the fake browser crashed")

    # --- Playwright's part

    async def new_context(self, **options: Any) -> FakeContext:
        await self.engine.pass_time("new_context")
        self.check()
        context = FakeContext(self, options)
        self.contexts.append(context)
        return context

    async def new_page(self, **options: Any) -> FakePage:
        return await (await self._open(**options)).new_page()

    @property
    def browser_type(self) -> FakeBrowserType:
        return self.engine.browser_type

    # --- the engine's part

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._lost = callback
        if not self.alive:
            self.crash()

    # "Any": FakeContext stands where Playwright's class is expected.
    async def open_context(self, identity: Identity, options: Mapping[str, Any]) -> Any:
        check_options(self.engine.name, self.engine.capabilities, options)
        return await self._open(**({"locale": identity.locale, "timezone_id": identity.timezone} | dict(options)))

    async def close(self, timeout_ms: int = 0) -> None:
        self._lost = None
        await self.engine.pass_time("close")
        self.alive = False

    async def kill(self) -> None:
        self._lost = None
        self.alive = False


class FakeLaunched:
    """A fake browser as an engine hands it to the host."""

    pid: int | None = None

    def __init__(self, fake: FakeBrowser) -> None:
        self.browser: Any = fake
        self._fake = fake
        self.on_lost = fake.on_lost
        self.new_context = fake.open_context
        self.close = fake.close
        self.kill = fake.kill

    @property
    def abandoned(self) -> int:
        return self._fake.abandoned

    async def memory_mb(self, enough_mb: float) -> float:
        return self._fake.memory_mb


class FakeEngine:
    """An engine without a browser.

    Attributes:
        documents: What pages show, by URL.
        browsers: Every browser launched, first to last.
        fail_launches: How many of the next launches fail.
        delays: Seconds that a step takes, by its name: launch, new_context, new_page, page, navigation, close_context,
            close. `math.inf` never ends.
        renewed: The browsers with which the next one was to share nothing.
        begun: How often each of these steps has begun.
        capabilities: What it can do; without one of them it refuses the options that need it.
        drawn_by: What it says draws its identities; with another value each seed is another visitor.
    """

    name = "fake"

    def __init__(self, *, max_contexts: int | None = None, one_identity_each: bool = False) -> None:
        self.max_contexts = max_contexts
        self.documents: dict[str, Document] = {}
        self.browsers: list[FakeBrowser] = []
        self.fail_launches = 0
        self.delays: dict[str, float] = {}
        self.begun: Counter[str] = Counter()
        self.renewed: list[Any] = []
        self.browser_type = FakeBrowserType()
        self.drawn_by = "fake 1"
        self.capabilities = frozenset(Capability)
        self._one_identity_each = one_identity_each

    @property
    def contexts(self) -> list[FakeContext]:
        """Every context ever opened, of all browsers."""
        return list(itertools.chain.from_iterable(browser.contexts for browser in self.browsers))

    async def pass_time(self, step: str) -> None:
        """Take the time that `delays` gives to a step."""
        self.begun[step] += 1
        delay = self.delays.get(step, 0.0)
        if delay == float("inf"):
            await asyncio.Event().wait()
        await asyncio.sleep(delay)

    def launch_key(self, identity: Identity) -> Hashable:
        return identity.seed if self._one_identity_each else None

    async def identify(self, identity: Identity) -> Identity:
        drawn = hashlib.sha256(f"{self.drawn_by}/{identity.seed}".encode()).hexdigest()
        return replace(identity, digest=drawn[:12], drawn_by=self.drawn_by)

    async def check(self) -> str:
        return "a fake browser"

    async def launch(self, identity: Identity) -> FakeLaunched:
        await self.pass_time("launch")
        if self.fail_launches:
            self.fail_launches -= 1
            raise LaunchFailed("the fake browser was told not to start; lower fake_engine.fail_launches", engine="fake")
        browser = FakeBrowser(self, identity)
        self.browsers.append(browser)
        return FakeLaunched(browser)

    def renew(self, launched: Launched) -> None:
        self.renewed.append(launched.browser)

    def classify(self, error: BaseException) -> Fault | None:
        return Fault.gone if isinstance(error, FakeBrowserError) else None

    async def close(self) -> None:
        """Nothing is shared between its browsers."""
