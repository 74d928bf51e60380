"""A Celery app with this runtime installed; its workers are Celery's own. What it needs is in the environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from typing import Any

from celery import Celery, Task, current_task
from celery.exceptions import SoftTimeLimitExceeded
from dramatiq.asyncio import get_event_loop_thread
from playwright.sync_api import sync_playwright

from asyncworker import open_session, processes
from asyncworker.celery import browser, expect, install, session
from asyncworker.loop import LoopThread
from asyncworker.runtime import Runtime
from asyncworker.session import current_attempt

URL = os.environ.get("TEST_CELERY_URL", "memory://")  # noqa: TID251 -- tests are no part of the package

app = Celery("installed", broker=URL, backend=URL if URL.startswith("redis") else "cache+memory://")
app.conf.update(worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
install(app)

if os.environ.get("TEST_LAUNCHES_IN_PARENT"):  # noqa: TID251 -- as above
    mistake = sync_playwright().start()


@app.task(bind=True, max_retries=3)
def title(self: Task, url: str, seed: int, fail: int = 0) -> dict[str, Any]:
    """The task of the "before" kind: it retries with its seed, and has a page."""
    with session(self, seed=seed) as s:
        s.page.goto(url)
        expect(s.page.locator("p").first).to_be_visible()
        if self.request.retries < fail:
            raise self.retry(countdown=0)
        return {
            "title": s.page.title(),
            "seed": s.seed,
            "random": s.random.random(),
            "attempt": [s.attempt.message_id == self.request.id, s.attempt.actor, s.attempt.number],
            "pid": os.getpid(),
            "generation": s.generation,
        }


@app.task
def by_browser(url: str, *, leave: bool = False) -> list[Any]:
    """Uses `browser` as if it were a global of Playwright's; never closes what it opens."""
    page = browser.new_page()
    second = browser.new_page(user_agent="mine")
    with browser.new_context() as context:
        third = context.new_page()
        third.goto(url)
    page.goto(url)
    found = [page.title(), second.evaluate("navigator.userAgent"), third.is_closed(), bool(browser.version)]
    if leave:
        raise SystemExit(3)
    return found


@app.task
def counts() -> dict[str, int]:
    """The counts of this process; sent after other tasks, when their contexts are closed."""
    return dict(_runtime().counts())


@app.task(bind=True)
def handlers_see_the_task(self: Task, url: str) -> list[Any]:
    with session(self, seed=1) as s:
        seen = []
        s.page.on("request", lambda _: seen.append([current_task.name, self.request.id, threading.get_ident()]))
        s.page.goto(url)
        return [*seen[0][:2], seen[0][2] != threading.get_ident()]


@app.task(bind=True, max_retries=2)
async def asynchronous(self: Task, url: str, fail: int = 0) -> dict[str, Any]:
    before = current_task.request.id
    async with open_session(seed=3) as s:
        await s.page.goto(url)
        await asyncio.sleep(0.3)
        if self.request.retries < fail:
            raise self.retry(countdown=0, exc=LookupError("mine"))
        attempt = current_attempt.get()
        assert attempt is not None
        return {
            "title": await s.page.title(),
            "same": before == self.request.id == current_task.request.id == attempt.message_id,
            "retries": self.request.retries,
            "thread": threading.current_thread().name,
            "child": await asyncio.to_thread(lambda: current_task.name),
            "session": await _refused(self),
        }


async def _refused(task: Task) -> str:
    try:
        with session(task):
            return "opened"
    except RuntimeError as error:
        return str(error)


@app.task(autoretry_for=(LookupError,), retry_kwargs={"max_retries": 1, "countdown": 0})
async def by_itself_retried() -> int:
    await asyncio.sleep(0)
    if current_task.request.retries == 0:
        raise LookupError("mine")
    return int(current_task.request.retries)


@app.task(soft_time_limit=1, time_limit=30)
async def softly_limited(catches: bool) -> str:
    try:
        async with asyncio.timeout(20):
            await asyncio.sleep(20)
    except SoftTimeLimitExceeded:
        if catches:
            await asyncio.sleep(0.01)
            return "caught in the coroutine"
        raise
    return "not limited"


@app.task(bind=True, soft_time_limit=1)
def limited_in_a_call(self: Task, url: str) -> list[str]:
    with session(self, seed=1) as s:
        try:
            s.page.goto(url)
        except SoftTimeLimitExceeded:
            s.page.goto("about:blank")
            return ["SoftTimeLimitExceeded", s.page.url]
    return []


@app.task(bind=True, time_limit=2)
def limited_by_us_alone(self: Task, url: str) -> str:
    """A pool of threads enforces no limit; the session has one."""
    with session(self, seed=1) as s:
        page = s.page
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(LookupError):
                page.evaluate("1")
            time.sleep(0.05)
    return "not limited"


@app.task(bind=True)
def stays(self: Task, url: str) -> None:
    with session(self, seed=1) as s:
        s.page.goto(url)
        app.backend.client.rpush("stays", os.getpid())
        time.sleep(60)


@app.task
def place() -> list[Any]:
    """Where this runs, and which tokens this process has."""
    mine = processes.new_token()
    there = get_event_loop_thread()
    return [os.getpid(), os.getppid(), isinstance(there, LoopThread), mine.pid]


def _runtime() -> Runtime:
    from asyncworker import runtime

    there = runtime._worker_runtime
    assert there is not None
    return there[0]
