"""What Celery takes for its pool: runs the task that it is given in the thread that gives it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery.app.trace import fast_trace_task
from celery.concurrency.base import BasePool
from celery.exceptions import Ignore, WorkerLostError
from celery.exceptions import TimeLimitExceeded as CeleryTimeLimitExceeded
from dramatiq.middleware import Shutdown, TimeLimitExceeded
from kombu.serialization import prepare_accept_content

from asyncworker.cancellations import Cancelled
from asyncworker.celery.bodies import Body, HardLimit, Terminated, current_body
from asyncworker.celery.delivery import current_delivery
from asyncworker.celery.limits import Limited, Limits
from asyncworker.middleware import FAILED_WITH


class Pid(int):
    """The pid that Celery knows a running task by, which also knows the task here: threads share a process."""

    limited: Limited


class Pool(BasePool):
    """Runs each task at once, in the worker thread that has its message; its time limits are kept by `limits`."""

    body_can_be_buffer = True
    limits: Limits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hostname = (self.options.get("initargs") or (None, None))[1]

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        callback: Callable[[Any], Any],
        error_callback: Callable[[Any], Any],
        accept_callback: Callable[[int, float], Any],
        timeout_callback: Callable[..., Any],
        soft_timeout: float | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> None:
        soft_s = soft_timeout or self.options.get("soft_timeout")
        hard_s = timeout or self.options.get("timeout")
        limited = _limited(soft_s, hard_s, timeout_callback)
        pid = Pid(os.getpid())
        pid.limited = limited
        token = current_body.set(limited.body)
        request = accept_callback.__self__  # type: ignore[attr-defined]
        try:
            with _told(request, error_callback):
                accept_callback(pid, time.monotonic())
                self.limits.begin(limited)
                traced = self._trace(args)
                _note(traced)
                callback(traced)
        except (HardLimit, Terminated):  # too late for the body to see it
            if not limited.body.is_told:
                timeout_callback(soft=False, timeout=hard_s)
        finally:
            self.limits.end(limited)
            current_body.reset(token)

    def _trace(self, args: Any) -> Any:
        return fast_trace_task(*args, _loc=self._where)

    @cached_property
    def _where(self) -> tuple[Any, Any, Any]:
        """What Celery's tracer takes from its worker: tasks, what they may be serialized as, and its name."""
        return self.app._tasks, prepare_accept_content(self.app.conf.accept_content), self.hostname

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        limited = getattr(pid, "limited", None)
        if limited is not None and limited.body.interrupt(Terminated):
            limited.body.is_told = True
            self.limits.interrupted(limited)

    def _get_info(self) -> dict[str, Any]:
        return {
            **super()._get_info(),
            "processes": [os.getpid()],
            "threads": threading.active_count(),
            "timeouts": [self.options.get("soft_timeout") or 0, self.options.get("timeout") or 0],
        }


def _limited(soft_s: float | None, hard_s: float | None, timeout_callback: Callable[..., Any]) -> Limited:
    body, delivery = Body(hard_s), current_delivery.get()

    def stuck() -> None:
        if not body.is_told:
            body.is_told = True
            timeout_callback(soft=False, timeout=hard_s)
        if delivery is not None:
            delivery.note_end()

    return Limited(
        body, soft_s, hard_s, on_soft=lambda limit_s: timeout_callback(soft=True, timeout=limit_s), on_stuck=stuck
    )


def _note(traced: Any) -> None:
    """Have the row of the attempt, and its line in the log, say how the task has failed."""
    failed, retval, _ = traced
    delivery = current_delivery.get()
    if not failed or delivery is None:
        return
    exception = retval.exception
    exception = getattr(exception, "exc", exception) if isinstance(exception, ExceptionWithTraceback) else exception
    if isinstance(exception, Ignore):
        return
    if isinstance(exception, CeleryTimeLimitExceeded):
        exception = TimeLimitExceeded(f"its time limit of {exception} s has passed")
    setattr(delivery.proxy, FAILED_WITH, exception)


@contextmanager
def _told(request: Any, error_callback: Callable[[Any], Any]) -> Iterator[None]:
    """Celery is told of what neither its tracer nor the body's limits can deal with."""
    try:
        yield
    except Shutdown:
        if request.task.acks_late:  # it goes back to its queue
            raise
        error_callback(lost("the worker process was stopped under it"))
    except Cancelled:
        request._announce_revoked("terminated", True, None, False)
        raise
    except Exception:  # noqa: BLE001 -- a hook's, which the tracer could not deal with
        error_callback(ExceptionInfo(sys.exc_info()))
    except (SystemExit, KeyboardInterrupt) as end:  # the body's own: a process of Celery's would end with it
        error_callback(lost(f"exitcode {getattr(end, 'code', None) or 0}"))


def lost(how: str) -> ExceptionInfo:
    """What Celery is told of a task whose process has ended under it."""
    try:
        raise WorkerLostError(f"Worker exited prematurely: {how}.")
    except WorkerLostError:
        return ExceptionInfo(sys.exc_info())
