"""How the body of a task is run: a function in its worker thread, a coroutine on the loop thread, both with an end.

The time limits and `revoke(terminate=True)` interrupt the body and nothing else: not Celery's tracer around it, which
stores the result, nor the hooks and signals.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery import _state
from celery.exceptions import Ignore, SoftTimeLimitExceeded, TimeLimitExceeded
from celery.utils.threads import get_ident
from dramatiq.asyncio import get_event_loop_thread
from dramatiq.middleware import Interrupt
from dramatiq.threading import raise_thread_exception

from asyncworker.errors import ConfigurationError


class HardLimit(Interrupt):
    """The time limit of a task has passed; no `except Exception` of its body sees this."""


class Terminated(Interrupt):
    """The task was revoked, and terminated."""


class Body:
    """The body that a worker thread is about to run, and how it is interrupted.

    Parameters:
        hard_s: Its time limit, for what it raises then.
    """

    def __init__(self, hard_s: float | None) -> None:
        self.hard_s = hard_s
        self.thread = threading.get_ident()
        self.is_inside = False
        self.has_begun = False
        #: Its end has been told to Celery already, by someone who did not want to wait for it.
        self.is_told = False
        self._interrupted = False
        self._refused: type[BaseException] | None = None
        self._driver: _Driver | None = None
        self._lock = threading.Lock()

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._lock:
            self.has_begun = self.is_inside = True
            refused = self._refused
        if refused is not None:
            self.is_inside = False
            raise refused
        try:
            yield
        finally:
            self._leave()

    def interrupt(self, exception: type[BaseException]) -> bool:
        """Raise this in the body, from another thread; False when it runs no more. One that has not begun, does not."""
        with self._lock:
            if not self.has_begun:
                if issubclass(exception, Interrupt):
                    self._refused = exception
                return True
            if not self.is_inside:
                return False
            if self._driver is not None and not issubclass(exception, Interrupt):
                self._driver.throw(exception)
                return True
            self._interrupted = True
            raise_thread_exception(self.thread, exception)
            return True

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the body's coroutine on the loop thread, with the request and the task of this thread."""
        loop_thread = get_event_loop_thread()
        if loop_thread is None:
            coroutine.close()
            raise RuntimeError("an async task runs in a worker of asyncworker; this is none")
        driver = _Driver(coroutine)
        with self._lock:
            self._driver = driver
        token = _thread.set(get_ident())
        try:
            return loop_thread.run_coroutine(driver.run())
        finally:
            _thread.reset(token)
            with self._lock:
                self._driver = None

    def _leave(self) -> None:
        """From here on it is not interrupted, nor by what was on its way."""
        while True:
            try:
                with self._lock:
                    self.is_inside = False
                    if self._interrupted:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), None)
                return
            except (HardLimit, Terminated, SoftTimeLimitExceeded):
                continue


#: The body that this thread, and what it has started on the loop, is at.
current_body: ContextVar[Body | None] = ContextVar("asyncworker_celery_body", default=None)

#: What Celery tells threads by, of the worker thread whose body runs on the loop.
_thread: ContextVar[Any] = ContextVar("asyncworker_celery_thread", default=None)


def _ident() -> Any:
    return _thread.get() or get_ident()


def adopt(task: Any) -> None:
    """Have a task's body run as this module says. Its hooks, options and results are Celery's as before."""
    if getattr(task, "_asyncworker_adopted", False):
        return
    task._asyncworker_adopted = True
    # With autoretry_for, `run` is Celery's, and calls this one.
    name = "_orig_run" if hasattr(task, "_orig_run") else "run"
    setattr(task, name, _as_body(getattr(task, name)))
    if is_async(task):
        _follow_context(task.request_stack)


def adopt_current_task() -> None:
    """Have `current_task` be right in code on the loop."""
    _follow_context(_state._task_stack)


def is_async(task: Any) -> bool:
    """True when a task's function is a coroutine function."""
    run = inspect.unwrap(getattr(task, "_orig_run", task.run))
    return inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(getattr(run, "__func__", None))


def _follow_context(stack: Any) -> None:
    """Have a stack of Celery's, one for each thread, be the worker thread's in what that runs on the loop."""
    if not hasattr(stack, "_local"):
        raise ConfigurationError(
            "USE_FAST_LOCALS is set, so Celery's requests are bound to threads and async tasks have none; unset it",
            name="USE_FAST_LOCALS",
        )
    stack.__ident_func__ = _ident


def _as_body(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def body(*args: Any, **kwargs: Any) -> Any:
        current = current_body.get()
        if current is None or current.is_inside or current.thread != threading.get_ident():
            return _nested(run, args, kwargs, current)
        try:
            with current.inside():
                result = run(*args, **kwargs)
                return current.run_coroutine(result) if inspect.iscoroutine(result) else result
        except HardLimit:
            if current.is_told:
                raise Ignore("its time limit has passed") from None
            raise TimeLimitExceeded(current.hard_s) from None
        except Terminated:
            raise Ignore("terminated") from None

    return body


def _nested(run: Callable[..., Any], args: Any, kwargs: Any, current: Body | None) -> Any:
    """A task that is called like a function: by the body of another one, or outside of a worker."""
    result = run(*args, **kwargs)
    if current is not None and current.thread == threading.get_ident() and inspect.iscoroutine(result):
        return current.run_coroutine(result)
    return result


class _Driver:
    """Runs a coroutine in a task of the loop, and can raise an exception at where it waits.

    A cancellation of the task wakes it, wherever it waits; what it is given instead is the exception.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thrown: BaseException | None = None

    def throw(self, exception: type[BaseException]) -> None:
        """From any thread; nothing happens when it has ended."""
        loop_thread = get_event_loop_thread()
        if loop_thread is not None and loop_thread.loop is not None:
            loop_thread.loop.call_soon_threadsafe(self._throw, exception())

    def _throw(self, exception: BaseException) -> None:
        if self._task is not None and not self._task.done():
            self._thrown = exception
            self._task.cancel()

    async def run(self) -> Any:
        self._task = asyncio.current_task()
        try:
            return await self._steps()
        finally:
            self._coroutine.close()

    @types.coroutine
    def _steps(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
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
        thrown, self._thrown = self._thrown, None
        if thrown is None or not isinstance(raised, asyncio.CancelledError) or self._task is None:
            return raised
        self._task.uncancel()
        return thrown
