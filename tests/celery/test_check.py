"""`asyncworker celery check`: what it says of apps, and its exit codes; nothing of an app is run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncworker.cli import app as command_line
from asyncworker.errors import ConfigurationError
from asyncworker.settings import child_environment
from tests.readme import ROOT

#: An app with everything that is no mere task.
SHOP = '''
"""Everything that needs a word."""

from celery import Celery, bootsteps, shared_task, signals
from celery.worker.control import control_command
from kombu import Queue
from kombu.common import Broadcast
from playwright.sync_api import sync_playwright

from shop.pages import browser

app = Celery("shop", broker="redis://127.0.0.1:1/0", backend="redis://127.0.0.1:1/0")
app.conf.update(
    worker_pool="threads",
    worker_concurrency=4,
    worker_max_tasks_per_child=20,
    task_soft_time_limit=30,
    task_queues=[Broadcast("everyone"), Queue("dead", queue_arguments={"x-dead-letter-exchange": "x"})],
)


class Step(bootsteps.StartStopStep):
    pass


app.steps["consumer"].add(Step)


@control_command()
def greet(state):
    return "hello"


@app.task(rate_limit="10/m", acks_late=True, reject_on_worker_lost=True)
def limited():
    raise AssertionError("a check runs nothing")


@app.task(time_limit=60)
async def awaited():
    pass


@shared_task(bind=True, autoretry_for=(ValueError,), max_retries=5)
def alone(self):
    with sync_playwright() as playwright:
        return playwright.chromium.launch().version


@signals.worker_init.connect
def too_early(**kwargs):
    sync_playwright().start()


@signals.worker_process_init.connect(weak=False)
def in_time(**kwargs):
    sync_playwright().start()


@signals.task_success.connect(retry=True)
def counted(sender=None, **kwargs):
    pass


@signals.eventlet_pool_started.connect
def green(**kwargs):
    pass
'''

PAGES = """
from playwright.sync_api import sync_playwright

if False:
    browser = sync_playwright().start().chromium.launch()
browser = None


def page():
    return sync_playwright().start().chromium.launch().new_page()
"""


def check(name: str, home: Path, *, code: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-B", "-m", "asyncworker", "celery", "check", name, "--json"],
        cwd=home,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def said(findings: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(each["level"], each["subject"]) for each in findings}


def test_the_example_runs_as_it_is() -> None:
    report = json.loads(check("tasks:app", ROOT / "examples" / "celery_before", code=0).stdout)
    assert report["runs_as_it_is"] is True
    tasks = {task["name"]: task for task in report["tasks"]}
    assert {name: task["options"] for name, task in tasks.items()} == {
        "tasks.price": {"default_retry_delay": 1, "time_limit": 60},
        "tasks.title": {},
        "tasks.wander": {"autoretry_for": "Error", "retry_backoff": True},
    }
    assert {name: task["bind"] for name, task in tasks.items()} == {
        "tasks.price": True,
        "tasks.title": True,
        "tasks.wander": False,
    }
    assert said(report["sources"]) == {("same", "sync_playwright()")}


def test_what_needs_a_decision_is_named_with_its_place_and_ends_with_exit_code_1(tmp_path: Path) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "work.py").write_text(SHOP)
    (package / "pages.py").write_text(PAGES)
    report = json.loads(check("shop.work:app", tmp_path, code=1).stdout)
    tasks = {task["name"]: task for task in report["tasks"]}
    assert {name: said(task["findings"]) for name, task in tasks.items()} == {
        "shop.work.alone": {("differs", "soft_time_limit")},
        "shop.work.awaited": {
            ("differs", "async def"),
            ("differs", "soft_time_limit and time_limit"),
            ("differs", "time_limit"),
        },
        "shop.work.limited": {("differs", "rate_limit"), ("same", "acks_late"), ("differs", "soft_time_limit")},
    }
    assert tasks["shop.work.alone"]["options"] == {
        "max_retries": 5,
        "autoretry_for": "ValueError",
        "soft_time_limit": 30,
    }
    assert said(report["settings"]) == {
        ("same", "bootstep Step"),
        ("same", "control command greet"),
        ("attention", "queue dead"),
        ("attention", "queue everyone"),
        ("differs", "broker_url"),
        ("differs", "worker_concurrency"),
        ("differs", "worker_max_tasks_per_child"),
        ("differs", "worker_pool"),
        ("same", "result_backend"),
    }
    assert said(report["signals"]) == {
        ("attention", "eventlet_pool_started -> shop.work.green"),
        ("differs", "worker_init -> shop.work.too_early"),
        ("differs", "worker_process_init -> shop.work.in_time"),
        ("same", "task_success -> shop.work.counted"),
    }
    lines = {text: number for number, text in enumerate(SHOP.splitlines(), start=1)}
    places = {each["where"].partition("shop/")[2]: each["level"] for each in report["sources"]}
    assert places == {
        "pages.py:5": "attention",  # at import
        "pages.py:10": "differs",  # by whoever calls it first
        f"work.py:{lines['def too_early(**kwargs):'] + 1}": "attention",
        f"work.py:{lines['def in_time(**kwargs):'] + 1}": "same",
        f"work.py:{lines['def alone(self):'] + 1}": "same",
    }
    assert {each.name for each in tmp_path.rglob("*")} == {"shop", "__init__.py", "work.py", "pages.py"}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("app = 3", "is no Celery app but 3"),
    ],
)
def test_what_cannot_be_loaded_ends_with_its_reason_and_exit_code_2(tmp_path: Path, source: str, reason: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    done = check("broken:app", tmp_path, code=2)
    assert reason in done.stderr
    assert done.stdout == ""


def test_without_celery_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "celery" else real(name, *more)
    )
    result = CliRunner().invoke(command_line, ["celery", "check", "tasks:app"])
    assert isinstance(result.exception, ConfigurationError)
    assert "asyncworker[celery]" in str(result.exception)
