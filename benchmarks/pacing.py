"""Do all workers together keep a pace? Judged by the log of the sites, which are a process of their own.

rate        4 worker processes with 4 slots; one host at 600 a minute and another without a pace, with work for both;
            half way 4 more processes. Of any sliding minute: the most and the fewest requests to the paced host
throughput  of the other host, beside the paced one and alone, in turn
line        10,000 messages of a slow host in line: what the workers cost then, and how soon another host's begins
refused     one 429 with Retry-After 20: how long no worker asks that host, and that others go on
kills       a worker process is killed every three seconds, and half way the store; and the rate when that is over
browser     the rate and the 429 again with a real Chromium, for a shorter time

All but the last use the fake engine, whose pages are asked for without a browser: 16 and 32 slots of Chromium are more
than two cores can serve.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _harness import Report, main, say
from _pacing_verdict import ON_ITS_WAY_S, PER_MINUTE, Found, Kept, Refused, Waited, judge
from _workshop import READY, Child, Workshop, within, workshop

from asyncworker import embedded
from asyncworker.broker import make_redis_broker
from asyncworker.engines.finding import find
from asyncworker.settings import load

PARTS = Path(__file__).parent / "pacing_parts"
sys.path.insert(0, str(PARTS))

from declared import declare  # noqa: E402 -- the workers import it from there, too

STAGES = ("rate", "throughput", "line", "refused", "kills", "browser")

PACED, PLAIN, SLOW = 0, 1, 2

#: So many messages without a pace wait at any time, where such are sent; looked at this often.
MANY_PLAIN, FEED_S = 1_500, 0.1

IN_LINE = 10_000

#: A worker that dies soon after it was ready, again and again, is a crash loop, which `up` ends.
KILL_EVERY_S = 3.0


@dataclass(frozen=True)
class Plan:
    """How long each stage measures, in s."""

    rate_s: float
    window_s: float
    throughput_s: float
    rounds: int
    idle_s: float
    retry_after_s: int
    kills_s: float
    browser_s: float


FULL = Plan(180, 60, 8, 7, 10, 20, 150, 40)
QUICK = Plan(40, 20, 4, 3, 4, 5, 50, 0)


class Log:
    """The log of the sites, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0
        self._reading = threading.Lock()
        self._asked: dict[int, list[float]] = {site: [] for site in (PACED, PLAIN, SLOW)}
        self.refused: list[float] = []

    def of(self, site: int, *, since: float = 0.0) -> list[float]:
        """When a site was asked."""
        self._read()
        asked = self._asked[site]
        return asked[bisect_left(asked, since) :]

    def count(self, site: int) -> int:
        self._read()
        return len(self._asked[site])

    def _read(self) -> None:
        with self._reading, self._path.open() as log:
            log.seek(self._read_to)
            for line in log.read().rpartition("\n")[0].splitlines():
                self._read_to += len(line) + 1
                at, site, status = line.split(" ")
                self._asked[int(site)].append(float(at))
                if status == "429":
                    self.refused.append(float(at))


