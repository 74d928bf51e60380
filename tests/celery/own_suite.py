"""`make celery-suite`: tests of Celery's own, unmodified, on its worker and on ours, with what differs.

They come from the source distribution of the Celery that is installed, and take 20 minutes. Each side has a Redis of
its own:

- `real`: the worker that the tests start themselves;
- `ours`: `dramatiq asyncworker.actors` with one process and one thread, and `asyncworker://` as the broker;
- `inside`: our worker in the process of the tests, for what fails on `ours`. Some tests look into their worker's
  process: they connect handlers of its signals, read its log, or change what it remembers.

A test that fails is run once more. The exit code is 1 when one passes on Celery's worker and on ours in neither way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import celery

from asyncworker.deployment import worker_command
from asyncworker.settings import child_environment
from tests.readme import ROOT
from tests.servers import Store, running
from tests.waiting import wait_until

DEPLOYMENT = Path(__file__).parent / "deployment"
CACHE = ROOT / ".venv" / "celery-suite"

TESTS = ("t/unit/utils/test_dispatcher.py", "t/integration/test_tasks.py", "t/integration/test_canvas.py")
SIDES = ("real", "ours", "inside")

READY = "Worker process is ready for action"

#: Left out: each of these takes a minute, on Celery's own worker, too.
STAMPING = "t/integration/test_canvas.py::test_stamping_mechanism"

Outcomes = dict[str, tuple[str, str]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="own_suite", description="Celery's own tests on its worker and on ours.")
    parser.add_argument("--side", choices=SIDES, action="append", help="may be repeated; without: all")
    parser.add_argument("--test", action="append", help=f"a file or a test; without: {', '.join(TESTS)}")
    parser.add_argument("--limit", type=int, default=300, metavar="S", help="how long one test may take (%(default)s)")
    options, rest = parser.parse_known_args()
    home = fetch(celery.__version__)
    tests, more = options.test or TESTS, ["--timeout", str(options.limit), *rest]
    sides = [side for side in options.side or SIDES if side != "inside"]
    with ThreadPoolExecutor() as pool:  # they mostly wait
        outcomes = dict(zip(sides, pool.map(lambda side: run(side, home, [*tests, *more]), sides), strict=True))
    if "inside" in (options.side or SIDES):
        if "ours" in outcomes:
            tests = [test for test, (outcome, _) in outcomes["ours"].items() if outcome == "failed"]
        if tests:
            outcomes["inside"] = run("inside", home, [*tests, *more])
    return compare(outcomes)


def fetch(version: str) -> Path:
    """The directory with the `t/` and the configuration of pytest of that version's source distribution."""
    home = CACHE / version
    if not (home / "t").is_dir():
        home.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", str(home)]
        subprocess.run([*pip, "--no-deps", "--no-binary", "celery", f"celery=={version}"], check=True, timeout=300)
        with tarfile.open(next(home.glob("celery-*.tar.gz"))) as archive:
            for member in archive.getmembers():  # not its celery/: the installed one is tested
                member.name = member.name.partition("/")[2]
                if member.name == "pyproject.toml" or member.name.startswith("t/"):
                    archive.extract(member, home, filter="data")
    return home


def run(side: str, home: Path, arguments: list[str]) -> Outcomes:
    """What came of each test; those that failed have been run twice."""
    directory = home / f"{side}-logs"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    with running(Store(directory / "store")) as store:
        environment = child_environment(
            PYTHONPATH=f"{home}:{DEPLOYMENT}",
            TEST_BROKER=store.url if side == "real" else "asyncworker://",
            TEST_BACKEND=store.url,
            REDIS_HOST="127.0.0.1",
            REDIS_PORT=str(store.port),
            ASYNCWORKER_BROKER_URL=store.url,
            ASYNCWORKER_STATE_DIR=str(directory / "state"),
            ASYNCWORKER_CELERY_APP="suite_app:app",
            SUITE_SIDE=side,
        )
        with worker(home, environment, directory) if side == "ours" else contextlib.nullcontext():
            first = _pytest(home, environment, directory / "first.jsonl", arguments)
            failed = [name for name, (outcome, _) in first.items() if outcome == "failed"]
            print(f"{side}: {_counts(first)}", flush=True)
            again = _pytest(home, environment, directory / "again.jsonl", [*arguments, "--lf"]) if failed else {}
    return first | again


@contextlib.contextmanager
def worker(home: Path, environment: dict[str, str], directory: Path) -> Iterator[None]:
    log = directory / "worker.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            worker_command("-p", "1", "-t", "1"), cwd=home, env=environment, stdout=output, stderr=output
        ) as command,
    ):
        try:
            wait_until(lambda: READY in log.read_text() or command.poll() is not None, "our worker is ready")
            if command.poll() is not None:
                raise SystemExit(log.read_text())
            yield
        finally:
            command.terminate()
            print(f"our worker ended with exit code {command.wait(60)}")


def _pytest(home: Path, environment: dict[str, str], report: Path, arguments: list[str]) -> Outcomes:
    options = ["-p", "celery.contrib.pytest", "-p", "suite_plugin", "-p", "no:asyncworker", "-q", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, "-W", "ignore", "--deselect", STAMPING, *arguments]
    log = report.with_suffix(".log")
    with log.open("wb") as output:
        environment = environment | {"SUITE_REPORT": str(report)}
        subprocess.run(command, cwd=home, env=environment, stdout=output, stderr=output, check=False)
    if not report.exists():
        raise SystemExit(log.read_text()[-4_000:])
    return read(report)


def read(report: Path) -> Outcomes:
    """Outcome and last line of the reason, by test; one part that failed is enough."""
    found: Outcomes = {}
    for line in report.read_text().splitlines():
        test, outcome, why = json.loads(line)
        if found.get(test, ("",))[0] != "failed":
            found[test] = outcome, why[:160]
    return found


def compare(outcomes: dict[str, Outcomes]) -> int:
    """Print the counts of all sides, and what failed on any; 1 when ours fails where Celery's does not."""
    worse = 0
    for side, found in outcomes.items():
        print(f"{side:8} {_counts(found)}")
    for test in sorted({test for found in outcomes.values() for test in found}):
        of = {side: found[test] for side, found in outcomes.items() if test in found}
        results = {side: result for side, (result, _) in of.items()}
        if "failed" not in results.values():
            continue
        print(f"\n{test}\n    " + ", ".join(f"{side} {result}" for side, result in results.items()))
        print(*(f"    {side}: {why}\n" for side, (_, why) in of.items() if why), sep="", end="")
        worse += results.get("real") == "passed" and "passed" not in (results.get("ours"), results.get("inside"))
    print(f"\n{worse} pass on Celery's worker and not on ours" if "real" in outcomes else "")
    return int(worse > 0)


def _counts(found: Outcomes) -> str:
    counts = Counter(outcome for outcome, _ in found.values())
    return ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
