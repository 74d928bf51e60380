"""Rates: the rate_limit of a task in this worker process, as Celery has it: so many begin in a second."""

from __future__ import annotations

import threading
import time
from typing import Any


class Rates:
    """Gives each task of a rate limit its time to begin, one after the other; none is taken twice.

    What has to wait for long can wait in the broker, since its time is its own by then.
    """

    def __init__(self) -> None:
        self._next: dict[int, tuple[Any, float]] = {}
        self._lock = threading.Lock()

    def wait_s(self, bucket: Any) -> float:
        """How long a task has to wait, in s.

        Parameters:
            bucket: Celery's token bucket of its kind; another one when its rate is changed. None: there is no limit.
        """
        if bucket is None:
            return 0.0
        now = time.monotonic()
        with self._lock:
            _, free_at = self._next.get(id(bucket), (bucket, now))
            begins = max(now, free_at)
            self._next[id(bucket)] = (bucket, begins + 1 / bucket.fill_rate)
        return begins - now
