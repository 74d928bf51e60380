"""`async def` tasks: their coroutine runs on the worker's loop, while the thread that runs the task waits.

Celery keeps the running task and its request on stacks of the thread. Here the coroutine, and whatever it starts, sees
the stacks of the thread that waits for it. What is raised in that thread, such as SoftTimeLimitExceeded, is raised in
the coroutine, at its await.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
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

logger = logging.getLogger("asyncworker.celery")

#: The mark of a function that runs a coroutine function on the loop.
_MARK = "_asyncworker_runs"

#: Whose stacks of tasks and requests are meant; None: the running thread's.
_stacks_of: ContextVar[object | None] = ContextVar("asyncworker_celery_stacks", default=None)


def make_runnable(task: Task) -> bool:
    """Have an `async def` task run on the loop; True when it was not so yet, and its tracer has to be built anew."""
    name = "_orig_run" if hasattr(task, "_orig_run") else "run"  # autoretry has wrapped it, and calls the other
    function = getattr(task, name)
    if hasattr(function, _MARK) or not inspect.iscoroutinefunction(inspect.unwrap(function)):
        return False
    setattr(task, name, _runner(task, function))
    return True


def _runner(task: Task, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        coroutine = function(*args, **kwargs)
        if _is_on_loop():
            return coroutine  # called by code that awaits it
        there: object = get_event_loop_thread()
        with in_task(task):
            return run_on(there, coroutine) if isinstance(there, LoopThread) else asyncio.run(coroutine)

    setattr(run, _MARK, function)
    return run


@contextlib.contextmanager
def in_task(task: Task) -> Iterator[None]:
    """What begins here, on the loop or in other threads, is part of the task that this thread runs."""
    stacks = _stacks_of.set(_own(task))
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
    work = _Work(coroutine)
    while True:
        try:
            return loop_thread.run_coroutine(work.ended())
        except Interrupt:
            raise
        except Exception as error:
            if work.has_ended:
                raise
            loop_thread.loop.call_soon_threadsafe(work.throw, error)
        except BaseException:  # the process is to end
            if not work.has_ended:
                loop_thread.run_coroutine(work.cancelled())
            raise


class _Work:
    """A coroutine on the loop, into which something may be raised."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        self._thrown: list[Exception] = []
        self._returned: Any = None
        self._raised: BaseException | None = None
        self.has_ended = False

    async def ended(self) -> Any:
        """Begin it, if it has not begun, and wait for its end."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        try:
            await asyncio.wait({self._task})
        except asyncio.CancelledError:
            await self.cancelled()
            raise
        if isinstance(self._raised, asyncio.CancelledError):
            raise RuntimeError("the coroutine of the task was cancelled by its own code") from self._raised
        if self._raised is not None:
            raise self._raised
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
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Nothing that it raises ends the task: SystemExit would end the loop."""
        try:
            self._returned = await _driven(self._coroutine, self._thrown)
        except BaseException as error:  # noqa: BLE001 -- it is raised in the waiting thread
            self._raised = error
        finally:
            self.has_ended = True


@types.coroutine
def _driven(coroutine: Coroutine[Any, Any, Any], thrown: list[Exception]) -> Generator[Any, Any, Any]:
    """Drive the coroutine; a cancellation that was asked for by `throw` arrives as what was thrown."""
    step: Callable[..., Any] = coroutine.send
    given: Any = None
    if thrown:
        step, given = coroutine.throw, thrown.pop()
    while True:
        try:
            awaited = step(given)
        except StopIteration as end:
            return end.value
        try:
            given = yield awaited
            step = coroutine.send
        except asyncio.CancelledError as error:
            step, given = coroutine.throw, error
            if thrown:
                given = thrown.pop()
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
        except BaseException as error:  # noqa: BLE001 -- it is the coroutine's
            step, given = coroutine.throw, error


def _own(task: Task) -> object:
    """Whose stacks this code sees; from now on, the loop and other threads can be told to see the same."""
    for stack in (_state._task_stack, task.request_stack):
        ident = getattr(stack, "__ident_func__", None)
        if ident is None:
            raise ConfigurationError(
                "USE_FAST_LOCALS is set, with which the loop cannot see the task that a thread runs; leave it unset",
                name="USE_FAST_LOCALS",
            )
        if not hasattr(ident, _MARK):
            stack.__ident_func__ = _ident(ident)
    return _state._task_stack.__ident_func__()


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
