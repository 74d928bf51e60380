"""Worker processes that die under tasks, or have to be replaced: each task gets what Celery 5.7 gives it."""

from __future__ import annotations

import os
import signal
import time

import celery
import pytest
from celery import Celery, chord

from asyncworker.watchdog import EXIT_REPLACED
from tests.celery.sides import HOME, Side, begun, names, our_side, result, send
from tests.waiting import BUSY_S
from tests.workers import Deployment

APP = "more_tasks:app"


def test_a_lost_worker_gives_each_task_what_its_acknowledgement_says(app: Celery, deployment: Deployment) -> None:
    own = {
        "ASYNCWORKER_CELERY_APP": APP,
        "ASYNCWORKER_CELERY_THREADS": "4",
        "RECORD": str(deployment.directory / "lost"),
    }
    environment = {"BROKER": "asyncworker://", "BACKEND": "asyncworker://"} | own
    with deployment.up("-p", "1", cwd=HOME, environment=environment) as running:
        side = Side({}, deployment.directory / "lost", running)
        running.ready()
        tasks = ("lost_early", "lost_late", "lost_late_reject", "lost_late_retry")
        sent = {task: begun(side, send(app, task)) for task in tasks}
        killed = time.monotonic()
        os.kill(running.workers[0], signal.SIGKILL)
        results = {task: repr(result(each)) for task, each in sent.items()}
        took_s = time.monotonic() - killed
        assert results["lost_early"].startswith("WorkerLostError")
        assert results["lost_late"].startswith("WorkerLostError")
        assert results["lost_late_reject"] == "[True, 0]"
        runs = {task: names(side, each).count("BODY") for task, each in sent.items()}
        assert runs | {"lost_late_retry": 2} == dict(zip(tasks, (1, 1, 2, 2), strict=True))
        assert names(side, sent["lost_early"])[-1] == "task_failure"
        if celery.VERSION >= (5, 7):  # the first that has retry_on_worker_lost
            assert results["lost_late_retry"] == "[False, 1]"
            assert runs["lost_late_retry"] == 2
            assert "Task.on_retry(WorkerLostError" in " ".join(names(side, sent["lost_late_retry"]))
        assert took_s < 10 + BUSY_S

        stuck, terminated = send(app, "stuck"), begun(side, send(app, "stuck_for_long"))
        app.control.revoke(terminated.id, terminate=True)
        assert repr(result(stuck)) == "TimeLimitExceeded(0.3)"
        running.wait_for_log(f"died: exit code {EXIT_REPLACED}")
        assert result(send(app, "add", 2, 3)) == 5
        assert [names(side, each).count("BODY") for each in (stuck, terminated)] == [1, 1]
        assert (stuck.state, terminated.state) == ("FAILURE", "REVOKED")
        assert names(side, stuck).count("task_failure") == (celery.VERSION >= (5, 7))  # before, Celery told no one


@pytest.mark.long
def test_the_body_of_a_chord_of_a_thousand_runs_once(app: Celery, deployment: Deployment) -> None:
    """As many members as end at once in two processes."""
    with our_side(deployment, "-p", "2", "-t", "1", name="chord") as side:
        side.worker.ready()
        one, tsum = (app.signature(f"facts.{name}") for name in ("typed", "tsum"))
        sent = chord(one.clone((number, 0)) for number in range(1_000))(tsum)
        assert sent.get(timeout=60) == 1_000
        assert side.worker.stop() == 0
        assert names(side, sent).count("BODY") == 1
        ended = [each["id"] for each in side.records() if each["what"] == "task_success"]
        assert len(ended) == len(set(ended)) == 1_001
