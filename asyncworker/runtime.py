"""Runtime: one attempt composed, for every edge.

`Runtime.session` is the one way to a context: `@actor` and `open_session` are both this context manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from asyncworker import engines
from asyncworker import identity as identities
from asyncworker.browser import BrowserHost
from asyncworker.contexts import in_lease
from asyncworker.ending import Ending, current_interruption
from asyncworker.engines import Engine, Fault
from asyncworker.errors import BrokerUnavailable, PhaseTimeout, RefusedMessage, TooManyRequests
from asyncworker.generation import Clock, Lease, LoopClock
from asyncworker.heeding import Heeding, Recovery
from asyncworker.identity import Identity
from asyncworker.lending import Loan, Slots
from asyncworker.once import Steps
from asyncworker.phases import Phase, Phases, current_phases
from asyncworker.session import Attempt, Session, current_attempt, subject
from asyncworker.settings import Settings, load
from asyncworker.shielding import shielded
from asyncworker.threads import in_thread
from asyncworker.watch import Watch

if TYPE_CHECKING:
    pass

logger = logging.getLogger("asyncworker")


#: How long after a message's time limit a call of Playwright may still wait; cancelling it may not end it.
AFTER_DEADLINE_MS = 1_000


class Runtime:
    """The browser host with its engine, and the sessions on it; lives on one loop.

    Parameters:
        settings: The deployment's settings.
        engine: What launches browsers; None: the one that the settings name.
        clock: Time for the host's back-off; a test's own takes none.
    """

    def __init__(self, settings: Settings, *, engine: Engine | None = None, clock: Clock | None = None) -> None:
        self.settings = settings
        self.engine = engine or engines.create(settings)
        self.host = BrowserHost(self.engine, settings, clock=clock or LoopClock())
        self._knows_home = False
        self.slots = Slots()
        self._recovery = Recovery()
        #: Awaited with the attempt before its session is opened; gives it with its number in the ledger.
        self.on_attempt: Callable[[Attempt], Awaitable[Attempt]] = _as_it_is
        #: Awaited with the attempt, the browser's generation and the identity whenever a session begins.
        self.on_session: Callable[[Attempt, int, Identity], Awaitable[None]] = _told_no_one
        #: Called with the attempt when its page is open, where its time limit begins; gives it with its deadline.
        self.on_ready: Callable[[Attempt], Attempt] = lambda attempt: attempt
        #: Called with it when its code has ended: what is left to do then has limits of its own.
        self.on_code_ended: Callable[[Attempt], None] = lambda attempt: None
        #: The steps that sessions enter, and who enters them; None: each session knows its own only.
        self.steps: Steps | None = None
        self.worker_id = ""
        #: Gives the deployment's seed; may ask the store, so it is called in a thread.
        self.default_seed: Callable[[], int] = lambda: _drawn_once(settings.seed)

    def limit(self, slots: int) -> None:
        """Have at most `slots` sessions at once; others wait for one to end."""
        self.slots = Slots(slots)

    def counts(self) -> dict[str, int]:
        """The host's counts, and its `slots` with those that are `slots_in_use`."""
        slots = {} if self.slots.total is None else {"slots": self.slots.total, "slots_in_use": self.slots.in_use}
        return {**self.host.counts, **slots}

    def identity(self, seed: int) -> Identity:
        """The identity of a seed in this deployment."""
        settings = self.settings
        return Identity(
            seed=seed,
            locale=settings.locale,
            timezone=settings.timezone,
            proxy=settings.proxy.value if settings.proxy else None,
            pins=settings.pins,
        )

    @contextlib.asynccontextmanager
    async def session(
        self, attempt: Attempt, *, context_options: Mapping[str, Any] | None = None, close_behind: bool = False
    ) -> AsyncIterator[Session]:
        """Lend a fresh context and its page for one attempt.

        When the work is cancelled from outside, by its time limit or a stop, the session is over at once: its context
        is closed under the code, which goes on with its own cleanup and is refused any further call.

        Parameters:
            context_options: More of Playwright's options of a new context.
            close_behind: Do not wait for the context to close when the code has succeeded; its slot does.

        Raises:
            BrowserCrashed: When the browser died meanwhile, whatever the code was waiting for.
            PageCrashed: When only the page's renderer died.
            LaunchFailed, PhaseTimeout, ForkedBrowser: When no context could be lent.
            SessionOver: When the attempt has been cancelled from outside, and its code goes on.
            ExitDrifted: When the proxy's exit changed under the browser.
            Unsupported: When the engine cannot do what the options or the code ask for.
            PaceDeferred: When the message's site has no slot for it now, or says to slow down (TooManyRequests).
            ConfigurationError: When the engine cannot draw the identity with the deployment's pins.
        """
        await _refuse_if_interrupted(attempt)
        with (current_phases.get() or Phases()).driven() as phases:
            async with self._lent(attempt, phases, context_options or {}, close_behind=close_behind) as session:
                yield session

    @contextlib.asynccontextmanager
    async def _lent(
        self, attempt: Attempt, phases: Phases, options: Mapping[str, Any], *, close_behind: bool
    ) -> AsyncIterator[Session]:
        """A session, each phase of which is timed."""
        phases.enter(Phase.wait)
        attempt, identity = await self._let_in(attempt)
        loan = await Loan.take(self.host, self.slots, identity, options, phases)
        lease = loan.lease
        lease.ending.subject = subject(attempt)
        try:
            if attempt.pacer is not None:
                await attempt.pacer.begin()  # with the page open: what follows is the code's first request
            phases.enter(Phase.code)
            with self._limited(attempt) as attempt, in_lease(lease), _interrupting(loan):
                self._limit_waits(lease, attempt)
                session = Session(lease, attempt, identity, self.settings, steps=self.steps, worker=self.worker_id)
                async with self._watched(lease, attempt):
                    await self.on_session(attempt, lease.generation.number, identity)
                    yield session
        except BaseException:
            close_behind = False  # the retry must not overlap this attempt
            raise
        finally:
            phases.pause()
            returning = loan.end("its attempt has ended")
            if not close_behind:
                await shielded(returning)

    async def _let_in(self, attempt: Attempt) -> tuple[Attempt, Identity]:
        """The attempt with its number, whose visitor it is, and a slot for it: all within the limit for waiting."""
        limit_ms = self.settings.browser_wait_ms
        try:
            async with asyncio.timeout(limit_ms / 1000) as waiting:
                attempt = await self.on_attempt(attempt)
                seed = await in_thread(self.default_seed) if attempt.seed is None else attempt.seed
                identity = await self.engine.identify(self.identity(seed))
                await self._know_home()
                await self.slots.take()
        except TimeoutError:
            if not waiting.expired():
                raise
            raise PhaseTimeout(
                f"{subject(attempt)} had no slot within {limit_ms} ms (ASYNCWORKER_BROWSER_WAIT_MS): "
                f"{self.slots.in_use} of {self.slots.total} are in use",
                phase=Phase.wait,
                engine=self.engine.name,
            ) from None
        return attempt, identity

    @contextlib.contextmanager
    def _limited(self, attempt: Attempt) -> Iterator[Attempt]:
        """The attempt with its deadline; the limit begins here, unless it has with the message or another session."""
        ready = self.on_ready(attempt) if attempt.deadline is None else attempt
        token = current_attempt.set(ready)
        try:
            yield ready
        finally:
            current_attempt.reset(token)
            if ready is not attempt:
                self.on_code_ended(ready)

    async def _know_home(self) -> None:
        """Tell the host once whose browser makes room for no other: the deployment's own."""
        if self._knows_home:
            return
        try:
            seed = await in_thread(self.default_seed)
        except BrokerUnavailable:
            return  # asked again by the next message
        self.host.home = self.engine.launch_key(self.identity(seed))
        self._knows_home = True

    async def close(self) -> None:
        """Close all browsers and the driver, each within its bound."""
        await self.host.close()

    def _limit_waits(self, lease: Lease, attempt: Attempt) -> None:
        """Playwright's own time limits end soon after the message's, which comes first: it is the error to see."""
        limit = self.settings.page_timeout_ms
        if attempt.deadline is not None:
            lease.generation.busy_until = max(lease.generation.busy_until, attempt.deadline)
            left = round((attempt.deadline - asyncio.get_running_loop().time()) * 1000)
            limit = max(1, min(limit, left + AFTER_DEADLINE_MS))
        lease.context.set_default_timeout(limit)
        lease.context.set_default_navigation_timeout(limit)

    @contextlib.asynccontextmanager
    async def _watched(self, lease: Lease, attempt: Attempt) -> AsyncIterator[None]:
        """Run the code; when its browser or page dies, or its site says to slow down, end it and say so."""
        watch = Watch(self.engine, lease)
        watch.begin()
        try:
            async with self._heeded(lease, attempt, watch):
                yield
        except asyncio.CancelledError:
            fault = watch.end()
            if fault is None or not watch.cancelled_by_us():
                raise
            raise fault from None
        except (RefusedMessage, TooManyRequests):
            watch.end()
            raise
        except Exception as error:
            if lease.ending.has_come and self.engine.classify(error) is Fault.gone:
                watch.end()
                raise lease.ending.error() from error
            explained = await watch.explain(error)
            if explained is None:
                raise
            raise explained from error
        else:
            if isinstance(fault := watch.end(), TooManyRequests):  # what the code has made of such a page is nothing
                raise fault

    @contextlib.asynccontextmanager
    async def _heeded(self, lease: Lease, attempt: Attempt, watch: Watch) -> AsyncIterator[None]:
        """Have all workers do what a site says to the pages of a paced message."""
        if attempt.pacer is None:
            yield
            return
        heeding = Heeding(lease, attempt.pacer, recovery=self._recovery, spawn=self.host.spawn, end_code=watch.notice)
        heeding.begin()
        try:
            yield
        except TooManyRequests as error:
            await heeding.raised(error)
            raise
        finally:
            await heeding.end()


