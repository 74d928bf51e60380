"""Plain Dramatiq with a browser in a module global."""

from __future__ import annotations

import asyncio

import dramatiq
from plain_broker import make_broker, parameters
from playwright.async_api import Browser, async_playwright
from work import launch_options, read_in_fresh_context

broker = make_broker("plain")

_browser: Browser | None = None
_launching = asyncio.Lock()


async def the_browser() -> Browser:
    global _browser
    async with _launching:
        if _browser is None:
            playwright = await async_playwright().start()
            _browser = await playwright.chromium.launch(**launch_options(parameters))
        return _browser


@dramatiq.actor(max_retries=0, store_results=True)
async def product(url: str) -> list[str]:
    return await read_in_fresh_context(await the_browser(), url)
