"""The actors, as workers and producers declare them."""

from __future__ import annotations

from typing import Any

from asyncworker import Pace, Session, actor


async def visit(session: Session, url: str) -> None:
    await session.page.goto(url)


def declare(broker: Any, per_minute: int) -> dict[str, Any]:
    """`paced` keeps that rate, `plain` none, `slow` goes once in an hour."""
    paces = {"paced": f"{per_minute}/m", "plain": None, "slow": Pace("1/h")}
    return {
        name: actor(actor_name=name, pace=pace, broker=broker, max_retries=10, min_backoff=100, max_backoff=1_000)(
            visit
        )
        for name, pace in paces.items()
    }
