"""Chaos: a steady load of pages and effects, with random kills, freezes and memory pressure, and an account of all.

Real Chromium, a real Valkey, `asyncworker up` and the demo's shop. SIGKILL and SIGSTOP go to worker processes, drivers,
browsers, renderers and the store, by a plan that follows from --seed alone: the same seed has the same faults at the
same times, to targets that are chosen by their index. When all has drained it is asked whether each promise was kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import redis
from _chaos_account import account, recoveries_ms
from _chaos_faults import Done, Faults
from _chaos_load import QUEUE, Load
from _chaos_plan import HEARTBEAT_MS, Target, plan
from _chaos_raw import Raw
from _chaos_verdict import OUTLIVE_S, Facts, judge
from _chaos_watch import Watch
from _harness import Report, main, say
from _stage import launch_options
from _workshop import BOOT_TIMEOUT_MS, READY, Child, Workshop, within, workshop
from dramatiq.results.errors import ResultError

from asyncworker.broker import make_redis_broker
from asyncworker.errors import BrokerUnavailable
from asyncworker.middleware import ledger_of
from asyncworker.queues import Queues
from asyncworker.redis_broker import WorkerBroker
from asyncworker.settings import Settings, as_environment
from asyncworker.settings import load as load_settings

PARTS = Path(__file__).parent / "chaos_parts"

#: All has to be done so long after the load has ended.
DRAIN_MS = 120_000
#: All slots have to serve at once within this, at the start and at the end.
SLOTS_MS = 60_000

#: A renderer's heap may have so many MB: the bomb's ends there and not where the machine does.
HEAP_MB = 256

#: A worker process with all below it that has more is a reason to replace its browser.
RECYCLE_MB = 700


def measure(options: argparse.Namespace) -> Report:
    minutes = 0.5 if options.quick else options.minutes
    with workshop() as place:
        run = Run(place, options, minutes * 60)
        try:
            report = run.run()
        except Exception:
            say(f"the logs are kept in {run.keep_logs()}")
            raise
        if not report.ok or options.keep:
            report.figures["logs"] = str(run.keep_logs())
    return report


class Run:
    """One chaos run in a workshop."""

    def __init__(self, place: Workshop, options: argparse.Namespace, seconds: float) -> None:
        self._place = place
        self._options = options
        self._seconds = seconds
        self._slots = options.workers * options.threads
        self._data = place.folder / "data"
        self._data.mkdir()
        self._settings = _settings(place, slots=options.threads)
        self._plan = [fault for fault in plan(options.seed, seconds) if fault.what in (options.only or (fault.what,))]
        self._journal: list[Done] = []
        with closing(sqlite3.connect(self._data / "effects.db")) as database, database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("CREATE TABLE effects (once TEXT PRIMARY KEY, message_id TEXT)")
            database.execute("CREATE TABLE asked (once TEXT, message_id TEXT, added INTEGER)")

    def run(self) -> Report:
        with ExitStack() as exits:
            shop = self._place.start("shop", sys.executable, str(PARTS / "shop.py"), pipes=True)
            url = shop.answer()
            broker = make_redis_broker(self._settings)
            exits.callback(broker.client.close)
            exits.callback(broker.close)
            up = self._start_up()
            raw = self._start_raw(url)
            load = Load(broker, self._data, url, slots=self._slots, per_s=self._options.rate, seed=self._options.seed)
            at_start = self._slots_that_serve(broker, load, url)
            raw.start()
            exits.callback(raw.stop)
            watch = exits.enter_context(Watch(up.pid))
            exits.callback(load.stop)
            self._rage(load, watch, raw)
            drain_s = self._drain(broker)
            at_end = self._slots_that_serve(broker, load, url)
            watch.stop()
            living = {one.pid for one in watch.targets(Target.worker)}
            exit_code = self._end(up)
            found = account(broker, load.sent, self._data, self._journal)
            took_ms, disturbed = recoveries_ms(self._data, self._journal)
            return judge(
                Facts(
                    seed=self._options.seed,
                    seconds=self._seconds,
                    sent=load.sent,
                    account=found,
                    journal=self._journal,
                    outlived=list(watch.outlived.values()),
                    quarters=list(watch.memory_quarters()),
                    peak_mb=max((mb for _, mb in watch.memory), default=0.0),
                    # Beside each there is its successor while it is replaced.
                    allowed_mb=2 * self._options.workers * RECYCLE_MB,
                    left=watch.left(OUTLIVE_S),
                    watch_errors=watch.errors,
                    drain_s=drain_s,
                    slots=self._slots,
                    slots_at_start=at_start,
                    slots_at_end=at_end,
                    slots_in_use=self._slots_in_use(broker, living),
                    exit_code=exit_code,
                    ours_ms=took_ms,
                    disturbed=disturbed,
                    raw_ms=raw.took_ms,
                    busy=self._options.busy,
                )
            )

    def _start_up(self) -> Child:
        options = ("-p", str(self._options.workers), "-t", str(self._options.threads))
        variables = as_environment(self._settings) | {"PYTHONPATH": str(PARTS)}
        up = self._place.start("up", sys.executable, "-m", "asyncworker", "up", *options, variables=variables)
        within(
            BOOT_TIMEOUT_MS,
            lambda: up.log.read_text().count(READY) >= self._options.workers or up.process.poll() is not None,
            lambda: f"the workers did not boot: {up.log_end()}",
        )
        if up.process.poll() is not None:
            raise RuntimeError(f"`asyncworker up` ended: {up.log_end()}")
        return up

    def _start_raw(self, url: str) -> Raw:
        options = launch_options(self._settings)
        page = f"{url}/products/1"
        child = self._place.start(
            "raw",
            *(sys.executable, str(PARTS / "raw_recovery.py"), json.dumps(options), page),
            # A killed browser leaves files in its TMPDIR.
            variables={"TMPDIR": str(self._place.folder), "PYTHONPATH": str(Path(__file__).parent)},
            pipes=True,
        )
        return Raw(child)

    def _rage(self, load: Load, watch: Watch, raw: Raw) -> None:
        """The load with its faults; the journal is kept also when it is interrupted."""

        def after_browser_kill() -> None:
            load.burst()
            raw.soon()

        faults = Faults(watch, state_dir=self._place.state_dir, trap=load.trap, after_browser_kill=after_browser_kill)
        self._journal = faults.journal
        say(f"seed {self._options.seed}: {len(self._plan)} faults in {self._seconds:.0f} s")
        begun_at = time.monotonic()
        load.start()
        never = threading.Event()
        faults.run(self._plan, begun_at, never)
        never.wait(max(0.0, begun_at + self._seconds - time.monotonic()))
        load.stop()

    def _drain(self, broker: WorkerBroker) -> float:
        """Wait until nothing is left in the queue; returns how long that took, in s.

        What is not done in time is found by the account.
        """
        say("the load and the faults have ended; waiting for what is left")
        began, queues = time.monotonic(), Queues(broker)
        while (took := time.monotonic() - began) < DRAIN_MS / 1000:
            try:
                stands = queues.look(QUEUE)
                if stands.waiting + stands.delayed + stands.running + stands.lost == 0:
                    break
            except (redis.RedisError, BrokerUnavailable):
                pass
            time.sleep(0.1)
        return took

    def _slots_that_serve(self, broker: WorkerBroker, load: Load, url: str) -> int:
        """Send a message for each slot, whose page answers when all are there at once; returns how many were."""
        together = f"{url}/together?n={self._slots}"
        messages = [load.send(url=together) for _ in range(self._slots)]
        backend, ends = broker.get_results_backend(), time.monotonic() + SLOTS_MS / 1000
        most = 0
        for message in messages:
            left_ms = max(1, int((ends - time.monotonic()) * 1000))
            try:
                title = backend.get_result(message, block=True, timeout=left_ms)
                most = max(most, int(title.split()[1]))
            except ResultError as error:
                say(f"a message for the slots has no result: {error}")
        return most

    def _slots_in_use(self, broker: WorkerBroker, living: set[int]) -> tuple[int, int]:
        """How many slots the workers had that were stopped last, and how many of these were in use, by the ledger."""
        counts = [
            each for worker, each in ledger_of(broker).counts().items() if int(worker.rpartition(":")[2]) in living
        ]
        return sum(each.get("slots", 0) for each in counts), sum(each.get("slots_in_use", 0) for each in counts)

    def _end(self, up: Child) -> int:
        self._place.stop(up)
        return up.process.returncode

    def keep_logs(self) -> Path:
        """Copy what tells the story of the run to where it stays."""
        folder = Path(self._options.logs or tempfile.mkdtemp(prefix="asyncworker-chaos-logs-"))
        folder.mkdir(parents=True, exist_ok=True)
        for log in (*self._place.folder.glob("*.log"), self._place.state_dir / "valkey.log", *self._data.iterdir()):
            if log.exists():
                shutil.copy(log, folder)
        (folder / "journal.json").write_text(json.dumps([done.facts() for done in self._journal], indent=1))
        return folder


def _settings(place: Workshop, *, slots: int) -> Settings:
    """Short limits, so that a minute has room for what they are for; a hog is a reason to recycle."""
    given = {"executable_path": path} if (path := load_settings().executable_path) is not None else {}
    return load_settings(
        {},
        engine="chromium",
        state_dir=place.state_dir,
        output_dir=place.folder / "output",
        actors=("visits",),
        launch_args=(f"--js-flags=--max-old-space-size={HEAP_MB}",),
        warm=True,
        slots=slots,
        launch_timeout_ms=20_000,
        context_timeout_ms=10_000,
        close_timeout_ms=8_000,
        heartbeat_timeout_ms=HEARTBEAT_MS,
        crash_loop_ready_ms=1_000,
        crash_loop_deaths=20,
        recycle_after=250,
        recycle_memory_mb=RECYCLE_MB,
        recycle_check_ms=2_000,
        result_ttl_ms=24 * 3_600_000,
        **given,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=15.0, help="how long the load lasts (15)")
    parser.add_argument("--seed", type=int, default=1, help="of the plan of faults and of the load (1)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (2)")
    parser.add_argument("--threads", type=int, default=2, help="slots of each (2)")
    parser.add_argument("--rate", type=float, default=6.0, help="messages a second (6)")
    parser.add_argument(
        "--only", action="append", metavar="WHAT", help="of the plan these faults alone, as in --only 'kill browser'"
    )
    parser.add_argument("--busy", action="store_true", help="the machine does other things: times are shown only")
    parser.add_argument("--logs", help="folder for the logs, which are kept when a promise was broken")
    parser.add_argument("--keep", action="store_true", help="keep the logs in any case")


def run(argv: Sequence[str] | None = None) -> int:
    return main(__doc__, measure, add_options=add_options, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
