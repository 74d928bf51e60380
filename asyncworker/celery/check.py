"""What becomes of a Celery app on these workers: read from its tasks, settings, signals and source; nothing is run.

The app's modules are imported, as Celery's worker does it, and that is all.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import celery
from celery import Celery
from celery.app.utils import find_app
from celery.worker.control import Panel

from asyncworker.celery.check_settings import settings_of, version_of
from asyncworker.celery.check_signals import receivers, where_is
from asyncworker.celery.check_sources import browsers_of
from asyncworker.celery.findings import Finding, Level, attention, differs, same
from asyncworker.errors import ConfigurationError

#: A task's options that are looked at; those that are not the defaults are shown.
OPTIONS = (
    "max_retries",
    "default_retry_delay",
    "autoretry_for",
    "dont_autoretry_for",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "retry_kwargs",
    "acks_late",
    "acks_on_failure_or_timeout",
    "acks_on_failure",
    "acks_on_timeout",
    "reject_on_worker_lost",
    "retry_on_worker_lost",
    "soft_time_limit",
    "time_limit",
    "rate_limit",
    "expires",
    "priority",
    "queue",
    "routing_key",
    "serializer",
    "compression",
    "ignore_result",
    "store_errors_even_if_ignored",
    "track_started",
    "throws",
)

#: Pools of Celery's that know no time limits.
_WITHOUT_LIMITS = ("solo", "threads", "eventlet", "gevent")


@dataclass(frozen=True)
class TaskReport:
    """One task; `options` are those that are not Celery's defaults."""

    name: str
    where: str | None
    is_bound: bool
    is_async: bool
    options: dict[str, Any]
    findings: list[Finding]

    @property
    def level(self) -> Level:
        return worst(self.findings)

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "where": self.where,
            "bind": self.is_bound,
            "async": self.is_async,
            "options": self.options,
            "level": self.level,
            "findings": [each.facts() for each in self.findings],
        }


@dataclass(frozen=True)
class Report:
    """Everything about an app."""

    app: str
    tasks: list[TaskReport]
    settings: list[Finding]
    signals: list[Finding]
    sources: list[Finding]

    @property
    def findings(self) -> list[Finding]:
        return [each for task in self.tasks for each in task.findings] + self.settings + self.signals + self.sources

    @property
    def needs_attention(self) -> bool:
        return worst(self.findings) is Level.attention

    def facts(self) -> dict[str, Any]:
        return {
            "app": self.app,
            "celery": celery.__version__,
            "runs_as_it_is": not self.needs_attention,
            "tasks": [task.facts() for task in self.tasks],
            **{group: [each.facts() for each in getattr(self, group)] for group in ("settings", "signals", "sources")},
        }


def worst(findings: list[Finding]) -> Level:
    """The level that needs most of a decision."""
    return max((each.level for each in findings), key=list(Level).index, default=Level.same)


def load_app(name: str) -> Celery:
    """Import an app and all modules with its tasks, as `celery -A` does.

    Raises:
        ConfigurationError: When there is no such app, or something does not import; with the whole traceback.
    """
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        app = find_app(name)
        if isinstance(app, Celery):
            app.loader.import_default_modules()
            app.finalize()
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"the Celery app {name} cannot be loaded from {Path.cwd()}; name it as `celery -A` does, in the directory "
            f"where that finds it:\n{''.join(traceback.format_exception(error))}".rstrip(),
            name=name,
        ) from error
    if not isinstance(app, Celery):
        raise ConfigurationError(f"{name} is no Celery app but {app!r}; name it as `celery -A` does", name=name)
    return app


def check(name: str) -> Report:
    """Look at an app.

    Raises:
        ConfigurationError: As `load_app`.
    """
    app = load_app(name)
    tasks = [task for each, task in sorted(app.tasks.items()) if not each.startswith("celery.")]
    listening = list(receivers())
    plain = Celery(set_as_current=False)
    plain.Task.bind(plain)
    return Report(
        app=name,
        tasks=[_task(task, app, plain) for task in tasks],
        settings=[*version_of((celery.VERSION.major, celery.VERSION.minor), celery.__version__), *_all_settings(app)],
        signals=[each.finding() for each in listening],
        sources=list(_sources(tasks, [each.function for each in listening])),
    )


def _all_settings(app: Celery) -> Iterator[Finding]:
    yield from settings_of(app)
    for command, function in sorted(Panel.data.items()):
        if not function.__module__.startswith("celery."):
            yield same(f"control command {command}", "answered by each worker process")


