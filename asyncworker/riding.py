"""Riding: what a thread has done goes to the store with the message that it begins next, in one round trip.

Of some queues it has to be known for certain which messages had begun, so a thread waits for a round trip before each
of them. The one before, which it has just done, rides along: its acknowledgement and its row need no thread and no
round trip of their own. What finds no ride within a moment is settled like everything else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from asyncworker.ledger import ClosedRow
from asyncworker.settling import Done, Settled

#: Seconds that what is done waits for a ride. So much longer is what a killed worker has just done not known as done.
WAIT_S = 0.005

#: The thread that looks for what waits too long ends when it has found nothing so many times.
IDLE_LOOKS = 20


@dataclass(frozen=True)
class Rider:
    """A message that is done, with its rows."""

    done: Done
    rows: list[ClosedRow]
    since: float


@dataclass
class Ride:
    """What goes along with a message that begins; who takes it along says what the store has answered.

    Attributes:
        tries: How often the store was told.
    """

    riders: list[Rider]
    tries: int = 0
    settled: Settled = field(default_factory=lambda: Settled([], []))

    @property
    def identifiers(self) -> list[str]:
        return [rider.done.identifier for rider in self.riders]

    @property
    def rows(self) -> list[ClosedRow]:
        return [row for rider in self.riders for row in rider.rows]


class Riding:
    """Decides what rides and what is settled by itself.

    Parameters:
        settle: Has a row, or a message that is done, settled without a ride.
    """

    def __init__(self, settle: Callable[[ClosedRow | Done], None]) -> None:
        self._settle = settle
        self._waiting: deque[Rider] = deque()
        self._changing = threading.Lock()
        self._thread = threading.local()
        self._looking: threading.Thread | None = None
        self._is_over = threading.Event()

    def put(self, what: ClosedRow | Done) -> None:
        """Have it settled, by a ride if this thread's message has begun with one; waits for nothing."""
        rows: list[ClosedRow] | None = getattr(self._thread, "rows", None)
        if rows is None:
            self._settle(what)
        elif isinstance(what, ClosedRow):
            rows.append(what)
            if what.number:  # more of it may be on its way, and its end must not come before that
                self.get_off()
        elif what.rejected:
            self.get_off()
            self._settle(what)
        else:
            self._thread.rows = None
            with self._changing:
                self._waiting.append(Rider(what, rows, time.monotonic()))
                self._look()

    def get_off(self) -> None:
        """What this thread has done, and does until it begins another message, is settled without a ride."""
        rows, self._thread.rows = getattr(self._thread, "rows", None), None
        for row in rows or ():
            self._settle(row)

    @contextmanager
    def ride(self, queue_name: str) -> Iterator[Ride]:
        """This thread begins a message of a queue; the block tells the store, of what rides along, too."""
        self.get_off()
        with self._changing:
            ride = Ride([rider for rider in self._waiting if rider.done.queue_name == queue_name])
            for rider in ride.riders:
                self._waiting.remove(rider)
        try:
            yield ride
        except BaseException:
            self._settle_all(ride.riders)
            raise
        self._thread.rows = []
        for row, _ in ride.settled.refused:
            self._settle(row)
        for rider, was_ours in zip(ride.riders, ride.settled.were_ours, strict=True):
            # Of what is repeated the first may have been taken.
            rider.done.taken(was_ours if was_ours or ride.tries == 1 else None)

    def stop(self) -> None:
        """Have all that waits settled without a ride."""
        self._is_over.set()
        self._settle_those_since(float("inf"))

    def _settle_all(self, riders: list[Rider]) -> None:
        for rider in riders:
            for row in rider.rows:  # first: who finds a message settled finds how it ended
                self._settle(row)
            self._settle(rider.done)

    def _settle_those_since(self, latest: float) -> bool:
        """Settle those that have waited since then; True when any waits, or did."""
        with self._changing:
            late = [rider for rider in self._waiting if rider.since <= latest]
            for rider in late:
                self._waiting.remove(rider)
            is_any = bool(late or self._waiting)
        self._settle_all(late)
        return is_any

    def _look(self) -> None:
        """See to it that none waits for long; the lock is held."""
        if self._looking is None:
            self._is_over.clear()
            self._looking = threading.Thread(target=self._run, name="asyncworker-riding", daemon=True)
            self._looking.start()

    def _run(self) -> None:
        idle = 0
        while idle < IDLE_LOOKS and not self._is_over.wait(WAIT_S):
            idle = 0 if self._settle_those_since(time.monotonic() - WAIT_S) else idle + 1
        with self._changing:
            self._looking = None
            if self._waiting:
                self._look()
