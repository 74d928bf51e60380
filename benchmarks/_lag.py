"""One scenario of loop_lag.py in a process of its own: how long was the event loop not served?

Started by loop_lag.py as `_lag.py SIDE SCENARIO DIRECTORY TREE`, with the stand-in engine in its environment; it
prints one JSON object. A ticker on the loop asks to be called each millisecond; what it is called too late is the
loop's lag. The same ticker runs in a process that does nothing else: the machine's own noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asyncworker.engines.invisible import InvisibleBrowser, InvisibleEngine
from asyncworker.identity import Identity
from asyncworker.middleware import SWITCH_INTERVAL_S
from asyncworker.settings import leave_invisible_core_alone, load

TICK_S = 0.001

#: Ours are bounded by these. The plain client has no such limits; its launch is cancelled instead.
LAUNCH_TIMEOUT_MS = 3_000
CLOSE_TIMEOUT_MS = 2_000

#: How long the engine's helper outlives it.
LINGER_MS = 1_500

#: What the pages of a scenario wait: longer than any bound here.
WAITING_MS = 30_000

PLACE = {"locale": "de-DE", "timezone": "Europe/Berlin"}
SEED = 42


class Ticker:
    """Ticks on the loop that runs it.

    Attributes:
        lag_s: The longest time by which a tick came too late.
    """

    def __init__(self) -> None:
        self.lag_s = 0.0

    async def run(self, until: Callable[[], bool]) -> None:
        last = time.perf_counter()
        while not until():
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self.lag_s = max(self.lag_s, now - last - TICK_S)
            last = now


@contextlib.contextmanager
def control() -> Iterator[Ticker]:
    """The ticker in a process that has nothing else to do; its lag is known at the end."""
    ticker = Ticker()
    command = [sys.executable, str(Path(__file__)), "control"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it ticks
        yield ticker
        process.stdin.close()
        ticker.lag_s = float(process.stdout.read())


async def tick_until_told() -> float:
    ticker, over = Ticker(), asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
    ticking = asyncio.ensure_future(ticker.run(over.is_set))
    await asyncio.sleep(20 * TICK_S)
    ticker.lag_s = 0.0
    print(flush=True)
    await ticking
    return ticker.lag_s


async def measured(work: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """The work's duration, its loop's lag and the control's, in ms."""
    ticker, over = Ticker(), asyncio.Event()
    with control() as other:
        ticking = asyncio.ensure_future(ticker.run(over.is_set))
        await asyncio.sleep(0.02)
        ticker.lag_s = 0.0
        began = time.perf_counter()
        await work()
        took = time.perf_counter() - began
        over.set()
        await ticking
    return {"duration_ms": took * 1000, "lag_ms": ticker.lag_s * 1000, "control_ms": other.lag_s * 1000}


class Up(Protocol):
    """A browser that is up."""

    browser: Any

    async def close(self) -> None: ...


class Side(Protocol):
    """Who launches and closes."""

    async def launch(self) -> Up: ...

    async def settle(self) -> None:
        """Wait until nothing of an abandoned launch is left."""


@dataclass
class OurBrowser:
    launched: InvisibleBrowser

    @property
    def browser(self) -> Any:
        return self.launched.browser

    async def close(self) -> None:
        await self.launched.close(CLOSE_TIMEOUT_MS)


class Ours:
    """This project's engine, as a worker's host calls it."""

    def __init__(self) -> None:
        given = {"engine": "invisible", "launch_timeout_ms": LAUNCH_TIMEOUT_MS} | PLACE
        self._engine = InvisibleEngine(load({}, **given))

    async def launch(self) -> OurBrowser:
        return OurBrowser(await self._engine.launch(Identity(seed=SEED, **PLACE)))

    async def settle(self) -> None:
        await self._engine.close()


@dataclass
class PlainBrowser:
    client: Any
    browser: Any

    async def close(self) -> None:
        await self.client.__aexit__(None, None, None)


class Plain:
    """`async with InvisiblePlaywright(...)`."""

    async def launch(self) -> PlainBrowser:
        leave_invisible_core_alone()
        from invisible_playwright.async_api import InvisiblePlaywright

        client = InvisiblePlaywright(seed=SEED, headless=True, humanize=False, **PLACE)
        async with asyncio.timeout(LAUNCH_TIMEOUT_MS / 1000):
            return PlainBrowser(client, await client.__aenter__())

    async def settle(self) -> None:
        """It cleans up itself, before it lets go."""


