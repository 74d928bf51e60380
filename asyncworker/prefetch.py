"""Prefetch: how many messages a worker takes from a queue before it has done those that it has."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A message that is done sooner than this is short. Beside its round trips to the store a longer one is not held up by
#: them, and one that waits behind it would be held up by it.
SHORT_S = 0.01

#: So many times its threads a worker that has short messages fetches ahead at most.
MOST_AHEAD = 4


class Prefetch:
    """What a worker has handed to its threads, and how much more it may take.

    As many as it has threads: no message waits behind a busy worker while another is idle. Only while each message
    turns out to be short it takes more with one round trip, and hands out twice as many as it has threads, so that
    none of them waits for the store.

    Parameters:
        threads: The worker's threads.
        clock: Gives seconds.
    """

    def __init__(self, threads: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.threads = threads
        self._clock = clock
        self._handed_out: dict[str, float] = {}
        self._streak = 0

    @property
    def most(self) -> int:
        """How many messages the worker may hold."""
        return self.threads + min(self._streak // 2, MOST_AHEAD * self.threads)

    @property
    def out(self) -> int:
        """How many messages its threads have, or are about to have."""
        return len(self._handed_out)

    def may_hand_out(self) -> bool:
        return self.out < self.threads * (2 if self._streak >= self.threads else 1)

    def hand_out(self, identifier: str) -> None:
        self._handed_out[identifier] = self._clock()

    def done(self, identifier: str) -> bool:
        """A thread is done with a message; True when there are no more out than threads."""
        since = self._handed_out.pop(identifier, None)
        if since is not None:
            # Threads may do this at once; a count that is lost makes no difference.
            self._streak = self._streak + 1 if self._clock() - since < SHORT_S else 0
        return self.out <= self.threads

    def stuck(self) -> None:
        """The threads are held up: no message is short any more."""
        self._streak = 0
