"""`install(app)`: this runtime inside a worker of Celery's own, in each of its processes that run tasks."""

from __future__ import annotations

import logging
import os
from typing import Any

import psutil
from celery import Celery, _state, concurrency, signals
from celery.app.trace import build_tracer
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.exceptions import WorkerShutdown
from dramatiq.asyncio import get_event_loop_thread

from asyncworker.celery import places
from asyncworker.celery.async_tasks import make_runnable
from asyncworker.celery.process import Process
from asyncworker.errors import ConfigurationError
from asyncworker.loop import LoopThread
from asyncworker.settings import Settings, load

logger = logging.getLogger("asyncworker.celery")

#: Their threads are no threads: the loop's would not run.
_GREEN = ("celery.concurrency.eventlet", "celery.concurrency.gevent")

_REMEDY = (
    "launch none at import, nor in a handler of worker_init: a task gets one by `from asyncworker.celery import "
    "browser`; or start children with --pool-start-method spawn"
)


def install(app: Celery, *, settings: Settings | None = None) -> None:
    """Give each process of the app's workers that runs tasks a loop, with a browser on its first use.

    Call it where the app is made. `browser` and `session` of asyncworker.celery then work in its tasks, and tasks may
    be `async def`. In a worker of asyncworker's own it changes nothing.

    Parameters:
        settings: None: those of the environment, ASYNCWORKER_*.

    Raises:
        ConfigurationError: When a setting cannot be used, or another app of this process has it already.
    """
    if places.process is not None:
        if _App.installed is not app:
            raise ConfigurationError("asyncworker.celery.install() was called with another app; one process has one")
        return
    places.process = Process(settings or load())
    _App.installed = app
    handlers = _Handlers(app, places.process)
    for signal, handler in (
        (signals.worker_init, handlers.worker_init),
        (signals.worker_before_create_process, handlers.before_fork),
        (signals.worker_process_init, handlers.process_init),
        (signals.worker_process_shutdown, handlers.process_shutdown),
        (signals.worker_shutdown, handlers.process_shutdown),
    ):
        signal.connect(handler, weak=False, dispatch_uid=f"asyncworker.celery.{handler.__name__}.{id(signal)}")
    _watch_declarations(app)


def _watch_declarations(app: Celery) -> None:
    """Have `async def` tasks run also where no worker is, as in a test that calls them eagerly.

    Celery has no signal for a task that is declared; in a worker its own signals find them all.
    """
    declare = app._task_from_fun

    def declared(*args: Any, **kwargs: Any) -> Any:
        task = declare(*args, **kwargs)
        make_runnable(task)
        return task

    app._task_from_fun = declared


class _App:
    installed: Celery | None = None


class _Handlers:
    """What is done at the signals of a worker."""

    def __init__(self, app: Celery, process: Process) -> None:
        self._app = app
        self._process = process
        self._forks = False

    def worker_init(self, sender: Any = None, **_: Any) -> None:
        """In the main process, before its pool is made."""
        if getattr(sender, "app", None) is not self._app:
            return
        self._make_tasks_runnable(self._app, None)
        pool = concurrency.get_implementation(sender.pool_cls)
        if pool.__module__ in _GREEN:
            # An exception would be logged, and the worker go on.
            raise SystemExit(
                f"asyncworker.celery: the pool {pool.__module__} has green threads, under which no browser's loop can "
                "run; use --pool prefork, threads or solo, and `async def` tasks for many at once"
            )
        if issubclass(pool, PreforkPool):
            self._process.become_parent()
            self._forks = sender.pool_start_method == "fork"
        else:
            self._process.begin()

    def before_fork(self, **_: Any) -> None:
        if self._forks and (found := live_browser()) is not None:
            logger.critical("this worker may not fork: %s. A child that uses it dies with SIGSEGV; %s", found, _REMEDY)
            raise WorkerShutdown(1)

    def process_init(self, sender: Any = None, **_: Any) -> None:
        """In each child; also in the main process with the solo pool."""
        # A child that was spawned has an app of its own, with the same tasks.
        self._make_tasks_runnable(_state.get_current_app(), sender)
        self._process.begin()

    def process_shutdown(self, **_: Any) -> None:
        self._process.end()

    def _make_tasks_runnable(self, app: Celery, hostname: str | None) -> None:
        for name, task in list(app.tasks.items()):
            if make_runnable(task):
                task.__trace__ = build_tracer(name, task, app.loader, hostname, app=app)


def live_browser() -> str | None:
    """What of a browser lives in this very process, in words; None: nothing."""
    there: object = get_event_loop_thread()
    if isinstance(there, LoopThread) and there.is_here:
        return f"its process {os.getpid()} has a loop of asyncworker's, which no child would have"
    for child in psutil.Process().children():
        try:
            line = child.cmdline()
        except psutil.Error:
            continue
        if "run-driver" in line:
            return f"its process {os.getpid()} has launched Playwright (its driver is process {child.pid})"
        if "-juggler-pipe" in line:
            return f"its process {os.getpid()} has launched a browser (process {child.pid})"
    return None
