"""The hooks that stand for Celery's signals fire in their order, in a real worker process."""

from __future__ import annotations

import time

import pytest
from dramatiq import Message

from tests.waiting import wait_until
from tests.workers import Deployment

pytestmark = pytest.mark.needs_browser

#: Celery's signal to the line that the witness writes for its hook.
SIGNALS = {
    "worker_process_init": "after_process_boot",
    "worker_ready": "after_worker_boot",
    "before_task_publish": "before_enqueue hooks.once_failing",
    "after_task_publish": "after_enqueue hooks.once_failing",
    "task_received": "after_receive_message hooks.once_failing",
    "task_prerun": "before_process_message hooks.once_failing",
    "task_failure": "after_process_message(RuntimeError) hooks.once_failing",
    "task_retry": "after_retry_message(RuntimeError) hooks.once_failing",
    "task_success": "after_process_message(NoneType) hooks.once_failing",
    "worker_shutting_down": "before_worker_shutdown",
    "worker_process_shutdown": "after_worker_shutdown",
}


def test_the_hooks_fire_in_the_order_of_celerys_signals(deployment: Deployment) -> None:
    lines = observed(deployment, deployment.send("hooks.publishing"), SIGNALS["task_success"])
    order = [
        "worker_process_init",
        "worker_ready",
        "before_task_publish",
        "after_task_publish",
        "task_received",
        "task_prerun",
        "task_failure",
        "task_retry",
        "task_success",
        "worker_shutting_down",
        "worker_process_shutdown",
    ]
    assert [signal for signal, _ in sorted(first_seen(lines).items(), key=lambda item: item[1])] == order
    # The attempt and its retry: task_prerun and task_postrun come once for each.
    assert lines.count(SIGNALS["task_prerun"]) == 2
    assert lines.count(SIGNALS["task_received"]) >= 2


def test_a_message_that_is_given_up_fires_the_hook_of_task_failure_last(deployment: Deployment) -> None:
    lines = observed(deployment, deployment.send("hooks.once_failing", "always"), "after_nack hooks.once_failing")
    mine = [line for line in lines if "once_failing" in line]
    assert mine[-2:] == [SIGNALS["task_failure"], "after_nack hooks.once_failing"]
    assert mine.count(SIGNALS["task_retry"]) == 1


def test_a_message_too_old_fires_the_hook_of_task_revoked_and_no_attempt_begins(deployment: Deployment) -> None:
    old = int(time.time() * 1000) - 120_000
    message = Message("default", "hooks.once_failing", ("once",), {}, {}, message_timestamp=old)
    deployment.broker.enqueue(message)
    lines = observed(deployment, message, "after_skip_message hooks.once_failing")
    assert SIGNALS["task_success"] not in lines
    assert deployment.rows(message) == []


def observed(deployment: Deployment, message: Message[object], until: str) -> list[str]:
    """What the witness wrote in the life of a worker process that is stopped after the line `until`."""
    file = deployment.directory / "hooks.txt"
    with deployment.worker("-p", "1", "-t", "1", environment={"HOOKS_FILE": str(file)}) as worker:
        wait_until(lambda: file.exists() and until in file.read_text().splitlines(), until, timeout_ms=40_000)
        assert worker.ready().stop() == 0
    return file.read_text().splitlines()


def first_seen(lines: list[str]) -> dict[str, int]:
    return {signal: lines.index(line) for signal, line in SIGNALS.items()}