@dataclass
class Stage:
    """What a scenario has to do with.

    Parameters:
        standin: The stand-in's tree, where its faults and its log are.
    """

    side: Side
    standin: Any

    def engine_pid(self) -> int:
        return int(self.standin.launches()[-1]["pid"])

    async def launch_in_vain(self) -> None:
        """A launch that is to fail, until nothing of it is left."""
        try:
            await self.side.launch()
        except Exception:  # noqa: BLE001 -- the plain client raises whatever it meets
            await self.side.settle()
        else:
            raise RuntimeError("the launch succeeded, though it should not")


Figures = dict[str, float]


async def launch(stage: Stage) -> Figures:
    """The first of the process, so with the client's import."""
    up: list[Up] = []

    async def work() -> None:
        up.append(await stage.side.launch())

    figures = await measured(work)
    await up[0].close()
    return figures


async def close(stage: Stage) -> Figures:
    up = await stage.side.launch()
    await up.browser.new_page()
    return await measured(up.close)


async def cancelled_launch(stage: Stage) -> Figures:
    """Cancelled once its engine runs, which never says that it is ready."""
    stage.standin.faults(never_ready=True)

    async def work() -> None:
        launching = asyncio.ensure_future(stage.side.launch())
        while not stage.standin.launches():
            await asyncio.sleep(0.02)
        launching.cancel()
        await asyncio.wait({launching})
        await stage.side.settle()

    return await measured(work)


async def launch_timeout(stage: Stage) -> Figures:
    stage.standin.faults(never_ready=True)
    return await measured(stage.launch_in_vain)


async def missing_engine(stage: Stage) -> Figures:
    stage.standin.tree.rename(stage.standin.directory / "elsewhere")
    return await measured(stage.launch_in_vain)


async def wedged_close(stage: Stage) -> Figures:
    """Its process is stopped: it lives and answers nothing."""
    up = await stage.side.launch()
    await up.browser.new_page()
    os.kill(stage.engine_pid(), signal.SIGSTOP)
    return await measured(up.close)


async def lingering_close(stage: Stage) -> Figures:
    """A process of the browser's outlives it."""
    stage.standin.faults(linger_ms=LINGER_MS)
    up = await stage.side.launch()
    return await measured(up.close)


async def close_while_waiting(stage: Stage) -> Figures:
    """Three pages are in `page.wait_for_timeout`, each in a thread of the client's, which nothing wakes."""
    up = await stage.side.launch()
    pages = [await up.browser.new_page() for _ in range(3)]
    waiting = [asyncio.ensure_future(page.wait_for_timeout(WAITING_MS)) for page in pages]
    await asyncio.sleep(0.2)

    async def work() -> None:
        for each in waiting:
            each.cancel()
        await up.close()

    return await measured(work)


async def crash(stage: Stage) -> Figures:
    """Its process is killed; then the next call fails and it is closed."""
    up = await stage.side.launch()
    page = await up.browser.new_page()

    async def work() -> None:
        os.kill(stage.engine_pid(), signal.SIGKILL)
        with contextlib.suppress(Exception):
            await page.title()
        await up.close()

    return await measured(work)


SCENARIOS: dict[str, Callable[[Stage], Awaitable[Figures]]] = {
    "launch": launch,
    "close": close,
    "cancelled launch": cancelled_launch,
    "launch timeout": launch_timeout,
    "missing engine": missing_engine,
    "wedged engine, close": wedged_close,
    "lingering helper, close": lingering_close,
    "pages waiting, close": close_while_waiting,
    "crash": crash,
}


def main(side: str, scenario: str, directory: str, tree: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.standin import Standin

    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a worker

    async def run() -> Figures:
        stage = Stage({"ours": Ours, "plain": Plain}[side](), Standin(Path(directory), Path(tree)))
        return await SCENARIOS[scenario](stage)

    print(json.dumps(asyncio.run(run())), flush=True)
    os._exit(0)  # the client's threads may still sleep


if __name__ == "__main__":
    if sys.argv[1:] == ["control"]:
        print(asyncio.run(tick_until_told()))
    else:
        main(*sys.argv[1:])
