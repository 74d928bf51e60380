"""The four ways to do the same work, up and warm, and the site that they read."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import redis
from _workshop import Child, Workshop, machine_cpu_s, script
from dramatiq import Broker, Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results.backend import ResultBackend
from dramatiq.results.backends import RedisBackend

from asyncworker import embedded
from asyncworker.broker import make_redis_broker
from asyncworker.demo.site import ShopSite
from asyncworker.engines.finding import find
from asyncworker.engines.playwright import QUIET_CHROMIUM
from asyncworker.settings import Settings

VARIANTS = ("raw", "ours", "plain", "per_message")

#: Its browsers end as orphans, mostly, and take the account of their CPU time with them.
UNACCOUNTED = "per_message"

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


@dataclass(frozen=True)
class Round:
    """One variant's turn.

    Parameters:
        seconds: From the first enqueue to the last result.
        cpu_s: The CPU time of the variant's processes meanwhile, its browsers with them; None: not known.
        foreign: The share of the machine's CPU time that went to processes outside this run; None: not known.
        pickup_ms: From an enqueue to a worker that was idle to the first result, before the clock ran; None: unseen.
    """

    messages: int
    seconds: float
    cpu_s: float | None = None
    foreign: float | None = None
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

    def __init__(self, place: Workshop, variants: dict[str, Variant], site_url: str, slots: int) -> None:
        self.variants = variants
        self.slots = slots
        self._place = place
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
        machine_s, run_s, cpu_s = machine_cpu_s(), self._place.cpu_s(), child.cpu_s()
        started = time.perf_counter()
        self._work(name, messages)
        seconds = time.perf_counter() - started
        cpu_s, foreign_s = child.cpu_s() - cpu_s, (machine_cpu_s() - machine_s) - (self._place.cpu_s() - run_s)
        idle_ms = pickup_s and pickup_s * 1000
        if name == UNACCOUNTED:
            return Round(messages, seconds, pickup_ms=idle_ms)
        return Round(messages, seconds, cpu_s, max(0.0, foreign_s / seconds / (os.cpu_count() or 1)), idle_ms)

    def _work(self, name: str, messages: int) -> float | None:
        known = list(self._expected)
        urls = [known[number % len(known)] for number in range(messages)]
        first, results = self.variants[name].work(urls)
        for url, result in zip(urls, results, strict=True):
            if result != self._expected[url]:
                raise ValueError(f"{name} read {result} from {url}, which serves {self._expected[url]}")
        return first


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
        "ours": Queued(workers["ours"], make_redis_broker(settings), RedisBackend(client=client), {"seed": 7}),
    }
    for name in ("plain", "per_message"):
        broker = RedisBroker(client=client, namespace=name, middleware=[])  # type: ignore[no-untyped-call]
        variants[name] = Queued(workers[name], broker, RedisBackend(client=client, namespace=f"{name}-results"), {})
    return Stage(place, variants, site.answer(), slots)


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
