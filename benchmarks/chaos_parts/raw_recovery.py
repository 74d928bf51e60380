"""Raw Playwright: for each line of stdin, kill the browser and print after how many ms the next page is done."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

import psutil
from _browsers import is_main
from playwright.async_api import Browser, Playwright, async_playwright
from reading import read

#: One that takes longer never comes back: the process ends.
LONGEST_S = 30.0


async def visit(browser: Browser, url: str) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    await read(page, url)
    await context.close()


def main_process() -> int:
    """The browser's, which is in another session than the driver's."""
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(one.pid) != os.getsid(0) and is_main(one):
                return one.pid
    raise RuntimeError("raw Playwright's browser is not there")


async def recovered(
    playwright: Playwright, browser: Browser, options: dict[str, Any], url: str
) -> tuple[Browser, float]:
    gone = asyncio.Event()
    browser.on("disconnected", lambda _: gone.set())
    pid = main_process()
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(LONGEST_S):
        await gone.wait()
        browser = await playwright.chromium.launch(**options)
        await visit(browser, url)
    return browser, (time.monotonic() - killed_at) * 1000


async def serve(options: dict[str, Any], url: str) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(**options)
        await visit(browser, url)
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            browser, took_ms = await recovered(playwright, browser, options, url)
            print(took_ms, flush=True)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1]), sys.argv[2]))
