"""`async def` tasks: their coroutine runs on the process's loop, while the thread that runs the task waits.

So it is in a worker of this package, and in Celery's own once `install(app)` was called. Celery keeps the running task
and its request on stacks of the thread; here the coroutine, and whatever it starts, sees the stacks of the thread that
waits for it. What is raised in that thread, such as SoftTimeLimitExceeded, is raised in the coroutine, at its await.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any

from celery import Task, _state
from dramatiq.asyncio import get_event_loop_thread
from dramatiq.middleware import Interrupt

from asyncworker.errors import ConfigurationError
from asyncworker.loop import LoopThread
from asyncworker.session import Attempt, current_attempt

#: The mark of a task whose coroutine runs on the loop, and of what finds the stacks of that.
_MARK = "_asyncworker_runs"

#: What `pydantic_wrapper` of celery.app.base calls the function of a task with pydantic=True.
_VALIDATED = "task_fun"

#: Whose stacks of tasks and requests are meant; None: the running thread's.
_stacks_of: ContextVar[object | None] = ContextVar("asyncworker_celery_stacks", default=None)


def is_async(task: Task) -> bool:
    """True when a task's function is a coroutine function."""
    return inspect.iscoroutinefunction(inspect.unwrap(getattr(task, "_orig_run", task.run)))


def make_runnable(task: Task) -> bool:
    """Have an `async def` task run on the loop; True when it was not so yet, and its tracer has to be built anew."""
    if getattr(task, _MARK, False) or not is_async(task):
        return False
    setattr(task, _MARK, True)
    name = "_orig_run" if hasattr(task, "_orig_run") else "run"  # autoretry has wrapped it, and calls the other
    function = getattr(task, name)
    validated = _validated_by(function)
    if validated is None:
        setattr(task, name, _runner(task, function))
    else:  # by what it returns, which is a model to be dumped, and no coroutine
        validated.cell_contents = _runner(task, validated.cell_contents)
    return True


def _validated_by(function: Any) -> types.CellType | None:
    """Where a function that validates another one's arguments by pydantic has that; None: it is the task's own."""
    plain = getattr(function, "__func__", function)
    names = plain.__code__.co_freevars if plain.__closure__ and hasattr(plain, "__wrapped__") else ()
    return plain.__closure__[names.index(_VALIDATED)] if _VALIDATED in names else None


def _runner(task: Task, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        coroutine = function(*args, **kwargs)
        if _is_on_loop():
            return coroutine  # called by code that awaits it
        there: object = get_event_loop_thread()
        with in_task(task):
            return run_on(there, coroutine) if isinstance(there, LoopThread) else asyncio.run(coroutine)

    return run


@contextlib.contextmanager
def in_task(task: Task) -> Iterator[None]:
    """What begins here, on the loop or in other threads, is part of the task that this thread runs."""
    follow(task)
    stacks = _stacks_of.set(_state._task_stack.__ident_func__())
    attempt = current_attempt.set(current_attempt.get() or attempt_of(task))
    try:
        yield
    finally:
        _stacks_of.reset(stacks)
        current_attempt.reset(attempt)


def attempt_of(task: Task) -> Attempt:
    """The attempt that a running task is."""
    request = task.request
    return Attempt(message_id=request.id, actor=task.name, number=(request.retries or 0) + 1)


def run_on(loop_thread: LoopThread, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run the coroutine on the loop and wait for it; what is raised in this thread meanwhile is raised in it."""
    driver = _Driver(coroutine)
    step = driver.run
    try:
        while True:
            try:
                return loop_thread.run_coroutine(step())
            except Interrupt:
                raise
            except Exception as error:
                if driver.has_ended:
                    raise
                loop_thread.loop.call_soon_threadsafe(driver.throw, error)
                step = driver.ended
            except BaseException:  # the process is to end
                if not driver.has_ended:
                    loop_thread.run_coroutine(driver.cancelled())
                raise
    finally:
        driver.forget()


class _Driver:
    """Runs a coroutine in the task of the loop that it is called in, and can raise an exception at where it waits.

    A cancellation of the task wakes it, wherever it waits; what it is given instead is the exception.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None
        self._thrown: list[Exception] = []
        self._returned: Any = None
        self._raised: list[BaseException] = []
        self.has_ended = False

    async def run(self) -> Any:
        self._task = asyncio.current_task()
        try:
            self._returned = await self._steps()
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the thread gets it
            self._raised.append(self._told(error))
            raise self._raised[-1] from error.__cause__
        finally:
            self.has_ended = True
            self._coroutine.close()
        return self._returned

    async def ended(self) -> Any:
        """Wait for the end of `run`, which another thread's wait has left; begin it, if it has not begun."""
        if self._task is None:
            return await self.run()
        try:
            await asyncio.wait({self._task})
        except asyncio.CancelledError:
            await self.cancelled()
            raise
        if self._raised:
            raise self._raised[-1]
        return self._returned

    async def cancelled(self) -> None:
        """Cancel it, and wait for its end."""
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()
            await asyncio.wait({self._task})

    def throw(self, error: Exception) -> None:
        """Raise this at its await, on the loop."""
        self._thrown.append(error)
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def forget(self) -> None:
        """No one waits any more. What was raised holds frames, which hold this."""
        self._raised.clear()
        if self._task is None:
            self._coroutine.close()

    def _told(self, error: BaseException) -> BaseException:
        """What is raised in the thread that waits."""
        if isinstance(error, asyncio.CancelledError) and self._task is not None and not self._task.cancelling():
            told = RuntimeError("the coroutine of the task was cancelled by its own code")
            told.__cause__ = error
            return told
        return error

    @types.coroutine
    def _steps(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = self._thrown.pop() if self._thrown else None
        while True:
            try:
                waits_for = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            value = error = None
            try:
                value = yield waits_for
            except BaseException as raised:  # noqa: BLE001 -- whatever it is, the coroutine gets it
                error = self._instead_of(raised)

    def _instead_of(self, raised: BaseException) -> BaseException:
        if not self._thrown or not isinstance(raised, asyncio.CancelledError) or self._task is None:
            return raised
        self._task.uncancel()
        return self._thrown.pop()


def follow(task: Task) -> None:
    """From now on the loop and other threads can be told to see the stacks of a thread that runs this task.

    Raises:
        ConfigurationError: When they cannot.
    """
    for stack in (_state._task_stack, task.request_stack):
        ident = getattr(stack, "__ident_func__", None)
        if ident is None:
            raise ConfigurationError(
                "USE_FAST_LOCALS is set, with which the loop cannot see the task that a thread runs; leave it unset",
                name="USE_FAST_LOCALS",
            )
        if not hasattr(ident, _MARK):
            stack.__ident_func__ = _ident(ident)


def _ident(own: Callable[[], object]) -> Callable[[], object]:
    def ident() -> object:
        meant = _stacks_of.get()
        return own() if meant is None else meant

    setattr(ident, _MARK, own)
    return ident


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
