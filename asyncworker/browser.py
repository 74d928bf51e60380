"""BrowserHost: the owner of the browsers of one process. Launch once, lend contexts, notice death.

A generation is one launched browser. Identities whose engine gives them the same launch key share a
generation; another key needs a browser of its own, and at most `max_browsers` are up at once. A generation
that was lost, or whose context did not open or close in time, gets no new contexts and ends with its last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from asyncworker.engines import Engine, Fault, Launched
from asyncworker.errors import BrowserCrashed, EngineError, ForkedBrowser, LaunchFailed, PhaseTimeout
from asyncworker.generation import Clock, Generation, Lease, LoopClock, crashed, shielded
from asyncworker.identity import Identity
from asyncworker.settings import Settings

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

logger = logging.getLogger("asyncworker.browser")

T = TypeVar("T")

#: A message tries this many browsers that die before its context is open, and fails with one more.
MOST_DEAD_BROWSERS = 3

#: A pause after failed launches grows to this and no further.
LONGEST_BACKOFF_MS = 60_000


@dataclass
class _Backoff:
    """When a key may be launched again after failures."""

    failures: int = 0
    not_before: float = 0.0


#: Whose code is running: contexts that it opens on the browser itself are closed with its session.
_lease: ContextVar[Lease | None] = ContextVar("asyncworker_lease", default=None)


class BrowserHost:
    """Owns the browsers of one process; every method runs on one loop.

    Parameters:
        engine: What launches the browsers.
        settings: The deployment's limits and timeouts.
        clock: Time; a test's own takes none.
    """

    def __init__(self, engine: Engine, settings: Settings, *, clock: Clock | None = None) -> None:
        self.engine = engine
        #: browsers_launched, browsers_lost, contexts_opened, contexts_closed
        self.counts: Counter[str] = Counter()
        self._settings = settings
        self._clock = clock or LoopClock()
        self._pid = os.getpid()
        self._live: dict[Hashable, Generation] = {}
        self._ending: set[Generation] = set()
        self._launches: dict[Hashable, asyncio.Task[Generation]] = {}
        self._backoffs: dict[Hashable, _Backoff] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._closed = False

    @contextlib.asynccontextmanager
    async def context(self, identity: Identity) -> AsyncIterator[Lease]:
        """Lend a fresh context with an open page; it is closed, shielded and bounded, on the way out.

        Raises:
            LaunchFailed: When no browser came up.
            PhaseTimeout: When none was free in time, or its context or page did not open in time.
            BrowserCrashed: When the browser died while the context was opened.
            ForkedBrowser: In a fork of the process that owns the browsers.
        """
        lease = await self._lend(identity)
        token = _lease.set(lease)
        try:
            yield lease
        finally:
            _lease.reset(token)
            await shielded(self._take_back(lease))

    async def warm(self, identity: Identity) -> None:
        """Have the identity's browser up before its first message. A failure is logged, not raised."""
        try:
            self._release(await self._acquire(identity))
        except EngineError as error:
            logger.error("the browser could not be launched at boot: %s", error)

    async def close(self) -> None:
        """Close all browsers, each within its bound; leaves no process of theirs. Never raises."""
        self._check_process()
        self._closed = True
        self._announce()
        for generation in list(self._live.values()):
            self._retire(generation)
            self._end(generation)
        if self._launches:
            await asyncio.wait(self._launches.values(), timeout=self._settings.launch_timeout_ms / 1000)
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self.engine.close()

    # --- the browser

    async def _acquire(self, identity: Identity) -> Generation:
        """A usable browser of the identity with room for one more context, already counted."""
        self._check_process()
        key = self.engine.launch_key(identity)
        wait_ms = self._settings.browser_wait_ms
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while True:
                    generation = self._live.get(key)
                    if generation is None or not generation.usable:
                        generation = await self._launch(key, identity)
                    if generation is not None and generation.usable and self._has_room(generation):
                        generation.leases += 1
                        return generation
                    if generation is None or not self._has_room(generation):
                        await self._change()
        except TimeoutError:
            raise PhaseTimeout(
                f"no {self.engine.name} browser was free within {wait_ms} ms (ASYNCWORKER_BROWSER_WAIT_MS); "
                "lower --threads or raise ASYNCWORKER_MAX_BROWSERS",
                phase="browser",
                engine=self.engine.name,
            ) from None

    async def _launch(self, key: Hashable, identity: Identity) -> Generation | None:
        """Join or start the one launch of the key; None when there is no room for another browser now."""
        if self._closed:
            raise LaunchFailed("the worker is shutting down; no browser is launched", engine=self.engine.name)
        task = self._launches.get(key)
        if task is None:
            if not self._make_room():
                return None
            task = asyncio.create_task(self._launch_once(key, identity), name=f"asyncworker-launch-{key}")
            self._launches[key] = task
            task.add_done_callback(lambda done: self._launch_ended(key, done))
        # Shielded: a message that gives up must not take the launch from the others that wait for it.
        return await asyncio.shield(task)

    async def _launch_once(self, key: Hashable, identity: Identity) -> Generation:
        backoff = self._backoffs.setdefault(key, _Backoff())
        if (pause := backoff.not_before - self._clock.monotonic()) > 0:
            logger.warning("waiting %d ms before %s is launched again", pause * 1000, self.engine.name)
            await self._clock.sleep(pause)
        started = self._clock.monotonic()
        try:
            launched = await self._launch_bounded(identity)
        except LaunchFailed as error:
            backoff.failures += 1
            doubled = self._settings.launch_backoff_ms * 2 ** min(backoff.failures - 1, 16)
            backoff.not_before = self._clock.monotonic() + min(doubled, LONGEST_BACKOFF_MS) / 1000
            logger.error("launch %d in a row failed: %s", backoff.failures, error)
            raise
        del self._backoffs[key]
        return self._adopt(key, launched, started)

    async def _launch_bounded(self, identity: Identity) -> Launched:
        """One launch; an engine that ignores its own time limit is left behind, and closed if it ever ends."""
        limit_ms = self._settings.launch_timeout_ms
        launching = asyncio.ensure_future(self.engine.launch(identity))
        # The engine keeps the limit itself and cleans up; this bound is for one that does not.
        await asyncio.wait({launching}, timeout=limit_ms / 1000 + 5)
        if not launching.done():
            launching.add_done_callback(self._launched_too_late)
            raise LaunchFailed(
                f"{self.engine.name} did not start in {limit_ms} ms (ASYNCWORKER_LAUNCH_TIMEOUT_MS); "
                "run `asyncworker doctor`",
                engine=self.engine.name,
            )
        try:
            return launching.result()
        except EngineError:
            raise
        except Exception as error:
            raise LaunchFailed(
                f"{self.engine.name} did not start: {type(error).__name__}: {error}; run `asyncworker doctor`",
                engine=self.engine.name,
            ) from error

    def _launched_too_late(self, launching: asyncio.Future[Launched]) -> None:
        if not launching.cancelled() and launching.exception() is None:
            self._spawn(launching.result().close(self._settings.close_timeout_ms))

    def _launch_ended(self, key: Hashable, task: asyncio.Task[Generation]) -> None:
        self._launches.pop(key, None)
        if not task.cancelled():
            task.exception()  # read: with no one waiting any more, asyncio would report it as forgotten
        self._announce()

    def _adopt(self, key: Hashable, launched: Launched, started: float) -> Generation:
        self.counts["browsers_launched"] += 1
        number = self.counts["browsers_launched"]
        gone = asyncio.get_running_loop().create_future()
        generation = Generation(number, key, launched, gone, used_at=self._clock.monotonic())
        self._live[key] = generation
        self._track(launched.browser)
        launched.on_lost(lambda reason: self._lost(generation, reason))
        elapsed_ms = (self._clock.monotonic() - started) * 1000
        logger.info("browser %d: %s is up after %d ms", number, self.engine.name, elapsed_ms)
        if self._closed:
            self._retire(generation)
            self._end(generation)
        return generation

    def _has_room(self, generation: Generation) -> bool:
        return self.engine.max_contexts is None or generation.leases < self.engine.max_contexts

    def _make_room(self) -> bool:
        """True when one more browser may be up; else the idle one that was used longest ago is closed for it."""
        if len(self._live) + len(self._launches) + len(self._ending) < self._settings.max_browsers:
            return True
        idle = [generation for generation in self._live.values() if generation.leases == 0]
        if idle and not self._ending:
            self._retire(min(idle, key=lambda generation: generation.used_at))
        return False

    def _release(self, generation: Generation) -> None:
        generation.leases -= 1
        generation.used_at = self._clock.monotonic()
        if not generation.usable and generation.leases == 0:
            self._end(generation)
        self._announce()

    def _retire(self, generation: Generation) -> None:
        """No new contexts; the browser is closed when its last one ends."""
        generation.retired = True
        self._forget(generation)
        if generation.leases == 0:
            self._end(generation)

    def _lost(self, generation: Generation, reason: str) -> None:
        if generation.lost is not None or generation.ending is not None:
            return
        generation.lost = reason
        generation.gone.set_result(None)
        self.counts["browsers_lost"] += 1
        self._forget(generation)
        logger.error("browser %d is gone (%s) with %d contexts open", generation.number, reason, generation.leases)
        for watcher in list(generation.watchers):
            watcher(reason)
        if generation.leases == 0:
            self._end(generation)

    def _forget(self, generation: Generation) -> None:
        if self._live.get(generation.key) is generation:
            del self._live[generation.key]
        self._announce()

    def _end(self, generation: Generation) -> None:
        if generation.ending is not None:
            return
        generation.ending = self._spawn(generation.launched.close(self._settings.close_timeout_ms))
        if generation.lost is None:  # one that is up still takes the place of another
            self._ending.add(generation)
            generation.ending.add_done_callback(lambda _: self._ended(generation))

    def _ended(self, generation: Generation) -> None:
        self._ending.discard(generation)
        self._announce()

    # --- its contexts

    async def _lend(self, identity: Identity) -> Lease:
        """A context with its page open.

        A browser that dies before that has run none of the message's code: the message takes the next one.
        """
        for dead in range(MOST_DEAD_BROWSERS + 1):
            generation = await self._acquire(identity)
            try:
                return await self._open(generation, identity)
            except BrowserCrashed:
                self._release(generation)
                if dead == MOST_DEAD_BROWSERS:
                    raise
            except BaseException:
                self._release(generation)
                raise
        raise AssertionError("unreachable")

    async def _open(self, generation: Generation, identity: Identity) -> Lease:
        opening = asyncio.ensure_future(generation.launched.new_context(identity))
        try:
            context = await self._step(generation, "context", opening)
        except BaseException:
            opening.add_done_callback(lambda done: self._opened_too_late(generation, done))
            raise
        self.counts["contexts_opened"] += 1
        try:
            page = await self._step(generation, "page", context.new_page())
        except BaseException:
            await shielded(self._close_context(generation, context))
            raise
        return Lease(generation, generation.launched.browser, context, page)

    async def _take_back(self, lease: Lease) -> None:
        for context in (*lease.others, lease.context):
            await self._close_context(lease.generation, context)
        self._release(lease.generation)

    def _track(self, browser: Browser) -> None:
        """Contexts that code opens on the browser itself belong to the session whose code opened them.

        Playwright has no event for a new context on every engine, so its two methods are wrapped on this object.
        """
        new_context, new_page = browser.new_context, browser.new_page

        def opened(context: BrowserContext) -> None:
            if (lease := _lease.get()) is not None:
                self.counts["contexts_opened"] += 1
                lease.others.append(context)

        async def tracked_context(**options: Any) -> BrowserContext:
            context = await new_context(**options)
            opened(context)
            return context

        async def tracked_page(**options: Any) -> Page:
            page = await new_page(**options)
            opened(page.context)
            return page

        browser.new_context = tracked_context  # type: ignore[method-assign]
        browser.new_page = tracked_page  # type: ignore[method-assign]

    def _opened_too_late(self, generation: Generation, opening: asyncio.Future[BrowserContext]) -> None:
        """The message has given up; its context is closed as soon as it exists."""
        if not opening.cancelled() and opening.exception() is None:
            self.counts["contexts_opened"] += 1
            self._spawn(self._close_context(generation, opening.result()))

    async def _step(self, generation: Generation, phase: str, step: Awaitable[T]) -> T:
        """Await one step of opening, bounded; name the phase and the browser in what it raises."""
        limit_ms = self._settings.context_timeout_ms
        doing: asyncio.Future[Any] = asyncio.ensure_future(step)
        doing.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, also when too late
        # A call that meets a dying browser may never end, so the browser's end is waited for as well.
        await asyncio.wait({doing, generation.gone}, timeout=limit_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            if generation.lost is not None:
                raise crashed(self.engine.name, generation)
            self._retire(generation)  # it does not answer: the next message gets another browser
            raise PhaseTimeout(
                f"{self.engine.name} opened no {phase} within {limit_ms} ms (ASYNCWORKER_CONTEXT_TIMEOUT_MS); "
                f"browser {generation.number} is replaced",
                phase=phase,
                engine=self.engine.name,
                generation=generation.number,
            )
        try:
            result: T = doing.result()
            return result
        except Exception as error:
            if generation.lost is None and self.engine.classify(error) is not Fault.gone:
                raise
            self._retire(generation)  # its end may be announced a moment later
            raise crashed(self.engine.name, generation) from error

    async def _close_context(self, generation: Generation, context: BrowserContext) -> None:
        """Close a context within `close_timeout_ms`; one that does not close retires its browser."""
        self.counts["contexts_closed"] += 1
        if generation.lost is not None:
            return
        closing = asyncio.ensure_future(context.close())
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())
        limit_ms = self._settings.close_timeout_ms
        await asyncio.wait({closing, generation.gone}, timeout=limit_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            if generation.lost is None:
                logger.warning(
                    "a context of browser %d did not close in %d ms; the browser gets no new ones and is killed "
                    "when its last context ends",
                    generation.number,
                    limit_ms,
                )
                self._retire(generation)
            closing.cancel()
        elif not closing.cancelled() and (error := closing.exception()) is not None and generation.usable:
            logger.debug("closing a context of browser %d said: %s", generation.number, error)

    # --- the rest

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run `work` beside the messages; `close` waits for it."""
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)  # noqa: S101 -- for the type checker: work is a coroutine
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedBrowser(
                f"the browsers of process {self._pid} cannot be used in its fork {os.getpid()}: launch after the "
                "fork, or start children with the `spawn` method",
                engine=self.engine.name,
            )
