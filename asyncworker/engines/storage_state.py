"""Playwright's storage state on an engine whose client takes the option and ignores it.

Cookies are added to the context; what an origin had in its localStorage is put back by a script that runs before
the page's own, in the origin's first document, whose storage is still empty.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncworker.errors import InvalidArguments

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page

#: How long one page may take to tell its origin's localStorage; a page that never answers holds up no other.
PAGE_TIMEOUT_S = 2.0

#: Stands before the saved origins in the script, by which it can be told from the actor's own.
MARK = "/* asyncworker: localStorage */"

# Only into an empty storage: what the site has changed or removed since then is not put back at each navigation, but
# for a site that has removed the last of it.
_RESTORE = """((origins) => {
  const saved = origins.find(({ origin }) => origin === window.location.origin);
  if (!saved || window.localStorage.length > 0) return;
  for (const { name, value } of saved.localStorage) window.localStorage.setItem(name, value);
})(%s %s)"""

_READ = """() => [
  window.location.origin,
  Array.from({ length: window.localStorage.length }, (_, place) => {
    const name = window.localStorage.key(place);
    return { name, value: window.localStorage.getItem(name) };
  }),
]"""


async def read(state: Any) -> dict[str, Any]:
    """A storage state as `new_context` takes it: a mapping, or the path of its JSON file.

    Raises:
        InvalidArguments: When it is neither, or lacks its shape.
    """
    if isinstance(state, str | Path):
        try:
            state = json.loads(await asyncio.to_thread(Path(state).read_text))
        except (OSError, ValueError) as error:
            raise InvalidArguments(
                f"the storage state {state} cannot be read: {error}; give the file that storage_state(path=...) wrote"
            ) from None
    cookies, origins = (state.get("cookies", []), state.get("origins", [])) if isinstance(state, dict) else (None, None)
    if not isinstance(cookies, list) or not isinstance(origins, list):
        raise InvalidArguments(
            'a storage state is {"cookies": [...], "origins": [...]} or the path of a JSON file; '
            "give what storage_state() returned"
        )
    return {"cookies": cookies, "origins": origins}


async def restore(context: BrowserContext, state: Any) -> None:
    """Bring a storage state into a fresh context."""
    parts = await read(state)
    if parts["cookies"]:
        await context.add_cookies(parts["cookies"])
    saved = [origin for origin in parts["origins"] if origin.get("localStorage")]
    if saved:
        await context.add_init_script(_RESTORE % (MARK, json.dumps(saved)))


def complete(context: BrowserContext) -> None:
    """Let `context.storage_state()` tell the origins, too: those that the context's pages show at that moment."""

    async def storage_state(*, path: str | Path | None = None, **options: Any) -> dict[str, Any]:
        state = await _gather(context)
        if path is not None:
            await asyncio.to_thread(Path(path).write_text, json.dumps(state, indent=2))
        return state

    context.storage_state = storage_state  # type: ignore[method-assign, assignment]


async def _gather(context: BrowserContext) -> dict[str, Any]:
    cookies = await context.cookies()
    found = await asyncio.gather(*(_local_storage(page) for page in context.pages))
    origins = {origin: items for origin, items in filter(None, found) if items}
    return {
        "cookies": cookies,
        "origins": [{"origin": origin, "localStorage": items} for origin, items in origins.items()],
    }


async def _local_storage(page: Page) -> tuple[str, list[dict[str, str]]] | None:
    try:
        async with asyncio.timeout(PAGE_TIMEOUT_S):
            origin, items = await page.evaluate(_READ)
    except Exception:  # noqa: BLE001 -- a page without storage, such as about:blank, raises what its script raised
        return None
    return origin, items
