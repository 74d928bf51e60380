"""What starting costs: a worker process with nothing to do, and an actors module imported by a producer.

worker    from the exec of `dramatiq asyncworker.actors -p 1` to its line "Worker process is ready for action.",
          with the embedded Valkey up already, as it is for every start but a machine's first; with the engines
          invisible (the default) and chromium
producer  a fresh interpreter that imports a module with one actor, minus one that imports nothing; and the same
          as the interpreter's own clock sees it. No browser library may be imported by it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _harness import Check, Report, main, say, spread
from _workshop import Workshop, script, workshop
from rich.table import Table

from asyncworker import embedded

#: Required of the medians, in ms.
WORKER_MS = 1_500
PRODUCER_MS = 400

#: Imported on use only: each costs hundreds of milliseconds.
HEAVY = ("playwright", "invisible_playwright", "invisible_core")

ENGINES = ("invisible", "chromium")

ACTORS = """
from asyncworker import Session, actor


@actor(max_retries=3, time_limit=60_000)
async def title(session: Session, url: str) -> str:
    await session.page.goto(url, wait_until="domcontentloaded")
    return await session.page.title()
"""

#: Says what an import took by the interpreter's own clock, and which browser libraries came along.
SAYING = f"""
import time
started = time.perf_counter()
{{statement}}
took = time.perf_counter() - started
import json, sys
print(json.dumps([took * 1000, [name for name in {HEAVY!r} if name in sys.modules]]), flush=True)
"""


@dataclass(frozen=True)
class Import:
    """One producer's start.

    Parameters:
        wall_ms: From the exec until it has imported, minus the same of a bare interpreter beside it.
        inside_ms: By the interpreter's own clock.
        exit_ms: From there to the process's end, minus the same; Python takes down what it imported.
        heavy: The browser libraries that were imported.
    """

    wall_ms: float
    inside_ms: float
    exit_ms: float
    heavy: tuple[str, ...]


@dataclass(frozen=True)
class Starts:
    """All that was measured: worker boots in ms by engine, the first of all apart, and imports."""

    first_ms: float
    worker_ms: dict[str, list[float]]
    imports: list[Import]


def measure(options: argparse.Namespace) -> Report:
    boots, imports, budget_s = (4, 7, 28.0) if options.quick else (9, 25, 240.0)
    began = time.monotonic()
    with workshop() as place:
        (place.folder / "pages.py").write_text(ACTORS)
        say("a first boot, which also starts the server and writes bytecode")
        first_ms = boot_ms(place, "invisible")
        embedded.ensure(place.state_dir)
        worker_ms: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for number in range(boots):
            for engine in ENGINES if number % 2 else ENGINES[::-1]:
                worker_ms[engine].append(boot_ms(place, engine))
            say(f"boot {number + 1} of {boots}: {', '.join(f'{e} {worker_ms[e][-1]:.0f} ms' for e in ENGINES)}")
            if time.monotonic() - began > budget_s:
                break
        imported = [one_import(place) for _ in range(imports + 1)][1:]
    return judge(Starts(first_ms, worker_ms, imported))


def boot_ms(place: Workshop, engine: str) -> float:
    """One worker's start; it is stopped again."""
    variables = bytecode(place) | {"ASYNCWORKER_ACTORS": "pages", "ASYNCWORKER_ENGINE": engine}
    started = time.perf_counter()
    worker = place.start("worker", script("dramatiq"), "asyncworker.actors", "-p", "1", variables=variables)
    worker.await_ready()
    took_ms = (time.perf_counter() - started) * 1000
    place.stop(worker)
    return took_ms


def one_import(place: Workshop) -> Import:
    """One producer's start, beside a bare interpreter's."""
    environment = place.environment(bytecode(place) | {"ASYNCWORKER_ACTORS": "pages"})
    bare_ms, bare_exit_ms, _ = _interpreter(place.folder, environment, "pass")
    wall_ms, exit_ms, said = _interpreter(place.folder, environment, "import pages")
    inside_ms, heavy = json.loads(said)
    return Import(wall_ms - bare_ms, inside_ms, exit_ms - bare_exit_ms, tuple(heavy))


def bytecode(place: Workshop) -> dict[str, str]:
    """Let the first start leave bytecode for the others, as an installed package has it, but not in the sources."""
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(place.folder / "bytecode")}


def _interpreter(folder: Path, environment: dict[str, str], statement: str) -> tuple[float, float, str]:
    """Run a statement in a fresh interpreter; the ms until it has, from there to the end, and what it said."""
    code = SAYING.format(statement=statement)
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        said = process.stdout.readline() if process.stdout else ""
        imported = time.perf_counter()
        _, error = process.communicate()
    ended = time.perf_counter()
    if process.returncode != 0:
        raise RuntimeError(f"the producer failed: {error[-2_000:]}")
    return (imported - started) * 1000, (ended - imported) * 1000, said


def judge(starts: Starts) -> Report:
    """The report on these starts."""
    workers = {engine: spread(times, digits=1) for engine, times in starts.worker_ms.items()}
    wall = spread([each.wall_ms for each in starts.imports], digits=1)
    inside = spread([each.inside_ms for each in starts.imports], digits=1)
    leaving = spread([each.exit_ms for each in starts.imports], digits=1)
    heavy = sorted({name for each in starts.imports for name in each.heavy})
    checks = [
        Check(f"worker ready, engine {engine}, ms", took["median"], "<", WORKER_MS) for engine, took in workers.items()
    ]
    checks += [
        Check("import in a producer, ms", wall["median"], "<", PRODUCER_MS),
        Check("import by its own clock, ms", inside["median"], "<", PRODUCER_MS),
        Check("browser libraries imported", len(heavy), "==", 0),
    ]
    table = Table(title="Starting")
    for heading in ("what", "median", "min", "max"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    imports = {"import, wall": wall, "import, inside": inside, "exit after it": leaving}
    rows = {f"worker, engine {engine}": took for engine, took in workers.items()}
    for name, took in (rows | imports).items():
        table.add_row(name, *(f"{took[key]:.0f} ms" for key in ("median", "min", "max")))
    figures = {
        "first_worker_ms": round(starts.first_ms, 1),
        "worker_ms": workers,
        "import_ms": wall,
        "import_inside_ms": inside,
        "exit_ms": leaving,
        "browser_libraries_imported": heavy,
    }
    return Report(checks, figures, table)


def run(argv: Sequence[str] | None = None) -> int:
    return main(__doc__, measure, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
