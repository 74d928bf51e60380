"""Phases: where an attempt is, and how long it has been in each phase.

Told by what opens and closes its session, on the loop, by setting a name and a time; read by the account of attempts
from other threads. Nothing here asks the store: the times go with the row when that is written anyway.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from enum import StrEnum


class Phase(StrEnum):
    """What an attempt is at, in this order: also the `phase` of PhaseTimeout."""

    wait = "wait"  # for its number in the ledger, a slot and a browser that is free
    launch = "launch"  # of the browser that it waits for
    context = "context"  # being opened, with its page
    code = "code"  # the actor's own
    close = "close"  # of the context


#: Those on the way to the end of the code, one after the other; the close may go on beside what comes then.
TIMED = (Phase.wait, Phase.launch, Phase.context, Phase.code)


class Phases:
    """A stopwatch of one attempt.

    The first session that the attempt opens drives it; sessions that its code opens beside that are its code's.

    Parameters:
        has_session: The attempt begins with waiting for its session; else with its code.
        clock: In seconds.
    """

    def __init__(self, *, has_session: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent = dict.fromkeys(TIMED, 0.0)
        self._has_had_session = has_session
        self._is_driven = False
        #: The phase and when it began; None: its end has come, and no other has begun.
        self._now: tuple[Phase, float | None] = (Phase.wait if has_session else Phase.code, clock())
        self._closing_since: float | None = None
        self._closed: float | None = None

    @property
    def at(self) -> Phase:
        """The phase that the attempt is at, or was at last; a close that goes on beside the code's end is one."""
        is_open = self._now[1] is not None
        return Phase.close if self.is_closing and not is_open else self._now[0]

    @property
    def reached(self) -> Phase:
        """How far the attempt has come on the way to the end of its code."""
        return self._now[0]

    @property
    def is_closing(self) -> bool:
        """True while the attempt's context closes."""
        return self._closing_since is not None

    def enter(self, phase: Phase) -> None:
        """The next phase begins; it may be one that was there before."""
        self.pause()
        self._now = phase, self._clock()

    def pause(self) -> None:
        """The phase ends, and none begins yet."""
        phase, since = self._now
        if since is not None:
            self._now = phase, None
            self._spent[phase] += self._clock() - since

    def begin_close(self) -> None:
        self._closing_since = self._clock()

    def end_close(self) -> None:
        since, self._closing_since = self._closing_since, None
        if since is not None:
            self._closed = (self._closed or 0.0) + self._clock() - since

    def ms(self) -> tuple[int, ...]:
        """Whole ms in wait, launch, context, code and close, as far as they are known; empty without any session.

        The last is missing until the context has closed.
        """
        if not self._has_had_session:
            return ()
        now, since = self._now
        spent = self._spent | ({} if since is None else {now: self._spent[now] + self._clock() - since})
        times = [spent[phase] for phase in TIMED]
        if self._closed is not None and not self.is_closing:
            times.append(self._closed)
        return tuple(round(each * 1000) for each in times)

    @contextlib.contextmanager
    def driven(self) -> Iterator[Phases]:
        """Within the block a session drives this; another one that is opened meanwhile has one of its own."""
        if self._is_driven:
            yield Phases()
            return
        former, self._is_driven, self._has_had_session = self._now[0], True, True
        try:
            yield self
        finally:
            self._is_driven = False
            if former is Phase.code:  # of an actor that opens its sessions itself
                self.enter(Phase.code)
            else:
                self.pause()


#: Of the attempt that the running thread, and the code that it has started on the loop, is at.
current_phases: ContextVar[Phases | None] = ContextVar("asyncworker_phases", default=None)

#: The same while its session is being opened: what opens it tells its steps.
_opening: ContextVar[Phases | None] = ContextVar("asyncworker_opening", default=None)


@contextlib.contextmanager
def opening(phases: Phases) -> Iterator[None]:
    """What runs here opens a session, and says by `enter` how far that is."""
    token = _opening.set(phases)
    try:
        yield
    finally:
        _opening.reset(token)


def enter(phase: Phase) -> None:
    """The session that is being opened here is in this phase; without one nothing happens."""
    if (phases := _opening.get()) is not None:
        phases.enter(phase)
