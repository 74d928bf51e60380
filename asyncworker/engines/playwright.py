"""Stock Playwright: chromium, firefox and webkit."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncworker import processes
from asyncworker.engines import Fault, Launched, capabilities, classify_by_name, context_options
from asyncworker.engines.driver import Driver
from asyncworker.engines.finding import find
from asyncworker.errors import EngineMissing, LaunchFailed
from asyncworker.identity import Identity
from asyncworker.settings import EngineName, Settings, child_environment
from asyncworker.shielding import shielded
from asyncworker.threads import in_thread

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext

logger = logging.getLogger("asyncworker.engine")

#: The browser's own talk with its vendor: a worker's traffic is the actors' and nothing else.
QUIET_CHROMIUM = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-sync",
    "--no-first-run",
    "--no-pings",
)
QUIET_FIREFOX = {
    "app.update.auto": False,
    "browser.safebrowsing.downloads.remote.enabled": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "toolkit.telemetry.enabled": False,
}


#: What a driver that answers may take to notice that a launch took too long, or that its browser is dead.
DRIVER_GRACE_S = 3.0

#: A launch that fails with its driver does so a moment before the driver's own end is seen.
DRIVER_LOST_S = 0.5


#: How Playwright tells, in the log of a launch, that somebody killed the browser.
_KILLED = "signal=SIGKILL"


class PlaywrightBrowser:
    """A browser that Playwright launched or connected to; it says itself when it is gone."""

    abandoned = 0  # a cancelled call holds up no other

    def __init__(
        self,
        browser: Browser,
        driver: Driver,
        token: processes.Token | None,
        give_back: Callable[[Driver], Awaitable[None]],
    ) -> None:
        self.browser = browser
        self.driver = driver
        self.pid: int | None = None
        self._give_back = give_back
        self._token = token
        self._new_context = browser.new_context  # before the host wraps it for code that opens its own
        self._closing = False
        self._callback: Callable[[str], None] | None = None
        browser.on("disconnected", lambda _: self._lost("the browser's process ended"))
        self._forget_driver = driver.on_lost(lambda: self._lost("Playwright's driver ended"))

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._callback = callback
        if not self.browser.is_connected():
            self._lost("the browser's process ended")

    async def new_context(self, identity: Identity, options: Mapping[str, Any]) -> BrowserContext:
        return await self._new_context(**(context_options(identity) | dict(options)))

    async def close(self, timeout_ms: int) -> None:
        self._closing = True
        self._forget_driver()  # it outlives many browsers and would keep them all
        closing = asyncio.ensure_future(self.browser.close())
        await asyncio.wait({closing}, timeout=timeout_ms / 1000)
        if not closing.done():
            logger.warning("the browser did not close in %d ms; killing it", timeout_ms)
        await self.kill()
        await asyncio.wait({closing}, timeout=DRIVER_GRACE_S)
        if not closing.done():
            closing.cancel()
            if self._token is not None:  # its browser is dead, and it has not noticed: it would fail the next one, too
                logger.error("Playwright's driver does not answer; it is killed, with all of its browsers")
                await self.driver.kill()
        elif not closing.cancelled() and (error := closing.exception()) is not None:
            logger.debug("the browser's close said: %s", error)
        await self._give_back(self.driver)

    async def memory_mb(self, enough_mb: float) -> float:
        tokens = {self.driver.token, self._token}
        return await in_thread(processes.memory_mb, lambda token: token in tokens, enough_mb=enough_mb)

    async def kill(self) -> None:
        if self._token is not None:
            await in_thread(processes.kill_launch, self._token)

    def _lost(self, reason: str) -> None:
        if not self._closing and self._callback is not None:
            callback, self._callback = self._callback, None
            callback(reason)


class PlaywrightEngine:
    """Launches chromium, firefox or webkit.

    One driver serves the browsers of the process, since a launch with a driver of its own took 0.7 s instead of
    0.2 s. It grows with every context, so it is replaced with a browser that is recycled, and ends with its last one.
    """

    max_contexts: int | None = None

    def __init__(self, settings: Settings) -> None:
        self.name = str(settings.engine)
        is_chromium = settings.engine is EngineName.chromium
        self.capabilities = capabilities.CHROMIUM if is_chromium else capabilities.STOCK
        self._settings = settings
        self._driver: Driver | None = None
        #: Drivers that serve no new browser and end with their last one.
        self._former: set[Driver] = set()
        self._starting = asyncio.Lock()

    def launch_key(self, identity: Identity) -> Hashable:
        return identity.proxy  # locale and time zone are options of a context

    async def identify(self, identity: Identity) -> Identity:
        return identity  # a stock browser shows every seed the same visitor

    async def check(self) -> str:
        found = await in_thread(find, self._settings)
        if found is None:
            raise EngineMissing(
                f"no {self.name} on this machine; install it with "
                f"`ASYNCWORKER_ENGINE={self.name} asyncworker doctor --install`",
                engine=self.name,
            )
        return found.describe()

    async def launch(self, identity: Identity) -> PlaywrightBrowser:
        await self.check()
        driver = await self._borrow_driver()
        try:
            return await self._launch(driver)
        except LaunchFailed as error:
            if was_killed(error.__cause__):
                logger.warning("%s was killed by somebody while it started; it is launched once more", self.name)
            elif await driver.ends_within(DRIVER_LOST_S):
                logger.warning("Playwright's driver ended under a launch, which is made by another one: %s", error)
            else:
                raise
        return await self._launch(await self._borrow_driver())

    async def _launch(self, driver: Driver) -> PlaywrightBrowser:
        """Launch on a borrowed driver, which is given back when nothing came up."""
        token, launching = processes.new_token(), None
        try:
            options = await in_thread(self._launch_options, token, driver.directory)
            launching = asyncio.ensure_future(getattr(driver.playwright, self.name).launch(**options))
            # The driver keeps the limit itself, unless it hangs.
            await asyncio.wait({launching}, timeout=self._settings.launch_timeout_ms / 1000 + DRIVER_GRACE_S)
            if not launching.done():
                await driver.kill()
            return PlaywrightBrowser(await launching, driver, token, self._give_back)
        except BaseException as error:
            await shielded(self._abandon(token, driver))
            if not isinstance(error, Exception):
                raise
            raise LaunchFailed(
                f"{self.name} did not start: {own_words(error)}; run `asyncworker doctor`",
                engine=self.name,
            ) from error
        finally:
            if launching is not None:
                launching.cancel()

    async def _abandon(self, token: processes.Token, driver: Driver) -> None:
        """Leave nothing of a launch that failed, or that no one waits for any more."""
        await in_thread(processes.kill_launch, token)
        await self._give_back(driver)

    def renew(self, launched: Launched) -> None:
        if isinstance(launched, PlaywrightBrowser) and launched.driver is self._driver:
            self._former.add(launched.driver)
            self._driver = None

    def classify(self, error: BaseException) -> Fault | None:
        return classify_by_name(error)

    async def close(self) -> None:
        driver, self._driver = self._driver, None
        former, self._former = self._former, set()
        for each in (*former, *([driver] if driver is not None else [])):
            await each.stop(self._settings.close_timeout_ms)

    async def _give_back(self, driver: Driver) -> None:
        driver.users -= 1
        if driver in self._former and driver.users == 0:
            self._former.remove(driver)
            await driver.stop(self._settings.close_timeout_ms)

    async def _borrow_driver(self) -> Driver:
        async with self._starting:
            if self._driver is None or self._driver.lost:
                limit_ms = self._settings.launch_timeout_ms
                try:
                    self._driver = await asyncio.wait_for(Driver.start(), limit_ms / 1000)
                except TimeoutError:
                    raise LaunchFailed(
                        f"Playwright's driver did not start in {limit_ms} ms (ASYNCWORKER_LAUNCH_TIMEOUT_MS); "
                        "run `asyncworker doctor`",
                        engine=self.name,
                    ) from None
            self._driver.users += 1
            return self._driver

    def _launch_options(self, token: processes.Token, directory: Path) -> dict[str, Any]:
        settings = self._settings
        found = find(settings)
        options: dict[str, Any] = {
            "headless": settings.headless,
            "args": list(settings.launch_args),
            "env": child_environment(**{processes.VARIABLE: str(token), "TMPDIR": str(directory)}),
            "timeout": settings.launch_timeout_ms,
            # Signals are the worker's to handle: it finishes its messages, then closes the browser.
            "handle_sigint": False,
            "handle_sigterm": False,
            "handle_sighup": False,
        }
        if found is not None and found.executable is not None:
            options["executable_path"] = str(found.executable)
        if found is not None and found.channel is not None:
            options["channel"] = found.channel
        if settings.proxy_parts is not None:
            options["proxy"] = settings.proxy_parts.as_option()
        if settings.engine is EngineName.chromium:
            options["args"] = [*QUIET_CHROMIUM, *settings.launch_args]
            # Playwright leaves the sandbox out for everyone unless told otherwise; Chromium refuses it to root only.
            options["chromium_sandbox"] = not _is_root()
        if settings.engine is EngineName.firefox:
            options["firefox_user_prefs"] = QUIET_FIREFOX
        return options


def _is_root() -> bool:
    if os.geteuid() != 0:
        return False
    logger.warning(
        "running as root: chromium starts with --no-sandbox, so a hostile page that breaks out of its renderer is "
        "root here; run the worker as another user"
    )
    return True


def own_reason(error: BaseException) -> str | None:
    """The reason that the browser itself gave for not starting, such as a library that it misses; None: none.

    It stands deep in Playwright's text, in the browser's log.
    """
    said = re.search(r"\[err\] (.*(?:error while loading|cannot open|sandbox|FATAL).*)", str(error))
    return said.group(1) if said else None


def was_killed(error: BaseException | None) -> bool:
    """True when a browser that was being launched was ended by SIGKILL, as by the kernel for want of memory.

    At the launch's limit Playwright itself kills what does not answer, and tells that as a timeout.
    """
    return _KILLED in str(error) and type(error).__name__ != "TimeoutError"


def own_words(error: BaseException) -> str:
    """The browser's own reason, else what Playwright says first; below that come some hundred lines of log."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return own_reason(error) or " ".join(lines[:2]) or type(error).__name__
