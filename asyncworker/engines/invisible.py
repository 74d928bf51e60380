"""invisible_playwright: its patched Firefox, one identity for each launch.

It differs from stock Playwright in nearly all that a long-lived worker relies on. There is no driver process: the
client runs four threads for each browser, a call holds one of them for its whole duration, and cancelling the
call frees none. A crash is announced by nothing, so the process itself is watched. Seed, pins, proxy, locale and
time zone are fixed at launch. Its launch must not be cancelled, and its plain close can block the loop for 20 s;
the order used here (bounded close, kill by token in a thread, then the exit) never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from asyncworker import processes
from asyncworker.engines import Fault, classify_by_name
from asyncworker.engines.finding import find
from asyncworker.errors import EngineMissing, LaunchFailed
from asyncworker.identity import Identity
from asyncworker.settings import Settings, leave_invisible_core_alone
from asyncworker.urls import Proxy

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext

logger = logging.getLogger("asyncworker.engine")

#: The client has four threads for each browser; one is left for closing.
MAX_CONTEXTS = 3

#: Where the system has no pidfd, the process is looked at this often.
POLL_S = 0.1


class InvisibleBrowser:
    """A patched Firefox; its process is watched, since the client says `is_connected()` for ever."""

    def __init__(self, client: Any, browser: Browser, token: processes.Token, pid: int | None) -> None:
        self.browser = browser
        self.pid = pid
        self._client = client
        self._token = token
        self._new_context = browser.new_context  # before the host wraps it for code that opens its own
        self._closing = False
        self._callback: Callable[[str], None] | None = None
        self._stop_watching: Callable[[], None] = lambda: None
        self._watch()

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._callback = callback
        if self.pid is None or not psutil.pid_exists(self.pid):
            self._lost()

    async def new_context(self, identity: Identity) -> BrowserContext:
        return await self._new_context()  # the client adds the identity's own viewport, locale and time zone

    async def close(self, timeout_ms: int) -> None:
        self._closing = True
        self._stop_watching()
        closing = asyncio.ensure_future(self.browser.close())
        await asyncio.wait({closing}, timeout=timeout_ms / 1000)
        if not closing.done():
            logger.warning("the browser did not close in %d ms; killing it", timeout_ms)
        await self.kill()
        await _quietly(self._client.__aexit__(None, None, None))
        await asyncio.wait({closing}, timeout=1)
        if closing.done() and not closing.cancelled() and (error := closing.exception()) is not None:
            logger.debug("the browser's close said: %s", error)
        closing.cancel()

    async def kill(self) -> None:
        await asyncio.to_thread(processes.kill_launch, self._token)

    def _watch(self) -> None:
        if self.pid is None:
            return
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            self._poll(loop)
            return
        loop.add_reader(descriptor, self._lost)

        def stop() -> None:
            self._stop_watching = lambda: None
            loop.remove_reader(descriptor)
            os.close(descriptor)

        self._stop_watching = stop

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        def look() -> None:
            if self.pid is not None and processes.lives(self.pid):
                handle[0] = loop.call_later(POLL_S, look)
            else:
                self._lost()

        handle = [loop.call_later(POLL_S, look)]
        self._stop_watching = lambda: handle[0].cancel()

    def _lost(self) -> None:
        self._stop_watching()
        if not self._closing and self._callback is not None:
            callback, self._callback = self._callback, None
            callback("the browser's process ended")


class InvisibleEngine:
    """Launches the patched Firefox that invisible_playwright fetched; never fetches it itself."""

    name = "invisible"
    max_contexts: int | None = MAX_CONTEXTS

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def launch_key(self, identity: Identity) -> Hashable:
        pins = json.dumps(dict(identity.pins), sort_keys=True)
        return identity.seed, identity.proxy, identity.locale, identity.timezone, pins

    async def check(self) -> str:
        found = await asyncio.to_thread(find, self._settings)
        if found is None:
            raise EngineMissing(
                "the patched Firefox of invisible_playwright is not on this machine; fetch it with "
                "`asyncworker doctor --install`",
                engine=self.name,
            )
        return found.describe()

    async def launch(self, identity: Identity) -> InvisibleBrowser:
        await self.check()
        token = processes.new_token()
        client = await asyncio.to_thread(_client, self._settings, identity, token)
        # Its own task: the client's launch must not be cancelled, it would block the loop while it cleans up.
        entering = asyncio.ensure_future(client.__aenter__())
        limit_ms = self._settings.launch_timeout_ms
        try:
            await asyncio.wait({entering}, timeout=limit_ms / 1000)
        except asyncio.CancelledError:
            entering.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.to_thread(processes.kill_launch, token)
            raise
        if not entering.done():
            await asyncio.to_thread(processes.kill_launch, token)
            await asyncio.wait({entering}, timeout=limit_ms / 1000)
            raise LaunchFailed(
                f"invisible did not start in {limit_ms} ms (ASYNCWORKER_LAUNCH_TIMEOUT_MS); run `asyncworker doctor`",
                engine=self.name,
            )
        try:
            browser = entering.result()
        except Exception as error:
            await asyncio.to_thread(processes.kill_launch, token)
            raise LaunchFailed(f"invisible did not start: {_reason(error)}", engine=self.name) from error
        pid = await asyncio.to_thread(_engine_pid, token)
        return InvisibleBrowser(client, browser, token, pid)

    def classify(self, error: BaseException) -> Fault | None:
        return classify_by_name(error)

    async def close(self) -> None:
        """Nothing is shared between its browsers."""


def _client(settings: Settings, identity: Identity, token: processes.Token) -> Any:
    """The client of one launch; drawing its identity takes some ms, its import half a second."""
    leave_invisible_core_alone()
    from invisible_playwright.async_api import InvisiblePlaywright

    class Client(InvisiblePlaywright):  # type: ignore[misc]  # its type is not known here
        """The client, whose browser carries our token beside its own."""

        def _build_env(self, prefs: Any) -> dict[str, str]:
            environment: dict[str, str] = super()._build_env(prefs)
            return environment | {processes.VARIABLE: str(token)}

    proxy = Proxy.parse(identity.proxy).as_option() if identity.proxy else None
    return Client(
        seed=identity.seed,
        pin=dict(identity.pins) or None,
        headless=settings.headless,
        proxy=proxy,
        extra_args=list(settings.launch_args),
        humanize=settings.humanize,
        locale=identity.locale or "auto",
        timezone=identity.timezone or "",
        binary_path=_text(settings.executable_path),
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _engine_pid(token: processes.Token) -> int | None:
    """The engine's process: the child of this one that carries the token."""
    me = os.getpid()
    return next((process.pid for process in processes.carriers(lambda t: t == token) if process.ppid() == me), None)


def _reason(error: BaseException) -> str:
    remedies = {
        "GeoTimezoneError": "set ASYNCWORKER_TIMEZONE and ASYNCWORKER_LOCALE",
        "EngineMismatch": "run `asyncworker doctor --install`",
        "SealError": "run `asyncworker doctor --install`",
    }
    remedy = remedies.get(type(error).__name__, "run `asyncworker doctor`")
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}; {remedy}"


async def _quietly(work: Any) -> None:
    """The exit of a browser whose process is gone may say anything."""
    with contextlib.suppress(Exception):
        await work
