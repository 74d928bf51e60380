"""What is done with a page, by the workers and by raw Playwright alike."""

from __future__ import annotations

from typing import Any

#: The page's own script has filled in what is read: a page that dies before has shown nothing.
IS_FILLED = "() => document.querySelector('.price')?.textContent"


async def read(page: Any, url: str) -> str:
    await page.goto(url, wait_until="domcontentloaded")
    await page.wait_for_function(IS_FILLED)
    title: str = await page.title()
    return title
