"""Actors that are useful as they are: what a page says, its title, its links, its picture.

Their arguments come from a queue and are not trusted: each URL is judged by the deployment's settings first, and
files are written below ASYNCWORKER_OUTPUT_DIR only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from asyncworker import Session, actor
from asyncworker.errors import AsyncworkerError, InvalidArguments
from asyncworker.guard import checked_output_path, checked_url, masked, write_output
from asyncworker.private_hosts import deny_private

if TYPE_CHECKING:
    from playwright.async_api import Page

#: The page's own clock ends a wait for fields; a page whose script never yields has none, and is given this more.
_GRACE_MS = 2_000
_LONGEST_WAIT_MS = 600_000


class FieldsMissing(AsyncworkerError, TimeoutError):
    """The page did not show all fields in time; the message is retried.

    Not raised for a selector that is no CSS: that is InvalidArguments, and no retry helps.
    """

    fields = ("url", "missing")
    url: str | None
    missing: list[str] | None


@actor(store_results=True, max_retries=3, time_limit=60_000)
async def scrape(
    session: Session, url: str, fields: dict[str, str], *, timeout_ms: int = 10_000, seed: int | None = None
) -> dict[str, str]:
    """Open a page and read its fields, as soon as a script has filled in the last of them.

    Parameters:
        fields: Name to CSS selector, as {"title": "h1", "price": ".price"}. The first element that matches counts,
            with its text on one line; with `a.next::attr(href)` its attribute of that name, as it is written.
        timeout_ms: How long all fields together may take, once the page's document is there.

    Raises:
        FieldsMissing: When one does not match, or is still empty, in time.
        InvalidArguments: When a selector is no CSS.
    """
    _check_fields(fields, timeout_ms)
    async with _open(session, url) as (page, status):
        answer = await _read_fields(page, fields, timeout_ms)
    if answer["invalid"]:
        reason = "; ".join(f"{name}: {fields[name]!r}" for name in answer["invalid"])
        raise InvalidArguments(f"no CSS selector: {reason}; correct what sends the message", actor="pages.scrape")
    if answer["missing"]:
        raise FieldsMissing(
            f"{masked(url)} (HTTP status {status}) did not show {', '.join(answer['missing'])} in {timeout_ms} ms; "
            "correct the selectors if the page has changed, or raise timeout_ms",
            url=masked(url),
            missing=answer["missing"],
        )
    found = dict(answer["found"])
    return {name: found[name] for name in fields}


@actor(store_results=True, max_retries=3, time_limit=60_000)
async def title(session: Session, url: str, *, seed: int | None = None) -> str:
    """The page's title."""
    async with _open(session, url) as (page, _):
        return await page.title()


@actor(store_results=True, max_retries=3, time_limit=60_000)
async def links(session: Session, url: str, *, seed: int | None = None) -> list[str]:
    """The absolute http and https URLs that the page's document links to, each once, in their order."""
    async with _open(session, url) as (page, _):
        found: list[str] = await page.evaluate(_LINKS)
    return found


@actor(store_results=True, max_retries=3, time_limit=60_000)
async def screenshot(session: Session, url: str, path: str, full_page: bool = False, *, seed: int | None = None) -> str:
    """Take a picture of the page and return where it was written.

    Parameters:
        path: Relative to ASYNCWORKER_OUTPUT_DIR; ends in .png, .jpg or .jpeg.
        full_page: All of the page, not just what fits the window.

    Raises:
        PathRefused: When the path leads anywhere else.
    """
    kind = _picture_kind(path)
    output_dir = session.settings.output_dir
    await asyncio.to_thread(checked_output_path, path, output_dir=output_dir)
    # Not "domcontentloaded" here: a picture is to show the page's own pictures.
    async with _open(session, url, wait_until="load") as (page, _):
        picture = await page.screenshot(full_page=full_page, type=kind)
    return str(await asyncio.to_thread(write_output, path, picture, output_dir=output_dir))


