"""Three tasks for the pages of a shop, in the one browser of the worker process."""

import random

from dramatiq.errors import Retry
from playwright.async_api import Error

from asyncworker import Session, actor


@actor(store_results=True, retry_when=lambda retries, error: retries < 3 and isinstance(error, Retry))
async def title(session: Session, url: str, *, seed: int | None = None) -> str:
    """The page's title."""
    page = session.page
    try:
        await page.goto(url, wait_until="domcontentloaded")
        return await page.title()
    except Error as exc:
        # What does not load now may load in a moment.
        raise Retry(str(exc), delay=1_000 * 2 ** (session.attempt.number - 1)) from exc


@actor(
    store_results=True,
    time_limit=60_000,
    retry_when=lambda retries, error: retries < 3 and isinstance(error, Retry),
    context_options={"viewport": {"width": 390, "height": 844}, "locale": "en-US"},
)
async def price(session: Session, url: str, *, seed: int | None = None) -> dict[str, object]:
    """What a product costs, as a phone sees it."""
    page = session.page
    response = await page.goto(url, wait_until="domcontentloaded")
    if response is None or response.status >= 500:
        raise Retry(delay=1_000)
    await page.locator(".price:not(:empty)").wait_for()  # a script fills it in
    return {
        "name": await page.inner_text("h1"),
        "price": await page.inner_text(".price"),
        "width": await page.evaluate("innerWidth"),
        "seed": seed,
    }


@actor(
    store_results=True,
    retry_when=lambda retries, error: retries < 3 and isinstance(error, Error),
    min_backoff=1_000,
    max_backoff=600_000,
)
async def wander(session: Session, url: str, steps: int = 2, *, seed: int | None = None) -> list[str]:
    """The headings along a walk through the shop; the same seed takes the same way."""
    way = random.Random(seed)
    page = session.page
    await page.goto(url, wait_until="domcontentloaded")
    headings = []
    for _ in range(steps):
        links = page.locator("a.card")
        async with page.expect_navigation():
            await links.nth(way.randrange(await links.count())).click()
        headings.append(await page.locator("h1").inner_text())
    return headings
