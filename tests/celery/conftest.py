"""A deployment for all tests of a module."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from asyncworker import embedded
from tests.waiting import BUSY_S
from tests.workers import Deployment


@pytest.fixture(scope="module")
def deployment(module_state_dir: Path) -> Iterator[Deployment]:
    deployment = Deployment(
        module_state_dir, heartbeat_timeout_ms=int(BUSY_S * 1000), cleanup_timeout_ms=1_500, close_timeout_ms=500
    )
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


@pytest.fixture(scope="module")
def app(deployment: Deployment) -> Iterator[Celery]:
    """A producer that imports no task, and names the store by a URL."""
    url = f"asyncworker+unix://{embedded.ensure(deployment.settings.state_dir)}"
    app = Celery("facts", broker=url, backend=url, set_as_current=False)
    app.conf.task_default_queue = "facts"
    yield app
    gc.collect()  # a result that is collected when the store has gone complains
    app.backend.result_consumer.stop()
    app.close()
