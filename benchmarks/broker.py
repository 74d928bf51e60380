"""Brokers side by side: plain Dramatiq, this project's, and those of arq, taskiq, SAQ, streaq and Celery.

  pickup    an idle worker, sent one message at a time at random gaps: ms from just before the sending to the start
            of the actor's body
  idle      the CPU time of a worker's processes without a message, in % of a core
  drain     messages/s of one worker process with 5,000 waiting messages that do nothing
  enqueue   messages/s from one thread, while no worker takes any
  memory    the memory of a worker before and with 100,000 delayed messages
  recovery  seconds from the SIGKILL of a worker until another has begun what it held (plain and ours)

Each system has a server and an interpreter of its own; their turns rotate, and ratios are taken within a rotation. A
system that is not installed is left out and said to be. The README beside this file says how each is set up.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence

from _broker_figures import Found, judge, percentile
from _broker_systems import SYSTEMS, Bench, System, installed
from _broker_trials import ALL, Plan, Quiet, Turn, order, quiet, turn
from _harness import Report, main, say
from _workshop import workshop

DEFAULT = ("plain", "ours")

FULL = Plan(rotations=4, pickups=15, gaps_s=(0.5, 1.5), messages=5_000, idle_s=20.0, delayed=100_000, recovery_s=60.0)
#: A plain worker that was idle for less than a second or two looks more often than one that was idle for long.
QUICK = Plan(rotations=1, pickups=8, gaps_s=(0.2, 0.6), messages=5_000, idle_s=10.0, delayed=5_000, recovery_s=18.0)

#: What a system that does not work raises here; one that must is not excused.
FAILURES = (RuntimeError, TimeoutError, ValueError, OSError)


def add_options(parser: argparse.ArgumentParser) -> None:
    names, trials = ",".join(SYSTEMS), ",".join(ALL)
    parser.add_argument(
        "--systems", type=_chosen(SYSTEMS), default=list(DEFAULT), help=f"some of {names}, or all (default plain,ours)"
    )
    parser.add_argument("--only", type=_chosen(ALL), default=list(ALL), help=f"some of {trials} (default all)")
    parser.add_argument("--rotations", type=int, help="turns of each system, instead of the plan's")
    parser.add_argument("--messages", type=int, help="waiting messages to drain, instead of 5,000")
    parser.add_argument("--delayed", type=int, help="delayed messages for the memory, instead of the plan's")
    parser.add_argument("--threads", type=int, default=8, help="messages at once in every system (default 8)")
    parser.add_argument(
        "--python",
        action="append",
        type=_named,
        default=[],
        metavar="NAME=PATH",
        help="the interpreter that has a system installed, where it is not this one; may be repeated",
    )


def _chosen(known: Collection[str]) -> object:
    """A list of names, comma-separated, of those that are known."""

    def parse(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _named(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in SYSTEMS or not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH of one of {', '.join(SYSTEMS)} and an interpreter")
    return name, path


class Absent:
    """The systems that are not measured, or not to the end, and why."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}

    @contextlib.contextmanager
    def guard(self, system: System) -> Iterator[None]:
        """Let a rival's failure be a finding about it; plain Dramatiq and ours must work."""
        try:
            yield
        except FAILURES as error:
            if system.name in DEFAULT:
                raise
            say(f"{system.name} failed: {error}")
            self.why[system.name] = f"failed: {error}"

    def present(self, systems: Sequence[System]) -> list[System]:
        return [system for system in systems if system.name not in self.why]


def measure(options: argparse.Namespace) -> Report:
    plan = QUICK if options.quick else FULL
    given = {"rotations": options.rotations, "messages": options.messages, "delayed": options.delayed}
    plan = dataclasses.replace(plan, **{name: value for name, value in given.items() if value is not None})
    absent = Absent()
    with workshop() as place:
        bench = Bench(place, threads=options.threads, pythons=dict(options.python))
        versions, systems = {}, []
        for system in (SYSTEMS[name] for name in options.systems):
            if found := installed(system, bench.python(system.name)):
                versions[system.name] = found
                systems.append(system)
            else:
                say(f"{system.name} is not installed in {bench.python(system.name)}")
                absent.why[system.name] = "not installed"
        rotations, loads = rotate(bench, systems, plan, options.only, absent)
        rest = quiet(bench, absent.present(systems), plan, options.only, absent.guard)
    return report(options, plan, versions, absent, rotations, loads, rest)


def rotate(
    bench: Bench, systems: Sequence[System], plan: Plan, only: Collection[str], absent: Absent
) -> tuple[list[dict[str, Turn]], list[float]]:
    """Let the systems take turns; returns their turns, and the load average before each rotation."""
    done: list[dict[str, Turn]] = []
    loads: list[float] = []
    for number in range(plan.rotations if {"pickup", "drain", "enqueue"} & set(only) else 0):
        loads.append(round(os.getloadavg()[0], 2))
        done.append({})
        for system in order(list(systems), number) if systems else ():
            if system.name in absent.why:
                continue
            began = time.monotonic()
            with absent.guard(system):
                one = done[-1][system.name] = turn(bench, system, plan, number, only)
                say(
                    f"rotation {number + 1} of {plan.rotations}, {time.monotonic() - began:.0f} s: {_said(system, one)}"
                )
    return done, loads


def _said(system: System, one: Turn) -> str:
    said = [f"pick-up {percentile(one.pickups_ms, 50):.2f} ms"] if one.pickups_ms else []
    said += [f"drain {one.drain_per_s:.0f}/s"] if one.drain_per_s else []
    said += [f"enqueue {one.enqueue_per_s:.0f}/s"] if one.enqueue_per_s else []
    return f"{system.name} {', '.join(said)}"


def report(
    options: argparse.Namespace,
    plan: Plan,
    versions: dict[str, str],
    absent: Absent,
    rotations: list[dict[str, Turn]],
    loads: list[float],
    rest: Quiet,
) -> Report:
    present = {name: found for name, found in versions.items() if name not in absent.why}
    turns = [{name: one for name, one in rotation.items() if name in present} for rotation in rotations]
    made = judge(Found(present, absent.why, turns, rest, loads))
    configured = {name: SYSTEMS[name].configured for name in present}
    made.figures |= {"threads": options.threads, "messages": plan.messages, "configured": configured}
    return made


def run(argv: Sequence[str] | None = None) -> int:
    return main(__doc__, measure, add_options=add_options, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
