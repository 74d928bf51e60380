"""Read a heading with the worker's browser, and hand it to an actor on a queue without one."""

from pathlib import Path

import dramatiq

from asyncworker import get_broker, open_session

FILE = Path("headings.txt")


@dramatiq.actor(broker=get_broker(), queue_name="browser", store_results=True, max_retries=3, time_limit=60_000)
async def heading(url: str) -> str:
    # No seed here: it is the deployment's. open_session(seed=7) would be another visitor.
    async with open_session() as session:
        await session.page.goto(url, wait_until="domcontentloaded")
        text = await session.page.inner_text("h1")
    note.send(f"{url} {text}")
    return text


@dramatiq.actor(broker=get_broker(), queue_name="files")
def note(line: str) -> None:
    """Append a line once: a message may run twice, so what is there already is left alone."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    if line not in lines:
        FILE.write_text("\n".join([*lines, line]) + "\n")
