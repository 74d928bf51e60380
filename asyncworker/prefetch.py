"""Prefetch: how many messages a worker takes from a queue before it has done those that it has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: Messages that a thread has done sooner than this, on the average, are short. Beside its round trips to the store a
#: longer one is not held up by them, and one that waits behind it would be held up by it.
SHORT_S = 0.02

#: How much the latest message counts in the average. One that a busy machine has held up among short ones does not
#: count as long; one that takes a second does.
WEIGHT = 0.1

#: So many times its threads a worker that has short messages fetches ahead at most.
MOST_AHEAD = 8


class Prefetch:
    """What a worker has handed to its threads, and how much more it may take.

    As many as it has threads: no message waits behind a busy worker while another is idle. Only while messages turn out
    to be short it takes more with one round trip, and hands out twice as many as it has threads, so that none of them
    waits for the store. What counts is how long the thread had a message, not how long that waited for a thread: else
    a slower machine would take less ahead, and be slower still.

    Parameters:
        threads: The worker's threads.
        clock: Gives seconds.
    """

    def __init__(self, threads: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.threads = threads
        self._clock = clock
        self._handed_out: dict[str, float] = {}
        self._freed_at: dict[int, float] = {}
        self._average_s = 0.0
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
        """This thread is done with a message; True when there are no more out than threads."""
        since = self._handed_out.pop(identifier, None)
        if since is not None:
            now, thread = self._clock(), threading.get_ident()
            took_s = now - max(since, self._freed_at.get(thread, since))
            self._freed_at[thread] = now
            # Threads may do this at once; a count that is lost makes no difference.
            self._average_s += WEIGHT * (took_s - self._average_s)
            self._streak = self._streak + 1 if self._average_s < SHORT_S else 0
        return self.out <= self.threads

    def stuck(self) -> None:
        """The threads are held up: no message is short any more."""
        self._streak = 0
