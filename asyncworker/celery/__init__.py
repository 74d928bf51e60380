"""Celery tasks on the worker's browser; needs the extra `asyncworker[celery]`.

    from asyncworker.celery import browser, session

`browser` and `session` are synchronous faces of the one browser of the worker process, for the bodies of tasks, and
`expect` makes Playwright's assertions about what they give. `install(app)` makes them, and `async def` tasks,
available in a worker of Celery's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncworker.celery.installation import install
    from asyncworker.celery.sessions import browser, session
    from asyncworker.sync_face import expect

__all__ = ["browser", "expect", "install", "session"]

#: Where each name is; imported on use.
_HOMES = {
    "browser": "asyncworker.celery.sessions",
    "expect": "asyncworker.sync_face",
    "install": "asyncworker.celery.installation",
    "session": "asyncworker.celery.sessions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("celery", "kombu", "billiard"):
            raise
        raise ModuleNotFoundError(
            f"asyncworker.celery needs {error.name}, which is not installed: `pip install asyncworker[celery]`",
            name=error.name,
        ) from error
