"""The Celery adapter: a Celery app's tasks on the workers of this package, with one setting changed.

    app = Celery("proj", broker="asyncworker://", backend="asyncworker://")

    ASYNCWORKER_CELERY_APP=proj.app:app dramatiq asyncworker.actors

Nothing of Celery is re-implemented: its apps, tasks, canvas, signals, results and its tracer stay. What carries and
runs its messages is ours: a transport of kombu's makes each Celery message one Dramatiq message, and one actor hands
that to Celery's tracer.
"""

from __future__ import annotations

import importlib.util

#: What has to be installed beside this package.
EXTRA = "asyncworker[celery]"

if importlib.util.find_spec("celery") is None:
    raise ModuleNotFoundError(
        f"asyncworker.celery needs Celery, which is not installed: pip install '{EXTRA}'", name="celery"
    )
