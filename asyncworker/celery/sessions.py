"""The worker's browser for synchronous tasks: `session(self)`, and a `browser` that belongs to the running task."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from celery import Task, _state, signals
from dramatiq.asyncio import get_event_loop_thread

from asyncworker.celery import places
from asyncworker.celery.async_tasks import attempt_of, in_task
from asyncworker.loop import LoopThread
from asyncworker.session import Attempt, current_attempt
from asyncworker.sync_session import SyncSession, open_sync_session

if TYPE_CHECKING:
    from playwright.sync_api import Browser

logger = logging.getLogger("asyncworker.celery")

#: The session that is open in this code; its browser is the one that `browser` is then.
_open_session: ContextVar[SyncSession | None] = ContextVar("asyncworker_celery_session", default=None)


@contextlib.contextmanager
def session(
    task: Task | None = None, *, seed: int | None = None, context_options: Mapping[str, Any] | None = None
) -> Iterator[SyncSession]:
    """A fresh context of the worker's browser with its page, for a synchronous task: `with session(self) as s:`.

    Outside a worker it launches a browser for the block alone, as the settings say.

    Parameters:
        task: The bound task's `self`; None: the task that is running, if any.
        seed: From 0 to 2**63-1; None: the deployment's. Pass it as an argument of the task, so that retries keep it.
        context_options: More of Playwright's options of a new context.

    Raises:
        Unsupported, InvalidSeed, EngineError: As `open_session`.
        ForkedBrowser: In the parent of a prefork worker.
        RuntimeError: In an `async def` task, which has `async with open_session() as session`.
    """
    places.check()
    running = task if task is not None else _state.get_current_task()
    with contextlib.ExitStack() as stack:
        attempt = None
        if running is not None:
            stack.enter_context(in_task(running))
            attempt = _limited(running, current_attempt.get() or attempt_of(running))
        opened = stack.enter_context(open_sync_session(seed=seed, context_options=context_options, attempt=attempt))
        stack.callback(_open_session.reset, _open_session.set(opened))
        yield opened


def _limited(task: Task, attempt: Attempt) -> Attempt:
    """The attempt with the deadline that the task's `time_limit` gives; a pool of threads enforces none by itself."""
    limit_s = next(iter(task.request.timelimit or ()), None) or task.time_limit
    there: object = get_event_loop_thread()
    if not limit_s or attempt.deadline is not None or not isinstance(there, LoopThread):
        return attempt
    return replace(attempt, deadline=there.loop.time() + limit_s)


class TaskBrowser:
    """The worker's browser as the running task sees it: like Playwright's, and its contexts end with the task.

    `close` ends what the task has opened, and not the browser, which others share.
    """

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._open: dict[int, _OfTask] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        opened = _open_session.get() or self._of_task().session()
        return getattr(opened.browser, name)

    def new_page(self, **options: Any) -> Any:
        """A page in a context of its own; the first one is there already."""
        if (already := _open_session.get()) is not None:
            return already.browser.new_page(**options)
        of_task = self._of_task()
        opened = of_task.session()
        if not options and not of_task.page_is_given:
            of_task.page_is_given = True
            return opened.page
        return opened.browser.new_page(**options)

    def close(self, **options: Any) -> None:
        """Close the contexts of the running task; without one there is nothing to close."""
        task = _state.get_current_worker_task()
        if task is not None:
            self._end(task.request)

    def _of_task(self) -> _OfTask:
        places.check()
        task = _state.get_current_worker_task()
        if task is None:
            raise RuntimeError(
                "`browser` is the running task's, and none is running here: use it in a task, or write "
                "`with session() as s:` in a script"
            )
        request = task.request
        with self._opening:
            return self._open.setdefault(id(request), _OfTask(task, request))

    def _end(self, request: Any) -> None:
        of_task = self._open.pop(id(request), None)
        if of_task is not None:
            of_task.leave()

    def __repr__(self) -> str:
        return "<Browser of the running task>"


class _OfTask:
    """The session that one execution of a task has, once it has used the browser."""

    def __init__(self, task: Task, request: Any) -> None:
        self._task = task
        self._request = request  # kept, or its id would be another's
        self._context = contextvars.copy_context()  # of whoever asks first; it may be left by another thread
        self._entering = threading.Lock()
        self._manager: AbstractContextManager[SyncSession] | None = None
        self._session: SyncSession | None = None
        self.page_is_given = False

    def session(self) -> SyncSession:
        """Its session, opened when it is first asked for."""
        with self._entering:
            if self._session is None:
                manager = session(self._task)
                self._session = self._context.run(manager.__enter__)
                self._manager = manager
            return self._session

    def leave(self) -> None:
        with self._entering:
            manager, self._manager = self._manager, None
        if manager is not None:
            self._context.run(manager.__exit__, None, None, None)


_browser = TaskBrowser()

#: The worker's browser, in a task.
browser = cast("Browser", _browser)


def _task_has_ended(task: Task | None = None, **_: Any) -> None:
    """Close what the task has opened by `browser`, whatever its end was."""
    if task is not None:
        _browser._end(task.request)


signals.task_postrun.connect(_task_has_ended, weak=False, dispatch_uid="asyncworker.celery.sessions")
