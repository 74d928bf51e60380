"""Pace: how often something may be asked of a site, and by what it is counted.

    Pace("2/s")    Pace("30/m")    Pace("1/10s")    Pace("500/day", max_concurrent=1)

What is counted together has one key: a subject, by default the host of a message's first URL, and the exit that the
traffic leaves by. All workers of a deployment share the account of a key (limiter.py).

Which pace holds for a key: what was set at run time for it, alone; else the stricter of the actor's own and the
deployment's rule, part by part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

MINUTE_MS = 60_000
DAY_MS = 86_400_000

#: A slot is longer than it would have to be by this: what is on its way to a server takes now longer, now shorter, and
#: by the server's own account, too, a minute must not have one more than was allowed.
MARGIN = 0.005

#: No rate is slower than one in this time.
MOST_PER_MS = 31 * DAY_MS

#: The exit of traffic that no proxy takes.
DIRECT = "direct"

#: The name of the rule for all hosts that no other rule names.
DEFAULT_RULE = "default"

#: By these statuses a site says to slow down.
SLOW_DOWN = (429, 503)

OverBudget = Literal["defer", "reject"]
OVER_BUDGET = ("defer", "reject")

#: Makes the subject of a key from the arguments that it names; None: the message is not paced.
KeyFunction = Callable[..., str | int | None]

_UNITS_MS = {
    "ms": 1, "s": 1_000, "sec": 1_000, "second": 1_000, "m": MINUTE_MS, "min": MINUTE_MS, "minute": MINUTE_MS,
    "h": 3_600_000, "hour": 3_600_000, "d": DAY_MS, "day": DAY_MS,
}  # fmt: skip
_RATE = re.compile(r"\s*(\d+)\s*/\s*(\d*)\s*([a-z]+)\s*", re.ASCII)


@dataclass(frozen=True)
class Rate:
    """So many in so many milliseconds."""

    count: int
    per_ms: int

    def __post_init__(self) -> None:
        for name, value, most in (("rate", self.count, 10**6), ("per_ms", self.per_ms, MOST_PER_MS)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r} is no whole number from 1 to {most}")
        if self.count > self.per_ms:
            raise ValueError(f"{self.count} in {self.per_ms} ms are more than one a millisecond")

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Read `2/s`, `30/m`, `1/10s`, `10/h` or `500/day`.

        Raises:
            ValueError: For anything else.
        """
        found = _RATE.fullmatch(text) if isinstance(text, str) else None
        unit_ms = _UNITS_MS.get(found[3]) if found else None
        if found is None or unit_ms is None:
            raise ValueError(f"{text!r} is no rate; write it as 2/s, 30/m, 1/10s, 10/h or 500/day")
        try:
            return cls(int(found[1]), int(found[2] or 1) * unit_ms)
        except ValueError as error:
            raise ValueError(f"{text!r} is no rate that can be kept: {error}") from None

    @property
    def interval_us(self) -> int:
        """The length of one slot in microseconds, with the margin."""
        return math.ceil(self.per_ms * 1_000 * (1 + MARGIN) / self.count)

    @property
    def pattern(self) -> int:
        """After so many slots the jitter repeats itself; 0: never.

        What is early by a part of its slot must not be one too many in its time: with few slots in it, each that
        follows another after that time is early or late by as much as that one was.
        """
        slots = max(1, self.count * max(1, MINUTE_MS // self.per_ms))
        return 0 if slots * MARGIN >= 1 else slots

    def __str__(self) -> str:
        for unit, unit_ms in (("day", DAY_MS), ("h", 3_600_000), ("m", MINUTE_MS), ("s", 1_000), ("ms", 1)):
            if self.per_ms % unit_ms == 0:
                many = self.per_ms // unit_ms
                return f"{self.count}/{many if many > 1 else ''}{unit}"
        raise AssertionError(self.per_ms)  # pragma: no cover -- every number of ms is one of ms


@dataclass(frozen=True, init=False)
class Pace:
    """How often, by what key, how many at once and how many a day.

    Parameters:
        rate: `"2/s"`, a `Rate`, or a number, which is counted in `per_ms`. None: as often as comes.
        per_ms: Where `rate` is a number: in how many ms.
        burst: After an idle time so many may follow each other at once; with more than 1 a window of time may have
            `burst - 1` more than the rate says.
        jitter: By how much of a slot, from 0 to below 1, each is later than a metronome would have it. The rate over a
            minute is kept, whatever this is.
        key: None: the host of the message's first URL. A function of arguments, by their names: what it returns, as
            the name of an account; of None the message is not paced.
        max_concurrent: So many messages of a key at once.
        budget: At most so much a day of UTC, as `"500/day"`.
        over_budget: What becomes of a message beyond that: `defer` it to the next day, or `reject` it.
        slow_down_on: The statuses by which the site says to slow down, where a page of the session is sent to it; none:
            the actor looks for itself, and may raise TooManyRequests.

    Raises:
        ValueError: For what cannot be kept.
    """

    rate: Rate | None
    burst: int = 1
    jitter: float = 0.3
    key: KeyFunction | None = None
    max_concurrent: int | None = None
    budget: int | None = None
    over_budget: OverBudget = "defer"
    slow_down_on: tuple[int, ...] = SLOW_DOWN

    def __init__(
        self,
        rate: str | int | Rate | None = None,
        *,
        per_ms: int | None = None,
        burst: int = 1,
        jitter: float = 0.3,
        key: KeyFunction | None = None,
        max_concurrent: int | None = None,
        budget: str | int | None = None,
        over_budget: OverBudget = "defer",
        slow_down_on: Iterable[int] = SLOW_DOWN,
    ) -> None:
        given = {
            "rate": _rate(rate, per_ms), "burst": burst, "jitter": jitter, "key": key,
            "max_concurrent": max_concurrent, "budget": _budget(budget), "over_budget": over_budget,
            "slow_down_on": _statuses(slow_down_on),
        }  # fmt: skip
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name, value in (("burst", self.burst), ("max_concurrent", self.max_concurrent)):
            if value is not None and (not _is_count(value) or value > 10_000):
                raise ValueError(f"{name}={value!r} is no whole number from 1 to 10000")
        if isinstance(self.jitter, bool) or not isinstance(self.jitter, int | float) or not 0 <= self.jitter < 1:
            raise ValueError(f"jitter={self.jitter!r} is no part of a slot from 0 to below 1")
        if self.key is not None and not callable(self.key):
            raise ValueError(f"key={self.key!r} is no function of a message's arguments")
        if self.over_budget not in OVER_BUDGET:
            raise ValueError(f"over_budget={self.over_budget!r} is none of {', '.join(OVER_BUDGET)}")
        if self.rate is None and self.burst != 1:
            raise ValueError(f"burst={self.burst} without a rate: there is nothing that it exceeds")

    def stricter(self, other: Pace | None) -> Pace:
        """Of each part the stricter; what is counted by, the jitter and the statuses stay this one's."""
        if other is None:
            return self
        rates = [rate for rate in (self.rate, other.rate) if rate is not None]
        has_other_rate = self.rate is None and other.rate is not None
        budget = _least(self.budget, other.budget)
        return Pace(
            max(rates, key=lambda rate: rate.interval_us, default=None),
            burst=other.burst if has_other_rate else self.burst if other.rate is None else min(self.burst, other.burst),
            jitter=other.jitter if has_other_rate else self.jitter,
            key=self.key,
            max_concurrent=_least(self.max_concurrent, other.max_concurrent),
            budget=budget,
            over_budget=self.over_budget if budget == self.budget else other.over_budget,
            slow_down_on=self.slow_down_on,
        )


def as_pace(value: object) -> Pace:
    """What an actor declares as its pace.

    Raises:
        ValueError: When it is none.
    """
    if isinstance(value, Pace):
        return value
    if isinstance(value, str):
        return Pace(value)
    raise ValueError(f'pace={value!r} is neither a rate such as "2/s" nor a Pace(...)')


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _least(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _rate(rate: str | int | Rate | None, per_ms: int | None) -> Rate | None:
    if _is_count(rate) and isinstance(rate, int):
        if per_ms is None:
            raise ValueError(f'rate={rate!r} does not say in what time; add per_ms=, or write "{rate}/s"')
        return Rate(rate, per_ms)
    if per_ms is not None:
        raise ValueError(f"per_ms={per_ms!r} goes with a rate that is a number, and rate={rate!r} is none")
    if rate is None or isinstance(rate, Rate):
        return rate
    return Rate.parse(rate)  # type: ignore[arg-type]  # says of whatever it is that it is no rate


def _statuses(given: object) -> tuple[int, ...]:
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for status in found:
        if not _is_count(status) or not 400 <= status <= 599:
            raise ValueError(f"slow_down_on={given!r}: {status!r} is no status from 400 to 599")
    return found


def _budget(budget: str | int | None) -> int | None:
    if budget is None or (_is_count(budget) and isinstance(budget, int)):
        return budget
    read = Rate.parse(budget) if isinstance(budget, str) else None
    if read is None or read.per_ms != DAY_MS:
        raise ValueError(f'budget={budget!r} is no number a day; write it as "500/day"')
    return read.count


# --- keys


@lru_cache(maxsize=4096)
def host_of(url: str) -> str | None:
    """The host of an http or https URL, with its port where that is not the scheme's; None: it is no such URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not host:
        return None
    host = host.rstrip(".")
    return host if port in (None, 80 if parts.scheme == "http" else 443) else f"{host}:{port}"


def first_host(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The host of the first argument that is an http or https URL, positional ones first."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, str) and value[:4].lower() == "http" and (host := host_of(value)):
            return host
    return None


def written(part: str) -> str:
    """A part of a key as it is written: without what separates parts, and ids."""
    return quote(part, safe=":/.-_*[]")[:500]


def key_of(subject: str, exit_: str = DIRECT) -> str:
    """The key under which a subject is counted through an exit: `shop.example|direct`."""
    return f"{written(subject)}|{written(exit_)}"


def parts_of(key: str) -> tuple[str, str]:
    """The subject and the exit of a key, as they are shown."""
    subject, _, exit_ = key.partition("|")
    return unquote(subject), unquote(exit_)


def shown(key: str) -> str:
    """A key in words."""
    subject, exit_ = parts_of(key)
    return f"{subject} ({exit_})"


def rule_names(subject: str) -> list[str]:
    """The names of rules that a subject falls under, the most exact first."""
    host = subject.rpartition(":")[0] if re.fullmatch(r".*:\d+", subject) else subject
    labels = host.split(".")
    wild = [f"*.{'.'.join(labels[start:])}" for start in range(1, len(labels))]
    return list(dict.fromkeys([subject, host, *wild, DEFAULT_RULE]))


@lru_cache(maxsize=4096)
def names_of(key: str) -> tuple[str, ...]:
    """The names by which a rate may be set for a key at run time, the most exact first."""
    return tuple(dict.fromkeys([key, *rule_names(parts_of(key)[0])]))


# --- rules of a deployment

_PARTS = (*(field.name for field in fields(Pace) if field.name != "key"), "per_ms")


@dataclass(frozen=True)
class Rules:
    """The rules of a deployment, by the name of a host, `*.domain`, what a key function returns, or `default`."""

    paces: Mapping[str, Pace]

    def of(self, subject: str) -> Pace | None:
        """The most exact rule for a subject."""
        return next((self.paces[name] for name in rule_names(subject) if name in self.paces), None)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Rules:
        """Take the tables `[pace."host"]` of a TOML document.

        Raises:
            ValueError: It names the table and what is wrong with it.
        """
        if unknown := sorted(set(document) - {"pace"}):
            raise ValueError(f'{unknown[0]!r} is no table of paces; write [pace."shop.example"]')
        tables = document.get("pace", {})
        if not isinstance(tables, Mapping):
            raise ValueError(f'pace = {tables!r} is no table; write [pace."shop.example"]')
        return cls({str(name).lower(): _rule(str(name), table) for name, table in tables.items()})


def _rule(name: str, table: object) -> Pace:
    if isinstance(table, str):
        table = {"rate": table}
    if not isinstance(table, Mapping):
        raise ValueError(f'pace."{name}" is {table!r}; it is a rate or a table')
    if unknown := sorted(set(table) - set(_PARTS)):
        raise ValueError(f'pace."{name}" has {unknown[0]!r}, which is none of {", ".join(sorted(_PARTS))}')
    if "*" in name and not re.fullmatch(r"\*\.[^*]+", name):
        raise ValueError(f'pace."{name}": a wildcard stands for the first labels of a host, as in *.example')
    try:
        return Pace(**table)
    except (ValueError, TypeError) as error:
        raise ValueError(f'pace."{name}": {error}') from None


def pace_for(own: Pace | None, rules: Rules | None, subject: str) -> Pace | None:
    """The pace of a message: the stricter of its actor's own and the deployment's rule; None: it has none."""
    rule = rules.of(subject) if rules is not None else None
    if own is None:
        return rule
    return own.stricter(rule)


# --- what a limiter is asked with


@dataclass(frozen=True)
class Terms:
    """A pace as a limiter reckons with it. The store keeps those that it was asked with last, for its estimates.

    Attributes:
        interval_us: The length of a slot; 0: there is no rate.
        pattern: After so many slots the jitter repeats itself; 0: never.
        seed: What the jitter is drawn from, with the number of the slot.
    """

    interval_us: int = 0
    burst: int = 1
    jitter: float = 0.0
    pattern: int = 0
    max_concurrent: int = 0
    budget: int = 0
    rejects: bool = False
    rate: str = ""
    seed: int = 0

    @classmethod
    def of(cls, pace: Pace, *, seed: int = 0) -> Terms:
        rate = pace.rate
        return cls(
            interval_us=rate.interval_us if rate else 0,
            burst=pace.burst,
            jitter=float(pace.jitter),
            pattern=rate.pattern if rate else 0,
            max_concurrent=pace.max_concurrent or 0,
            budget=pace.budget or 0,
            rejects=pace.over_budget == "reject",
            rate=str(rate) if rate else "",
            seed=seed,
        )

    def at_rate(self, rate: Rate) -> Terms:
        """These terms with a rate that was set at run time; a burst is the former rate's."""
        return replace(self, interval_us=rate.interval_us, pattern=rate.pattern, burst=1, rate=str(rate))
