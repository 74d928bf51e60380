"""How the body of a task is interrupted in a worker of this package: a function, or the wait for a coroutine.

The time limits and `revoke(terminate=True)` interrupt the body and nothing else: not Celery's tracer around it, which
stores the result, nor the hooks and signals.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery.exceptions import Ignore, SoftTimeLimitExceeded, TimeLimitExceeded
from dramatiq.middleware import Interrupt
from dramatiq.threading import raise_thread_exception

from asyncworker.celery.async_tasks import follow, is_async, make_runnable


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
            # A thread that waits for its coroutine has it raised there.
            self._interrupted = True
            raise_thread_exception(self.thread, exception)
            return True

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


def adopt(task: Any) -> None:
    """Have a task's body run as this module says. Its hooks, options and results are Celery's as before."""
    if getattr(task, "_asyncworker_adopted", False):
        return
    task._asyncworker_adopted = True
    make_runnable(task)
    if is_async(task):
        follow(task)
    # With autoretry_for, `run` is Celery's, and calls this one.
    name = "_orig_run" if hasattr(task, "_orig_run") else "run"
    setattr(task, name, _as_body(getattr(task, name)))


def _as_body(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def body(*args: Any, **kwargs: Any) -> Any:
        current = current_body.get()
        if current is None or current.is_inside or current.thread != threading.get_ident():
            return run(*args, **kwargs)  # like a function: by the body of another one, or outside of a worker
        try:
            with current.inside():
                return run(*args, **kwargs)
        except HardLimit:
            if current.is_told:
                raise Ignore("its time limit has passed") from None
            raise TimeLimitExceeded(current.hard_s) from None
        except Terminated:
            raise Ignore("terminated") from None

    return body
