"""The limiter of one process, for tests: what pacing.lua does, in Python, with a clock that is passed in."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncworker.limiter import Answer, KeyState, Verdict
from asyncworker.pace import Rate, Terms, names_of

SECOND = 1_000_000
DAY = 86_400 * SECOND

#: As in pacing.lua.
OUT_FOR = 60 * SECOND
LOOK_AGAIN = 5 * SECOND
MOST_LEAD = 2 * SECOND
NEAR = 30_000
CATCH_UP = 100_000
BACK_OFF, MOST_BACK_OFF = 5 * SECOND, 600 * SECOND
MOST_SLOW, GOOD_FOR_STEP, MOST_STEP = 4, 10, 16
AT_ONCE = 500


@dataclass
class _Member:
    state: str
    ticket: int
    since: int
    key: str


@dataclass
class _State:
    key: str
    terms: Terms | None = None
    start: float = 0
    n: int = 0
    held: float = 0
    reason: str = ""
    lead: int = 0
    window: int = 0
    day: int = 0
    spent: int = 0
    slow: int = 0
    step: int = 0
    good: int = 0
    tickets: int = 0
    is_listed: bool = False
    taken: list[int] = field(default_factory=list)
    line: dict[str, int] = field(default_factory=dict)
    out: dict[str, int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)

    def head(self) -> str:
        return min(self.line, key=lambda member: (self.line[member], member))


class MemoryLimiter:
    """A limiter that ends with its process.

    Parameters:
        clock_us: The time in microseconds; a test's own takes none.
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._lock = threading.RLock()
        self._states: dict[str, _State] = {}
        self._members: dict[str, _Member] = {}
        self._due: dict[str, float] = {}
        self._rates: dict[str, Rate] = {}

    # --- what the estimates are made of

    def _get(self, key: str, now: int) -> _State:
        state = self._states.setdefault(key, _State(key))
        state.out = {member: at for member, at in state.out.items() if at >= now - OUT_FOR}
        state.running = {member: at for member, at in state.running.items() if at >= now - DAY}
        if state.day != now // DAY:
            state.spent = 0
        return state

    def _terms(self, state: _State) -> Terms:
        own = state.terms or Terms()
        if state.terms is None:
            return own
        rate = next((self._rates[name] for name in names_of(state.key) if name in self._rates), None)
        return own if rate is None else own.at_rate(rate)

    def _slot(self, state: _State) -> float:
        return float(self._terms(state).interval_us * 2**state.slow)

    def _tat(self, state: _State) -> float:
        return state.start + self._slot(state) if state.start > 0 else 0

    def _estimate(self, state: _State, out: int, running: int, now: int) -> float | None:
        terms = self._terms(state)
        if terms.max_concurrent and out + running >= terms.max_concurrent:
            return None
        start = max(now, state.held)
        if state.terms is None:
            return start if out == 0 else None
        at = max(start, max(start, self._tat(state)) + (out - terms.burst + 1) * self._slot(state))
        if terms.budget and not terms.rejects and state.spent + out >= terms.budget:
            at = max(at, (now // DAY + 1) * DAY)
        return at

    def _is_near(self, state: _State, at: float | None, now: int) -> bool:
        return at is not None and at - now <= state.window + state.lead

    def _early(self, state: _State) -> int:
        return min(state.window, NEAR) + state.lead

    def _next(self, state: _State, now: int) -> float | None:
        return self._estimate(state, len(state.out), len(state.running), now)

    def _score(self, state: _State, now: int) -> None:
        if not state.line:
            self._due.pop(state.key, None)
            return
        at = self._next(state, now)
        self._due[state.key] = now + LOOK_AGAIN if at is None else max(0, at - self._early(state))

    # --- members

    def _of(self, key: str, member: str) -> _Member | None:
        known = self._members.get(member) if member else None
        if known is not None and known.key != key:
            self.done(member)
            return None
        return known

    def _leave(self, state: _State, member: str) -> None:
        state.out.pop(member, None)
        state.running.pop(member, None)

    def _ticket(self, state: _State, known: _Member | None) -> int:
        if known is not None:
            return known.ticket
        state.tickets += 1
        return state.tickets

    def _let_out(self, state: _State, member: str, ticket: int, now: int, since: int | None = None) -> None:
        self._members[member] = _Member("o", ticket, now if since is None else since, state.key)
        state.out[member] = now

    def _enter(self, state: _State, member: str, ticket: int, now: int) -> None:
        self._members[member] = _Member("w", ticket, now, state.key)
        state.line[member] = ticket

    def arrive(self, arrivals: Sequence[tuple[str, str]], *, hold_ms: float) -> list[bool]:
        with self._lock:
            now = self._clock_us()
            return [self._arrive(key, member, round(hold_ms * 1000), now) for key, member in arrivals]

    def _arrive(self, key: str, member: str, window: int, now: int) -> bool:
        known = self._of(key, member)
        state = self._get(key, now)
        state.window, state.is_listed = window, True
        if known is not None and known.state == "w":
            return False
        self._leave(state, member)
        if known is not None and known.state == "o":
            goes = self._is_near(state, self._estimate(state, 0, len(state.running), now), now)
        else:
            goes = (not state.line or known is not None) and self._is_near(state, self._next(state, now), now)
        ticket = self._ticket(state, known)
        if goes:
            since = known.since if known is not None and known.state == "o" else None
            self._let_out(state, member, ticket, now, since)
        else:
            self._enter(state, member, ticket, now)
        self._score(state, now)
        return goes

    def admit(self) -> list[str]:
        with self._lock:
            now, let_go = self._clock_us(), list[str]()
            for key in sorted(
                (key for key, at in self._due.items() if at <= now), key=lambda key: (self._due[key], key)
            ):
                state = self._get(key, now)
                while state.line and len(let_go) < AT_ONCE:
                    at = self._next(state, now)
                    if at is None or at - now > self._early(state):
                        break
                    member = state.head()
                    self._let_out(state, member, state.line.pop(member), now)
                    let_go.append(member)
                self._score(state, now)
            return let_go

    def next_due_ms(self) -> float | None:
        with self._lock:
            return self._next_due(self._clock_us())

    def _next_due(self, now: int) -> float | None:
        return None if not self._due else math.floor(max(0, min(self._due.values()) - now)) / 1000

    # --- slots

    def commit(
        self, key: str, terms: Terms, *, member: str = "", hold_ms: float, most_ms: float | None = None
    ) -> Answer:
        with self._lock:
            now = self._clock_us()
            known = self._of(key, member)
            state = self._get(key, now)
            state.terms, state.window, state.is_listed = terms, round(hold_ms * 1000), True
            self._leave(state, member)
            most = round((hold_ms if most_ms is None else most_ms) * 1000) + state.lead
            verdict, at = self._refusal(state, member, known, most, now), float(now)
            if verdict is None:
                late = math.floor(self._jitter(state) * self._slot(state))
                burst = self._terms(state).burst
                at = max(now, state.held, self._tat(state) - (burst - 1) * self._slot(state) + late)
                if at - now <= most:
                    verdict = Verdict.go, at
                    tat = self._tat(state)
                    begun = max(tat, at - late)
                    is_on_time = begun - tat <= min(CATCH_UP, self._slot(state) * 0.75)
                    self._take(state, member, known, tat if is_on_time else begun, now)
                else:
                    verdict = Verdict.later, at
            if verdict[0] is not Verdict.go and known is not None:
                self._let_out(state, member, known.ticket, now)
            self._score(state, now)
            return Answer(verdict[0], math.floor(max(0, verdict[1] - now)) / 1000, self._next_due(now))

    def _refusal(
        self, state: _State, member: str, known: _Member | None, most: int, now: int
    ) -> tuple[Verdict, float] | None:
        terms = self._terms(state)
        if member and state.line and known is None:
            return Verdict.later, now
        if member and terms.max_concurrent and len(state.running) >= terms.max_concurrent:
            return Verdict.later, now
        if terms.budget and state.spent >= terms.budget:
            return Verdict.spent if terms.rejects else Verdict.later, (now // DAY + 1) * DAY
        if state.held > now + most:
            return Verdict.later, state.held
        return None

    def _jitter(self, state: _State) -> float:
        terms = self._terms(state)
        n = state.n % terms.pattern if terms.pattern else state.n
        drawn = hashlib.sha1(f"{terms.seed}:{state.key}:{n}".encode(), usedforsecurity=False).hexdigest()
        return int(drawn[:8], 16) / 4_294_967_296 * terms.jitter

    def _take(self, state: _State, member: str, known: _Member | None, start: float, now: int) -> None:
        state.start, state.n, state.day, state.spent = start, state.n + 1, now // DAY, state.spent + 1
        second = now // SECOND
        state.taken = [at for at in state.taken if at > second - 60] + [second]
        if known is not None and known.state == "o":
            lead = state.lead + (now - known.since - state.lead) // 8
            state.lead = min(MOST_LEAD, max(0, lead))
        if member:
            self._members[member] = _Member("r", self._ticket(state, known), now, state.key)
            state.running[member] = now

    def back(self, key: str, member: str, *, hold_ms: float) -> None:
        with self._lock:
            now = self._clock_us()
            known = self._of(key, member)
            state = self._get(key, now)
            state.window, state.is_listed = state.window or round(hold_ms * 1000), True
            self._leave(state, member)
            self._enter(state, member, self._ticket(state, known), now)
            self._score(state, now)

    def lost(self, member: str) -> None:
        with self._lock:
            known = self._members.get(member)
            if known is None or known.state == "w":
                return
            now = self._clock_us()
            state = self._get(known.key, now)
            self._leave(state, member)
            self._let_out(state, member, known.ticket, now)
            self._score(state, now)

    def done(self, member: str) -> None:
        with self._lock:
            known = self._members.pop(member, None)
            if known is None:
                return
            now = self._clock_us()
            state = self._get(known.key, now)
            self._leave(state, member)
            state.line.pop(member, None)
            self._score(state, now)

    # --- what keys are told

    def held_ms(self, key: str) -> float:
        with self._lock:
            now = self._clock_us()
            return max(0, self._get(key, now).held - now) / 1000

    def hold(
        self,
        key: str,
        *,
        for_ms: float | None = None,
        until_ms: float | None = None,
        reason: str = "",
        slows: bool = False,
    ) -> float:
        with self._lock:
            return self._hold(key, self._clock_us(), for_ms=for_ms, until_ms=until_ms, reason=reason, slows=slows)

    def _hold(
        self, key: str, now: int, *, for_ms: float | None, until_ms: float | None, reason: str, slows: bool
    ) -> float:
        state = self._get(key, now)
        state.is_listed = True
        ends: float = round((until_ms or 0) * 1000)
        if for_ms:
            ends = now + round(for_ms * 1000)
        if not ends:
            ends = now + min(MOST_BACK_OFF, BACK_OFF * 2**state.step)
            state.step = min(state.step + 1, MOST_STEP)
        if ends > state.held:
            state.held, state.reason = ends, reason
        if slows:
            state.slow, state.good = min(MOST_SLOW, state.slow + 1), 0
        self._score(state, now)
        return state.held / 1000

    def slow_down(self, key: str, *, for_ms: float | None = None, reason: str = "") -> float | None:
        with self._lock:
            now = self._clock_us()
            is_first = self._get(key, now).held <= now
            if is_first or for_ms:
                until_ms = self._hold(key, now, for_ms=for_ms, until_ms=None, reason=reason, slows=is_first)
            return until_ms - now / 1000 if is_first else None

    def succeeded(self, key: str) -> int:
        with self._lock:
            now = self._clock_us()
            state = self._get(key, now)
            if (state.slow or state.step) and state.held <= now:
                state.good, state.is_listed = state.good + 1, True
                if state.good >= GOOD_FOR_STEP:
                    state.good, state.slow, state.step = 0, max(0, state.slow - 1), max(0, state.step - 1)
                self._score(state, now)
            return state.slow

    def release(self, key: str) -> None:
        with self._lock:
            now = self._clock_us()
            state = self._get(key, now)
            state.held, state.reason, state.step, state.slow, state.good = 0, "", 0, 0, 0
            state.is_listed = True
            self._score(state, now)

    def set_rate(self, name: str, rate: Rate | None) -> None:
        with self._lock:
            now = self._clock_us()
            if rate is None:
                self._rates.pop(name, None)
            else:
                self._rates[name] = rate
            for key in list(self._due):
                self._score(self._get(key, now), now)

    def rates(self) -> dict[str, str]:
        with self._lock:
            return {name: str(rate) for name, rate in sorted(self._rates.items())}

    def states(self) -> list[KeyState]:
        with self._lock:
            now = self._clock_us()
            return [
                self._shown(self._get(key, now), now) for key in sorted(self._states) if self._states[key].is_listed
            ]

    def _shown(self, state: _State, now: int) -> KeyState:
        terms, is_held = self._terms(state), state.held > now
        return KeyState(
            key=state.key,
            rate=terms.rate,
            used=sum(at * SECOND > now - 60 * SECOND for at in state.taken),
            held_until_ms=state.held / 1000 if is_held else None,
            reason=state.reason if is_held else "",
            waiting=len(state.line),
            out=len(state.out),
            running=len(state.running),
            spent=state.spent,
            budget=terms.budget or None,
            slowed=state.slow,
        )