#: The worker's runtime and the loop that it lives on, set at its boot.
_worker_runtime: tuple[Runtime, asyncio.AbstractEventLoop] | None = None


def set_runtime(runtime: Runtime | None, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Make `runtime` the one that `open_session` uses on `loop`; None: none."""
    global _worker_runtime
    _worker_runtime = (runtime, loop) if runtime is not None and loop is not None else None


@contextlib.asynccontextmanager
async def open_session(
    *, seed: int | None = None, context_options: Mapping[str, Any] | None = None
) -> AsyncIterator[Session]:
    """A session for a plain `@dramatiq.actor`, or for a script.

    In a worker it lends a context of the worker's browser. Anywhere else it launches a browser as the settings
    say, for this session alone, and closes it: the way to replay one message in a debugger.

    Parameters:
        seed: From 0 to 2**63-1; None: the running message's seed, else the deployment's.
        context_options: More of Playwright's options of a new context, such as storage_state or extra_http_headers.

    Raises:
        Unsupported: When the engine cannot honour one of the options.
        InvalidSeed: For anything else.
        EngineError: When no context could be lent, or the browser died.
    """
    if seed is not None:
        identities.checked_seed(seed)
    running = current_attempt.get() or Attempt()
    attempt = running if seed is None else replace(running, seed=seed)
    if _worker_runtime is not None and _worker_runtime[1] is asyncio.get_running_loop():
        async with _worker_runtime[0].session(attempt, context_options=context_options) as session:
            yield session
        return
    runtime = Runtime(load())
    try:
        async with runtime.session(attempt, context_options=context_options) as session:
            yield session
    finally:
        await shielded(runtime.close())


@cache
def _drawn_once(seed: int | None) -> int:
    """Without a store, a process draws its deployment's seed itself."""
    return identities.new_seed() if seed is None else seed


async def _refuse_if_interrupted(attempt: Attempt) -> None:
    """Code that was cancelled from outside and goes on gets no session any more."""
    interruption = current_interruption.get()
    if interruption is not None and interruption.reason is not None:
        ending = Ending(subject(attempt))
        ending.come(interruption.reason)
        await ending.refuse()


@contextlib.contextmanager
def _interrupting(loan: Loan) -> Iterator[None]:
    """When the work is cancelled from outside, the session is over at once, and what it has is taken back."""
    interruption = current_interruption.get()
    if interruption is None:
        yield
        return
    with interruption.heard_by(loan.end):
        yield


async def _as_it_is(attempt: Attempt) -> Attempt:
    """Without a worker the number that an attempt has is the one it keeps."""
    return attempt


async def _told_no_one(attempt: Attempt, generation: int, identity: Identity) -> None:
    """Without a worker there is no account of attempts."""