@contextlib.asynccontextmanager
async def _open(
    session: Session, url: str, *, wait_until: Literal["domcontentloaded", "load"] = "domcontentloaded"
) -> AsyncIterator[tuple[Page, int | None]]:
    """The session's page at `url`, with its HTTP status; leave the block with the result in hand.

    Raises:
        UrlRefused: When the settings do not allow this URL, or where it leads.
    """
    settings = session.settings
    url = checked_url(url, schemes=settings.allowed_schemes)
    page = session.page
    watch: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
    if settings.deny_private_hosts:
        watch = deny_private(page, url, proxied=settings.proxy is not None)
    async with watch:
        response = await page.goto(url, wait_until=wait_until)
        yield page, response.status if response is not None else None


def _check_fields(fields: object, timeout_ms: object) -> None:
    named = isinstance(fields, dict) and all(isinstance(selector, str) for selector in fields.values())
    if not named or not fields:
        raise InvalidArguments(
            f"fields is a mapping of name to CSS selector, as {{'title': 'h1'}}, not {fields!r:.100}; "
            "correct what sends the message",
            actor="pages.scrape",
        )
    if type(timeout_ms) is not int or not 0 < timeout_ms <= _LONGEST_WAIT_MS:
        raise InvalidArguments(
            f"timeout_ms is an integer from 1 to {_LONGEST_WAIT_MS}, not {timeout_ms!r:.100}; "
            "correct what sends the message",
            actor="pages.scrape",
        )


def _picture_kind(path: object) -> Literal["png", "jpeg"]:
    suffix = PurePath(path).suffix.lower() if isinstance(path, str) else ""
    if suffix not in (".png", ".jpg", ".jpeg"):
        raise InvalidArguments(
            f"a picture's path ends in .png, .jpg or .jpeg, not {path!r:.100}; correct what sends the message",
            actor="pages.screenshot",
        )
    return "png" if suffix == ".png" else "jpeg"


async def _read_fields(page: Page, fields: dict[str, str], timeout_ms: int) -> dict[str, Any]:
    """Wait for all fields and read them, in one round trip to the page.

    A page that moves on meanwhile, as interstitials do, takes its script with it: then the next one is asked,
    in what is left of the time.
    """
    wanted = [_wanted(name, selector) for name, selector in fields.items()]
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    missing: dict[str, Any] = {"found": [], "missing": list(fields), "invalid": []}
    while (left_ms := round((deadline - loop.time()) * 1000)) > 0:
        try:
            async with asyncio.timeout((left_ms + _GRACE_MS) / 1000):
                answer: dict[str, Any] = await page.evaluate(_FIELDS, [wanted, left_ms])
                return answer
        except TimeoutError:
            return missing
        except Exception as error:
            if "context was destroyed" not in str(error):  # each browser library has its own Error
                raise
    return missing


def _wanted(name: str, selector: str) -> dict[str, str | None]:
    """`a.next::attr(href)`, as Scrapy writes it, is the attribute href of `a.next`."""
    css, mark, attribute = selector.rpartition("::attr(")
    if mark and attribute.endswith(")"):
        return {"name": name, "css": css, "attribute": attribute[:-1].strip()}
    return {"name": name, "css": selector, "attribute": None}


# Looks again after every change of the document, not by a timer: a field is seen as soon as it is there.
_FIELDS = """
([wanted, timeout]) => new Promise((resolve) => {
  const found = [], invalid = [];
  for (const { name, css } of wanted) {
    try { document.querySelector(css); } catch { invalid.push(name); }
  }
  let open = wanted;
  const look = () => {
    open = open.filter(({ name, css, attribute }) => {
      const element = document.querySelector(css);
      const text = element && (attribute === null ? element.textContent : element.getAttribute(attribute));
      const line = (text || "").replace(/\\s+/g, " ").trim();
      if (line) found.push([name, line]);
      return !line;
    });
    return open.length === 0;
  };
  const answer = () => resolve({ found, invalid, missing: open.map(({ name }) => name) });
  if (invalid.length || look()) return answer();
  const observer = new MutationObserver(() => { if (look()) end(); });
  const timer = setTimeout(() => { look(); end(); }, timeout);
  const end = () => { observer.disconnect(); clearTimeout(timer); answer(); };
  observer.observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
})
"""

_LINKS = """
() => {
  const found = new Set();
  for (const link of document.querySelectorAll("a[href], area[href]")) {
    let url;
    try { url = new URL(link.getAttribute("href"), document.baseURI); } catch { continue; }
    if (url.protocol === "http:" || url.protocol === "https:") found.add(url.href);
  }
  return [...found];
}
"""
