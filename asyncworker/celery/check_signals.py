"""Which of Celery's signals an app listens to, and what becomes of them on these workers."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from celery import signals
from celery.utils.dispatch import Signal

from asyncworker.celery.findings import Finding, attention, differs, same

_NO_POOL = "never sent: there is no such pool"

#: Signals that are not sent here as they are there, each with how to say it; all others are the same.
_DIFFERENT: dict[str, tuple[Callable[..., Finding], str]] = {
    "worker_process_init": (
        differs,
        "sent in the thread that runs synchronous tasks, before its first one; it is not killed after "
        "worker_proc_alive_timeout, and is sent with every pool",
    ),
    "worker_process_shutdown": (
        differs,
        "sent in the thread that runs synchronous tasks, after its last one; there is no process for its exitcode",
    ),
    "worker_before_create_process": (differs, "Dramatiq makes the processes, and each announces itself"),
    "setup_logging": (differs, "called, but Dramatiq's handlers stay: remove them from the root logger there"),
    "after_setup_logger": (differs, "called; the logger has Dramatiq's handlers"),
    "after_setup_task_logger": (differs, "called; the logger has Dramatiq's handlers"),
    "worker_init": (differs, "sent in each worker process: none forks another, and a browser is not made here"),
    "celeryd_init": (differs, "sent in each worker process, with the worker that deals with messages there"),
    "celeryd_after_setup": (differs, "sent in each worker process, with the worker that deals with messages there"),
    "worker_ready": (differs, "sent in each worker process"),
    "worker_shutting_down": (differs, "sent in each worker process"),
    "worker_shutdown": (differs, "sent in each worker process"),
    "user_preload_options": (attention, "sent by Celery's command only, and workers are started by Dramatiq's"),
    "eventlet_pool_started": (attention, _NO_POOL),
    "eventlet_pool_preshutdown": (attention, _NO_POOL),
    "eventlet_pool_postshutdown": (attention, _NO_POOL),
    "eventlet_pool_apply": (attention, _NO_POOL),
}

_SAME = {
    "beat": "sent by `celery beat`, which stays",
    "publish": "sent by the producer, which stays",
    "task": "sent at the same place, with the same arguments",
}


@dataclass(frozen=True)
class Receiver:
    """A function that listens to a signal."""

    signal: str
    function: Any

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{getattr(self.function, '__qualname__', type(self.function).__name__)}"

    @property
    def where(self) -> str | None:
        return where_is(self.function)

    def finding(self) -> Finding:
        level, what = _DIFFERENT.get(self.signal, (same, _SAME[_kind(self.signal)]))
        return level(f"{self.signal} -> {self.name}", what, self.where)


def receivers() -> Iterator[Receiver]:
    """Everything that listens to Celery's signals, but for what Celery itself has connected."""
    for name in sorted(vars(signals)):
        signal = getattr(signals, name)
        if not isinstance(signal, Signal):
            continue
        for _, reference in signal.receivers or ():
            function = reference() if isinstance(reference, weakref.ReferenceType) else reference
            if function is not None and hasattr(
                function, "_dispatch_uid"
            ):  # Celery's own, around one that is connected with retry=True
                function = inspect.getclosurevars(function).nonlocals.get("retry_fun", function)
            if function is not None and not _is_celerys(function):
                yield Receiver(name, function)


def where_is(function: Any) -> str | None:
    """`file:line` of a function; None for what has no source."""
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):
        return None


def _is_celerys(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] in ("celery", "kombu")


def _kind(signal: str) -> str:
    if signal.startswith("beat_"):
        return "beat"
    return "publish" if signal.endswith("_publish") or signal == "task_sent" else "task"
