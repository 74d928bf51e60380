"""The figures of benchmarks/broker.py: medians, ratios within each rotation, and what is required beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _broker_trials import Quiet, Recovered, Turn
from _harness import Check, Report, spread
from rich.table import Table

#: Required of ours, on two cores.
PICKUP_P50_MS = 2.0
PICKUP_P95_MS = 5.0
IDLE_PERCENT = 0.5
DRAIN_OF_PLAIN = 1.5
DRAIN_OF_FASTEST = 1.0
ENQUEUE_OF_PLAIN = 0.9
#: The heartbeat timeout (15 s, by default) and 2 s.
RECOVERY_S = 17.0

REQUIRED = (
    "required",
    f"≤ {PICKUP_P50_MS:g}",
    f"≤ {PICKUP_P95_MS:g}",
    f"< {IDLE_PERCENT:g} %",
    "",
    f"≥ {DRAIN_OF_PLAIN:g}",
    "",
    f"≥ {ENQUEUE_OF_PLAIN:g}",
    "flat",
    f"≤ {RECOVERY_S:g} s",
)

HEADINGS = ("p50 ms", "p95 ms", "idle", "drain/s", "/plain", "enqueue/s", "/plain", "RSS MB", "recovery")

Rotations = Sequence[Mapping[str, Turn]]
Fact = Callable[[Turn], float | None]


def drain_rate(turn: Turn) -> float | None:
    return turn.drain_per_s


def enqueue_rate(turn: Turn) -> float | None:
    return turn.enqueue_per_s


@dataclass(frozen=True)
class Found:
    """All that was found.

    Parameters:
        versions: By system, those that were measured.
        absent: By system, why it was not, or not to its end.
        rotations: The turns of the systems that were there to the end.
    """

    versions: Mapping[str, str]
    absent: Mapping[str, str]
    rotations: Rotations
    quiet: Quiet
    loads: Sequence[float] = field(default=())


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent of them do not exceed.

    Raises:
        ValueError: When there is none.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def pooled(rotations: Rotations, name: str) -> list[float]:
    return [value for turns in rotations if name in turns for value in turns[name].pickups_ms]


def known(rotations: Rotations, name: str, fact: Fact) -> list[float]:
    return [value for turns in rotations if name in turns and (value := fact(turns[name])) is not None]


def ratios(rotations: Rotations, one: str, other: str, fact: Fact) -> list[float]:
    """Taken within each rotation, so that a machine that is slower for a while slows both."""
    pairs = [(fact(turns[one]), fact(turns[other])) for turns in rotations if one in turns and other in turns]
    return [mine / its for mine, its in pairs if mine is not None and its is not None]


def fastest_other(rotations: Rotations, names: Sequence[str]) -> tuple[str, list[float]] | None:
    """The rival that ours is least ahead of in draining, with the ratios; None: no rival was measured."""
    of_rivals = {
        name: found
        for name in names
        if name not in ("plain", "ours") and (found := ratios(rotations, "ours", name, drain_rate))
    }
    if not of_rivals:
        return None
    return min(of_rivals.items(), key=lambda rival: statistics.median(rival[1]))


def checks(found: Found) -> list[Check]:
    """The required figures, as far as they were measured."""
    made = []
    if picked := pooled(found.rotations, "ours"):
        made.append(Check("idle pick-up p50, ms", percentile(picked, 50), "<=", PICKUP_P50_MS))
        made.append(Check("idle pick-up p95, ms", percentile(picked, 95), "<=", PICKUP_P95_MS))
    if "ours" in found.quiet.idle:
        made.append(Check("idle CPU, % of a core", found.quiet.idle["ours"], "<", IDLE_PERCENT))
    if drained := ratios(found.rotations, "ours", "plain", drain_rate):
        made.append(_ratio("drain: ours / plain Dramatiq", drained, DRAIN_OF_PLAIN))
    if fastest := fastest_other(found.rotations, list(found.versions)):
        made.append(_ratio(f"drain: ours / fastest other ({fastest[0]})", fastest[1], DRAIN_OF_FASTEST))
    if enqueued := ratios(found.rotations, "ours", "plain", enqueue_rate):
        made.append(_ratio("enqueue: ours / plain Dramatiq", enqueued, ENQUEUE_OF_PLAIN))
    if recovered := found.quiet.recovery.get("ours"):
        # One that was given up took longer than its limit, which is more than is allowed.
        seconds = recovered.limit_s if recovered.seconds is None else recovered.seconds
        made.append(Check("recovery, s", seconds, "<=", RECOVERY_S))
    return made


def _ratio(name: str, values: Sequence[float], limit: float) -> Check:
    # The standard error of a median is 1.25 times the mean's; of one rotation it is not known.
    error = 1.25 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Check(name, statistics.median(values), ">=", limit, error)


def figures(found: Found, name: str) -> dict[str, Any]:
    """All figures of a system, for the JSON; those that were not measured are left out."""
    here: dict[str, Any] = {"versions": found.versions[name]}
    if picked := pooled(found.rotations, name):
        here["pickup_ms"] = {
            "p50": round(percentile(picked, 50), 3),
            "p95": round(percentile(picked, 95), 3),
            "messages": len(picked),
            "p50_by_rotation": [round(percentile(turns[name].pickups_ms, 50), 3) for turns in found.rotations],
        }
    for key, fact in (("drain_per_s", drain_rate), ("enqueue_per_s", enqueue_rate)):
        if values := known(found.rotations, name, fact):
            here[key] = spread(values, digits=1)
            if of_plain := ratios(found.rotations, name, "plain", fact):
                here[f"{key}_of_plain"] = spread(of_plain)
    if name in found.quiet.idle:
        here["idle_cpu_percent"] = round(found.quiet.idle[name], 3)
    if memory := found.quiet.memory.get(name):
        before_mb, after_mb = round(memory.before_mb, 1), round(memory.after_mb, 1)
        here["rss_mb"] = {"before": before_mb, "with_delayed": after_mb, "delayed_messages": memory.messages}
    if recovered := found.quiet.recovery.get(name):
        seconds = recovered.seconds
        here["recovery_s"] = {"longer_than": recovered.limit_s} if seconds is None else round(seconds, 2)
    return here


def judge(found: Found) -> Report:
    """The report; its `ok` says that plain Dramatiq and ours were measured, each check whether it holds."""
    systems = {name: figures(found, name) for name in found.versions}
    facts = {
        "rotations": len(found.rotations),
        "load_by_rotation": list(found.loads),
        "not_measured": dict(found.absent),
    }
    return Report(checks(found), {"systems": systems, **facts}, table(found, systems), decides=False)


def table(found: Found, systems: Mapping[str, Mapping[str, Any]]) -> Table:
    reasons = "; ".join(f"{name}: {_brief(why)}" for name, why in found.absent.items())
    made = Table(
        title="Brokers side by side: medians, ± the rotation that was farthest from it",
        caption=f"not measured: {reasons}" if reasons else None,
    )
    made.add_column("system", no_wrap=True)
    for heading in HEADINGS:
        made.add_column(heading, justify="right", no_wrap=True)
    for name, here in systems.items():
        made.add_row(name, *_cells(here, found.quiet.recovery.get(name)))
    made.add_section()
    made.add_row(*REQUIRED, style="bold")
    return made


def _brief(why: str) -> str:
    """A reason in one line: of a traceback what it ends with."""
    first, *rest = [line for line in why.splitlines() if line.strip()]
    return first if not rest else f"{first[:60]} … {rest[-1][:100]}"


def _cells(here: Mapping[str, Any], recovered: Recovered | None) -> list[str]:
    picked, rss = here.get("pickup_ms"), here.get("rss_mb")
    return [
        f"{picked['p50']:.2f}" if picked else "",
        f"{picked['p95']:.2f}" if picked else "",
        f"{here['idle_cpu_percent']:.2f} %" if "idle_cpu_percent" in here else "",
        *_rate_cells(here, "drain_per_s"),
        *_rate_cells(here, "enqueue_per_s"),
        f"{rss['before']:.0f} → {rss['with_delayed']:.0f}" if rss else "",
        shown(recovered) if recovered else "",
    ]


def _rate_cells(here: Mapping[str, Any], key: str) -> tuple[str, str]:
    rate, ratio = here.get(key), here.get(f"{key}_of_plain")
    around = f"{rate['median']:.0f} ±{_around(rate):.0f} %" if rate else ""
    return around, f"{ratio['median']:.2f}" if ratio else ""


def _around(rate: Mapping[str, float]) -> float:
    """How far a rotation was from the median at most, in percent."""
    return 100 * max(rate["max"] - rate["median"], rate["median"] - rate["min"]) / rate["median"]


def shown(recovered: Recovered) -> str:
    if recovered.seconds is None:
        return f"> {recovered.limit_s:.0f} s"
    return f"{recovered.seconds:.1f} s"
