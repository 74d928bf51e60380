"""What every benchmark shares: its options, its report, and how busy the machine was.

A script in this folder has a function `measure(options) -> Report`, and `run(argv)`, which hands it to `main`. That
prints a table, or with `--json` one JSON object whose key `ok` says whether every required figure was met; the exit
code is 0 then, and 1 otherwise, also when the measuring itself failed (key `error`).
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import signal
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import psutil
from rich.console import Console
from rich.table import Table

_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Check:
    """One required figure: `value` must stand in `relation` (>=, <=, < or ==) to `limit`.

    Parameters:
        error: The standard error of the value, shown beside it; the verdict does not use it.
    """

    name: str
    value: float
    relation: str
    limit: float
    error: float = 0.0

    @property
    def ok(self) -> bool:
        return _HOLDS[self.relation](self.value, self.limit)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "relation": self.relation,
            "limit": self.limit,
            "standard_error": round(self.error, 4),
            "ok": self.ok,
        }


@dataclass
class Report:
    """What a benchmark found.

    Parameters:
        checks: The required figures; `ok` is true when there is one and all hold.
        figures: Everything else that the JSON object holds, by key.
        table: The same for a person.
        decides: False: the checks are shown beside what was found, and `ok` says that it was found.
    """

    checks: list[Check]
    figures: dict[str, Any]
    table: Table
    noise: dict[str, Any] = field(default_factory=dict)
    decides: bool = True

    @property
    def ok(self) -> bool:
        if not self.decides:
            return True
        return bool(self.checks) and all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        checks = [check.as_json() for check in self.checks]
        return {"ok": self.ok, "checks": checks, **self.figures, "machine": self.noise}

    def show(self) -> None:
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(self.table)
        for check in self.checks:
            mark = "[green]ok  [/green]" if check.ok else f"[red]{'FAIL' if self.decides else 'MISS'}[/red]"
            error = f" (± {check.error:.3f})" if check.error else ""
            console.print(f"{mark} {check.name}: {check.value:.3f}{error}, required {check.relation} {check.limit:g}")
        console.print(noise_line(self.noise), style="dim")


class Noise:
    """How busy the machine is with other things, from here to `facts`."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._times = psutil.cpu_times()

    def facts(self) -> dict[str, Any]:
        """The machine and its noise; the load averages are those of the last minute."""
        now = psutil.cpu_times()
        spent = sum(now) - sum(self._times) or 1.0
        stolen = getattr(now, "steal", 0.0) - getattr(self._times, "steal", 0.0)
        return {
            "cores": len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else psutil.cpu_count(),
            "python": platform.python_version(),
            "load_before": round(self._load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "steal_percent": round(100 * stolen / spent, 2),
        }


def noise_line(noise: dict[str, Any]) -> str:
    return (
        f"machine: {noise['cores']} cores, Python {noise['python']}, load average {noise['load_before']} before and "
        f"{noise['load_after']} after, {noise['steal_percent']} % of the CPU time taken by other guests of the host"
    )


def spread(values: Sequence[float], *, digits: int = 3) -> dict[str, float]:
    """Median, least and most of some rounds."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def main(
    description: str | None,
    measure: Callable[[argparse.Namespace], Report],
    *,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark; returns the exit code.

    Parameters:
        description: The script's docstring.
        measure: Does the work; what it raises becomes the report's `error`.
        add_options: Adds the script's own options to --json and --quick.
        argv: The command line; None: the process's own.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the key `ok`")
    parser.add_argument("--quick", action="store_true", help="be done within a minute; the figures are noisier")
    add_options(parser)
    options = parser.parse_args(argv)
    noise = Noise()
    terminated = signal.signal(signal.SIGTERM, _interrupted)
    try:
        report = measure(options)
    except KeyboardInterrupt:
        say("interrupted; everything that was started is stopped")
        return 130
    except Exception as error:  # noqa: BLE001 -- a benchmark that fails has failed its requirement
        return _failed(error, as_json=options.json)
    finally:
        signal.signal(signal.SIGTERM, terminated)
    report.noise = noise.facts()
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        report.show()
    return 0 if report.ok else 1


def _failed(error: Exception, *, as_json: bool) -> int:
    traceback.print_exception(error)
    text = f"{type(error).__name__}: {error}"
    if as_json:
        print(json.dumps({"ok": False, "error": text}))
    else:
        say(text)
    return 1


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def say(text: str) -> None:
    """Tell the person who waits; stdout belongs to the result."""
    print(text, file=sys.stderr, flush=True)
