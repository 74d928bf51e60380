"""How long does the engine invisible keep a worker's event loop waiting? A stand-in result, without the real Firefox.

Each scenario runs in a process of its own, with the real client on the stand-in engine of tests/standin: through
this project's engine, and through the plain client (`async with InvisiblePlaywright(...)`). A ticker on the loop
asks to be called each millisecond; the longest time by which it was called too late is the loop's lag. A second
ticker, in a process that has nothing else to do, shows what the machine itself adds.

Required: a lag of at most 50 ms, or 3 times the second ticker's where the machine is that noisy. A scenario that is
over is measured again, and the median counts. The plain client is there to compare: nothing is required of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _harness import Check, Report, main, say
from _lag import SCENARIOS
from _workshop import Workshop, workshop
from rich.table import Table

from asyncworker.settings import leave_invisible_core_alone

#: Required of our lag, whichever is more: this, or so many times the control's.
LAG_MS = 50
NOISE_FACTOR = 3

#: A scenario whose lag is over is measured so often in all.
MOST_ROUNDS = 3

#: A process that measures one scenario is killed after this: the plain client may never end.
HARD_LIMIT_S = 60.0

#: Where the plain client is done in a second or two; in the others it blocks for up to 20 s.
QUICK_PLAIN = ("launch", "close", "crash")


@dataclass(frozen=True)
class Round:
    """One scenario, once, in ms."""

    duration_ms: float
    lag_ms: float
    control_ms: float

    @property
    def limit_ms(self) -> float:
        return max(LAG_MS, NOISE_FACTOR * self.control_ms)


@dataclass
class Measured:
    """All rounds of one scenario.

    Parameters:
        plain: The plain client's round; None: not measured, or not ended in time.
    """

    ours: list[Round] = field(default_factory=list)
    plain: Round | None = None

    @property
    def typical(self) -> Round:
        """The round whose lag is the median, measured by its own limit."""
        return sorted(self.ours, key=lambda each: each.lag_ms / each.limit_ms)[(len(self.ours) - 1) // 2]


def measure(options: argparse.Namespace) -> Report:
    found: dict[str, Measured] = {}
    with workshop() as place:
        for name in SCENARIOS:
            say(name)
            found[name] = one = Measured()
            for number in range(MOST_ROUNDS):
                one.ours.append(one_round(place, "ours", name))
                if number + 1 >= (1 if options.quick else MOST_ROUNDS) and one.typical.lag_ms < one.typical.limit_ms:
                    break
            if not options.quick or name in QUICK_PLAIN:
                one.plain = plain_round(place, name)
    return judge(found)


def plain_round(place: Workshop, scenario: str) -> Round | None:
    """The plain client's, which may not end in time."""
    try:
        return one_round(place, "plain", scenario)
    except subprocess.TimeoutExpired:
        say(f"{scenario}: the plain client did not end within {HARD_LIMIT_S:.0f} s")
        return None


def one_round(place: Workshop, side: str, scenario: str) -> Round:
    """Run one scenario in a process of its own, on a stand-in engine of its own."""
    leave_invisible_core_alone()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.standin import build_tree

    directory = place.folder / f"{side}-{scenario.replace(' ', '-')}-{time.monotonic_ns()}"
    directory.mkdir()
    standin = build_tree(directory)
    command = [sys.executable, str(Path(__file__).with_name("_lag.py")), side, scenario, str(directory)]
    done = subprocess.run(
        [*command, str(standin.tree)],
        cwd=place.folder,
        env=place.environment(standin.environment | dict.fromkeys(_PROXIES, "")),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HARD_LIMIT_S,
        check=False,
        start_new_session=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{scenario} ({side}) failed: {done.stderr[-2_000:]}")
    return Round(**json.loads(done.stdout))


#: Of the person's own shell: nobody is to be asked for this machine's address.
_PROXIES = ("NO_PROXY", "no_proxy", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def judge(found: Mapping[str, Measured]) -> Report:
    """The report on these rounds."""
    table = Table(title="The event loop's lag, in ms (stand-in engine)")
    for heading in ("scenario", "duration", "lag", "control's lag", "plain client's", "its duration"):
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    checks, figures = [], {}
    for name, one in found.items():
        ours, plain = one.typical, one.plain
        checks.append(Check(f"{name}: lag, ms", ours.lag_ms, "<", ours.limit_ms))
        shown = (ours.duration_ms, ours.lag_ms, ours.control_ms)
        theirs = (plain.lag_ms, plain.duration_ms) if plain else ()
        table.add_row(name, *(f"{value:.0f}" for value in (*shown, *theirs)), *([] if plain else ["-", "-"]))
        figures[name] = {
            "rounds": len(one.ours),
            "duration_ms": round(ours.duration_ms, 1),
            "lag_ms": round(ours.lag_ms, 1),
            "worst_lag_ms": round(max(each.lag_ms for each in one.ours), 1),
            "control_lag_ms": round(ours.control_ms, 1),
            "plain_lag_ms": round(plain.lag_ms, 1) if plain else None,
            "plain_duration_ms": round(plain.duration_ms, 1) if plain else None,
        }
    return Report(checks, {"engine": "stand-in", "scenarios": figures}, table)


def run(argv: Sequence[str] | None = None) -> int:
    return main(__doc__, measure, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
