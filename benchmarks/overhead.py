"""What the queue, the seed and the care for the browser cost: jobs per second of four ways to do the same work.

  raw          Playwright in one process: one browser, one asyncio task per slot, no queue. The limit.
  ours         this project's actors in `dramatiq asyncworker.actors -p 1 -t SLOTS`
  plain        Dramatiq's own async actors with a browser in a module global
  per_message  the same with a browser launched per message

All four are up and warm during the whole run, and one works at a time: rounds of a few seconds alternate, and
their order rotates. Ratios are medians over the rotations, each taken within its rotation. The README beside this
file says what is measured, and why it is fair.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _harness import Check, Report, main, say, spread
from _stage import VARIANTS, Round, Stage, set_up
from _workshop import workshop
from rich.table import Table

from asyncworker.engines.finding import find
from asyncworker.errors import EngineMissing
from asyncworker.settings import EngineName, load

#: Required of the median ratios. "Not slower than plain Dramatiq" has this much grace for noise, the others none.
OF_THE_LIMIT = 0.95
OF_PLAIN = 0.98
OF_PER_MESSAGE = 1.6

#: A rotation counts while nothing but this run took more than this share of the CPU in any of its rounds, as long
#: as there are enough of such rotations; otherwise all count, and the report says `quiet: false`.
FOREIGN = 0.10
FEWEST_QUIET = 3

#: A name to its median, min and max.
Figures = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    #: Quiet ones; those that are not are measured again.
    rotations: int
    round_s: float
    #: No rotation is begun that would end later than this after the start.
    budget_s: float
    #: In the first rotation only: what is far from its limit leaves the time to what is near.
    measured_once: tuple[str, ...] = ()


FULL = Plan(rotations=24, round_s=3.0, budget_s=480.0)
QUICK = Plan(rotations=4, round_s=1.5, budget_s=42.5, measured_once=("per_message",))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=4, help="messages at once in every variant (default 4)")
    parser.add_argument("--rotations", type=int, help="rounds of each variant, instead of the plan's")
    parser.add_argument("--executable", type=Path, help="the Chromium to use, instead of the one that is found")


def measure(options: argparse.Namespace) -> Report:
    plan = QUICK if options.quick else FULL
    began = time.monotonic()
    with workshop() as place:
        settings = load({}, engine=EngineName.chromium, state_dir=place.state_dir, executable_path=options.executable)
        browser = find(settings)
        if browser is None:
            raise EngineMissing("no Chromium on this machine; `asyncworker doctor --install` gets one")
        here = set_up(place, settings, options.slots)
        say(f"all variants are up after {time.monotonic() - began:.1f} s")
        rotations = rotate(here, options.rotations or plan.rotations, plan, began)
    report = judge(rotations)
    report.figures |= {"slots": options.slots, "browser": browser.describe()}
    return report


def rotate(here: Stage, rotations: int, plan: Plan, began: float) -> list[dict[str, Round]]:
    """Let the variants take turns; each rotation begins with another one."""
    trials = {name: here.round(name, here.slots) for name in VARIANTS}  # browsers up, caches warm
    say(f"warm after {time.monotonic() - began:.1f} s")
    sizes = _sizes(trials["raw"].rate, plan.round_s, here.slots)
    done: list[dict[str, Round]] = []
    last_s = 0.0
    while len(_quiet(done)) < rotations:
        started = time.monotonic()
        if started - began + last_s > plan.budget_s:
            say(f"out of time after {len(done)} rotations; {len(_quiet(done))} of {rotations} wanted were quiet")
            break
        order = [name for name in _order(len(done)) if not (done and name in plan.measured_once)]
        rounds = {name: here.round(name, sizes[name]) for name in order}
        shown = ", ".join(f"{name} {rounds[name].rate:.2f}/s" for name in order)
        say(f"rotation {len(done) + 1}: {shown}; up to {_foreign(rounds):.0%} of the CPU was used by others")
        done.append(rounds | {name: done[0][name] for name in plan.measured_once if done})
        last_s = time.monotonic() - started
    return done


def _foreign(rounds: dict[str, Round]) -> float:
    return max(each.foreign or 0.0 for each in rounds.values())


def _quiet(rotations: Sequence[dict[str, Round]]) -> list[dict[str, Round]]:
    return [rounds for rounds in rotations if _foreign(rounds) <= FOREIGN]


def _sizes(rate: float, round_s: float, slots: int) -> dict[str, int]:
    """Messages in a round: the same number for all but the slowest, which takes twice as long for each."""
    full = max(2, round(rate * round_s / slots)) * slots
    return dict.fromkeys(VARIANTS, full) | {"per_message": max(slots, full // 2 // slots * slots)}


def _order(number: int) -> list[str]:
    """Each variant comes first in turn, and every second rotation runs backwards, so that none always follows
    the same other."""
    first = number % len(VARIANTS)
    order = [*VARIANTS[first:], *VARIANTS[:first]]
    return order[::-1] if number // len(VARIANTS) % 2 else order


def judge(rotations: Sequence[dict[str, Round]]) -> Report:
    """The report on these rotations.

    Raises:
        ValueError: When there is none.
    """
    if not rotations:
        raise ValueError("no rotation was measured within the time; run it without --quick, or on a quieter machine")
    measured, quiet = len(rotations), _quiet(rotations)
    if len(quiet) >= min(FEWEST_QUIET, measured):
        rotations = quiet
    rates = {name: spread([rounds[name].rate for rounds in rotations]) for name in VARIANTS}
    ratios = {
        f"{one}/{other}": spread(_ratios(rotations, one, other))
        for one in VARIANTS
        for other in VARIANTS
        if one != other
    }
    costs = _spreads(rotations, lambda each: each.cpu_s and each.cpu_s / each.messages * 1000)
    pickups = _spreads(rotations, lambda each: each.pickup_ms)
    checks = [
        _check(rotations, "ours / raw limit", "raw", OF_THE_LIMIT),
        _check(rotations, "ours / plain Dramatiq", "plain", OF_PLAIN),
        _check(rotations, "ours / browser per message", "per_message", OF_PER_MESSAGE),
    ]
    figures = {
        "rotations": len(rotations),
        "rotations_measured": measured,
        "quiet": rotations is quiet,
        "jobs_per_s": rates,
        "ratios": ratios,
        "cpu_ms_per_job": costs,
        "first_result_when_idle_ms": pickups,
        "rounds": [{name: round(rounds[name].rate, 3) for name in VARIANTS} for rounds in rotations],
        "foreign": [round(_foreign(rounds), 3) for rounds in rotations],
    }
    return Report(checks, figures, _table(rates, ratios, costs, pickups))


def _check(rotations: Sequence[dict[str, Round]], name: str, other: str, limit: float) -> Check:
    values = _ratios(rotations, "ours", other)
    # The standard error of a median is 1.25 times the mean's; of one rotation it is not known.
    error = 1.25 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Check(name, statistics.median(values), ">=", limit, error)


def _ratios(rotations: Sequence[dict[str, Round]], one: str, other: str) -> list[float]:
    """Taken within each rotation, so that a machine that is slower for a while slows both."""
    return [rounds[one].rate / rounds[other].rate for rounds in rotations]


def _spreads(rotations: Sequence[dict[str, Round]], fact: Callable[[Round], float | None]) -> Figures:
    """A fact of the rounds by variant; variants of which it is not known are left out."""
    known = {name: [each for rounds in rotations if (each := fact(rounds[name])) is not None] for name in VARIANTS}
    return {name: spread(values, digits=1) for name, values in known.items() if values}


def _table(rates: Figures, ratios: Figures, costs: Figures, pickups: Figures) -> Table:
    table = Table(title="The same work, four ways")
    table.add_column("variant", no_wrap=True)
    for heading in ("jobs/s", "min–max", *(f"/{name}" for name in VARIANTS), "CPU/job", "from idle"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in VARIANTS:
        rate = rates[name]
        shown = [f"{ratios[f'{name}/{other}']['median']:.3f}" if name != other else "1" for other in VARIANTS]
        cost, pickup = (f"{each[name]['median']:.0f} ms" if name in each else "" for each in (costs, pickups))
        around = f"{rate['min']:.1f}–{rate['max']:.1f}"
        table.add_row(name, f"{rate['median']:.2f}", around, *shown, cost, pickup)
    return table


def run(argv: Sequence[str] | None = None) -> int:
    return main(__doc__, measure, add_options=add_options, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
