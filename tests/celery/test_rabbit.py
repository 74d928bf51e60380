"""Celery tasks with RabbitMQ as the deployment's broker; results, remote control and events are in its store."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.celery.sides import Side, our_side
from tests.conftest import missing
from tests.rabbitmq import RabbitDeployment, rabbit_server, why_missing
from tests.waiting import wait_until

EXPECTED = {
    "succeed": "{'sum': 3}",
    "raise": "ValueError('boom')",
    "retry_countdown0": "'done after 2'",
    "countdown": "{'sum': 3}",
    "chain": "113",
    "chord": "6",
    "reject_requeue": "0",
    "unknown_task": "Task of kind 'no.such.task' never registered, please make sure it's imported.",
    "routed": "'mail:high'",
}

#: So often a task of these ends in a worker, in all.
ENDINGS = 1 + 1 + 3 + 1 + 3 + 4 + 2 + 1


@pytest.fixture(scope="module")
def rabbit(module_state_dir: Path) -> Iterator[RabbitDeployment]:
    reason, is_failure = why_missing()
    if reason is not None:
        missing(reason) if is_failure else pytest.skip(reason)
    with rabbit_server() as server:
        server.start()
        deployment = RabbitDeployment(module_state_dir, server.url, heartbeat_timeout_ms=2_000)
        yield deployment
        deployment.broker.close()


def test_tasks_run_and_are_lost_as_on_redis(rabbit: RabbitDeployment) -> None:
    own = {"ASYNCWORKER_CELERY_APP": "more_tasks:app", "ASYNCWORKER_CELERY_THREADS": "2"}
    with our_side(rabbit, "-p", "1", **own) as side, side.client(*EXPECTED, "lost_early", "lost_late_reject"):
        side.worker.ready()
        sent = side.sent()
        side.wait_for("RUNS", times=2)
        os.kill(side.worker.workers[0], signal.SIGKILL)
        assert side.worker.command.wait(20) != 0  # Dramatiq's master ends with its worker
        with our_side(rabbit, "-p", "1", **own):
            side.wait_for("task_postrun", times=ENDINGS)
            wait_until(lambda: any(each["what"] == "task_unknown" for each in side.records()), "an unknown task")
            ids = {name: of[-1] for name, of in sent.items()}
            for name in ("lost_early", "lost_late_reject"):
                wait_until(lambda name=name: ended(side, ids[name]), f"{name} has ended")  # type: ignore[misc]
            results = {name: told[-1]["result"] for name, told in side.results().items()}
    assert results.pop("lost_early").startswith("WorkerLostError")
    assert results.pop("lost_late_reject") == "[True, 0]"
    assert results == EXPECTED


def ended(side: Side, task_id: str) -> bool:
    ends = ("task_failure", "task_success")
    return any(each["what"] in ends and each["id"] == task_id for each in side.records())
