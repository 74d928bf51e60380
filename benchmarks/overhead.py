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
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import redis
from _harness import Check, Child, Report, Workshop, main, say, script, spread, workshop
from dramatiq import Broker, Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results.backend import ResultBackend
from dramatiq.results.backends import RedisBackend
from rich.table import Table

from asyncworker import embedded
from asyncworker.broker import make_broker
from asyncworker.demo.site import ShopSite
from asyncworker.engines.finding import find
from asyncworker.engines.playwright import QUIET_CHROMIUM
from asyncworker.errors import EngineMissing
from asyncworker.settings import EngineName, Settings, load

VARIANTS = ("raw", "ours", "plain", "per_message")

#: Required of the median ratios. Two warm workers that do the same differ by 1 to 2 % from run to run on a shared
#: machine, so "not slower than plain Dramatiq" is judged with that much grace.
OF_THE_LIMIT = 0.95
OF_PLAIN = 0.98
OF_PER_MESSAGE = 1.6

#: The variants' sources; their processes import from here and run in the workshop's folder.
SOURCES = Path(__file__).parent / "variants"

#: The site's own process: it ends with its stdin.
SITE = """
import sys
from asyncworker.demo.site import ShopSite
with ShopSite() as site:
    print(site.url, flush=True)
    sys.stdin.read()
"""

#: Longer than any round: a result that takes this long is lost.
RESULT_TIMEOUT_MS = 60_000


#: A name to its median, min and max.
Figures = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rotations: int
    round_s: float
    #: No rotation is begun that would end later than this after the start.
    budget_s: float


FULL = Plan(rotations=8, round_s=5.0, budget_s=400.0)
QUICK = Plan(rotations=4, round_s=2.0, budget_s=38.0)


@dataclass(frozen=True)
class Round:
    """One variant's turn.

    Parameters:
        seconds: From the first enqueue to the last result.
        cpu_s: The CPU time of the variant's processes meanwhile, its browsers with them.
        pickup_ms: From an enqueue to a worker that was idle to the first result, before the clock ran; None: unseen.
    """

    messages: int
    seconds: float
    cpu_s: float = 0.0
    pickup_ms: float | None = None

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.messages / self.seconds


class Variant(Protocol):
    """One way to do the work, by the processes under `child`."""

    child: Child

    def work(self, urls: Sequence[str]) -> tuple[float | None, list[list[str]]]:
        """Do it for all `urls`; returns the seconds to the first result, where that is seen, and all results."""


class Raw:
    """The limit: told over a pipe what to read."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def work(self, urls: Sequence[str]) -> tuple[float | None, list[list[str]]]:
        self.child.tell(json.dumps(list(urls)))
        results: list[list[str]] = json.loads(self.child.answer())
        return None, results


class Queued:
    """A worker behind a queue: whoever works, it is told and awaited in the same way, through Dramatiq's results."""

    def __init__(self, child: Child, broker: Broker, results: ResultBackend, kwargs: dict[str, Any]) -> None:
        self.child = child
        self._broker = broker
        self._results = results
        self._kwargs = kwargs

    def work(self, urls: Sequence[str]) -> tuple[float | None, list[list[str]]]:
        started = time.perf_counter()
        messages = [self._broker.enqueue(self._message(url)) for url in urls]
        read = [self._result(messages[0])]
        first = time.perf_counter() - started
        return first, read + [self._result(message) for message in messages[1:]]

    def _message(self, url: str) -> Message[list[str]]:
        return Message(queue_name="default", actor_name="product", args=(url,), kwargs=self._kwargs, options={})

    def _result(self, message: Message[list[str]]) -> list[str]:
        result: list[str] = message.get_result(backend=self._results, block=True, timeout=RESULT_TIMEOUT_MS)
        return result


class Stage:
    """All variants, up, and the site that they read."""

    def __init__(self, variants: dict[str, Variant], site_url: str, slots: int) -> None:
        self.variants = variants
        self.slots = slots
        shop = ShopSite()  # serves nothing, but knows what the one in the other process serves
        shop.stop()
        products = [shop.product(number) for number in range(1, shop.products + 1)]
        self._expected = {f"{site_url}/products/{p.number}": [p.title, p.price] for p in products}

    def round(self, name: str, messages: int) -> Round:
        """One variant's turn: it is woken by one uncounted message per slot, then the clock runs.

        Raises:
            ValueError: When a result is not what the site serves.
        """
        pickup_s = self._work(name, self.slots)
        child = self.variants[name].child
        cpu_s, started = child.cpu_s(), time.perf_counter()
        self._work(name, messages)
        seconds = time.perf_counter() - started
        return Round(messages, seconds, child.cpu_s() - cpu_s, pickup_s and pickup_s * 1000)

    def _work(self, name: str, messages: int) -> float | None:
        known = list(self._expected)
        urls = [known[number % len(known)] for number in range(messages)]
        first, results = self.variants[name].work(urls)
        for url, result in zip(urls, results, strict=True):
            if result != self._expected[url]:
                raise ValueError(f"{name} read {result} from {url}, which serves {self._expected[url]}")
        return first


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


