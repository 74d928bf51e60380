"""Tasks that only our workers can run as they are meant, and such as end their worker."""

from __future__ import annotations

import asyncio
import contextlib
import time

import facts_tasks
from celery import current_task
from celery.exceptions import SoftTimeLimitExceeded
from facts_tasks import Hooked, app, body, record, slowly, task


@task(bind=True)
async def aio(self, number):
    body(self)
    await asyncio.sleep(0)

    async def helper():
        return self.request.id

    inner = await asyncio.wait_for(helper(), 5)
    both = await asyncio.gather(helper(), helper())
    aside = await asyncio.to_thread(lambda: self.request.id)
    return [number, {inner, aside, *both} == {self.request.id}, current_task.name]


@task(bind=True, max_retries=2)
async def aio_retry(self):
    body(self)
    await asyncio.sleep(0.01)
    if self.request.retries < 2:
        raise self.retry(exc=ValueError("again"), countdown=0)
    return self.request.retries


@task(bind=True, autoretry_for=(KeyError,), retry_kwargs={"countdown": 0, "max_retries": 1})
async def aio_autoretry(self):
    body(self)
    await asyncio.sleep(0.01)
    raise KeyError("again")


@task(bind=True, soft_time_limit=0.3)
async def aio_soft(self):
    body(self)
    try:
        async with asyncio.timeout(20):
            await asyncio.wait_for(asyncio.sleep(20), 20)
    except SoftTimeLimitExceeded as error:
        await asyncio.sleep(0.01)
        return [list(error.args), asyncio.current_task().cancelling()]


@task(bind=True, time_limit=0.3)
async def aio_hard(self):
    body(self)
    try:
        await asyncio.sleep(20)
    finally:
        await asyncio.sleep(0.05)
        record("note", self.request.id, self.request.root_id, cleaned=True)


@task(bind=True)
async def aio_sleeper(self):
    body(self)
    await asyncio.sleep(30)


@task(bind=True)
async def aio_calls(self):
    """Calls tasks like functions."""
    body(self)
    return [await aio_plain(1), facts_tasks.add(1, 2), self.request.id is not None]


@app.task(name="facts.aio_plain")
async def aio_plain(number):
    await asyncio.sleep(0)
    return number


@task(bind=True)
def calls_aio(self):
    body(self)
    return aio_plain(7)


@task(bind=True, time_limit=0.3)
def stuck(self):
    """In a call to C, where no interrupt is seen."""
    body(self)
    time.sleep(60)


@task(bind=True)
def stuck_for_long(self):
    body(self)
    time.sleep(60)


@app.task(name="facts.limited", rate_limit="4/s", base=Hooked, bind=True)
def limited(self):
    record("BEGAN", self.request.id, self.request.root_id, at=time.time())


def _killed(self):
    body(self)
    redelivered = self.request.delivery_info["redelivered"]
    record("RUNS", self.request.id, self.request.root_id, redelivered=redelivered, retries=self.request.retries)
    if not redelivered and not self.request.retries:
        slowly(60)  # until it is killed
    return [redelivered, self.request.retries]


@task(bind=True)
def lost_early(self):
    return _killed(self)


@task(bind=True, acks_late=True)
def lost_late(self):
    return _killed(self)


@task(bind=True, acks_late=True, reject_on_worker_lost=True)
def lost_late_reject(self):
    return _killed(self)


@task(bind=True, acks_late=True, retry_on_worker_lost=True, default_retry_delay=0)
def lost_late_retry(self):
    return _killed(self)


@task(bind=True)
def holds(self, seconds):
    """Ignores soft interrupts."""
    body(self)
    with contextlib.suppress(Exception):
        slowly(seconds)
