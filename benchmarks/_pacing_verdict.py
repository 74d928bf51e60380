"""What the log of a site says about a pace, and what pacing.py requires of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from _harness import Check, Report
from rich.table import Table

#: The pace of the measured host.
PER_MINUTE = 600

#: Required: of the rate while work waits; of another host's throughput; for a message of another host, in ms.
LEAST = 590 / 600
SHARE = 0.95
STARTS_MS = 50.0

#: In windows that are shorter than a minute so much more is allowed.
SHORT = 1.01

#: What 10,000 waiting messages may cost the workers: of one core, and of memory.
CPU_PERCENT, MEMORY_MB = 2.0, 20.0

#: So long after a refusal what was on its way may still arrive, in s.
ON_ITS_WAY_S = 0.25


def most_in(times: Sequence[float], window_s: float) -> int:
    """The most requests in any window of that length."""
    most, first = 0, 0
    for last, at in enumerate(times):
        while at - times[first] >= window_s:
            first += 1
        most = max(most, last - first + 1)
    return most


def least_in(times: Sequence[float], window_s: float) -> int:
    """The fewest requests in any window of that length between the first request and the last."""
    least, last = len(times), 0
    for first, at in enumerate(times):
        if at + window_s > times[-1]:
            break
        while last < len(times) and times[last] <= at + window_s:
            last += 1
        least = min(least, last - first - 1)
    return least


@dataclass(frozen=True)
class Kept:
    """A rate as the log shows it: the most and the fewest in any window of a length, in s."""

    requests: int
    window_s: float
    most: int
    least: int

    @classmethod
    def of(cls, times: Sequence[float], window_s: float) -> Kept:
        return cls(len(times), window_s, most_in(times, window_s), least_in(times, window_s))

    @property
    def asked(self) -> float:
        return PER_MINUTE * self.window_s / 60

    @property
    def allowed(self) -> int:
        """In a minute a slot's half percent is more than what a request may be late; in less it may not be."""
        return round(self.asked if self.window_s >= 60 else self.asked * SHORT)


@dataclass(frozen=True)
class Refused:
    """After a 429.

    Parameters:
        asked_s: It asked to be left alone for so long.
        quiet_s: From the refusal to the first request that was not on its way.
        others: Requests to another host meanwhile.
    """

    asked_s: float
    quiet_s: float
    others: int

    @classmethod
    def of(cls, refused_at: float, times: Sequence[float], others: Sequence[float], asked_s: float) -> Refused:
        later = [at for at in times if at > refused_at + ON_ITS_WAY_S]
        quiet_s = later[0] - refused_at if later else 0.0
        return cls(asked_s, quiet_s, sum(refused_at < at < refused_at + asked_s for at in others))


@dataclass(frozen=True)
class Waited:
    """With many messages of one slow host in line.

    Parameters:
        cpu_percent: Of one core, of all workers together: without them, and with them.
        memory_mb: The same of their memory.
        starts_ms: From the send of a message of another host to its request.
    """

    messages: int
    cpu_percent: tuple[float, float]
    memory_mb: tuple[float, float]
    starts_ms: Sequence[float]


@dataclass
class Found:
    """All that was measured; what is None, or empty, was not."""

    rate: Kept | None = None
    throughput: Sequence[tuple[float, float]] = ()
    waited: Waited | None = None
    refused: Refused | None = None
    killed: Kept | None = None
    recovered: float | None = None
    browser: Kept | None = None
    browser_refused: Refused | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def judge(found: Found) -> Report:
    checks: list[Check] = []
    table = Table("what", "found", "allowed or asked", title="Paces, by the sites' own log")
    for name, kept in (("rate", found.rate), ("kills", found.killed), ("browser", found.browser)):
        if kept is not None:
            checks.append(Check(f"{name}: most in {kept.window_s:.0f} s", kept.most, "<=", kept.allowed))
            spread = f"{kept.least} to {kept.most} in {kept.window_s:.0f} s ({kept.requests} requests)"
            table.add_row(name, spread, f"{kept.allowed}")
    if found.rate is not None:
        least = found.rate.asked * LEAST
        checks.append(Check(f"rate: fewest in {found.rate.window_s:.0f} s", found.rate.least, ">=", least))
    if found.recovered is not None:
        checks.append(Check("kills: of the rate, when they are over", found.recovered, ">=", SHARE))
        table.add_row("after the kills", f"{found.recovered:.3f} of the rate", f">= {SHARE}")
    if found.throughput:
        shares = [beside / alone for alone, beside in found.throughput]
        checks.append(Check("another host: throughput beside the paced one", statistics.median(shares), ">=", SHARE))
        for alone, beside in found.throughput:
            table.add_row("another host", f"{beside:.0f}/s beside the paced one", f"{alone:.0f}/s alone")
    _judge_waited(found.waited, checks, table)
    for name, refused in (("429", found.refused), ("429, browser", found.browser_refused)):
        if refused is not None:
            checks.append(Check(f"{name}: quiet for s", refused.quiet_s, ">=", refused.asked_s))
            checks.append(Check(f"{name}: others go on", refused.others, ">=", 1))
            table.add_row(
                name, f"quiet for {refused.quiet_s:.1f} s, {refused.others} others", f"{refused.asked_s:.0f} s"
            )
    return Report(checks, {"found": _as_json(found)}, table)


def _judge_waited(waited: Waited | None, checks: list[Check], table: Table) -> None:
    if waited is None:
        return
    cpu, memory = (after - before for before, after in (waited.cpu_percent, waited.memory_mb))
    checks.append(Check("in line: more CPU, % of a core", cpu, "<=", CPU_PERCENT))
    checks.append(Check("in line: more memory, MB", memory, "<=", MEMORY_MB))
    checks.append(Check("in line: start of another host's, ms", max(waited.starts_ms), "<=", STARTS_MS))
    figures = f"{waited.cpu_percent[1]:.1f} % CPU, {waited.memory_mb[1]:.0f} MB"
    idle = f"{waited.cpu_percent[0]:.1f} % CPU, {waited.memory_mb[0]:.0f} MB without"
    table.add_row(f"{waited.messages} in line", figures, idle)
    median = statistics.median(waited.starts_ms)
    table.add_row("another host's starts", f"median {median:.1f} ms, most {max(waited.starts_ms):.1f} ms", "50 ms")


def _as_json(found: Found) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if hasattr(value, "__dataclass_fields__"):
            return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return round(value, 4) if isinstance(value, float) else value

    read: dict[str, Any] = plain(found)
    return {name: value for name, value in read.items() if value not in (None, [], {})}
