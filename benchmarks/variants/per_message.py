"""Plain Dramatiq with a browser launched per message; Playwright's driver stays, so only the browser counts."""

from __future__ import annotations

import asyncio

import dramatiq
from plain_broker import make_broker, parameters
from playwright.async_api import Playwright, async_playwright
from work import launch_options, read_in_fresh_context

broker = make_broker("per_message")

_playwright: Playwright | None = None
_starting = asyncio.Lock()


async def the_playwright() -> Playwright:
    global _playwright
    async with _starting:
        if _playwright is None:
            _playwright = await async_playwright().start()
        return _playwright


@dramatiq.actor(max_retries=0, store_results=True)
async def product(url: str) -> list[str]:
    playwright = await the_playwright()
    browser = await playwright.chromium.launch(**launch_options(parameters))
    try:
        return await read_in_fresh_context(browser, url)
    finally:
        await browser.close()
