"""What every benchmark shares: its options, its report, and the processes and files that it leaves behind none of.

A script in this folder has a function `measure(options) -> Report` and hands it to `main`, which prints a table,
or with `--json` one JSON object whose key `ok` says whether every required figure was met; the exit code is 0 then,
and 1 otherwise, also when the measuring itself failed (key `error`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import os
import platform
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil
from rich.console import Console
from rich.table import Table

from asyncworker import embedded
from asyncworker.settings import child_environment

#: Carried by every process of a run, so that what outlives its parent is still found, and nothing else is.
RUN_VARIABLE = "_BENCHMARK_RUN"

#: The line by which Dramatiq says that a worker process has booted.
READY = "Worker process is ready for action."

BOOT_TIMEOUT_MS = 60_000
STOP_TIMEOUT_MS = 30_000

_HOLDS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<": operator.lt, "==": operator.eq}


@dataclass(frozen=True)
class Check:
    """One required figure: `value` must stand in `relation` (>=, < or ==) to `limit`."""

    name: str
    value: float
    relation: str
    limit: float

    @property
    def ok(self) -> bool:
        return _HOLDS[self.relation](self.value, self.limit)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "relation": self.relation,
            "limit": self.limit,
            "ok": self.ok,
        }


@dataclass
class Report:
    """What a benchmark found.

    Parameters:
        checks: The required figures; `ok` is true when there is one and all hold.
        figures: Everything else that the JSON object holds, by key.
        table: The same for a person.
    """

    checks: list[Check]
    figures: dict[str, Any]
    table: Table
    noise: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        checks = [check.as_json() for check in self.checks]
        return {"ok": self.ok, "checks": checks, **self.figures, "machine": self.noise}

    def show(self) -> None:
        console = Console()
        console.print(self.table)
        for check in self.checks:
            mark = "[green]ok  [/green]" if check.ok else "[red]FAIL[/red]"
            console.print(f"{mark} {check.name}: {check.value:.3f}, required {check.relation} {check.limit:g}")
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
    parser.add_argument("--quick", action="store_true", help="be done in less than 50 s; the figures are noisier")
    add_options(parser)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupted)
    noise = Noise()
    try:
        report = measure(options)
    except KeyboardInterrupt:
        say("interrupted; everything that was started is stopped")
        return 130
    except Exception as error:  # noqa: BLE001 -- a benchmark that fails has failed its requirement
        return _failed(error, as_json=options.json)
    report.noise = noise.facts()
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        report.show()
    return 0 if report.ok else 1


def _failed(error: Exception, *, as_json: bool) -> int:
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


def within(timeout_ms: float, fact: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Wait until `fact()` is true.

    Raises:
        TimeoutError: When it is not within `timeout_ms`; with what `otherwise()` says.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    while not fact():
        if time.monotonic() >= deadline:
            raise TimeoutError(otherwise())
        time.sleep(0.01)


class Child:
    """A process of a run, in a session of its own: a Ctrl-C at the terminal reaches the script alone."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> None:
        """Write one line to its stdin."""
        stdin = self._pipe(self.process.stdin)
        stdin.write(f"{line}\n".encode())
        stdin.flush()

    def answer(self) -> str:
        """Read one line of its stdout.

        Raises:
            RuntimeError: When it ended instead; with the end of its log.
        """
        line = self._pipe(self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {self.log_end()}")
        return line.decode().rstrip("\n")

    def await_ready(self) -> None:
        """Wait until a Dramatiq worker has booted.

        Raises:
            RuntimeError: When it ended instead.
            TimeoutError: When it did neither.
        """
        within(
            BOOT_TIMEOUT_MS,
            lambda: READY in self.log.read_text() or self.process.poll() is not None,
            lambda: f"{self.name} did not boot within {BOOT_TIMEOUT_MS} ms: {self.log_end()}",
        )
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended: {self.log_end()}")

    def cpu_s(self) -> float:
        """The CPU time of its whole tree so far, with what has ended and was reaped."""
        spent = 0.0
        me = psutil.Process(self.pid)
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                spent += times.user + times.system + times.children_user + times.children_system
        return spent

    def stop(self) -> None:
        """Let it end by itself (its stdin ends, SIGTERM), or kill it."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        else:
            self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_MS / 1000)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-2_000:]

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise ValueError(f"{self.name} was started without pipes")
        return pipe


class Workshop:
    """A temporary directory, an embedded Valkey in it, and the processes of one run; made by `workshop()`.

    Attributes:
        folder: The processes' working directory.
        state_dir: The embedded Valkey's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.socket = embedded.socket_path(self.state_dir)
        self._run = secrets.token_hex(8)
        self._children: list[Child] = []

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """This process's environment without its ASYNCWORKER_ settings, with the run's own and `variables`."""
        own = {RUN_VARIABLE: self._run, "ASYNCWORKER_STATE_DIR": str(self.state_dir)}
        return child_environment(**own, **variables)

    def start(self, name: str, *command: str, variables: Mapping[str, str] = {}, pipes: bool = False) -> Child:
        """Start a process; with `pipes`, to be talked to line by line."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment(variables),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else stderr,
                stderr=stderr,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def stop(self, child: Child) -> None:
        """Stop one process before the others."""
        child.stop()
        self._children.remove(child)

    def close(self) -> None:
        """Stop everything: the processes, the server, and what they may have left behind."""
        for child in reversed(self._children):
            child.stop()
        embedded.stop(self.state_dir)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(RUN_VARIABLE) == self._run:
                    process.kill()


@contextlib.contextmanager
def workshop() -> Iterator[Workshop]:
    """A place to measure in, of which nothing is left: no process, no file."""
    folder = Path(tempfile.mkdtemp(prefix="asyncworker-benchmark-"))
    place = Workshop(folder)
    try:
        yield place
    finally:
        try:
            place.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def script(name: str) -> str:
    """The path of a program that is installed beside this interpreter, such as `dramatiq`."""
    return str(Path(sys.executable).with_name(name))
