"""Whether the promises were kept in a chaos run: a line for each, with figures, and who broke it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _chaos_account import Account
from _chaos_faults import Done
from _chaos_load import Sent
from _chaos_watch import Outlived
from _harness import Check, Report
from rich.table import Table

#: No process outlives its owner by more than this, in s.
OUTLIVE_S = 5.0

#: A killed browser is back serving within this, in ms.
BACK_MS = 1_000.0

#: It may take longer where the machine is so loaded that raw Playwright does: at most so many times as long.
BESIDE_RAW = 1.25

#: The last quarter's memory is at most so many times the first one's.
GROWTH = 1.5

#: In a run shorter than this a quarter's memory is that of the faults that it had.
LONG_S = 300.0

#: So many sentences of who broke a promise are shown.
SHOWN = 20


@dataclass(frozen=True)
class Facts:
    """What a run has found.

    Attributes:
        outlived: What was left of owners that died, for how long.
        quarters: The median memory of each quarter of the run, in MB.
        peak_mb, allowed_mb: The most, and what it may be.
        left: What carried a token when all was over.
        slots_in_use: By the ledger, of the workers that were stopped last: how many slots, and how many in use.
        ours_ms, raw_ms: From a browser's SIGKILL to the next page.
        disturbed: How many such kills tell no time, since another fault followed.
        busy: Times that the machine's other work can disturb decide nothing.
    """

    seed: int
    seconds: float
    sent: Sent
    account: Account
    journal: Sequence[Done]
    outlived: Sequence[Outlived]
    quarters: Sequence[float]
    peak_mb: float
    allowed_mb: float
    left: Sequence[str]
    drain_s: float
    slots: int
    slots_at_start: int
    slots_at_end: int
    slots_in_use: tuple[int, int]
    exit_code: int
    ours_ms: Sequence[float]
    raw_ms: Sequence[float]
    disturbed: int
    watch_errors: Sequence[str] = ()
    busy: bool = False


def judge(facts: Facts) -> Report:
    """The promises and their figures."""
    found, broken = facts.account, [*facts.account.broken]
    longest = max((each.seconds for each in facts.outlived), default=0.0)
    for each in facts.outlived:
        if each.seconds > OUTLIVE_S:
            broken.append(f"outlived worker process {each.owner} by {each.seconds:.1f} s: {sorted(each.names)}")
    if facts.left:
        broken.append(f"left when all was over: {facts.left}")
    registered, in_use = facts.slots_in_use
    checks = [
        Check("messages without an outcome", found.missing, "==", 0),
        Check("messages with two outcomes", found.both, "==", 0),
        Check("messages that succeeded without exactly one effect", found.wrong_effects, "==", 0),
        Check("s that a process outlived its owner", longest, "<=", OUTLIVE_S),
        Check("processes left at the end", len(facts.left), "==", 0),
        Check("slots that serve at the end", facts.slots_at_end, "==", facts.slots_at_start),
        Check("slots at the end by the ledger", registered, "==", facts.slots),
        Check("slots in use at the end by the ledger", in_use, "==", 0),
        _memory(facts),
        Check("attempts that were lost without a cause", found.false_losses, "==", 0),
        Check("rows of attempts left open", found.left_open, "==", 0),
        Check("exit code of `asyncworker up`", facts.exit_code, "==", 0),
        Check("looks at the processes that failed", len(facts.watch_errors), "==", 0),
        Check("messages that succeeded", len(found.succeeded), ">=", 1),
    ]
    if facts.ours_ms and not facts.busy:
        for name, of in (("median", _median), ("p95", _p95)):
            most = max(BACK_MS, BESIDE_RAW * of(facts.raw_ms)) if facts.raw_ms else BACK_MS
            checks.append(Check(f"ms until a killed browser serves again, {name}", of(facts.ours_ms), "<=", most))
    return Report(checks, _figures(facts, broken, longest), _table(facts, broken, longest))


def _memory(facts: Facts) -> Check:
    """Whether memory is bounded: the last quarter's beside the first one's, where a quarter is longer than a fault."""
    if facts.seconds < LONG_S or not facts.quarters:
        return Check("MB of memory at most", facts.peak_mb, "<=", facts.allowed_mb)
    return Check("memory of the last quarter / the first", facts.quarters[-1] / facts.quarters[0], "<=", GROWTH)


def _rows(facts: Facts, longest: float) -> list[tuple[str, str]]:
    found = facts.account
    in_all = len(facts.sent.messages)
    registered, in_use = facts.slots_in_use
    done = [each for each in facts.journal if each.pid is not None or each.fault.deed in ("bomb", "hog")]
    attempts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.attempts.items()))
    lost_figures = f"{found.lost} attempts lost, {found.false_losses} of them without a kill or a long freeze"
    quarters = " / ".join(f"{mb:.0f}" for mb in facts.quarters)
    return [
        ("faults", f"{len(done)} done, {len(facts.journal) - len(done)} found no target"),
        (
            "one final outcome",
            f"{in_all} sent: {len(found.succeeded)} succeeded, {len(found.dead)} dead letters, "
            f"{found.missing} none, {found.both} both; drained in {facts.drain_s:.1f} s",
        ),
        ("attempts", attempts),
        (
            "effects once",
            f"{found.wrong_effects} wrong; {found.asked_again} asked for again after a kill, "
            f"{found.refused_effects} of these refused by the unique column",
        ),
        ("no orphan", f"longest {longest:.2f} s after the death of its owner ({len(facts.outlived)} owners died)"),
        (
            "slots",
            f"{facts.slots_at_start} served at once at the start, {facts.slots_at_end} at the end; "
            f"the ledger: {registered}, {in_use} in use",
        ),
        ("memory", f"most {facts.peak_mb:.0f} MB; quarters {quarters} MB"),
        ("browser back, ours", f"{spread(facts.ours_ms)}; {facts.disturbed} met another fault"),
        ("browser back, raw Playwright", spread(facts.raw_ms)),
        ("no false loss", lost_figures),
    ]


def _table(facts: Facts, broken: list[str], longest: float) -> Table:
    table = Table(title=f"chaos: seed {facts.seed}, {facts.seconds / 60:g} minutes", show_lines=True)
    table.add_column("promise", no_wrap=True)
    table.add_column("figures")
    for name, text in _rows(facts, longest):
        table.add_row(name, text)
    for sentence in broken[:SHOWN]:
        table.add_row("[red]broken[/red]", sentence)
    return table


def _figures(facts: Facts, broken: list[str], longest: float) -> dict[str, Any]:
    kinds = Counter(each.fault.what for each in facts.journal if each.pid is not None)
    return {
        "seed": facts.seed,
        "seconds": facts.seconds,
        "sent": len(facts.sent.messages),
        "maybe_sent": len(facts.sent.maybe),
        "refused": facts.sent.refused,
        "held_back_s": round(facts.sent.held_back_s, 1),
        "faults": dict(sorted(kinds.items())),
        "promises": dict(_rows(facts, longest)),
        "broken": broken,
        "dead_letters": facts.account.dead,
        "back_ms": {"ours": [round(ms) for ms in facts.ours_ms], "raw": [round(ms) for ms in facts.raw_ms]},
        "watch_errors": list(facts.watch_errors)[:SHOWN],
    }


def spread(values: Sequence[float]) -> str:
    if not values:
        return "none measured"
    return f"median {_median(values):.0f} ms, p95 {_p95(values):.0f} ms, most {max(values):.0f} ms of {len(values)}"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
