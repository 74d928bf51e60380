"""Actors that do not end when they should."""

import asyncio
import contextlib
import ctypes
import time
from typing import Any

import dramatiq

from asyncworker import Session, actor

#: So that a test that fails leaves nothing running.
LONGEST_S = 90


@actor(store_results=True, max_retries=0, time_limit=1_500)
async def stubborn(session: Session, url: str) -> None:
    """Catches everything and calls again, until it is refused for good; says by what it was refused."""
    calls: dict[str, Any] = {
        "page.goto": lambda: session.page.goto(url),
        "context.new_page": lambda: session.context.new_page(),
        "browser.new_context": lambda: session.browser.new_context(),
        "browser.new_page": lambda: session.browser.new_page(),
        "browser_type.launch": lambda: session.browser.browser_type.launch(),
    }
    browser, ends = session.browser, time.monotonic() + LONGEST_S
    with contextlib.suppress(BaseException):
        await session.page.goto(url)
    calls["kept browser"] = lambda: browser.new_context()
    said = set()
    while time.monotonic() < ends:
        for name, call in calls.items():
            try:
                await call()
                said.add(f"{name}: went through")
            except BaseException as error:
                said.add(f"{name}: {type(error).__name__}")
        if len(said) >= len(calls):
            session.log.info("stubborn: %s", ", ".join(sorted(said)))
            said = set()


@actor(store_results=True, max_retries=0, time_limit=1_500)
async def spin(session: Session, url: str) -> None:
    """Waits for a page whose script never yields."""
    await session.page.goto(url)
    await session.page.wait_for_selector("#never")


@actor(store_results=True, max_retries=0, time_limit=60_000)
async def slow_close_each_tenth(session: Session, number: int) -> int:
    """For each tenth message its context takes 10 s to close; for others its close fails."""
    if number % 10 == 5:

        async def failing(**options: Any) -> None:
            raise RuntimeError("this context does not close")

        session.context.close = failing  # type: ignore[method-assign]
    if number % 10 == 9:
        close = session.context.close

        async def slowly(**options: Any) -> None:
            await asyncio.sleep(10)
            await close(**options)

        session.context.close = slowly  # type: ignore[method-assign]
    return number


@actor(store_results=True, max_retries=0)
async def block_loop(session: Session, seconds: float, *, attempts: int = 99) -> int:
    """Blocks the loop that all sessions of the process share, in its first attempts."""
    if session.attempt.number <= attempts:
        await asyncio.gather(_block(seconds))  # in a task of its own
    return session.attempt.number


async def _block(seconds: float) -> None:
    time.sleep(seconds)


@dramatiq.actor(queue_name="blocked", store_results=True, max_retries=0, time_limit=500)
def block_thread(seconds: float) -> None:
    """A call to C, which sees no interrupt."""
    time.sleep(seconds)


@dramatiq.actor(queue_name="blocked", store_results=True, max_retries=0)
def keep_the_interpreter(seconds: int) -> None:
    """A call to C that lets no other thread run."""
    ctypes.PyDLL(None).sleep(seconds)
