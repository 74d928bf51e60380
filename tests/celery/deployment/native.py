"""Actors beside the tasks."""

from __future__ import annotations

import dramatiq
from more_tasks import app  # noqa: F401 -- it is found here, and served


@dramatiq.actor(actor_name="native", max_retries=1, min_backoff=500, max_backoff=500)
def native(fails: bool) -> None:
    if fails:
        raise ValueError("native")
