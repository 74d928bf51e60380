"""The tasks of Celery's own integration tests, for a worker of ours; see tests/celery/own_suite.py."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("celery.tests", broker="asyncworker://", backend=os.environ["TEST_BACKEND"])  # noqa: TID251 -- no settings
app.conf.result_extended = True
app.set_default()

import celery.contrib.testing.tasks  # noqa: E402, F401 -- its ping
from t.integration.tasks import ClassBasedAutoRetryTask  # noqa: E402 -- shared tasks, all of them

app.register_task(ClassBasedAutoRetryTask())
