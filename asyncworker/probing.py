"""Prober: does a browser finish a navigation? And what that, with its launches, says of this worker process.

A browser may answer its protocol and yet load no page any more. So one that no message's page has finished loading in
for a while gets a page of the worker's own: in a context that takes no slot, only where the engine has room, and only
on a browser that is up. Two such probes in a row that fail, with no message's page in between, end the use of the
browser; another is launched and probed in its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from asyncworker.browser import BrowserHost
from asyncworker.errors import EngineError
from asyncworker.generation import Generation
from asyncworker.identity import Identity
from asyncworker.settings import EngineName, Settings
from asyncworker.threads import in_thread

if TYPE_CHECKING:
    from playwright.async_api import Page

logger = logging.getLogger("asyncworker.health")

#: How often is looked whether a probe is due, and what the browsers do.
TICK_S = 0.25

#: So many failed probes in a row end the use of a browser.
MOST_FAILED = 2

#: Browsers that are replaced in a row, none of which finished a navigation, are replaced with pauses up to this.
LONGEST_PAUSE_S = 600.0

#: What is loaded where no local page can be reached: behind a proxy, or by a browser on another host.
TITLE = "asyncworker"
DATA_URL = f"data:text/html,<title>{TITLE}</title>"


class State(StrEnum):
    """What a worker process is, for whoever sends it work or decides whether to restart it."""

    starting = "starting"
    ready = "ready"
    draining = "draining"
    sick = "sick"


@dataclass(frozen=True)
class Standing:
    """How the browsers of a process stand; `generation` is the newest of those that get contexts."""

    state: State
    reason: str
    generation: int | None = None


@dataclass(frozen=True)
class Probe:
    """The last one: when it ended (ms of the epoch), how long it took, and why it failed; None: it did not."""

    at_ms: int
    ms: int
    failure: str | None = None


class Prober:
    """Looks at the browsers of one host, on its loop.

    Parameters:
        home: Gives the deployment's own identity, for a launch with ASYNCWORKER_WARM; may block.
        local_url: A page of this process's own; None: there is none.
        told: Called after each look.
    """

    def __init__(
        self,
        host: BrowserHost,
        settings: Settings,
        *,
        home: Callable[[], Identity] | None = None,
        local_url: str | None = None,
        told: Callable[[], object] = lambda: None,
    ) -> None:
        self.last: Probe | None = None
        #: Why the engine cannot launch at all, as the boot found it.
        self.engine_problem: str | None = None
        self._host = host
        self._settings = settings
        self._home = home
        # Traffic of a proxied browser leaves by the proxy, also to this machine; a remote one is not on it.
        reaches_us = settings.proxy is None and settings.engine is not EngineName.remote
        self._local_url = local_url if reaches_us else None
        self._local_works = False
        self._told = told
        self._working: asyncio.Task[None] | None = None
        self._sick: str | None = None
        self._sick_since = 0.0
        self._proven = False
        self._replaced_in_a_row = 0
        self._not_before = 0.0
        self._warmed_at: float | None = None
        self._launching_since: float | None = None
        self.standing = self._stand()

    async def run(self) -> None:
        """Look for ever."""
        try:
            while True:
                self.look()
                await asyncio.sleep(TICK_S)
        finally:
            if self._working is not None:
                self._working.cancel()

    def look(self) -> None:
        """Begin what is due, and say how the browsers stand."""
        try:
            if self._working is None and (generation := self._due()) is not None:
                self._begin(self._probe(generation))
            elif self._working is None and self._is_cold_and_should_not_be():
                self._begin(self._warm())
            self.standing = self._stand()
        except Exception:
            logger.exception("the browsers could not be looked at; it is tried again")
        self._told()

    # --- what is due

    def _due(self) -> Generation | None:
        interval_s = self._settings.probe_interval_ms / 1000
        if interval_s == 0:
            return None
        now = self._host.clock.monotonic()
        for generation in self._host.usable():
            if not self._host.has_room(generation):
                continue
            if generation.proved_at is None and generation.probed_at is None and generation.leases == 0:
                return generation
            if 0 < generation.failed_probes < MOST_FAILED:
                return generation
            seen = (generation.launched_at, generation.proved_at or 0.0, generation.probed_at or 0.0)
            if now - max(seen) >= interval_s:
                return generation
        return None

    def _is_cold_and_should_not_be(self) -> bool:
        """With ASYNCWORKER_WARM a browser that died idle is launched again; the boot itself launches the first."""
        if not (self._settings.warm and self._settings.probe_interval_ms and self._home):
            return False
        now = self._host.clock.monotonic()
        if self._warmed_at is None or self._host.usable() or self._host.is_launching:
            self._warmed_at = now
            return False
        return now - self._warmed_at >= self._settings.probe_interval_ms / 1000

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._working = self._host.spawn(work)
        self._working.add_done_callback(self._ended)

    def _ended(self, work: asyncio.Task[None]) -> None:
        self._working = None
        if not work.cancelled() and (error := work.exception()) is not None:
            logger.error("a probe could not be made: %r", error)

    async def _warm(self) -> None:
        self._warmed_at = self._host.clock.monotonic()
        if self._home is not None:
            await self._host.warm(await in_thread(self._home))

    # --- a probe

    async def _probe(self, generation: Generation) -> None:
        """Load a page in the browser, within the limit, and draw the consequences."""
        clock = self._host.clock
        began = clock.monotonic()
        failure = await self._failure(generation)
        ended = clock.monotonic()
        self.last = Probe(round(time.time() * 1000), round((ended - began) * 1000), failure)
        generation.probed_at = ended
        if failure is None:
            generation.proved_at, generation.failed_probes = ended, 0
            return
        over = generation.lost is not None or (generation.retired and not generation.wedged)
        if over or (generation.proved_at or 0.0) > began:
            return  # its end is known by other ways; or a message's page was loaded meanwhile
        generation.failed_probes += 1
        logger.warning("browser %d failed probe %d: %s", generation.number, generation.failed_probes, failure)
        # One that could not even open a page gets no contexts any more.
        if generation.failed_probes >= MOST_FAILED or generation.retired:
            await self._replace(generation, failure)

    async def _failure(self, generation: Generation) -> str | None:
        """Why no navigation was finished; None: one was."""
        limit_ms = self._settings.probe_timeout_ms
        lease = None
        try:
            async with asyncio.timeout(limit_ms / 1000):
                lease = await self._host.lend_for_probe(generation)
                return await self._navigate(lease.page, limit_ms)
        except TimeoutError:
            done = "opened no page" if lease is None else "finished no navigation"
            return f"it {done} within {limit_ms} ms (ASYNCWORKER_PROBE_TIMEOUT_MS)"
        except EngineError as error:
            return f"it opened no page: {error}"
        except Exception as error:  # noqa: BLE001 -- of whichever library, and all that it says is that it opened none
            return f"it opened no page: {_in_short(error)}"
        finally:
            if lease is not None:
                await self._host.take_back_probe(lease)  # bounded; what is in use now is so by messages only

    async def _navigate(self, page: Page, limit_ms: int) -> str | None:
        """Load the local page, or the data: URL. What passes the caller's limit is a hang; what raises is an answer."""
        if self._local_url is not None:
            failure = await _load(page, self._local_url, limit_ms)
            if failure is None or self._local_works:
                self._local_works = True
                return failure
            # The browser's command line may keep it from this machine's addresses, which says nothing of its health.
            logger.warning("probes load a data: URL from now on, since the local page cannot be: %s", failure)
            self._local_url = None
        return await _load(page, DATA_URL, limit_ms)

    async def _replace(self, generation: Generation, failure: str) -> None:
        """End the use of a browser that is up and of no use, and bring up another that is probed next."""
        clock = self._host.clock
        if clock.monotonic() < self._not_before and not generation.retired:
            return
        wanted = self._host.is_wanted(generation)
        if wanted:
            self._sick = f"browser {generation.number} {failure.removeprefix('it ')}"
            self._sick_since = clock.monotonic()
        logger.error(
            "browser %d answers and is of no use (%s): it gets no more contexts, and another one is launched",
            generation.number,
            failure,
        )
        pause_s = self._settings.probe_interval_ms / 1000 * 2**self._replaced_in_a_row
        self._not_before = clock.monotonic() + min(pause_s, LONGEST_PAUSE_S)
        self._replaced_in_a_row = min(self._replaced_in_a_row + 1, 16)
        self._host.discard(generation)
        if wanted:
            await self._host.warm(generation.identity)

    # --- how they stand

    def _stand(self) -> Standing:
        usable = self._host.usable()
        self._note(usable)
        number = max((generation.number for generation in usable), default=None)
        state, reason = self._verdict(usable)
        return Standing(state, reason, number)

    def _note(self, usable: list[Generation]) -> None:
        """What has been proven, and since when a launch goes on."""
        proved = [generation.proved_at for generation in usable if generation.proved_at is not None]
        if not usable:
            self._proven = False
        elif proved:
            self._proven = True
        if self._sick is not None and proved and max(proved) >= self._sick_since:
            logger.warning("a browser finishes navigations again")
            self._sick, self._replaced_in_a_row = None, 0
        if not self._host.is_launching:
            self._launching_since = None
        elif self._launching_since is None:
            self._launching_since = self._host.clock.monotonic()

    def _verdict(self, usable: list[Generation]) -> tuple[State, str]:
        if self._sick is not None:
            return State.sick, self._sick if usable else self._host.launch_failure or self._sick
        if usable:
            if self._proven or not self._settings.probe_interval_ms:
                return State.ready, "its browser finishes navigations" if self._proven else "its browser is up"
            return State.starting, "its browser is up, and was not yet seen to finish a navigation"
        if (failure := self._host.launch_failure) is not None:
            return State.sick, failure
        if self._launching_since is not None:
            elapsed_ms = (self._host.clock.monotonic() - self._launching_since) * 1000
            return State.starting, f"its browser is being launched, for {elapsed_ms:.0f} ms so far"
        if self.engine_problem is not None:
            return State.sick, self.engine_problem
        if self._settings.warm:
            return State.starting, "its browser is not up (ASYNCWORKER_WARM)"
        return State.ready, "no browser is up; the next message launches one"


async def _load(page: Page, url: str, limit_ms: int) -> str | None:
    """Why the page was not loaded; None: it was, to the end."""
    try:
        await page.goto(url, timeout=2 * limit_ms, wait_until="domcontentloaded")
        title = await page.title()
    except Exception as error:  # noqa: BLE001 -- of whichever library; what matters is that no page was loaded
        return f"it finished no navigation: {_in_short(error)}"
    return None if title == TITLE else f"it finished a navigation to another page, titled {title!r}"


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
