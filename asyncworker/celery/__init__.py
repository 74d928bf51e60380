"""The Celery adapter: a Celery app's tasks on the workers of this package, with one setting changed.

    app = Celery("proj", broker="asyncworker://", backend="asyncworker://")

    ASYNCWORKER_CELERY_APP=proj.app:app dramatiq asyncworker.actors

Nothing of Celery is re-implemented: its apps, tasks, canvas, signals, results and its tracer stay. What carries and
runs its messages is ours: a transport of kombu's makes each Celery message one Dramatiq message, and one actor hands
that to Celery's tracer.

`browser` and `session` are synchronous faces of the one browser of the worker process, for the bodies of tasks, and
`expect` makes Playwright's assertions about what they give. `install(app)` makes them, and `async def` tasks,
available in a worker of Celery's own.
"""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncworker.celery.installation import install
    from asyncworker.celery.sessions import browser, session
    from asyncworker.sync_face import expect

#: What has to be installed beside this package.
EXTRA = "asyncworker[celery]"

if importlib.util.find_spec("celery") is None:
    raise ModuleNotFoundError(
        f"asyncworker.celery needs Celery, which is not installed: pip install '{EXTRA}'", name="celery"
    )

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
    return getattr(import_module(_HOMES[name]), name)
