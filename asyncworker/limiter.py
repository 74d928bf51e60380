"""Limiters: who may go now, who waits, and until when; one account for all workers of a deployment.

A message that is paced has these states, and its member is how a limiter names it:

    arrive ──► waits in line ──► (admit) ──► is out ──► (commit) ──► runs ──► (done)
       └────────── goes ─────────────────────►  ▲ └──── (back) ──► waits in line again, where it was

A slot is taken by `commit` alone, at the last moment before the code. Whatever else happens, a worker that is killed or
an estimate that was wrong, no rate is exceeded; and who is out and never comes is waited for a minute at most.

Slots follow each other as in GCRA, by the clock of the store. The jitter makes each later than a metronome would have
it by a part of a slot, a pure function of the seed, the key and the slot's number; it never moves the slots after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from asyncworker.ledger import text
from asyncworker.pace import Rate, Terms, names_of, parts_of

#: What stands before each script that asks for paces.
PACING = (Path(__file__).parent / "pacing.lua").read_text()

#: KEYS = {prefix}, ARGV = {the time in microseconds or an empty text, command, ...}
_SCRIPT = (
    PACING
    + """
redis.call("del", KEYS[1] .. ":none")  -- a full store takes the rest of the script then
local P = pacing(KEYS[1], tonumber(ARGV[1]))
if ARGV[2] == "arrive" then
    local answer = {}
    for i = 4, #ARGV, 2 do answer[#answer + 1] = P.arrive(ARGV[i], ARGV[i + 1], tonumber(ARGV[3])) and 1 or 0 end
    return answer
