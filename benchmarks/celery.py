"""Celery's prefork pool and the adapter side by side: tasks that do nothing, in as many worker processes.

  drain     tasks/s of a worker with 1,500 waiting tasks: from the start of the first body to that of the last, and the
            CPU time of its processes for one
  pickup    an idle worker, sent one task at a time at random gaps: ms from just before the sending to the start of
            the body

`prefork` is `celery worker --pool prefork --concurrency N`; `sync` is the same task on this project's workers
(`-p N -t 1`), and `async` an `async def` one there (`-p N`, so with Dramatiq's eight threads). `native` is an actor
that does the same, for its pick-up: what a task's takes more is Celery's, half a ms to a ms each for `apply_async` in
the producer and for the request and the tracer in the worker, which prefork's tasks pass through, too. Each has a
Valkey of its own; all are up during the whole run, one works at a time, their rounds rotate, and ratios are taken
within one.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from _broker_figures import percentile
from _broker_systems import SYSTEMS as NATIVES
from _broker_systems import Bench, Producer, System, Worker, installed
from _broker_trials import DRAIN_FROM, DRAIN_TIMEOUT_MS, drain_rate, order, pickups
from _harness import Check, Report, main, say, spread
from _workshop import workshop
from rich.table import Table

#: Required of ours: not below prefork; a ratio that is less by no more than this is noise.
OF_PREFORK = 0.98
#: Required of ours: picked up as soon as by prefork, which has Celery's own sending and tracer on its way as well. Runs
#: differ by a tenth, and a coroutine is handed to the thread of the loop; what is more was added here.
PICKUP_OF_PREFORK = 1.25

#: Rounds, waiting tasks in each, and pick-ups in all, each so many seconds after the one before.
ROUNDS, QUICK_ROUNDS = 12, 3
TASKS = 1_500
PICKUPS, QUICK_PICKUPS = 15, 8
PICKUP_ROUNDS, QUICK_PICKUP_ROUNDS = 3, 1
GAPS_S, QUICK_GAPS_S = (0.5, 1.5), (0.2, 0.6)


@dataclass(frozen=True)
class Round:
    """What one round of a system has found."""

    rate: float
    cpu_ms: float


Rounds = Sequence[Mapping[str, Round]]
Up = Mapping[str, tuple[Worker, Producer]]

_OURS = ("dramatiq", "asyncworker.actors", "-p", "{threads}")


def _ours(name: str, module: str, configured: str, *options: str) -> System:
    variables = (("ASYNCWORKER_CELERY_APP", f"{module}:app"),)
    command = (*_OURS, *options)
    return System(name, module, ("asyncworker", "celery"), command, configured, variables=variables, is_ours=True)


PREFORK = System(
    "prefork",
    "on_celery",
    ("celery",),
    ("celery", "-A", "on_celery", "worker", "--pool", "prefork", "--concurrency", "{threads}"),
    "celery worker, its defaults",
)
SYSTEMS = {
    system.name: system
    for system in (
        PREFORK,
        _ours("sync", "on_adapter", "the same task; broker_url is ours", "-t", "1"),
        _ours("async", "on_adapter_async", "an async def task, eight threads"),
    )
}
OURS = tuple(name for name, system in SYSTEMS.items() if system.is_ours)
NATIVE = replace(NATIVES["ours"], name="native", command=(*_OURS, "-t", "1"))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=2, help="worker processes of each (default 2)")
    parser.add_argument("--rounds", type=int, help=f"rounds of each, instead of {ROUNDS} ({QUICK_ROUNDS} with --quick)")
    parser.add_argument("--results", action="store_true", help="keep results, in the same Valkey")
    parser.add_argument("--only", choices=("drain", "pickup"), help="measure this alone")


def measure(options: argparse.Namespace) -> Report:
    rounds, picked = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS), {}
    with workshop() as place, contextlib.ExitStack() as stack:
        bench = Bench(place, threads=options.processes, pythons={}, results=options.results)
        beside = {} if options.only == "drain" else {NATIVE.name: NATIVE}
        systems = SYSTEMS | beside
        up = {name: stack.enter_context(bench.up(system, bench.server(name))) for name, system in systems.items()}
        if options.only != "drain":
            picked = pick_up(up, options.quick)
        found = [] if options.only == "pickup" else [drain(up, number) for number in range(rounds)]
    report = judge(found, picked)
    versions = {name: installed(system, sys.executable) for name, system in SYSTEMS.items()}
    report.figures |= {"processes": options.processes, "results": options.results, "versions": versions}
    report.figures |= {"configured": {name: system.configured for name, system in SYSTEMS.items()}}
    return report


def pick_up(up: Up, is_quick: bool) -> dict[str, list[float]]:
    """Pick-ups in ms, by system, a few of each in turn; all have the same gaps."""
    picked: dict[str, list[float]] = {name: [] for name in up}
    for turn in range(QUICK_PICKUP_ROUNDS if is_quick else PICKUP_ROUNDS):
        gaps = random.Random(turn)
        span = QUICK_GAPS_S if is_quick else GAPS_S
        gaps_s = [gaps.uniform(*span) for _ in range(QUICK_PICKUPS if is_quick else PICKUPS)]
        for name, (worker, producer) in up.items():
            found = pickups(worker, producer, gaps_s, first=turn * PICKUPS)
            picked[name].extend(found)
            say(f"{name}: picked up in {statistics.median(found):.2f} ms")
    return picked


def drain(up: Up, number: int) -> dict[str, Round]:
    """One rotation: each system drains as many waiting tasks, one after the other."""
    return {system.name: _drain(*up[system.name], number) for system in order(list(SYSTEMS.values()), number)}


def _drain(worker: Worker, producer: Producer, number: int) -> Round:
    first, before = DRAIN_FROM + number * TASKS, worker.begun()
    with worker.stopped():
        producer.send(first, TASKS)
        spent_s = worker.child.cpu_s()
    worker.await_begun(before + TASKS, DRAIN_TIMEOUT_MS)
    spent_s = worker.child.cpu_s() - spent_s
    found = Round(drain_rate(worker.times(range(first, first + TASKS)).values()), 1_000 * spent_s / TASKS)
    say(f"round {number + 1}: {worker.system.name} {found.rate:.0f}/s, {found.cpu_ms:.2f} ms of CPU for one")
    return found


def judge(rounds: Rounds, picked: Mapping[str, Sequence[float]]) -> Report:
    """The report: ratios to prefork within each rotation, by their medians."""
    checks, systems = [], {}
    table = Table(title="Tasks that do nothing: medians (least to most)")
    for heading in ("", "tasks/s", "/prefork", "CPU ms", "pick-up p50 ms", "p95 ms"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name in [*SYSTEMS, NATIVE.name]:
        here: dict[str, Any] = {}
        if rounds and name in SYSTEMS:
            here["drain_per_s"] = spread([one[name].rate for one in rounds], digits=1)
            here["drain_of_prefork"] = spread(_of_prefork(rounds, name, lambda one: one.rate))
            here["cpu_ms"] = spread([one[name].cpu_ms for one in rounds])
        if picked:
            here["pickup_ms"] = {f"p{part}": round(percentile(picked[name], part), 3) for part in (50, 95)}
        systems[name] = here
        table.add_row(name, *_cells(here))
        if name in OURS and rounds:
            ratios = _of_prefork(rounds, name, lambda one: one.rate)
            error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
            median = statistics.median(ratios)
            checks.append(Check(f"{name}: tasks/s of prefork's", median, ">=", OF_PREFORK, error))
        if name in OURS and picked:
            of_prefork = percentile(picked[name], 50) / percentile(picked[PREFORK.name], 50)
            checks.append(Check(f"{name}: idle pick-up p50, of prefork's", of_prefork, "<=", PICKUP_OF_PREFORK))
    return Report(checks, {"systems": systems, "rounds": len(rounds), "tasks": TASKS}, table)


def _of_prefork(rounds: Rounds, name: str, fact: Callable[[Round], float]) -> list[float]:
    return [fact(one[name]) / fact(one[PREFORK.name]) for one in rounds]


def _cells(here: dict[str, Any]) -> tuple[str, ...]:
    rate, ratio, picked = here.get("drain_per_s"), here.get("drain_of_prefork"), here.get("pickup_ms")
    cpu = here.get("cpu_ms")
    return (
        f"{rate['median']:.0f} ({rate['min']:.0f} to {rate['max']:.0f})" if rate else "",
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio else "",
        f"{cpu['median']:.2f}" if cpu else "",
        f"{picked['p50']:.2f}" if picked else "",
        f"{picked['p95']:.2f}" if picked else "",
    )


def run(argv: Sequence[str] | None = None) -> int:
    return main(__doc__, measure, add_options=add_options, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