class Fleet:
    """The sites, the store, and what sends; workers are started as a stage needs them."""

    def __init__(self, place: Workshop, engine: str) -> None:
        self.place = place
        parameters = {"engine": engine, "per_minute": PER_MINUTE}
        (place.folder / "parameters.json").write_text(json.dumps(parameters))
        embedded.ensure(place.state_dir)
        self._sites = place.start("sites", sys.executable, str(PARTS / "sites.py"), "sites.txt", pipes=True)
        self.urls = self._sites.answer().split()
        self.log = Log(place.folder / "sites.txt")
        self.broker: Any = make_redis_broker(load({}, engine="chromium", state_dir=place.state_dir))
        self._actors = declare(self.broker, PER_MINUTE)
        self._ups = 0

    def up(self, processes: int) -> Child:
        """Start `asyncworker up -p N -t 4`, and wait until all are ready."""
        self._ups += 1
        variables = {"PYTHONPATH": str(PARTS), "ASYNCWORKER_ACTORS": "paced", "ASYNCWORKER_ENGINE": "chromium"}
        settings = load({}, engine="chromium")
        found = find(settings)
        if found is not None and found.executable is not None:
            variables["ASYNCWORKER_EXECUTABLE_PATH"] = str(found.executable)
        command = (sys.executable, "-m", "asyncworker", "up", "-p", str(processes), "-t", "4")
        child = self.place.start(f"up-{self._ups}", *command, variables=variables)
        within(90_000, lambda: child.log.read_text().count(READY) >= processes, child.log_end)
        return child

    def workers(self, child: Child) -> list[psutil.Process]:
        """The worker processes of an `up` that live."""
        found = []
        for pid in re.findall(rf"\[PID (\d+)\].*{READY}", child.log.read_text()):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return [process for process in found if process.is_running()]

    def send(self, name: str, site: int, count: int) -> None:
        made = self._actors[name]
        for start in range(0, count, 500):
            self.broker.send_many([made.message(self.urls[site]) for _ in range(min(500, count - start))])

    def refuse(self, site: int, seconds: int) -> float:
        """Have a site answer the next request with 429; returns when it did."""
        self._sites.tell(f"refuse {site} {seconds}")
        self._sites.answer()
        within(30_000, lambda: self.log.count(site) > 0 and bool(self.log.refused), lambda: "no one asked the site")
        return self.log.refused[-1]

    @contextmanager
    def fed(self) -> Iterator[None]:
        """Have messages without a pace waiting meanwhile."""
        over, before = threading.Event(), self.log.count(PLAIN)

        def feed() -> None:
            sent = 0
            while not over.wait(FEED_S):
                waiting = sent - (self.log.count(PLAIN) - before)
                if waiting < MANY_PLAIN:
                    self.send("plain", PLAIN, 500)
                    sent += 500

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.drop()

    def drop(self) -> None:
        """Have nothing wait any more."""
        self.broker.flush("default")

    def close(self) -> None:
        self.broker.close()
        self.broker.client.close()


def rate(fleet: Fleet, plan: Plan, found: Found) -> None:
    children = [fleet.up(4)]
    fleet.send("paced", PACED, round(PER_MINUTE * plan.rate_s / 60 * 1.2))
    with fleet.fed():
        began = time.monotonic()
        _sleep_until(began + plan.rate_s / 2)
        children.append(fleet.up(4))
        _sleep_until(began + plan.rate_s)
        times = [at for at in fleet.log.of(PACED) if at <= began + plan.rate_s]
    found.rate = Kept.of(times, plan.window_s)
    found.notes["plain_requests_beside_the_rate"] = len(fleet.log.of(PLAIN))
    for child in children:
        fleet.place.stop(child)


def throughput(fleet: Fleet, plan: Plan, found: Found) -> None:
    child = fleet.up(4)

    def per_second() -> float:
        with fleet.fed():
            _sleep(2)
            began = time.monotonic()
            _sleep(plan.throughput_s)
            return len(fleet.log.of(PLAIN, since=began)) / (time.monotonic() - began)

    pairs = []
    for _ in range(plan.rounds):
        alone = per_second()
        fleet.send("paced", PACED, round(PER_MINUTE * (plan.throughput_s + 10) / 60))
        pairs.append((alone, per_second()))
    found.throughput = pairs
    fleet.place.stop(child)


def line(fleet: Fleet, plan: Plan, found: Found) -> None:
    child = fleet.up(4)
    fleet.send("slow", SLOW, 1)
    within(30_000, lambda: len(fleet.log.of(SLOW)) == 1, lambda: "the slow host was not asked")
    _sleep(2)
    workers = fleet.workers(child)
    before = _cost(workers, plan.idle_s)
    fleet.send("slow", SLOW, IN_LINE)
    limiter = fleet.broker.limiter
    within(60_000, lambda: sum(state.waiting for state in limiter.states()) == IN_LINE, lambda: "they are not in line")
    _sleep(2)
    after = _cost(workers, plan.idle_s)
    starts = []
    for _ in range(20):
        since = time.monotonic()
        fleet.send("plain", PLAIN, 1)
        within(
            10_000, lambda since=since: bool(fleet.log.of(PLAIN, since=since)), lambda: "another host's did not begin"
        )
        starts.append((fleet.log.of(PLAIN, since=since)[0] - since) * 1000)
        _sleep(0.2)
    found.waited = Waited(IN_LINE, (before[0], after[0]), (before[1], after[1]), starts)
    fleet.drop()
    fleet.place.stop(child)


