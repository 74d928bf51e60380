"""Runtime and Session: one attempt composed, for every edge.

`Runtime.session` is the one way to a context: `@actor` and `open_session` are both this context manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from asyncworker import engines
from asyncworker import identity as identities
from asyncworker.browser import BrowserHost
from asyncworker.contexts import current_lease, in_lease
from asyncworker.ending import Ending, current_interruption
from asyncworker.engines import Engine, Fault
from asyncworker.errors import BrokerUnavailable, PhaseTimeout, RefusedMessage
from asyncworker.fencing import Fence
from asyncworker.generation import Clock, Lease, LoopClock
from asyncworker.identity import Identity
from asyncworker.lending import Loan, Slots
from asyncworker.once import Holder, OnLost, Step, Steps
from asyncworker.settings import Settings, load
from asyncworker.shielding import shielded
from asyncworker.step_records import MemoryStepRecords
from asyncworker.threads import in_thread
from asyncworker.watch import Watch

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

logger = logging.getLogger("asyncworker")


#: How long after a message's time limit a call of Playwright may still wait; cancelling it may not end it.
AFTER_DEADLINE_MS = 1_000


@dataclass(frozen=True)
class Attempt:
    """One execution of a message.

    Attributes:
        seed: The message's seed; None: the deployment's.
        number: Counted from 1 over all executions of the message, by the ledger.
        deadline: The loop's time at which the time limit passes; None: there is none, or it has not begun, since the
            session's page is not open yet.
    """

    seed: int | None = None
    message_id: str | None = None
    actor: str | None = None
    number: int = 1
    deadline: float | None = None
    fencing: Fence = field(default_factory=Fence, repr=False, compare=False)

    @property
    def fence(self) -> int:
        """An integer that only grows over the attempts of a message, given by the store when a worker takes it.

        With RabbitMQ an attempt without a session asks the store for it here, which blocks for a round trip.
        """
        return self.fencing.value


#: The attempt that the running worker thread, and the code that it started on the loop, is at.
current_attempt: ContextVar[Attempt | None] = ContextVar("asyncworker_attempt", default=None)


class SessionLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines end with the facts of their attempt; they are attributes of the record, too."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        facts = dict(self.extra or {})
        kwargs["extra"] = {**facts, **kwargs.get("extra", {})}
        return f"{msg} [{' '.join(f'{name}={fact}' for name, fact in facts.items())}]", kwargs


class Session:
    """What an actor receives for one attempt, as a bound Celery task receives `self`.

    Attributes:
        seed: The seed of the message: the same on every attempt.
        identity: What a site sees as one visitor, derived from the seed.
        attempt: Which execution of which message this is.
        settings: The worker's settings.
        log: A logger whose lines say to which message, actor, attempt, seed, identity and browser they belong.
    """

    def __init__(
        self,
        lease: Lease,
        attempt: Attempt,
        identity: Identity,
        settings: Settings,
        *,
        steps: Steps | None = None,
        worker: str = "",
    ) -> None:
        self.attempt = attempt
        self.identity = identity
        self.seed = identity.seed
        self.settings = settings
        self.log = SessionLog(logger, _facts(attempt, identity, lease))
        self._lease = lease
        self._steps = steps or Steps(MemoryStepRecords())
        self._worker = worker
        self._random: random.Random | None = None

    @property
    def page(self) -> Page:
        """The page, already open."""
        return self._open_lease().page

    @property
    def context(self) -> BrowserContext:
        """The fresh context of this attempt."""
        return self._open_lease().context

    @property
    def browser(self) -> Browser:
        """The browser, shared with other attempts; contexts opened on it here are closed with this session."""
        return self._open_lease().browser

    @property
    def generation(self) -> int:
        """Which launch of this worker process the browser is, counted from 1."""
        return self._lease.generation.number

    @property
    def random(self) -> random.Random:
        """Pseudo-random numbers derived from the seed: each attempt draws the same ones."""
        if self._random is None:
            self._random = identities.stream(self.seed, "session")
        return self._random

    def once(
        self, name: str, key: str | int | None = None, *, on_lost: OnLost = "open", wait_ms: int = 10_000
    ) -> contextlib.AbstractAsyncContextManager[Step]:
        """A step that is done once, over all attempts, duplicates and workers; what is promised stands in once.py.

            async with session.once("insert", url) as step:
                if not step.done:
                    step.value = await insert(url, unique_by=step.id)
            return step.value

        The step is done when the block ends without an exception. Outside a worker only this session knows of it.

        Parameters:
            name: Which step of this actor it is.
            key: Which of its effects, over all messages of this actor; None: this message's own.
            on_lost: What becomes of a step whose holder died, or whose block raised: `open`: the next one enters it;
                `unknown`: no one does, until a person has said by `asyncworker once resolve` what became of it.
            wait_ms: How long to wait for another message that holds it.

        Raises:
            StepHeld: When that was not done in time; this message is retried.
            StaleAttempt: When this attempt's message was taken by another worker.
            UnknownOutcome: When a person has to decide; the message is in the dead letters then.
            ValueError: For a name or key that cannot be one.
            redis.RedisError, BrokerUnavailable: When the store does not answer.
        """
        attempt = self.attempt
        holder = Holder(attempt.message_id or "", attempt.actor or "", self._worker, attempt.fencing)
        return self._steps.once(holder, name, key, on_lost=on_lost, wait_ms=wait_ms)

    def _open_lease(self) -> Lease:
        ending = self._lease.ending
        # To the session's own code, which goes on although it was cancelled, each call says so: it takes its time.
        if ending.has_come and current_lease.get() is not self._lease:
            raise ending.error()
        return self._lease

    def __repr__(self) -> str:
        return f"<Session of {_subject(self.attempt)}, seed {self.seed}, browser {self.generation}>"


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
            ConfigurationError: When the engine cannot draw the identity with the deployment's pins.
        """
        await _refuse_if_interrupted(attempt)
        attempt, identity = await self._let_in(attempt)
        loan = await Loan.take(self.host, self.slots, identity, context_options or {})
        lease = loan.lease
        lease.ending.subject = _subject(attempt)
        try:
            with self._limited(attempt) as attempt, in_lease(lease), _interrupting(loan):
                self._limit_waits(lease, attempt)
                session = Session(lease, attempt, identity, self.settings, steps=self.steps, worker=self.worker_id)
                async with self._watched(lease):
                    await self.on_session(attempt, lease.generation.number, identity)
                    yield session
        except BaseException:
            close_behind = False  # the retry must not overlap this attempt
            raise
        finally:
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
                f"{_subject(attempt)} had no slot within {limit_ms} ms (ASYNCWORKER_BROWSER_WAIT_MS): "
                f"{self.slots.in_use} of {self.slots.total} are in use",
                phase="wait",
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
    async def _watched(self, lease: Lease) -> AsyncIterator[None]:
        """Run the code; when its browser or page dies, end it and say so."""
        watch = Watch(self.engine, lease)
        watch.begin()
        try:
            yield
        except asyncio.CancelledError:
            fault = watch.end()
            if fault is None or not watch.cancelled_by_us():
                raise
            raise fault from None
        except RefusedMessage:
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
            watch.end()


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


def _subject(attempt: Attempt) -> str:
    return f"message {attempt.message_id} ({attempt.actor})" if attempt.message_id else "open_session()"


def _facts(attempt: Attempt, identity: Identity, lease: Lease) -> dict[str, object]:
    facts: dict[str, object] = {
        "message_id": attempt.message_id,
        "actor": attempt.actor,
        "attempt": attempt.number,
        "seed": identity.seed,
    }
    if identity.digest is not None:
        facts["identity"] = identity.digest
    return facts | {"browser": lease.generation.number}


async def _refuse_if_interrupted(attempt: Attempt) -> None:
    """Code that was cancelled from outside and goes on gets no session any more."""
    interruption = current_interruption.get()
    if interruption is not None and interruption.reason is not None:
        ending = Ending(_subject(attempt))
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
