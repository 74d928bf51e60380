"""Actors of the scenarios that were reported from the field."""

import asyncio
from pathlib import Path
from typing import Any

import dramatiq

from asyncworker import Session, actor


def _note(path: str, event: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{event}\n")


@actor(store_results=True, max_retries=0, time_limit=60_000)
async def picture(session: Session, url: str) -> dict[str, int]:
    """A screenshot: how large it is, and by which browser."""
    await session.page.goto(url)
    return {"bytes": len(await session.page.screenshot()), "generation": session.generation}


@actor(store_results=True, max_retries=1, min_backoff=1, max_backoff=2, time_limit=1_000)
async def slow_close_and_retry(session: Session, url: str, path: str, close_ms: int) -> int:
    """Hits its time limit on its first attempt, and then its context takes a while to close."""
    number = session.attempt.number
    _note(path, f"begun {number}")
    if number == 1:
        close = session.context.close

        async def slowly(**options: Any) -> None:
            await asyncio.sleep(close_ms / 1000)
            await close(**options)
            _note(path, "closed 1")

        session.context.close = slowly  # type: ignore[method-assign]
        await session.page.goto(url)
    return number


@actor(store_results=True, max_retries=0, time_limit=20_000)
async def trapped(session: Session, url: str) -> str:
    """Ends on a page that asks before it is left."""
    await session.page.goto(url)
    await session.page.click("p")
    return await session.page.title()


@actor(store_results=True, max_retries=5, min_backoff=1, max_backoff=2)
async def seen(session: Session, url: str, path: str, *, seed: int | None = None) -> int:
    """Whom a site sees, noted on each of five attempts; the second ends with its renderer, the others by an error."""
    page = session.page
    await page.goto(url)
    place = await page.evaluate("[navigator.language, Intl.DateTimeFormat().resolvedOptions().timeZone]")
    who = session.identity
    _note(path, f"{session.seed} {seed} {who.locale} {who.timezone} {who.proxy} {place}")
    match session.attempt.number:
        case 5:
            return 5
        case 2:
            await page.goto("chrome://crash")
    raise RuntimeError("not yet")


@dramatiq.actor(queue_name="retried", max_retries=20, min_backoff=700, max_backoff=1_500)
def retried(path: str, failures: int) -> None:
    """Notes which of its attempts this is, and fails so often."""
    message = dramatiq.middleware.CurrentMessage.get_current_message()
    if message is None:
        return
    retries = message.options.get("retries", 0)
    _note(path, f"{message.message_id} {retries}")
    if retries < failures:
        raise RuntimeError("not yet")
