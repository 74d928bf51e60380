"""Backlog: what the ledger's store has not taken, kept in memory and written in order when it is back.

No message waits for its row: a worker whose store is away goes on and says so. What comes while something waits here
waits behind it, also where the store would take it by now: so rows are numbered in the order of their attempts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable

import redis

from asyncworker.patience import locked_out, passes, remedy

logger = logging.getLogger("asyncworker.worker")

#: So many attempts are kept; of more the oldest are dropped, counted, and told of.
MOST = 10_000


class Backlog:
    """What waits to be written, by attempt.

    Parameters:
        most: How many attempts are kept.
    """

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, Callable[[], object]] = {}
        self._dropped = 0
        self._written = 0

    @property
    def is_away(self) -> bool:
        """True while something waits: the store is not asked for more meanwhile."""
        return bool(self._waiting)

    @property
    def dropped(self) -> int:
        """How many attempts found no place since the store went away."""
        return self._dropped

    def add(self, key: Hashable, write: Callable[[], object], error: BaseException | None = None) -> None:
        """Have something written later; what waits under the same key is replaced, in its place.

        Parameters:
            write: May be repeated, by any thread.
            error: What the store said, where it was asked.
        """
        with self._lock:
            is_first = not self._waiting
            self._waiting[key] = write
            is_full = len(self._waiting) > self._most
            if is_full:
                del self._waiting[next(iter(self._waiting))]
                self._dropped += 1
            has_just_begun_to_drop = is_full and self._dropped == 1
        if is_first:
            logger.warning(
                "the ledger's store does not take rows (%s%s): this worker goes on, keeps them in memory and writes "
                "them when the store does",
                error,
                remedy(error) if error is not None else "",
            )
        if has_just_begun_to_drop:
            logger.error("the ledger's store is away for long: of more than %d rows the oldest are dropped", self._most)

    def write(self) -> bool:
        """Write what waits, first to last, until the store refuses; True when nothing waits any more."""
        while (first := self._first()) is not None:
            key, write = first
            try:
                write()
            except redis.RedisError as error:
                if passes(error) or locked_out(error):
                    return False
                logger.error("the ledger's store refuses a row: %s", error)
            self._done(key, write)
        return True

    def _first(self) -> tuple[Hashable, Callable[[], object]] | None:
        with self._lock:
            return next(iter(self._waiting.items()), None)

    def _done(self, key: Hashable, write: Callable[[], object]) -> None:
        with self._lock:
            if self._waiting.get(key) is not write:  # replaced meanwhile, or dropped
                return
            del self._waiting[key]
            self._written += 1
            if self._waiting:
                return
            written, dropped, self._written, self._dropped = self._written, self._dropped, 0, 0
        logger.warning("the ledger's store takes rows again: %d were written, %d were dropped", written, dropped)

    def stop(self) -> None:
        """The last try; what is left is told of."""
        if not self.write():
            logger.error("the ledger's store is away, and this worker stops: %d rows are dropped", len(self._waiting))
