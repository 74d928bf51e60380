"""A browser that runs elsewhere: a Playwright server (ws:// or wss://) or a CDP address.

Nothing is launched here, so nothing can be killed here: closing means letting go of the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from urllib.parse import urlsplit

from asyncworker.engines import capabilities
from asyncworker.engines.playwright import PlaywrightBrowser, PlaywrightEngine
from asyncworker.errors import ConfigurationError, LaunchFailed
from asyncworker.identity import Identity
from asyncworker.settings import Settings
from asyncworker.urls import SecretUrl


class RemoteEngine(PlaywrightEngine):
    """Connects to ASYNCWORKER_ENDPOINT."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.capabilities = capabilities.CHROMIUM  # whatever listens there judges for itself
        if settings.endpoint is None:
            raise ConfigurationError("the engine remote needs ASYNCWORKER_ENDPOINT", name="ASYNCWORKER_ENDPOINT")
        self._endpoint: SecretUrl = settings.endpoint

    def launch_key(self, identity: Identity) -> Hashable:
        return None

    async def check(self) -> str:
        return f"a browser at {self._endpoint}"

    async def launch(self, identity: Identity) -> PlaywrightBrowser:
        driver = await self._borrow_driver()
        url, timeout = self._endpoint.value, self._settings.launch_timeout_ms
        chromium = driver.playwright.chromium
        try:
            connecting = (
                chromium.connect_over_cdp(url, timeout=timeout)
                if _is_cdp(url)
                else chromium.connect(url, timeout=timeout)
            )
            browser = await asyncio.wait_for(connecting, timeout / 1000)
        except Exception as error:
            await self._give_back(driver)
            raise LaunchFailed(
                f"no browser answers at {self._endpoint}: {type(error).__name__}; is it running, and reachable "
                "from here?",
                engine=self.name,
            ) from error
        return PlaywrightBrowser(browser, driver, None, self._give_back)


def _is_cdp(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") or parts.path.startswith("/devtools/browser/")
