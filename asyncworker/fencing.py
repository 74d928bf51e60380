"""Fences: integers that tell a later attempt of a message from an earlier one.

The store gives them, and each that it gives is greater than all before: over the attempts of a message, whatever ended
the earlier ones, and over all messages. It counts from its own time in microseconds, so that they also grow when it
has lost its data, or a replica has taken its place that had not heard of the last ones.

With Redis or Valkey as the broker a message gets its fence in the step in which a worker takes it, which costs no
round trip: an attempt whose worker was frozen before it began cannot get a greater one when it wakes. RabbitMQ knows of
no fences: there an attempt with a session asks the store for one before it begins, and another one when its code wants
to know it, so an attempt that was frozen before that is not recognized by its fence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_lock = threading.Lock()
_last = 0


def local_fence() -> int:
    """A fence where there is no store to give it: it grows within this process."""
    global _last
    with _lock:
        _last = max(_last + 1, time.time_ns() // 1_000)
        return _last


@dataclass(frozen=True)
class Claim:
    """Where the broker's store says that a message is this worker's: who takes it away removes it there."""

    acks: str
    identifier: str


class Fence:
    """The fence of one attempt.

    Parameters:
        value: None: `draw` gives it when it is wanted.
        claim: None: the broker's store cannot say whose a message is.
    """

    def __init__(
        self, value: int | None = None, *, claim: Claim | None = None, draw: Callable[[], int] = local_fence
    ) -> None:
        self.claim = claim
        self._value = value
        self._draw = draw
        self._drawing = threading.Lock()

    @property
    def value(self) -> int:
        """May ask the store, once.

        Raises:
            redis.RedisError: When the store does not answer.
        """
        with self._drawing:
            if self._value is None:
                self._value = self._draw()
            return self._value