def set_up(place: Workshop, settings: Settings, slots: int) -> Stage:
    """Start the site, the broker and all variants, in processes that the workshop stops."""
    embedded.ensure(place.state_dir)
    parameters = {"socket": str(place.socket), "slots": slots, "launch": launch_options(settings)}
    (place.folder / "parameters.json").write_text(json.dumps(parameters))
    site = place.start("site", sys.executable, "-c", SITE, pipes=True)
    raw = place.start("raw", sys.executable, str(SOURCES / "raw.py"), pipes=True)
    worker = (script("dramatiq"), "-p", "1", "-t", str(slots))
    sources = {"PYTHONPATH": str(SOURCES)}
    ours = sources | {"ASYNCWORKER_ENGINE": "chromium", "ASYNCWORKER_ACTORS": "ours", "ASYNCWORKER_SLOTS": str(slots)}
    if settings.executable_path is not None:
        ours["ASYNCWORKER_EXECUTABLE_PATH"] = str(settings.executable_path)
    workers = {"ours": place.start("ours", *worker, "asyncworker.actors", variables=ours)}
    workers |= {name: place.start(name, *worker, name, variables=sources) for name in ("plain", "per_message")}
    for started in workers.values():
        started.await_ready()
    client = redis.Redis(unix_socket_path=str(place.socket))
    variants: dict[str, Variant] = {
        "raw": Raw(raw),
        "ours": Queued(workers["ours"], make_broker(settings), RedisBackend(client=client), {"seed": 7}),
    }
    for name in ("plain", "per_message"):
        broker = RedisBroker(client=client, namespace=name, middleware=[])  # type: ignore[no-untyped-call]
        variants[name] = Queued(workers[name], broker, RedisBackend(client=client, namespace=f"{name}-results"), {})
    return Stage(variants, site.answer(), slots)


def launch_options(settings: Settings) -> dict[str, Any]:
    """Playwright's options that give the other variants the browser which asyncworker launches."""
    found = find(settings)
    arguments = [*QUIET_CHROMIUM, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    options: dict[str, Any] = {"headless": settings.headless, "args": arguments}
    if found is not None and found.executable is not None:
        options["executable_path"] = str(found.executable)
    if found is not None and found.channel is not None:
        options["channel"] = found.channel
    return options


def rotate(here: Stage, rotations: int, plan: Plan, began: float) -> list[dict[str, Round]]:
    """Let the variants take turns; each rotation begins with another one."""
    trials = {name: here.round(name, 2 * here.slots) for name in VARIANTS}  # browsers up, caches warm
    say(f"warm after {time.monotonic() - began:.1f} s")
    sizes = _sizes(trials["raw"].rate, plan.round_s, here.slots)
    done: list[dict[str, Round]] = []
    longest_s = 0.0
    for number in range(rotations):
        started = time.monotonic()
        if started - began + longest_s > plan.budget_s:
            say(f"out of time after {number} of {rotations} rotations")
            break
        order = _order(number)
        rounds = {name: here.round(name, sizes[name]) for name in order}
        say(f"rotation {number + 1}: " + ", ".join(f"{name} {rounds[name].rate:.2f}/s" for name in order))
        done.append(rounds)
        longest_s = max(longest_s, time.monotonic() - started)
    return done


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
        raise ValueError("no rotation was measured; allow more time or fewer messages")
    rates = {name: spread([rounds[name].rate for rounds in rotations]) for name in VARIANTS}
    ratios = {f"{one}/{other}": _ratio(rotations, one, other) for one in VARIANTS for other in VARIANTS if one != other}
    costs = {
        name: spread([rounds[name].cpu_s / rounds[name].messages * 1000 for rounds in rotations], digits=1)
        for name in VARIANTS
    }
    pickups = {
        name: spread([ms for rounds in rotations if (ms := rounds[name].pickup_ms) is not None], digits=1)
        for name in VARIANTS
        if name != "raw"
    }
    checks = [
        Check("ours / raw limit", ratios["ours/raw"]["median"], ">=", OF_THE_LIMIT),
        Check("ours / plain Dramatiq", ratios["ours/plain"]["median"], ">=", OF_PLAIN),
        Check("ours / browser per message", ratios["ours/per_message"]["median"], ">=", OF_PER_MESSAGE),
    ]
    figures = {
        "rotations": len(rotations),
        "jobs_per_s": rates,
        "ratios": ratios,
        "cpu_ms_per_job": costs,
        "first_result_when_idle_ms": pickups,
        "rounds": [{name: round(rounds[name].rate, 3) for name in VARIANTS} for rounds in rotations],
    }
    return Report(checks, figures, _table(rates, ratios, costs, pickups))


def _ratio(rotations: Sequence[dict[str, Round]], one: str, other: str) -> dict[str, float]:
    """Taken within each rotation, so that a machine that is slower for a while slows both."""
    return spread([rounds[one].rate / rounds[other].rate for rounds in rotations])


def _table(rates: Figures, ratios: Figures, costs: Figures, pickups: Figures) -> Table:
    table = Table(title="The same work, four ways")
    table.add_column("variant", no_wrap=True)
    for heading in ("jobs/s", "min–max", *(f"/{name}" for name in VARIANTS), "CPU/job", "from idle"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in VARIANTS:
        rate = rates[name]
        shown = [f"{ratios[f'{name}/{other}']['median']:.3f}" if name != other else "1" for other in VARIANTS]
        pickup = f"{pickups[name]['median']:.0f} ms" if name in pickups else ""
        around = f"{rate['min']:.1f}–{rate['max']:.1f}"
        table.add_row(name, f"{rate['median']:.2f}", around, *shown, f"{costs[name]['median']:.0f} ms", pickup)
    return table


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options=add_options))
