"""The work of one message, the same for every variant: open a product page, read what its script fills in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

#: Waits for the price and reads it and the title, in one round trip.
READ = """() => new Promise((resolve) => {
  const price = document.querySelector(".price");
  const answer = () => resolve([document.querySelector("h1").textContent, price.textContent]);
  if (price.textContent) return answer();
  new MutationObserver(answer).observe(price, { childList: true });
})"""


async def read_product(page: Page, url: str) -> list[str]:
    """The product's title and price."""
    await page.goto(url, wait_until="domcontentloaded")
    return cast(list[str], await page.evaluate(READ))


async def read_in_fresh_context(browser: Browser, url: str) -> list[str]:
    """The same in a context of its own, as code without asyncworker does it."""
    context = await browser.new_context()
    try:
        return await read_product(await context.new_page(), url)
    finally:
        await context.close()


def launch_options(parameters: dict[str, Any]) -> dict[str, Any]:
    """Playwright's options for the browser that asyncworker launches, too."""
    return cast(dict[str, Any], parameters["launch"])
