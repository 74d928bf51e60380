"""Actors that write down when they ran."""

import time
from pathlib import Path

import dramatiq

from asyncworker import Session, actor


def _note(path: str, number: int) -> None:
    with Path(path).open("a") as file:
        file.write(f"{number} {time.time()}\n")


@dramatiq.actor(queue_name="noted", max_retries=0)
def note(path: str, number: int, *, ms: int = 0) -> None:
    """Work for so long, then add a line with the number and the UNIX time."""
    time.sleep(ms / 1000)
    _note(path, number)


@dramatiq.actor(queue_name="noted", store_results=True, max_retries=0)
def note_and_answer(path: str, number: int, *, ms: int = 0) -> int:
    """The same, with a result."""
    time.sleep(ms / 1000)
    _note(path, number)
    return number


@actor(queue_name="looked", max_retries=0)
async def look_and_note(session: Session, path: str, number: int, *, seed: int | None = None) -> None:
    """Open a page, then note, without a result."""
    await session.page.goto("about:blank")
    _note(path, number)
