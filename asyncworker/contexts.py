"""Contexts: opens and closes the contexts of a generation, each step within its bound.

`new_context`, `new_page` and `close` have no time limit of their own, and a call that meets a dying browser may
never end: so each is awaited with a limit and beside the browser's end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from asyncworker.ending import current_ending, guard_shared, refuse_if_over
from asyncworker.engines import Engine, Fault
from asyncworker.errors import PhaseTimeout
from asyncworker.generation import Generation, Lease, crashed, drifted
from asyncworker.identity import Identity
from asyncworker.phases import Phase
from asyncworker.settings import Settings
from asyncworker.shielding import shielded

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page

logger = logging.getLogger("asyncworker.browser")

T = TypeVar("T")

#: A browser that has let one step pass its limit gets no more than this for the rest.
WEDGED_TIMEOUT_MS = 1_000

#: Whose code is running: contexts that it opens on the browser itself are closed with its session.
current_lease: ContextVar[Lease | None] = ContextVar("asyncworker_lease", default=None)


@contextmanager
def in_lease(lease: Lease) -> Iterator[None]:
    """What runs here, and the tasks that it begins, are the code of this lease's session."""
    tokens = current_lease.set(lease), current_ending.set(lease.ending)
    try:
        yield
    finally:
        current_lease.reset(tokens[0])
        current_ending.reset(tokens[1])


def close_limit_ms(settings: Settings, generation: Generation) -> int:
    """How long a context of the generation, or its browser, may take to close."""
    limit_ms = settings.close_timeout_ms
    return min(limit_ms, WEDGED_TIMEOUT_MS) if generation.wedged else limit_ms


class Contexts:
    """The contexts of one host.

    Parameters:
        counts: Of the host; contexts_opened and contexts_closed are counted in it. None: no one's are, as probes are no
            use of a browser.
        retire: Called with a generation that is to get no new contexts.
        spawn: Runs work beside the messages.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        counts: Counter[str] | None,
        *,
        retire: Callable[[Generation], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._counts = counts
        self._retire = retire
        self._spawn = spawn

    async def open(self, generation: Generation, identity: Identity, options: Mapping[str, Any]) -> Lease:
        """Open a context and its page.

        Raises:
            BrowserCrashed, ExitDrifted: When the browser is of no more use; it is retired.
            PhaseTimeout: When a step took too long; the browser is retired, too.
            Unsupported: When the engine cannot honour an option.
        """
        opening = asyncio.ensure_future(generation.launched.new_context(identity, options))
        try:
            context = await self._step(generation, "context", opening)
        except BaseException:
            opening.add_done_callback(lambda done: self._opened_too_late(generation, done))
            raise
        self._opened(generation)
        try:
            page = await self._step(generation, "page", context.new_page())
        except BaseException:
            await shielded(self.close(generation, context))
            raise
        return Lease(generation, identity, generation.launched.browser, context, page)

    async def close(self, generation: Generation, context: BrowserContext) -> None:
        """Close a context within `close_timeout_ms`; one that does not close retires its browser."""
        if self._counts is not None:
            self._counts["contexts_closed"] += 1
        if generation.lost is not None:
            return
        closing = asyncio.ensure_future(context.close())
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())
        limit_ms = close_limit_ms(self._settings, generation)
        await asyncio.wait({closing, generation.gone}, timeout=limit_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            if generation.lost is None:
                logger.warning(
                    "a context of browser %d did not close in %d ms; the browser gets no new ones and is killed "
                    "when its last context ends",
                    generation.number,
                    limit_ms,
                )
                self._wedged(generation)
            closing.cancel()
        elif not closing.cancelled() and (error := closing.exception()) is not None and generation.usable:
            logger.debug("closing a context of browser %d said: %s", generation.number, error)

    async def close_all(self, lease: Lease) -> None:
        """Close what was lent, and what the code opened beside it: at once, so that all of it has one bound."""
        others, lease.others = lease.others, []
        await asyncio.gather(*(self.close(lease.generation, context) for context in (*others, lease.context)))

    def track(self, generation: Generation) -> None:
        """Contexts that code opens on the browser itself are its session's: of its identity, and closed with it.

        Playwright has no event for a new context on every engine, so its two methods are wrapped on this object.
        """
        launched, browser = generation.launched, generation.launched.browser
        new_context = browser.new_context
        guard_shared(browser)
        guard_shared(getattr(browser, "browser_type", None))

        async def tracked_context(**options: Any) -> BrowserContext:
            lease = current_lease.get()
            if lease is None:
                return await new_context(**options)
            await refuse_if_over()
            context = await launched.new_context(lease.identity, options)
            self._opened(generation)
            if lease.ending.has_come:  # meanwhile: no one else would close it
                self._spawn(self.close(generation, context))
                raise lease.ending.error()
            lease.others.append(context)
            return context

        async def tracked_page(**options: Any) -> Page:
            context = await tracked_context(**options)
            page = await context.new_page()
            if (lease := current_lease.get()) is not None:
                page.on("close", lambda _: self._closed_with_its_page(lease, context))
            return page

        browser.new_context = tracked_context  # type: ignore[method-assign]
        browser.new_page = tracked_page  # type: ignore[method-assign]

    def _closed_with_its_page(self, lease: Lease, context: BrowserContext) -> None:
        """A context that `browser.new_page` opened ends with its page, as in Playwright."""
        if context in lease.others:
            lease.others.remove(context)
            self._spawn(self.close(lease.generation, context))

    def _opened(self, generation: Generation) -> None:
        if self._counts is not None:
            generation.contexts += 1
            self._counts["contexts_opened"] += 1

    def _opened_too_late(self, generation: Generation, opening: asyncio.Future[BrowserContext]) -> None:
        """The message has given up; its context is closed as soon as it exists."""
        if not opening.cancelled() and opening.exception() is None:
            self._opened(generation)
            self._spawn(self.close(generation, opening.result()))

    def _wedged(self, generation: Generation) -> None:
        generation.wedged = True
        self._retire(generation)

    async def _step(self, generation: Generation, what: str, step: Awaitable[T]) -> T:
        """Await one step of opening, bounded; name what was to be opened and the browser in what it raises."""
        limit_ms = self._settings.context_timeout_ms
        doing: asyncio.Future[Any] = asyncio.ensure_future(step)
        doing.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, also when too late
        # A call that meets a dying browser may never end, so the browser's end is waited for as well.
        await asyncio.wait({doing, generation.gone}, timeout=limit_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            if generation.lost is not None:
                raise crashed(self._engine.name, generation)
            self._wedged(generation)  # it does not answer: the next message gets another browser
            raise PhaseTimeout(
                f"{self._engine.name} opened no {what} within {limit_ms} ms (ASYNCWORKER_CONTEXT_TIMEOUT_MS); "
                f"browser {generation.number} is replaced",
                phase=Phase.context,
                engine=self._engine.name,
                generation=generation.number,
            )
        try:
            result: T = doing.result()
            return result
        except Exception as error:
            fault = self._engine.classify(error)
            if fault is Fault.exit_drifted:
                self._retire(generation)
                raise drifted(self._engine.name, generation, error) from error
            if generation.lost is None and fault is not Fault.gone:
                raise
            self._retire(generation)  # its end may be announced a moment later
            raise crashed(self._engine.name, generation) from error
