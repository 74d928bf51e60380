"""The first actor."""

from asyncworker import Session, actor


@actor(store_results=True, max_retries=3, time_limit=60_000)
async def title(session: Session, url: str, *, seed: int | None = None) -> str:
    await session.page.goto(url, wait_until="domcontentloaded")
    return await session.page.title()
