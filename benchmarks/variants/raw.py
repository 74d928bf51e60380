"""The limit: one process, one browser, as many asyncio tasks as slots, and no queue.

Reads lines from stdin, each a JSON list of URLs; answers each with one line, the JSON list of what was read.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, async_playwright
from work import launch_options, read_in_fresh_context


async def read_all(browser: Browser, urls: list[str], slots: int) -> list[list[str]]:
    results: list[list[str]] = [[] for _ in urls]
    waiting = iter(enumerate(urls))

    async def slot() -> None:
        for place, url in waiting:
            results[place] = await read_in_fresh_context(browser, url)

    await asyncio.gather(*(slot() for _ in range(slots)))
    return results


async def serve(parameters: dict[str, Any]) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(**launch_options(parameters))
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await read_all(browser, json.loads(line), parameters["slots"])), flush=True)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(Path("parameters.json").read_text())))
