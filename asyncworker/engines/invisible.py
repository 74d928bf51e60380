"""invisible_playwright: its patched Firefox, one identity for each launch.

It differs from stock Playwright in nearly all that a long-lived worker relies on. There is no driver process: the
client runs four threads for each browser, a call holds one of them for its whole duration, and cancelling the
call frees none. A crash is announced by nothing, so the process itself is watched. Seed, pins, proxy, locale and
time zone are fixed at launch. Its launch must not be cancelled, and its plain close can block the loop for 20 s;
the order used here (bounded close, kill by token in a thread, then the exit) never does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncworker import processes
from asyncworker.engines import (
    Fault,
    Launched,
    capabilities,
    classify_by_name,
    invisible_client,
    profile,
    storage_state,
)
from asyncworker.engines.finding import Found, find, needs_xvfb, which
from asyncworker.engines.lifeline import Lifeline
from asyncworker.errors import EngineMissing, LaunchFailed
from asyncworker.identity import Identity
from asyncworker.settings import Settings
from asyncworker.shielding import shielded
from asyncworker.threads import in_thread
from asyncworker.urls import Proxy

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext

logger = logging.getLogger("asyncworker.engine")

#: The client has four threads for each browser; one is left for closing.
MAX_CONTEXTS = 3

#: What a browser that was told to close, or killed, may still take for its client to be done with it.
EXIT_TIMEOUT_S = 5.0

#: Of what the client says of a failed launch; the engine's exit code and last words are among them.
MOST_LINES = 5

#: What a launch that nobody waits for has started is looked for this often, until the launch itself has ended.
ABANDONED_LAUNCH_POLL_S = 0.25


class InvisibleBrowser:
    """A patched Firefox; its process is watched, since the client says `is_connected()` for ever."""

    def __init__(self, client: Any, browser: Browser, token: processes.Token, pid: int | None) -> None:
        self.browser = browser
        self.pid = pid
        self._client = client
        self._token = token
        self._new_context = browser.new_context  # before the host wraps it for code that opens its own
        self._lifeline = Lifeline(pid)

    @property
    def abandoned(self) -> int:
        """A cancelled call holds its thread until its own time limit; closing its page or context frees none."""
        return invisible_client.abandoned(self._client)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._lifeline.on_end(lambda: callback("the browser's process ended"))

    async def new_context(self, identity: Identity, options: Mapping[str, Any]) -> BrowserContext:
        capabilities.check_options(InvisibleEngine.name, InvisibleEngine.capabilities, options)
        # The client adds the identity's own viewport, locale and time zone to whatever is given.
        given = {name: value for name, value in options.items() if name != "storage_state"}
        context = await self._new_context(**given)
        try:
            if (state := options.get("storage_state")) is not None:
                await storage_state.restore(context, state)
        except BaseException:
            await shielded(_bounded(context.close()))
            raise
        storage_state.complete(context)
        capabilities.refuse_tracing_stop(InvisibleEngine.name, context)
        return context

    async def memory_mb(self, enough_mb: float) -> float:
        return await in_thread(processes.memory_mb, lambda token: token == self._token, enough_mb=enough_mb)

    async def close(self, timeout_ms: int) -> None:
        self._lifeline.cut()
        closing = asyncio.ensure_future(self.browser.close())
        await asyncio.wait({closing}, timeout=timeout_ms / 1000)
        if not closing.done():
            logger.warning("the browser did not close in %d ms; killing it", timeout_ms)
        await self.kill()
        await _exit(self._client)
        await _bounded(closing)

    async def kill(self) -> None:
        await in_thread(processes.kill_launch, self._token)


class InvisibleEngine:
    """Launches the patched Firefox that invisible_playwright fetched; never fetches it itself."""

    name = "invisible"
    max_contexts: int | None = MAX_CONTEXTS
    capabilities = capabilities.INVISIBLE

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._abandoned: set[asyncio.Task[None]] = set()

    def launch_key(self, identity: Identity) -> Hashable:
        pins = json.dumps(dict(identity.pins), sort_keys=True)
        return identity.seed, identity.proxy, identity.locale, identity.timezone, pins

    async def identify(self, identity: Identity) -> Identity:
        # In a thread: the first one imports invisible_core.
        drawn = await in_thread(
            profile.drawn, identity.seed, identity.pins, locale=identity.locale, timezone=identity.timezone
        )
        return replace(identity, digest=drawn.digest, drawn_by=drawn.drawn_by)

    async def check(self) -> str:
        return (await in_thread(self._found)).describe()

    async def launch(self, identity: Identity) -> InvisibleBrowser:
        limit_ms = self._settings.launch_timeout_ms
        token = processes.new_token()
        launching = asyncio.ensure_future(self._launch(identity, token))
        try:
            await asyncio.wait({launching}, timeout=limit_ms / 1000)
        finally:
            # The client's launch is never cancelled: it would block the loop for 10 s while it cleans up.
            if not launching.done():
                self._leave(launching, token)
        if not launching.done():
            raise LaunchFailed(
                f"invisible did not start in {limit_ms} ms (ASYNCWORKER_LAUNCH_TIMEOUT_MS); run `asyncworker doctor`",
                engine=self.name,
            )
        return launching.result()

    def renew(self, launched: Launched) -> None:
        """Its browsers share nothing."""

    def classify(self, error: BaseException) -> Fault | None:
        return classify_by_name(error)

    async def close(self) -> None:
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=EXIT_TIMEOUT_S)

    def _found(self) -> Found:
        found = find(self._settings)
        if found is None:
            raise EngineMissing(
                "the patched Firefox of invisible_playwright is not on this machine; fetch it with "
                "`asyncworker doctor --install`",
                engine=self.name,
            )
        if needs_xvfb(self._settings) and which("Xvfb") is None:
            raise EngineMissing(
                "the patched Firefox draws on a virtual screen, and there is no Xvfb on this machine; install it "
                "with `apt-get install xvfb`, or set INVPW_TRUE_HEADLESS=1 to do without, which sites can tell",
                engine=self.name,
            )
        return found

    async def _launch(self, identity: Identity, token: processes.Token) -> InvisibleBrowser:
        client: Any = None
        try:
            found = await in_thread(self._found)
            client = await in_thread(invisible_client.create, self._settings, identity, token, found.executable)
            await in_thread(client.prepare)
            browser = await client.__aenter__()
            invisible_client.count_abandoned(client)
            pid = await in_thread(_engine_pid, token)
        except Exception as error:  # noqa: BLE001 -- whatever the client raises is why it did not start
            await in_thread(processes.kill_launch, token)
            if client is not None:
                await _exit(client)
            raise _launch_failed(error, identity.proxy) from _tellable(error, identity.proxy)
        return InvisibleBrowser(client, browser, token, pid)

    def _leave(self, launching: asyncio.Future[InvisibleBrowser], token: processes.Token) -> None:
        task = asyncio.ensure_future(_end_launch(launching, token))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)


async def _end_launch(launching: asyncio.Future[InvisibleBrowser], token: processes.Token) -> None:
    """End a launch that nobody waits for; killed first, the client is done in 0.02 s instead of blocking for 10."""
    while not launching.done():
        await in_thread(processes.kill_launch, token)
        await asyncio.wait({launching}, timeout=ABANDONED_LAUNCH_POLL_S)
    if not launching.cancelled() and launching.exception() is None:
        await launching.result().close(0)


async def _exit(client: Any) -> None:
    """Let the client of a browser whose processes are gone clean up; it may say anything about that."""
    display, client._virtual_display = client._virtual_display, None
    if display is not None:
        await in_thread(display.stop)  # waits for the screen to end
    invisible_client.make_exit_quick(client)
    await _bounded(client.__aexit__(None, None, None))


async def _bounded(work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Await what belongs to a browser that is gone: it may raise, or never end."""
    doing = asyncio.ensure_future(work)
    await asyncio.wait({doing}, timeout=EXIT_TIMEOUT_S)
    if not doing.done():
        doing.cancel()
    elif not doing.cancelled() and (error := doing.exception()) is not None:
        logger.debug("the end of a browser said: %s", error)