elseif ARGV[2] == "admit" then
    local answer = {}
    P.admit(function(members)
        for _, member in ipairs(members) do answer[#answer + 1] = member end
    end)
    return answer
elseif ARGV[2] == "back" then
    return P.back(ARGV[3], ARGV[4], tonumber(ARGV[5]))
elseif ARGV[2] == "next_due" then
    return string.format("%.0f", P.next_due())
end
return P[ARGV[2]](unpack(ARGV, 3))
"""
)

#: Of the keys in the broker's store, after its namespace.
PREFIX = ":__pace__"

#: So long is waited in code that runs, which cannot be put off: in effect, as long as its own time limit.
WITHOUT_END_MS = 31 * 86_400_000


class Verdict(StrEnum):
    """What a limiter says to who wants a slot."""

    go = "go"
    later = "later"  # put it off: it waits in line
    spent = "spent"  # the budget of the day is, and the pace says to reject then


@dataclass(frozen=True)
class Answer:
    """A verdict.

    Attributes:
        wait_ms: `go`: until the slot, which is taken. Else: until there may be one.
        next_due_ms: Until a line is to be looked at; None: none is.
    """

    verdict: Verdict
    wait_ms: float
    next_due_ms: float | None = None


@dataclass(frozen=True)
class KeyState:
    """A key as a person sees it.

    Attributes:
        rate: Its rate, `own` or set at run time; empty: it has none.
        used: Slots that were taken in the last minute.
        held_until_ms: UNIX ms of the store's clock; None: it is not held.
        waiting: In line.
        out: Let go, and before their slot.
        running: Between their slot and their end.
        spent: Of the budget, today.
        slowed: So often the rate is halved after it was told to slow down.
    """

    key: str
    rate: str
    used: int
    held_until_ms: float | None
    reason: str
    waiting: int
    out: int
    running: int
    spent: int
    budget: int | None
    slowed: int

    @property
    def subject(self) -> str:
        return parts_of(self.key)[0]

    @property
    def exit(self) -> str:
        return parts_of(self.key)[1]


class Limiter(Protocol):
    """What both limiters do. That in the store raises redis.RedisError."""

    def arrive(self, arrivals: Sequence[tuple[str, str]], *, hold_ms: float) -> list[bool]:
        """Which of these (key, member) may go now, in order; the others wait in line.

        Parameters:
            hold_ms: One goes so long before its slot at most, and what it takes to open a page.
        """

    def admit(self) -> list[str]:
        """Let go, from the heads of the lines, whose time has come."""

    def next_due_ms(self) -> float | None:
        """In how many ms `admit` has something to do; None: there is no line."""

    def commit(
        self, key: str, terms: Terms, *, member: str = "", hold_ms: float, most_ms: float | None = None
    ) -> Answer:
        """Take a slot.

        Parameters:
            member: The message, which runs from here on; empty: no message's, such as a further navigation.
            most_ms: For the slot to come at most; None: `hold_ms`.
        """

    def back(self, key: str, member: str, *, hold_ms: float) -> None:
        """Have a member that was out, or ran, wait in line where it was; an unknown one as the last."""

    def lost(self, member: str) -> None:
        """Say that a member's worker died: it goes to another, to take a slot there; its place is kept meanwhile."""

    def done(self, member: str) -> None:
        """Forget a member, whatever it was at; may be repeated."""

    def held_ms(self, key: str) -> float:
        """For how long a key is still held; 0: it is not."""

    def hold(
        self,
        key: str,
        *,
        for_ms: float | None = None,
        until_ms: float | None = None,
        reason: str = "",
        slows: bool = False,
    ) -> float:
        """Let no one go for a time; returns until when, in UNIX ms of the limiter's clock.

        A hold never shortens one that lasts longer.

        Parameters:
            for_ms: How long.
            until_ms: Until when, by the limiter's clock. Where neither is given it is a back-off: 5 s, doubled with
                each up to 10 min.
            slows: Halve the rate, too, up to four times; it recovers by `succeeded`.
        """

    def slow_down(self, key: str, *, for_ms: float | None = None, reason: str = "") -> float | None:
        """Hold a key, and halve its rate, since its site says to slow down; without a time it is a back-off.

        Where it is held already this makes that longer at most: of the requests that were on their way the first to be
        refused speaks for all.

        Returns:
            For how many ms it is held; None: it was held already.
        """

    def succeeded(self, key: str) -> int:
        """Say that a site has answered well: ten times take back one halving, and one doubling of the back-off.

        Returns:
            How often the rate is still halved.
        """

    def release(self, key: str) -> None:
        """End a hold at once, and all that is left of the back-off."""

    def set_rate(self, name: str, rate: Rate | None) -> None:
        """Set the rate of all keys that fall under a name (`names_of`) from now on, in place of their own; None: again.

        What already waits for its slot on a loop keeps it.
        """

    def rates(self) -> dict[str, str]:
        """The rates that were set at run time, by name."""

    def states(self) -> list[KeyState]:
        """The keys that were used within a day or have a line, by key."""


class RedisLimiter:
    """The limiter in the broker's store (pacing.lua).

    Parameters:
        prefix: Of its keys; the broker's Lua uses the same.
        clock_us: For tests: the time in microseconds; None: the store's own clock.
    """

    def __init__(self, client: Any, *, prefix: str, clock_us: Callable[[], int] | None = None) -> None:
        self._client = client
        self._prefix = prefix
        self._clock_us = clock_us
        self._script = client.register_script(_SCRIPT)

    def _do(self, command: str, *words: Any) -> Any:
        at: int | str = "" if self._clock_us is None else self._clock_us()
        return self._script(keys=[self._prefix], args=[at, command, *words])

    def arrive(self, arrivals: Sequence[tuple[str, str]], *, hold_ms: float) -> list[bool]:
        words = [part for arrival in arrivals for part in arrival]
        return [bool(each) for each in self._do("arrive", _us(hold_ms), *words)]

    def admit(self) -> list[str]:
        return [text(member) for member in self._do("admit")]

    def next_due_ms(self) -> float | None:
        return _due(self._do("next_due"))

    def commit(
        self, key: str, terms: Terms, *, member: str = "", hold_ms: float, most_ms: float | None = None
    ) -> Answer:
        most_ms = hold_ms if most_ms is None else most_ms
        verdict, wait_us, due_us = self._do("commit", key, member, _us(hold_ms), _us(most_ms), *words_of(terms, key))
        return Answer(Verdict(text(verdict)), int(wait_us) / 1000, _due(due_us))

    def back(self, key: str, member: str, *, hold_ms: float) -> None:
        self._do("back", key, member, _us(hold_ms))

    def lost(self, member: str) -> None:
        self._do("lost", member)

    def done(self, member: str) -> None:
        self._do("done", member)

    def held_ms(self, key: str) -> float:
        return int(self._do("held", key)) / 1000

    def hold(
        self,
        key: str,
        *,
        for_ms: float | None = None,
        until_ms: float | None = None,
        reason: str = "",
        slows: bool = False,
    ) -> float:
        until_us, _ = self._do("hold", key, _us(until_ms or 0), _us(for_ms or 0), int(slows), reason)
        return int(until_us) / 1000

    def slow_down(self, key: str, *, for_ms: float | None = None, reason: str = "") -> float | None:
        return int(self._do("told", key, _us(for_ms or 0), reason)) / 1000 or None

    def succeeded(self, key: str) -> int:
        return int(self._do("succeeded", key))

    def release(self, key: str) -> None:
        self._do("free", key)

    def set_rate(self, name: str, rate: Rate | None) -> None:
        if rate is None:
            self._do("set_rate", name, 0, 0, "")
        else:
            self._do("set_rate", name, rate.interval_us, rate.pattern, str(rate))

    def rates(self) -> dict[str, str]:
        stored: Mapping[Any, Any] = self._client.hgetall(f"{self._prefix}:rates")
        return {text(name): text(value).split(" ", 2)[2] for name, value in sorted(stored.items())}

    def states(self) -> list[KeyState]:
        said = self._do("listing")
        states = [_state(said[start : start + _FACTS]) for start in range(0, len(said), _FACTS)]
        return sorted(states, key=lambda state: state.key)


_FACTS = 11


def words_of(terms: Terms, key: str) -> list[Any]:
    """Terms as pacing.lua takes them."""
    return [
        terms.interval_us, terms.burst, repr(terms.jitter), terms.pattern, terms.max_concurrent, terms.budget,
        int(terms.rejects), terms.seed, terms.rate, "\n".join(names_of(key)),
    ]  # fmt: skip


def _us(ms: float) -> int:
    return round(ms * 1000)


def _due(us: bytes | str) -> float | None:
    due = int(us)
    return None if due < 0 else due / 1000


def _state(facts: Sequence[Any]) -> KeyState:
    key, rate, used, held, reason, waiting, out, running, spent, budget, slowed = facts
    return KeyState(
        key=text(key),
        rate=text(rate),
        used=int(used),
        held_until_ms=int(held) / 1000 or None,
        reason=text(reason) if int(held) else "",
        waiting=int(waiting),
        out=int(out),
        running=int(running),
        spent=int(spent),
        budget=int(budget) or None,
        slowed=int(slowed),
    )