def _task(task: Any, app: Celery, plain: Celery) -> TaskReport:
    function = body_of(task)
    return TaskReport(
        name=task.name,
        where=where_is(function),
        is_bound=not isinstance(inspect.getattr_static(type(task), "run", None), staticmethod),
        is_async=inspect.iscoroutinefunction(function),
        options=_options(task, plain.Task),
        findings=list(_about(task, function, app, plain.Task)),
    )


def body_of(task: Any) -> Any:
    """The function that was written as the body of a task, without what Celery put around it."""
    run = inspect.unwrap(getattr(task, "_orig_run", task.run))
    return getattr(run, "__func__", run)


def _options(task: Any, plain: Any) -> dict[str, Any]:
    missing = object()
    values = {name: getattr(task, name, missing) for name in OPTIONS}
    shown = {}
    for name, value in values.items():
        if value is not missing and value != getattr(plain, name, None):
            shown[name] = value if isinstance(value, str | int | float | bool | None) else _readable(value)
    return shown


def _readable(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(each.__name__ if isinstance(each, type) else repr(each) for each in value)
    return repr(value)


def _about(task: Any, function: Any, app: Celery, plain: Any) -> Iterator[Finding]:
    finding = partial(_at, where_is(function))
    if inspect.iscoroutinefunction(function):
        yield finding(differs, "async def", "Celery cannot run it; here it runs on the worker's loop")
    if task.rate_limit:
        yield finding(
            differs,
            "rate_limit",
            f"{task.rate_limit} holds for all workers together, where Celery counts each worker alone; "
            "ASYNCWORKER_CELERY_RATES=worker counts each worker process",
        )
    yield from (finding(*each) for each in _limits(task, app))
    if task.acks_late:
        again = task.reject_on_worker_lost or task.retry_on_worker_lost
        fate = "run again" if again else "FAILURE, with WorkerLostError"
        yield finding(same, "acks_late", f"as with Celery, a task whose worker process died is {fate}")
    for option in ("acks_on_failure_or_timeout", "acks_on_failure", "acks_on_timeout"):
        # what comes from the app's settings is said there
        if getattr(task, option, None) is False and app.conf.get(f"task_{option}") is not False:
            yield finding(attention, option, "what failed is not left to a dead letter exchange of RabbitMQ")
    for attribute in ("Request", "Strategy"):
        if getattr(task, attribute) != getattr(plain, attribute):
            yield finding(same, attribute, "your own class around the message is used here, too")


def _at(where: str | None, level: Any, subject: str, what: str) -> Finding:
    found: Finding = level(subject, what, where)
    return found


def _limits(task: Any, app: Celery) -> Iterator[tuple[Any, str, str]]:
    limits = [name for name in ("soft_time_limit", "time_limit") if getattr(task, name)]
    if not limits:
        return
    subject = " and ".join(limits)
    if app.conf.worker_pool in _WITHOUT_LIMITS:
        yield differs, subject, f"Celery's pool {app.conf.worker_pool} ignores it; here it holds"
    if task.time_limit:
        yield (
            differs,
            "time_limit",
            "the body is interrupted and its finally blocks run, the process lives on; Celery ends the process. Here "
            "that is replaced when the body does not end",
        )


def _sources(tasks: list[Any], listening: list[Any]) -> Iterator[Finding]:
    """What browser libraries are used for in the modules of tasks and signal receivers, and in those beside them."""
    bodies = [body_of(task) for task in tasks]
    names: dict[Path, set[str]] = {}
    for function in [*bodies, *listening]:
        for path in _files_beside(function.__module__):
            names.setdefault(path, set())
    for body in bodies:
        file = inspect.getsourcefile(body)
        if file is not None:
            names.setdefault(Path(file), set()).add(body.__name__)
    for path in sorted(names):
        yield from browsers_of(path, tasks=names[path])


def _files_beside(module: str) -> Iterator[Path]:
    """The sources of a module and of all loaded modules of its top package, unless that is an installed one."""
    top = module.partition(".")[0]
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if name.partition(".")[0] == top and file and file.endswith(".py") and not _is_installed(file):
            yield Path(file)


def _is_installed(file: str) -> bool:
    return "site-packages" in Path(file).parts or "dist-packages" in Path(file).parts


__all__ = ["Report", "TaskReport", "check", "load_app"]
