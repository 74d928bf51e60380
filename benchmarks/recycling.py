"""What recycling costs and keeps: throughput, the slowest message, and the memory of browser, driver and Python.

Messages are short sessions on the runtime, four at once, in this process: a fresh context, a product page of the
demo's site, its title. They are run without recycling and with a browser replaced eight times, in turns; memory is
that of all processes (what they share counted once) when the last message is done and no browser is being replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
from _harness import Check, Report, main, say
from rich.table import Table

from asyncworker import processes
from asyncworker.demo.site import ShopSite
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt
from asyncworker.settings import load

SLOTS = 4
RECYCLES = 8

#: Required: all messages together are later by no more than this for each recycle, in s: a launch takes CPU too.
MOST_COST_S = 2.0


@dataclass(frozen=True)
class Round:
    """One run of all messages in one process."""

    per_s: float
    slowest_ms: float
    browser_mb: float
    driver_mb: float
    sample_ms: float
    launched: int
    recycled: int


def measure(options: argparse.Namespace) -> Report:
    count, rounds = (240, 1) if options.quick else (options.messages, 3)
    found: dict[str, list[Round]] = {"without": [], "with": []}
    for number in range(rounds):
        for name in found if number % 2 else reversed(found):
            with tempfile.TemporaryDirectory() as folder:
                tempfile.tempdir, before = folder, tempfile.tempdir  # a lock of its own
                try:
                    found[name].append(asyncio.run(one_round(count, recycling=name == "with")))
                finally:
                    tempfile.tempdir = before
            say(f"round {number + 1} of {rounds}, {name} recycling: {found[name][-1].per_s:.1f} messages/s")
    return judge(found, count)


async def one_round(count: int, *, recycling: bool) -> Round:
    """Run the messages; every one has to succeed."""
    runtime = Runtime(load({}, engine="chromium", recycle_after=count // RECYCLES if recycling else 0))
    runtime.limit(SLOTS)
    took_ms: list[float] = []
    with ShopSite() as site:

        async def message(number: int) -> None:
            async with runtime.session(Attempt(seed=number)) as session:
                started = time.perf_counter()
                await session.page.goto(site.product_url(1), wait_until="domcontentloaded")
                await session.page.title()
            took_ms.append((time.perf_counter() - started) * 1000)

        try:
            await message(0)
            started = time.perf_counter()
            await asyncio.gather(*(message(number) for number in range(count)))
            per_s = count / (time.perf_counter() - started)
            async with asyncio.timeout(60):
                while len(processes.tokens(_mine("browser"))) > 1:
                    await asyncio.sleep(0.05)
            browser_mb, driver_mb, sample_ms = await asyncio.to_thread(memory)
        finally:
            await runtime.close()
    counts = runtime.host.counts
    return Round(
        per_s,
        max(took_ms),
        browser_mb,
        driver_mb,
        sample_ms,
        counts["browsers_launched"],
        counts["browsers_recycled"],
    )


def memory() -> tuple[float, float, float]:
    """Of the browser and of the driver, and how many ms a worker's usual look at both takes."""
    started = time.perf_counter()
    processes.memory_mb(lambda token: token.pid == psutil.Process().pid, enough_mb=1e6)
    sample_ms = (time.perf_counter() - started) * 1000
    return processes.memory_mb(_mine("browser")), processes.memory_mb(_mine("driver")), sample_ms


def _mine(role: str) -> Callable[[processes.Token], bool]:
    """Tokens of this process's in one role."""
    pid = psutil.Process().pid
    return lambda token: token.role == role and token.pid == pid


def judge(found: dict[str, list[Round]], count: int) -> Report:
    table = Table(title=f"{count} messages, {SLOTS} at once; medians")
    for column in ("recycling", "launches", "messages/s", "slowest ms", "browser MB", "driver MB", "one look ms"):
        table.add_column(column, justify="left" if column == "recycling" else "right")
    figures = {}
    for name, rounds in found.items():
        median = {each: statistics.median(getattr(one, each) for one in rounds) for each in Round.__annotations__}
        figures[name] = {each: round(value, 1) for each, value in median.items()}
        shown = ("launched", "per_s", "slowest_ms", "browser_mb", "driver_mb", "sample_ms")
        table.add_row(name, *(f"{median[each]:.0f}" if each != "per_s" else f"{median[each]:.1f}" for each in shown))
    with_, without = figures["with"], figures["without"]
    cost_s = (count / with_["per_s"] - count / without["per_s"]) / max(1, with_["recycled"])
    extra = max(one.launched - 1 - one.recycled for one in (*found["with"], *found["without"]))
    checks = [
        Check("later for each recycle, in s", cost_s, "<=", MOST_COST_S),
        Check("launches that are neither the first nor a recycle", extra, "<=", 0),
        Check("recycles", with_["recycled"], ">=", RECYCLES - 2),
    ]
    return Report(checks, {"messages": count, "recycling": figures}, table)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--messages", type=int, default=800, help="messages of one round")


def run(argv: Sequence[str] | None = None) -> int:
    return main(__doc__, measure, add_options=add_options, argv=argv)


if __name__ == "__main__":
    sys.exit(run())
