"""A session for synchronous code: open_session() held open on the loop, and called from threads.

A task on the loop enters the session and leaves it, and is what the death of the browser cancels. Each call from a
thread is work of its own on the loop, done as the session's code. When the thread is interrupted in a call, or its
time limit has passed wherever it is, the session is over as it is for code on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from dramatiq.asyncio import get_event_loop_thread
from dramatiq.middleware import Interrupt

from asyncworker.ending import HARMLESS, Ending, Interruption, current_ending, current_interruption
from asyncworker.errors import SessionOver
from asyncworker.identity import Identity
from asyncworker.lane import Lane
from asyncworker.loop import LoopThread
from asyncworker.once import OnLost, Step
from asyncworker.runtime import open_session
from asyncworker.session import Attempt, Session, SessionLog, current_attempt
from asyncworker.settings import Settings, load
from asyncworker.sync_face import Face

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

logger = logging.getLogger("asyncworker.sync")

T = TypeVar("T")
R = TypeVar("R")

#: A session whose thread goes on so long after its deadline is over: the thread is told first where it can be.
AFTER_DEADLINE_S = 0.5


class _Call:
    """One call on the loop, for a thread that may have gone on without it."""

    def __init__(self) -> None:
        self.has_ended = False
        self._is_dropped = False
        self._task: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        """On the loop, in the task that does it."""
        if self._is_dropped:
            raise asyncio.CancelledError
        self._task = asyncio.current_task()

    def drop(self) -> None:
        """Cancel it, on the loop."""
        self._is_dropped = True
        if self._task is not None and not self.has_ended:
            self._task.cancel()


class Kept(Generic[T]):
    """An asynchronous context manager that a task on the loop holds open for other threads.

    Parameters:
        loop_thread: Where the task lives.
        manager: What it enters, and leaves.
    """

    def __init__(self, loop_thread: LoopThread, manager: AbstractAsyncContextManager[T]) -> None:
        self._loop_thread = loop_thread
        self._manager = manager
        self._calls: set[_Call] = set()
        self._interruption = Interruption()
        self._variables: contextvars.Context | None = None
        self._ending: Ending | None = None
        self._fault: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_left = False
        #: Called on the loop when it is left.
        self.on_end: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def open(self, made_of: Callable[[T], R]) -> Iterator[R]:
        """Enter it, and leave it with what the block raises.

        Raises what it raises itself, such as an explanation of what the block has raised. Whatever a signal raises in
        this thread, and wherever, it is left: also when it was only being entered.
        """
        refuse_on_loop(self._loop_thread, "a session")
        try:
            yield made_of(self._loop_thread.run_coroutine(self._enter()))
        except BaseException as error:
            self._leave(error)
            raise
        else:
            self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self._loop_thread.is_here:  # else it has ended, and all that was on it
            self._loop_thread.run_coroutine(self._let_go(error))

    def call(self, what: str, begin: Callable[[], Any]) -> Any:
        """Call `begin` on the loop as code of the session, and await what it returns; raises what that raises.

        Raises:
            SessionOver: When it is over; when its browser died, what that raises.
            RuntimeError: On the loop's own thread.
        """
        refuse_on_loop(self._loop_thread, what)
        call = _Call()
        try:
            return self._loop_thread.run_coroutine(self._do(call, what, begin))
        except Interrupt as interrupt:
            self._from_outside(self._interrupt, type(interrupt).__name__)
            raise
        except BaseException:
            if not call.has_ended:  # it was raised in this thread, by a signal
                self._from_outside(call.drop)
            raise

    def interrupt_at(self, deadline: float) -> None:
        """Have it end when the loop's time has come so far, whatever its thread does then."""
        loop = self._loop_thread.loop
        late = deadline + AFTER_DEADLINE_S
        self._from_outside(lambda: loop.call_at(late, self._interrupt, "TimeLimitExceeded"))

    def _from_outside(self, what: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all that it did
            self._loop_thread.loop.call_soon_threadsafe(what, *args)

    # --- on the loop

    async def _enter(self) -> T:
        if self._is_left:
            raise asyncio.CancelledError
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[T] = loop.create_future()
        self._left: asyncio.Future[BaseException | None] = loop.create_future()
        context = contextvars.copy_context()
        context.run(current_interruption.set, self._interruption)
        self._task = loop.create_task(self._keep(), context=context)
        try:
            await asyncio.wait((self._task, self._opened), return_when=asyncio.FIRST_COMPLETED)
            self._raise_fault()
            if not self._opened.done():
                raise asyncio.CancelledError
            return self._opened.result()
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait({self._task})
            raise

    async def _keep(self) -> None:
        try:
            async with self._manager as value:
                self._variables = contextvars.copy_context()
                self._ending = current_ending.get()
                self._opened.set_result(value)
                if (error := await self._left) is not None:
                    raise error
        except Exception as error:  # noqa: BLE001 -- it is raised in the threads
            self._fault = error
        finally:
            self.on_end()
            for call in tuple(self._calls):
                call.drop()

    async def _let_go(self, error: BaseException | None) -> None:
        self._is_left = True
        task = self._task
        if task is None or task.done():
            if error is None or (isinstance(error, Exception) and error is not self._fault):
                self._raise_fault()
            return
        if self._left.done():  # cancelled: it is on its way out
            pass
        elif not self._opened.done():  # this thread waits for it no more
            task.cancel()
        elif error is None or (isinstance(error, Exception) and not isinstance(error, StopIteration)):
            self._left.set_result(error)
        else:
            self._interrupt(type(error).__name__)
        await asyncio.wait({task})
        self._raise_fault()

    def _raise_fault(self) -> None:
        """Raise what has ended it, without where it was raised before: that grows with each time."""
        if self._fault is not None:
            raise self._fault.with_traceback(None)

    def _interrupt(self, reason: str) -> None:
        if self._task is not None and not self._task.done():
            self._interruption.tell(reason)
            self._task.cancel()

    async def _do(self, call: _Call, what: str, begin: Callable[[], Any]) -> Any:
        self._refuse(what)
        for variable, value in self._variables.items() if self._variables is not None else ():
            variable.set(value)
        call.begin()
        self._calls.add(call)
        try:
            result = begin()
            return await result if hasattr(result, "__await__") else result
        except (Exception, asyncio.CancelledError) as error:
            if not isinstance(error, SessionOver):
                self._refuse(what, error)
            raise
        finally:
            call.has_ended = True
            self._calls.discard(call)

    def _refuse(self, what: str, cause: BaseException | None = None) -> None:
        """Raise what has ended the session, unless the call is one that ends what has ended."""
        self._raise_fault()
        is_over = (self._ending is not None and self._ending.has_come) or self._task is None or self._task.done()
        if is_over and what.removesuffix("()").rpartition(".")[2] not in HARMLESS:
            ending = self._ending or Ending()
            ending.come("it has been left")
            raise ending.error() from cause


class SyncSession:
    """What synchronous code receives for one attempt: a `Session` whose page, context and browser are synchronous."""

    def __init__(self, session: Session, loop_thread: LoopThread, kept: Kept[Session]) -> None:
        package = type(session.page).__module__.partition(".")[0]
        self._session = session
        self._loop_thread = loop_thread
        self._kept = kept
        self.face = Face(kept.call, Lane(contextvars.copy_context()), package)
        kept.on_end = self.face.close
        self.seed: int = session.seed
        self.identity: Identity = session.identity
        self.attempt: Attempt = session.attempt
        self.settings: Settings = session.settings
        self.generation: int = session.generation
        self.log: SessionLog = session.log

    @property
    def page(self) -> Page:
        """The page, already open."""
        return cast("Page", self.face.call("session.page", lambda: self._session.page))

    @property
    def context(self) -> BrowserContext:
        """The fresh context of this attempt."""
        return cast("BrowserContext", self.face.call("session.context", lambda: self._session.context))

    @property
    def browser(self) -> Browser:
        """The browser, shared with other attempts; contexts opened on it here are closed with this session."""
        return cast("Browser", self.face.call("session.browser", lambda: self._session.browser))

    @property
    def random(self) -> random.Random:
        """Pseudo-random numbers derived from the seed: each attempt draws the same ones."""
        return self._session.random

    @contextlib.contextmanager
    def once(
        self, name: str, key: str | int | None = None, *, on_lost: OnLost = "open", wait_ms: int = 10_000
    ) -> Iterator[Step]:
        """A step that is done once, as `Session.once` has it: `with session.once("insert", url) as step:`."""
        manager = self.face.call(
            "session.once()", lambda: self._session.once(name, key, on_lost=on_lost, wait_ms=wait_ms)
        )
        holder: Kept[Step] = Kept(self._loop_thread, manager)
        with holder.open(lambda step: step) as step:
            yield step

    def __repr__(self) -> str:
        return repr(self._session)


@contextlib.contextmanager
def open_sync_session(
    *, seed: int | None = None, context_options: Mapping[str, Any] | None = None, attempt: Attempt | None = None
) -> Iterator[SyncSession]:
    """`open_session` for code in a thread of a worker, or for a script; what it lends may be called from any thread.

    In a worker it lends a context of the worker's browser; anywhere else it launches one for this session alone.

    Parameters:
        seed: From 0 to 2**63-1; None: the attempt's, else the deployment's.
        context_options: More of Playwright's options of a new context.
        attempt: Whose session it is; None: the running message's.

    Raises:
        Unsupported, InvalidSeed, EngineError: As `open_session`.
        RuntimeError: On the loop's own thread.
    """
    with _attempting(attempt), _loop_thread() as loop_thread:
        holder: Kept[Session] = Kept(loop_thread, open_session(seed=seed, context_options=context_options))
        with holder.open(lambda session: SyncSession(session, loop_thread, holder)) as session:
            if session.attempt.deadline is not None:
                holder.interrupt_at(session.attempt.deadline)
            yield session


def refuse_on_loop(loop_thread: LoopThread, what: str) -> None:
    """Raise RuntimeError on the loop's own thread."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return
    if running is loop_thread.loop:
        raise RuntimeError(
            f"{what} of a synchronous session was used by code on the worker's loop, which would wait for itself for "
            "ever; there write `async with open_session() as session`, or use it in `await asyncio.to_thread(...)`"
        )


@contextlib.contextmanager
def _attempting(attempt: Attempt | None) -> Iterator[None]:
    if attempt is None:
        yield
        return
    token = current_attempt.set(attempt)
    try:
        yield
    finally:
        current_attempt.reset(token)


@contextlib.contextmanager
def _loop_thread() -> Iterator[LoopThread]:
    """The worker's loop; without a worker one for as long as it is needed."""
    there: object = get_event_loop_thread()
    if isinstance(there, LoopThread):
        yield there
        return
    loop_thread = LoopThread(cleanup_timeout_ms=load().cleanup_timeout_ms)
    loop_thread.start()
    try:
        yield loop_thread
    finally:
        loop_thread.stop()
