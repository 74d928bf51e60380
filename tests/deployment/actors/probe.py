"""Actors whose behaviour the process tests look at. Facts about them go to the site and into results."""

import asyncio
import contextlib
import os
from typing import Any

import dramatiq

from asyncworker import Session, actor, open_session


@actor(store_results=True, max_retries=0)
async def text(session: Session, url: str, *, seed: int | None = None) -> str:
    """The text of a page's only paragraph."""
    await session.page.goto(url, wait_until="domcontentloaded")
    return await session.page.inner_text("p")


@actor(store_results=True, max_retries=5, min_backoff=50, max_backoff=100)
async def visit(session: Session, url: str, *, fail: int = 0, seed: int | None = None) -> dict[str, Any]:
    """Go to a page; fail on the first `fail` attempts, with the seed in what is said."""
    await session.page.goto(f"{url}&seed={seed}" if "?" in url else f"{url}?seed={seed}")
    if session.attempt.number <= fail:
        raise RuntimeError(f"told to fail with seed {seed}")
    return {
        "seed": seed,
        "attempt": session.attempt.number,
        "random": session.random.random(),
        "generation": session.generation,
        "pid": os.getpid(),
    }


@actor(store_results=True, max_retries=5, min_backoff=50, max_backoff=100)
async def visitor(session: Session, url: str | None = None, *, seed: int | None = None) -> dict[str, Any]:
    """Whom a site sees, and the process of the browser that shows it."""
    if url is not None:
        await session.page.goto(url)
    return {
        "seed": session.seed,
        "digest": session.identity.digest,
        "attempt": session.attempt.number,
        "engine": session._lease.generation.launched.pid,
        "pid": os.getpid(),
    }


@actor(store_results=True, max_retries=0, time_limit=1_500)
async def stuck(session: Session, url: str, *, cleanup_ms: int = 0) -> None:
    """Never ends by itself; its own cleanup takes a while and says that it ended."""
    try:
        await session.page.goto(url)
    finally:
        await asyncio.sleep(cleanup_ms / 1000)
        session.log.info("cleanup ended")


@actor(store_results=True, max_retries=0)
async def slow_close(session: Session, url: str, close_ms: int) -> str:
    """Its context takes a while to close."""
    context = session.context
    close = context.close

    async def slowly(**options: Any) -> None:
        session.log.info("close began")
        await asyncio.sleep(close_ms / 1000)
        await close(**options)
        session.log.info("close ended")

    context.close = slowly  # type: ignore[method-assign]
    session.log.info("close will be slow")
    await session.page.goto(url)
    return await session.page.title()


@actor(store_results=True, max_retries=0, time_limit=3_000)
async def slow_close_over_limit(session: Session, url: str, close_ms: int) -> None:
    """Hits its time limit, and then its context takes a while to close."""
    await slow_close.fn_async(session, url, close_ms)
    await asyncio.sleep(60)


@actor(store_results=True, max_retries=3, min_backoff=50, max_backoff=100)
async def crash_page(session: Session, *, crashes: int = 1, seed: int | None = None) -> dict[str, Any]:
    """Its page's renderer dies on the first attempts."""
    if session.attempt.number <= crashes:
        await session.page.goto("chrome://crash")
    return {"seed": seed, "attempt": session.attempt.number, "generation": session.generation}


@actor(store_results=True, max_retries=0)
async def name_crash(session: Session) -> str:
    """Waits for something else than the page while its page dies."""
    crash = asyncio.ensure_future(session.page.goto("chrome://crash"))
    try:
        await asyncio.sleep(60)
    finally:
        with contextlib.suppress(Exception):
            await crash
    return "not noticed"


@dramatiq.actor(queue_name="plain", store_results=True, max_retries=0)
def add(left: int, right: int) -> int:
    """An actor without a browser."""
    return left + right


@dramatiq.actor(queue_name="opened", store_results=True, max_retries=0)
async def open_own(url: str) -> dict[str, Any]:
    """A plain Dramatiq actor that opens a session itself."""
    async with open_session(seed=7) as session:
        await session.page.goto(url)
        return {"title": await session.page.title(), "seed": session.seed, "generation": session.generation}


@actor(store_results=True, max_retries=0)
async def leave_open(session: Session, url: str) -> int:
    """Opens contexts on the browser itself and closes none."""
    for _ in range(2):
        context = await session.browser.new_context()
        await (await context.new_page()).goto(url)
    await session.browser.new_page()
    await session.context.new_page()
    return len(session.browser.contexts)


@actor(store_results=True, max_retries=0)
async def contexts(session: Session) -> int:
    """How many contexts the browser has, with this one."""
    return len(session.browser.contexts)
