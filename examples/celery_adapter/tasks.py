"""Three tasks for the pages of a shop, in the one browser of the worker process."""

import random

from celery import Celery
from playwright.sync_api import Error

from asyncworker.celery import browser, session

app = Celery("tasks", broker="asyncworker://", backend="asyncworker://")


@app.task(bind=True, max_retries=3)
def title(self, url: str, seed: int | None = None) -> str:
    """The page's title."""
    page = browser.new_page()
    try:
        page.goto(url, wait_until="domcontentloaded")
        return page.title()
    except Error as exc:
        # What does not load now may load in a moment.
        raise self.retry(exc=exc, countdown=2**self.request.retries)
    finally:
        page.close()


@app.task(bind=True, max_retries=3, default_retry_delay=1, time_limit=60)
def price(self, url: str, seed: int | None = None) -> dict[str, object]:
    """What a product costs, as a phone sees it."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, locale="en-US")
    try:
        page = context.new_page()
        response = page.goto(url, wait_until="domcontentloaded")
        if response is None or response.status >= 500:
            raise self.retry()
        page.locator(".price:not(:empty)").wait_for()  # a script fills it in
        return {
            "name": page.inner_text("h1"),
            "price": page.inner_text(".price"),
            "width": page.evaluate("innerWidth"),
            "seed": seed,
        }
    finally:
        context.close()


@app.task(bind=True, autoretry_for=(Error,), retry_backoff=True, max_retries=3)
def wander(self, url: str, steps: int = 2, seed: int | None = None) -> list[str]:
    """The headings along a walk through the shop; the same seed takes the same way."""
    way = random.Random(seed)
    headings = []
    with session(self, seed=seed) as s:
        s.page.goto(url, wait_until="domcontentloaded")
        for _ in range(steps):
            links = s.page.locator("a.card")
            with s.page.expect_navigation():
                links.nth(way.randrange(links.count())).click()
            headings.append(s.page.locator("h1").inner_text())
    return headings
