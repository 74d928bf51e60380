"""Actors that end their worker process, and those that run beside them."""

import os
import signal
import time

import dramatiq

from actors.held import wait_for
from asyncworker import Session, actor


@dramatiq.actor(queue_name="deadly", max_retries=3)
def die(gate: str, *, seed: int | None = None) -> None:
    """Kill the process as soon as the file is there.

    Not before: a process that is killed while it tells Dramatiq's command that it is up may leave that waiting for
    ever, with the lock of what it tells it by.
    """
    wait_for(gate)
    os.kill(os.getpid(), signal.SIGKILL)


@dramatiq.actor(queue_name="deadly", max_retries=0, store_results=True)
def linger(ms: int) -> int:
    """Be there for a while."""
    time.sleep(ms / 1000)
    return ms


@actor(queue_name="deadly", max_retries=3)
async def die_in_page(session: Session, url: str, *, seed: int | None = None) -> None:
    """Kill the process once the page has answered."""
    await session.page.goto(url)
    os.kill(os.getpid(), signal.SIGKILL)