def refused(fleet: Fleet, plan: Plan, *, processes: int = 4) -> Refused:
    child = fleet.up(processes)
    fleet.send("paced", PACED, 400)
    since = time.monotonic()
    within(60_000, lambda: len(fleet.log.of(PACED, since=since)) >= 20, lambda: "the host was not asked")
    with fleet.fed():
        refused_at = fleet.refuse(PACED, plan.retry_after_s)
        _sleep_until(refused_at + plan.retry_after_s)
        within(30_000, lambda: fleet.log.of(PACED)[-1] > refused_at + ON_ITS_WAY_S, lambda: "it was asked no more")
        answer = Refused.of(refused_at, fleet.log.of(PACED), fleet.log.of(PLAIN), plan.retry_after_s)
    said = child.log.read_text().count("says to slow down")
    if said != 1:
        raise ValueError(f"{said} log lines say that the host is held, and one hold is one line")
    fleet.place.stop(child)
    return answer


def kills(fleet: Fleet, plan: Plan, found: Found) -> None:
    """Kills for the most of the time; of the last part the rate has to be there again."""
    child = fleet.up(4)
    fleet.send("paced", PACED, round(PER_MINUTE * plan.kills_s / 60 * 1.5))
    began, killed = time.monotonic(), 0
    calm_at, store_at = began + plan.kills_s * 0.6, began + plan.kills_s * 0.3
    has_killed_store = False
    while time.monotonic() < calm_at:
        _sleep(KILL_EVERY_S)
        if workers := fleet.workers(child):
            with suppress(psutil.NoSuchProcess):
                workers[0].kill()  # the one that lives longest
                killed += 1
        if not has_killed_store and time.monotonic() > store_at:
            has_killed_store = True
            os.kill(int((fleet.place.state_dir / "valkey.pid").read_text()), signal.SIGKILL)
            embedded.ensure(fleet.place.state_dir)
    _sleep_until(began + plan.kills_s)
    ends = time.monotonic()
    times = fleet.log.of(PACED, since=began)
    found.killed = Kept.of(times, plan.window_s)
    calm_s = (ends - calm_at) / 2
    found.recovered = len([at for at in times if at > ends - calm_s]) / (PER_MINUTE / 60 * calm_s)
    found.notes["killed_workers"] = killed
    fleet.drop()
    fleet.place.stop(child)


def browser(plan: Plan, found: Found) -> None:
    with opened("chromium") as fleet:
        child = fleet.up(2)
        fleet.send("paced", PACED, round(PER_MINUTE * plan.browser_s / 60 * 1.2))
        within(60_000, lambda: len(fleet.log.of(PACED)) >= 10, lambda: f"no page was opened: {child.log_end()}")
        began = time.monotonic()
        _sleep(plan.browser_s)
        found.browser = Kept.of(fleet.log.of(PACED, since=began), plan.browser_s / 2)
        fleet.drop()
        fleet.place.stop(child)
    with opened("chromium") as fleet:
        found.browser_refused = refused(fleet, plan, processes=2)


@contextmanager
def opened(engine: str = "fake") -> Iterator[Fleet]:
    with workshop() as place:
        fleet = Fleet(place, engine)
        try:
            yield fleet
        finally:
            fleet.close()


def measure(options: argparse.Namespace) -> Report:
    plan, found = QUICK if options.quick else FULL, Found()

    def refuse(fleet: Fleet, plan: Plan, found: Found) -> None:
        found.refused = refused(fleet, plan)

    stages: dict[str, Callable[[Fleet, Plan, Found], None]] = {
        "rate": rate,
        "throughput": throughput,
        "line": line,
        "refused": refuse,
        "kills": kills,
    }
    for name, stage in stages.items():
        if name in options.only:
            say(f"{name} …")
            with opened() as fleet:
                stage(fleet, plan, found)
    if "browser" in options.only and plan.browser_s:
        say("browser …")
        browser(plan, found)
    return judge(found)


def _cost(workers: Sequence[psutil.Process], seconds: float) -> tuple[float, float]:
    """CPU in percent of one core, and memory in MB, of all together."""

    def spent() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in workers)

    before, began = spent(), time.monotonic()
    _sleep(seconds)
    cpu = (spent() - before) / (time.monotonic() - began) * 100
    return cpu, sum(process.memory_info().rss for process in workers) / 1_000_000


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def add_options(parser: argparse.ArgumentParser) -> None:
    def stages(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if unknown := [name for name in found if name not in STAGES]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(STAGES)}")
        return found

    parser.add_argument("--only", type=stages, default=STAGES, help=f"of {','.join(STAGES)}; default: all")


def run(argv: Sequence[str] | None = None) -> int:
    return main(__doc__, measure, add_options=add_options, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
