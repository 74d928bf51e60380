"""Plugin for Celery's own integration tests: what is their worker; see tests/celery/own_suite.py."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery.contrib.testing import worker as testing
from celery.result import _set_task_join_will_block

SIDE = os.environ["SUITE_SIDE"]  # noqa: TID251 -- no settings of ours
REPORT = os.environ.get("SUITE_REPORT")  # noqa: TID251


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: run again by pytest-rerunfailures, which is not here")
    if SIDE != "real":
        testing.start_worker = none if SIDE == "ours" else inside


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Their own limits are of five minutes, six times over."""
    for item in items:
        item.add_marker(pytest.mark.timeout(config.getoption("timeout")), append=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if REPORT and (report.when == "call" or not report.passed):
        why = "" if report.passed else str(report.longrepr).strip().rpartition("\n")[2]
        line = json.dumps([report.nodeid, report.outcome, why])
        with Path(REPORT).open("a") as file:
            file.write(line + "\n")


@contextmanager
def none(app: Any, **_: Any) -> Iterator[Any]:
    """It runs already."""
    yield types.SimpleNamespace(app=app)


@contextmanager
def inside(app: Any, **_: Any) -> Iterator[Any]:
    """Our worker, in this process."""
    from dramatiq import Worker

    module = types.ModuleType("suite_app")
    module.app = app  # type: ignore[attr-defined]
    sys.modules["suite_app"] = module
    testing.setup_app_for_worker(app, "info", None)
    from asyncworker.actors import broker

    broker.emit_after("process_boot")
    worker = Worker(broker, worker_threads=1)
    worker.start()
    _set_task_join_will_block(False)
    try:
        yield types.SimpleNamespace(app=app)
    finally:
        worker.stop()