def _engine_pid(token: processes.Token) -> int | None:
    """The engine's process: the child of this one that carries the token."""
    me = os.getpid()
    return next((process.pid for process in processes.carriers(lambda t: t == token) if process.ppid() == me), None)


def _launch_failed(error: Exception, proxy: str | None) -> LaunchFailed:
    """What the client said, without the proxy's password, and what helps."""
    if isinstance(error, LaunchFailed):
        return error
    remedies = {
        "GeoTimezoneError": "set ASYNCWORKER_TIMEZONE (and ASYNCWORKER_LOCALE), or make the exit reachable",
        "EngineMismatch": "run `asyncworker doctor --install`",
        "SealError": "run `asyncworker doctor --install`",
    }
    if "Broken pipe" in str(error):  # how the client tells it when it writes before it has seen the engine's end
        return LaunchFailed(
            "invisible did not start: the engine's process ended while it started; run `asyncworker doctor`",
            engine=InvisibleEngine.name,
        )
    remedy = remedies.get(type(error).__name__, "run `asyncworker doctor`")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:MOST_LINES]
    said = _scrubbed(f"{type(error).__name__}: {' '.join(lines).rstrip('.')}", proxy)
    return LaunchFailed(f"invisible did not start: {said}; {remedy}", engine=InvisibleEngine.name)


def _tellable(error: Exception, proxy: str | None) -> BaseException | None:
    """The error as a cause that a log may print; None when its text, or that of what it came of, tells a secret."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, LaunchFailed) or _scrubbed(str(each), proxy) != str(each):
            return None
        each = each.__cause__ or each.__context__
    return error


def _scrubbed(text: str, proxy: str | None) -> str:
    return Proxy.parse(proxy).scrubbed(text) if proxy else text
