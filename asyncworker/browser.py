"""BrowserHost: the owner of the browsers of one process. Launch once, lend contexts, notice death.

A generation is one launched browser. Identities whose engine gives them the same launch key share a generation;
another key needs a browser of its own, and at most `max_browsers` are up at once, those that are about to end
included. A generation that was lost, that let a step pass its limit or in which cancelled calls pile up gets no
new contexts and ends with its last one. One that has had its time does so when the next one has taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from asyncworker.contexts import Contexts, close_limit_ms, in_lease
from asyncworker.ending import of_no_session
from asyncworker.engines import Engine, Launched
from asyncworker.errors import BrowserCrashed, EngineError, ExitDrifted, ForkedBrowser, LaunchFailed, PhaseTimeout
from asyncworker.generation import Clock, Generation, Lease, LoopClock
from asyncworker.identity import Identity
from asyncworker.launching import Launcher
from asyncworker.phases import Phase, enter
from asyncworker.recycling import Recycler
from asyncworker.settings import Settings
from asyncworker.shielding import shielded
from asyncworker.turn import Turn

if TYPE_CHECKING:
    from playwright.async_api import Page

logger = logging.getLogger("asyncworker.browser")

#: A message tries this many browsers that die before its context is open, and fails with one more.
MOST_DEAD_BROWSERS = 3

#: So many cancelled calls that still hold their browser up end its use.
MOST_ABANDONED = 2

#: Who has waited this part of `browser_wait_ms` for a browser of its own takes the place of one that is busy.
FAIR_PART = 0.25


@dataclass
class _Waiting:
    """Messages of one key that have no browser yet."""

    since: float
    messages: int = 0


class BrowserHost:
    """Owns the browsers of one process; every method runs on one loop.

    Parameters:
        engine: What launches the browsers.
        settings: The deployment's limits and timeouts.
        clock: Time; a test's own takes none.
        turn: Who on this machine may replace a browser now; None: as all processes ask.
    """

    def __init__(
        self, engine: Engine, settings: Settings, *, clock: Clock | None = None, turn: Turn | None = None
    ) -> None:
        self.engine = engine
        #: browsers_launched, browsers_lost, browsers_recycled, contexts_opened, contexts_closed
        self.counts: Counter[str] = Counter()
        #: The launch key of the deployment's own identity, whose browser makes room for no other; None: unknown.
        self.home: Hashable = None
        self._settings = settings
        self._clock = self.clock = clock or LoopClock()
        self._pid = os.getpid()
        self._live: dict[Hashable, Generation] = {}
        self._up: set[Generation] = set()
        self._launches: dict[Hashable, asyncio.Task[Generation]] = {}
        self._waiting: dict[Hashable, _Waiting] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._closed = False
        self._launcher = Launcher(engine, settings, self._clock, too_late=self._launched_too_late)
        self._contexts = Contexts(engine, settings, self.counts, retire=self.retire, spawn=self.spawn)
        self._probes = Contexts(engine, settings, None, retire=self.retire, spawn=self.spawn)
        self.recycler = Recycler(self, settings, self._clock, self.counts, spawn=self.spawn, turn=turn)

    @contextlib.asynccontextmanager
    async def context(
        self, identity: Identity, options: Mapping[str, Any] = MappingProxyType({})
    ) -> AsyncIterator[Lease]:
        """Lend a fresh context with an open page; it is closed, shielded and bounded, on the way out.

        Parameters:
            options: More of Playwright's options of a new context.

        Raises:
            LaunchFailed: When no browser came up.
            PhaseTimeout: When none was free in time, or its context or page did not open in time.
            BrowserCrashed, ExitDrifted: When one browser after another died while the context was opened.
            ForkedBrowser: In a fork of the process that owns the browsers.
            Unsupported: When the engine cannot honour an option.
        """
        lease = await self.lend(identity, options)
        try:
            with in_lease(lease):
                yield lease
        finally:
            await shielded(self.take_back(lease))

    async def warm(self, identity: Identity) -> None:
        """Have the identity's browser up before its first message. A failure is logged, not raised."""
        try:
            self._release(await self._acquire(identity))
        except EngineError as error:
            logger.error("the browser could not be launched before a message: %s", error)

    async def close(self) -> None:
        """Close all browsers, each within its bound; leaves no process of theirs. Never raises."""
        self._check_process()
        self._closed = True
        self._announce()
        await self.recycler.end()
        for generation in list(self._live.values()):
            generation.retired = True
            if generation.key not in self._launches:  # else the next one, once up, takes over to be closed as well
                self.retire(generation)
        for generation in list(self._up):
            self._end(generation)
        if self._launches:
            await asyncio.wait(self._launches.values(), timeout=self._settings.launch_timeout_ms / 1000)
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self.engine.close()

    # --- lending

    async def lend(self, identity: Identity, options: Mapping[str, Any]) -> Lease:
        """A context with its page open, for `take_back` to close; raises what `context` does.

        A browser that dies before that has run none of the message's code: the message takes the next one.
        """
        for dead in range(MOST_DEAD_BROWSERS + 1):
            enter(Phase.wait)
            generation = await self._acquire(identity)
            enter(Phase.context)
            try:
                lease = await self._contexts.open(generation, identity, options)
            except (BrowserCrashed, ExitDrifted) as error:
                self._release(generation)
                if dead == MOST_DEAD_BROWSERS:
                    raise
                logger.warning("another browser is taken: %s", error)
            except BaseException:
                self._release(generation)
                raise
            else:
                self.recycler.consider(generation)
                lease.page.on("domcontentloaded", partial(self._navigated, generation))
                return lease
        raise AssertionError("unreachable")

    async def take_back(self, lease: Lease) -> None:
        """Close what was lent, within its bound."""
        try:
            await self._contexts.close_all(lease)
        finally:
            self._release(lease.generation)

    async def _acquire(self, identity: Identity) -> Generation:
        """A usable browser of the identity with room for one more context, already counted."""
        self._check_process()
        key = self.engine.launch_key(identity)
        wait_ms = self._settings.browser_wait_ms
        try:
            async with asyncio.timeout(wait_ms / 1000):
                with self._queued(key):
                    while (generation := self._with_room(key)) is None:
                        await self._launched_or_changed(key, identity)
                    generation.leases += 1
                    return generation
        except TimeoutError:
            raise self._waited_too_long(key) from None

    def _waited_too_long(self, key: Hashable) -> PhaseTimeout:
        name, wait_ms = self.engine.name, self._settings.browser_wait_ms
        said = f"within {wait_ms} ms (ASYNCWORKER_BROWSER_WAIT_MS)"
        if key in self._launches:
            return PhaseTimeout(f"{name} did not come up {said}; see the log", phase=Phase.launch, engine=name)
        return PhaseTimeout(
            f"no {name} browser was free {said}; lower --threads or raise ASYNCWORKER_MAX_BROWSERS",
            phase=Phase.wait,
            engine=name,
        )

    @contextlib.contextmanager
    def _queued(self, key: Hashable) -> Iterator[None]:
        waiting = self._waiting.setdefault(key, _Waiting(self._clock.monotonic()))
        waiting.messages += 1
        try:
            yield
        finally:
            waiting.messages -= 1
            if waiting.messages == 0:
                del self._waiting[key]
                self._announce()  # it may have been first in the queue

    def _with_room(self, key: Hashable) -> Generation | None:
        generation = self._live.get(key)
        if generation is None or not generation.usable:
            return None
        most = self.engine.max_contexts
        # A cancelled call that goes on holds a place as a context does.
        held = generation.leases + generation.launched.abandoned if generation.leases else 0
        return generation if most is None or held < most else None

    async def _launched_or_changed(self, key: Hashable, identity: Identity) -> None:
        if self._closed:
            raise LaunchFailed("the worker is shutting down; no browser is launched", engine=self.engine.name)
        task = self._launches.get(key)
        if task is None and key not in self._live and self._make_room(key):
            task = self._begin_launch(key, identity)
        if task is not None and key not in self._live:
            enter(Phase.launch)
            # Shielded: a message that gives up must not take the launch from the others that wait for it.
            await asyncio.shield(task)
            return
        enter(Phase.wait)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.browser_wait_ms * FAIR_PART / 1000):
                await self._changed.wait()

    # --- room for browsers

    def _make_room(self, key: Hashable) -> bool:
        """True when a browser of this key may be launched now; else something may have been retired for it.

        Keys get their browsers in the order in which they began to wait. The idle browser that was used longest
        ago is retired for them; where none is idle, a busy one is, once they have waited their part.
        """
        queue = [each for each in self._waiting if each not in self._live and each not in self._launches]
        ahead = queue.index(key)
        # One that is being replaced and the next one have one place together.
        up = [generation for generation in self._up if not generation.replaced]
        launches = [each for each in self._launches if each not in self._live]
        free = self._settings.max_browsers - len(up) - len(launches)
        if ahead < free:
            return True
        if ahead < free + sum(not generation.usable for generation in up):
            return False  # one that is about to end makes the room
        guests = [one for one in self._live.values() if one.key != self.home or self._settings.max_browsers == 1]
        # One that has just come up has no context yet, but is what its own messages have waited for.
        guests = [generation for generation in guests if generation.leases or generation.key not in self._waiting]
        idle = [generation for generation in guests if generation.leases == 0]
        if idle:
            self.retire(min(idle, key=lambda generation: generation.used_at))
        elif guests and self._waited_ms(key) >= self._settings.browser_wait_ms * FAIR_PART:
            self.retire(min(guests, key=lambda generation: generation.number))
        return False

    def _waited_ms(self, key: Hashable) -> float:
        return (self._clock.monotonic() - self._waiting[key].since) * 1000

    def _begin_launch(self, key: Hashable, identity: Identity) -> asyncio.Task[Generation]:
        # Not the message's own: what is launched, and all that its client begins, outlives the session.
        task = asyncio.create_task(
            self._launch(key, identity), name=f"asyncworker-launch-{key}", context=of_no_session()
        )
        self._launches[key] = task
        task.add_done_callback(lambda done: self._launch_ended(key, done))
        return task

    async def _launch(self, key: Hashable, identity: Identity) -> Generation:
        started = self._clock.monotonic()
        launched = await self._launcher.launch(key, identity)
        self.counts["browsers_launched"] += 1
        number = self.counts["browsers_launched"]
        gone = asyncio.get_running_loop().create_future()
        now = self._clock.monotonic()
        generation = Generation(number, key, identity, launched, gone, used_at=now, launched_at=now)
        former = self._live.get(key)
        self._live[key] = generation
        self._up.add(generation)
        if former is not None:
            former.replaced = True
            self.retire(former)
        self._contexts.track(generation)
        launched.on_lost(lambda reason: self._lost(generation, reason))
        elapsed_ms = (self._clock.monotonic() - started) * 1000
        logger.info("browser %d: %s is up after %d ms", number, self.engine.name, elapsed_ms)
        if self._closed:
            self.retire(generation)
        else:
            self.recycler.begin()
        return generation

    def _launch_ended(self, key: Hashable, task: asyncio.Task[Generation]) -> None:
        self._launches.pop(key, None)
        if not task.cancelled():
            task.exception()  # read: with no one waiting any more, asyncio would report it as forgotten
        self._announce()

    def _launched_too_late(self, launched: Launched) -> None:
        self.spawn(launched.close(self._settings.close_timeout_ms))

    # --- the end of a generation

    def _release(self, generation: Generation) -> None:
        generation.leases -= 1
        generation.used_at = self._clock.monotonic()
        if generation.usable and (abandoned := generation.launched.abandoned) >= MOST_ABANDONED:
            logger.warning(
                "browser %d is replaced: %d cancelled calls still hold its client up", generation.number, abandoned
            )
            self.counts["browsers_recycled"] += 1
            self.retire(generation)
        elif not generation.usable:
            self.retire(generation)
        else:
            self.recycler.consider(generation)
        self._announce()

    def retire(self, generation: Generation) -> None:
        """No new contexts; the browser is closed when its last one ends."""
        generation.retired = True
        self._forget(generation)
        if generation.leases == 0:
            self._end(generation)

    def _lost(self, generation: Generation, reason: str) -> None:
        if generation.lost is not None or generation.ending is not None:
            return
        self.counts["browsers_lost"] += 1
        self._up.discard(generation)
        self._forget(generation)
        logger.error("browser %d is gone (%s) with %d contexts open", generation.number, reason, generation.leases)
        self._tell(generation, reason)
        if generation.leases == 0:
            self._end(generation)

    def _tell(self, generation: Generation, reason: str) -> None:
        """Have everyone on the browser know that it is of no more use."""
        generation.lost = reason
        generation.gone.set_result(None)
        for watcher in list(generation.watchers):
            watcher(reason)

    def _forget(self, generation: Generation) -> None:
        if self._live.get(generation.key) is generation:
            del self._live[generation.key]
        self._announce()

    def _end(self, generation: Generation) -> None:
        if generation.ending is not None:
            return
        generation.ending = self.spawn(generation.launched.close(close_limit_ms(self._settings, generation)))
        generation.ending.add_done_callback(lambda _: self._ended(generation))

    def _ended(self, generation: Generation) -> None:
        self._up.discard(generation)
        self._announce()

    # --- the recycler's questions

    def usable(self) -> list[Generation]:
        return [generation for generation in list(self._live.values()) if generation.usable]

    def is_wanted(self, generation: Generation) -> bool:
        """The deployment's own is, and one that is in use; a guest's may never be asked for again."""
        return generation.key == self.home or generation.leases > 0 or generation.key in self._waiting

    async def replace(self, generation: Generation) -> bool:
        if self._closed or generation.key in self._launches:
            return False
        self.engine.renew(generation.launched)
        launch = self._begin_launch(generation.key, generation.identity)
        await asyncio.wait({launch})  # the launch has told of its failure
        return generation.replaced

    async def ended(self, generation: Generation, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while generation in self._up:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def cut_off(self, generation: Generation, reason: str) -> None:
        if generation.lost is None and generation.ending is None:
            generation.cut_off = True
            self._tell(generation, reason)
            self._end(generation)

    # --- the prober's questions

    @property
    def is_launching(self) -> bool:
        return bool(self._launches)

    @property
    def keeps_waiting(self) -> bool:
        """No browser is up and one is being launched: messages have to wait for it. Of any thread."""
        return bool(self._launches) and not self.usable()

    @property
    def launch_failure(self) -> str | None:
        """Why the latest launch failed; None: it did not."""
        return self._launcher.failure

    def has_room(self, generation: Generation) -> bool:
        """Whether a context more would keep no message waiting."""
        return self._with_room(generation.key) is generation

    async def lend_for_probe(self, generation: Generation) -> Lease:
        """A context of this very browser that takes no slot; raises what `context` does."""
        generation.leases += 1
        try:
            return await self._probes.open(generation, generation.identity, {})
        except BaseException:
            self._release_probe(generation)
            raise

    async def take_back_probe(self, lease: Lease) -> None:
        try:
            await self._probes.close_all(lease)
        finally:
            self._release_probe(lease.generation)

    def _release_probe(self, generation: Generation) -> None:
        used_at = generation.used_at
        self._release(generation)
        generation.used_at = used_at  # a probe is no use: the browser that no message has used for longest goes first

    def discard(self, generation: Generation) -> None:
        """End the use of a browser that loads no page; it counts as none of `max_browsers` any more, once at a time."""
        generation.wedged = True
        generation.replaced = not any(other.replaced for other in self._up)
        self.counts["browsers_recycled"] += 1
        self.retire(generation)

    def _navigated(self, generation: Generation, page: Page) -> None:
        """A message's page has loaded: no probe proves more. What a browser shows by itself proves nothing."""
        if not page.url.startswith(("about:", "chrome-error:")):
            generation.proved_at, generation.failed_probes = self._clock.monotonic(), 0

    # --- the rest

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside the messages; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work, context=of_no_session())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedBrowser(
                f"the browsers of process {self._pid} cannot be used in its fork {os.getpid()}: launch after the "
                "fork, or start children with the `spawn` method",
                engine=self.engine.name,
            )
