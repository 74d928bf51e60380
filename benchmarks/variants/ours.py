"""This project's actor."""

from __future__ import annotations

from work import read_product

from asyncworker import Session, actor


@actor(actor_name="product", max_retries=0, store_results=True)
async def product(session: Session, url: str) -> list[str]:
    return await read_product(session.page, url)
