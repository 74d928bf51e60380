"""What Celery's pools do, done by our worker: limits, revokes, rates, priorities, control, events, lost workers."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import Celery
from dramatiq import Message

from asyncworker import cancel
from asyncworker.middleware import ledger_of
from tests.celery.sides import HOME, Side, begun, names, our_side, result, send
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment


@pytest.fixture(scope="module")
def side(deployment: Deployment) -> Iterator[Side]:
    """One worker process with four threads, and actors beside its tasks; it is named in no setting."""
    with our_side(
        deployment, ASYNCWORKER_CELERY_APP="", ASYNCWORKER_ACTORS="native", ASYNCWORKER_CELERY_THREADS="4"
    ) as side:
        side.worker.ready()
        yield side
        assert side.worker.stop() == 0


# --- async tasks


def test_async_tasks_have_their_request_wherever_their_code_runs(app: Celery, side: Side) -> None:
    assert result(send(app, "aio", 7)) == [7, True, "facts.aio"]
    assert result(send(app, "aio_calls")) == [1, 3, True]
    assert result(send(app, "calls_aio")) == 7


def test_async_tasks_are_retried_as_others_are(app: Celery, side: Side) -> None:
    sent, failing = send(app, "aio_retry"), send(app, "aio_autoretry")
    assert result(sent) == 2
    assert repr(result(failing)) == "KeyError('again')"
    assert names(side, sent).count("task_postrun(RETRY)") == 2
    assert names(side, failing).count("BODY") == 2


def test_time_limits_of_async_tasks_are_raised_where_they_wait_and_their_cleanup_ends(app: Celery, side: Side) -> None:
    soft, hard = send(app, "aio_soft"), send(app, "aio_hard")
    assert result(soft) == [[], 0]
    assert repr(result(hard)) == "TimeLimitExceeded(0.3)"
    ending = ["note", "Task.on_failure(TimeLimitExceeded)", "task_failure", "Task.after_return(FAILURE)"]
    wait_until(lambda: names(side, hard)[4:] == [*ending, "task_postrun(FAILURE)"], "the order of its end")


def test_the_ledger_says_how_a_task_has_failed(app: Celery, deployment: Deployment, side: Side) -> None:
    sent = {each: send(app, each) for each in ("boom", "aio_hard", "ok")}
    for each in sent.values():
        result(each)

    def outcomes() -> dict[str, list[str]]:
        rows = {each: ledger_of(deployment.broker).rows(of.id) for each, of in sent.items()}
        return {each: [str(row.outcome) for row in of] for each, of in rows.items()}

    expected = {"boom": ["failed"], "aio_hard": ["timed_out"], "ok": ["failed"]}  # an argument is missing
    wait_until(lambda: outcomes() == expected, "the rows of all")
    for each, of in sent.items():
        # By that name sessions tell their steps apart, too: all these messages are for one actor.
        assert {row.actor for row in ledger_of(deployment.broker).rows(of.id)} == {f"facts.{each}"}


# --- revokes

#: What a client may see of a terminated task; Celery 5.6 stores one reason after the other.
TERMINATED = {"TaskRevokedError('terminated')"} | (
    {"TaskRevokedError('revoked')"} if celery.VERSION < (5, 7) else set()
)


@pytest.mark.parametrize("task", ["sleeper", "aio_sleeper"])
def test_a_running_task_is_terminated_and_its_worker_goes_on(app: Celery, side: Side, task: str) -> None:
    sent = begun(side, send(app, task, *([30] if task == "sleeper" else [])))
    active = wait_until(lambda: app.control.inspect(timeout=1, limit=1).active(), "an answer")
    assert sent.id in {each["id"] for tasks in active.values() for each in tasks}
    app.control.revoke(sent.id, terminate=True)
    assert repr(result(sent)) in TERMINATED
    wait_until(lambda: "task_postrun(IGNORED)" in names(side, sent), "its body has ended")
    wait_until(lambda: "task_revoked([True, False])" in names(side, sent), "Celery was told")
    assert result(send(app, "add", 1, 2)) == 3


def test_a_revoked_task_does_not_begin(app: Celery, side: Side) -> None:
    sent = send(app, "add", 1, 2, countdown=4)
    scheduled = wait_until(lambda: app.control.inspect(timeout=1, limit=1).scheduled(), "an answer")
    assert [each["request"]["name"] for tasks in scheduled.values() for each in tasks] == ["facts.add"]
    app.control.revoke(sent.id)
    assert repr(result(sent)) == "TaskRevokedError('revoked')"
    wait_until(lambda: "task_revoked([False, False])" in names(side, sent), "it was dropped")
    assert "BODY" not in names(side, sent)


def test_a_task_that_is_cancelled_by_our_command_is_revoked(app: Celery, deployment: Deployment, side: Side) -> None:
    """Where its app is, and so its results, is known to the worker alone."""
    sent = send(app, "add", 1, 2, countdown=100)
    assert cancel(sent.id, broker=deployment.broker).found == "delayed"
    assert repr(result(sent)) == "TaskRevokedError('revoked')"
    wait_until(lambda: "task_revoked([False, False])" in names(side, sent), "Celery was told")
    assert "BODY" not in names(side, sent)
    wait_until(lambda: cancel(sent.id, broker=deployment.broker).found == "ended", "it is gone")
    running = begun(side, send(app, "sleeper", 30))
    assert cancel(running.id, broker=deployment.broker).found == "running"
    assert repr(result(running)) == "TaskRevokedError('terminated')"
    wait_until(lambda: "task_revoked([True, False])" in names(side, running), "Celery was told")


# --- rates and limits


def test_a_rate_limit_spaces_the_tasks_of_a_kind(app: Celery, side: Side) -> None:
    sent_at = time.time()
    sent = [send(app, "limited") for _ in range(9)]
    for each in sent:
        result(each)
    began = sorted(each["at"] for each in side.records() if each["what"] == "BEGAN")
    assert len(began) == 9
    assert 1.8 < began[-1] - sent_at < 2.5 + BUSY_S
    assert statistics.median(after - before for before, after in itertools.pairwise(began)) > 0.1


def test_remote_control_changes_rates_and_limits_and_refuses_what_it_cannot_do(
    app: Celery, deployment: Deployment, side: Side
) -> None:
    def ask(command: str, **arguments: Any) -> Any:
        (answer,) = app.control.broadcast(command, arguments=arguments, reply=True, timeout=30, limit=1)
        return next(iter(answer.values()))

    assert ask("ping") == {"ok": "pong"}
    assert ask("rate_limit", task_name="facts.limited", rate_limit="100/s") == {"ok": "new rate limit set successfully"}
    assert deployment.broker.limiter.rates() == {"facts.limited|celery": "100/s"}, "all workers know, also later ones"
    assert ask("time_limit", task_name="facts.sleeper", hard=0.3, soft=None)["ok"]
    assert repr(result(send(app, "sleeper", 20))) == "TimeLimitExceeded(0.3)"
    assert ask("time_limit", task_name="facts.sleeper", hard=None, soft=None)["ok"]
    assert "facts.aio" in ask("registered")
    queues = {each["name"]: each for each in ask("active_queues")}
    assert set(queues) == {"facts", "mail:high"}
    assert all(
        {"exchange", "routing_key", "durable", "exclusive", "auto_delete"} <= set(each) for each in queues.values()
    )
    assert ask("stats")["pool"]["implementation"] == "asyncworker.celery.pool:Pool"
    assert "asyncworker up" in ask("pool_restart")["error"]
    assert "task_queues" in ask("add_consumer", queue="x")["error"]


def test_what_a_project_has_added_to_celerys_consumer_is_used(app: Celery, side: Side) -> None:
    sent = send(app, "by_strategy")
    result(sent)
    assert names(side, sent)[:2] == ["STRATEGY", "task_received"]
    (step,) = (each for each in side.records() if each["what"] == "STEP")
    assert app.control.broadcast("greet", reply=True, timeout=30, limit=1) == [
        {step["hostname"]: f"hello from {step['hostname']}"}
    ]


# --- events


def test_events_show_tasks_and_workers(app: Celery, side: Side) -> None:
    seen: list[tuple[str, str | None]] = []

    def see(connection: Any, what: tuple[str, str | None]) -> None:
        ends = time.monotonic() + 20
        while what not in seen and time.monotonic() < ends:
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=1)

    app.control.enable_events(reply=True, timeout=30, limit=1)
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": lambda e: seen.append((e["type"], e.get("uuid")))})
        with receiver.consumer_context() as (own, *_):
            see(own, ("worker-heartbeat", None))  # from here on it listens
            sent = send(app, "add", 1, 2)
            see(own, ("task-succeeded", sent.id))
    assert [kind for kind, of_task in seen if of_task == sent.id] == ["task-received", "task-started", "task-succeeded"]


# --- beat


def test_beat_sends_what_is_due(side: Side, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "beat_tasks:app", "beat", "--pidfile", ""]
    with subprocess.Popen(
        [*command, "--schedule", str(tmp_path / "schedule")],
        cwd=HOME,
        env=side.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as beat:
        try:
            is_due = {"what": "ORDER", "number": "by beat"}
            wait_until(lambda: any(is_due.items() <= each.items() for each in side.records()), "what was due has run")
        finally:
            beat.terminate()  # its exit code is 1 when that comes while it writes its schedule


# --- actors beside the tasks


def test_actors_send_the_signals_of_tasks(deployment: Deployment, side: Side) -> None:
    good, bad = deployment.send("native", False), deployment.send("native", True)

    def told(message: Message[Any]) -> list[str]:
        found = [each for each in side.records() if each["id"] == message.message_id]
        return [f"{each['what']}({each['of']})" if "of" in each else each["what"] for each in found]

    once = ["task_received", "task_prerun", "task_success", "task_postrun(SUCCESS)"]
    wait_until(lambda: told(good) == once, f"the signals of {good}")
    retried = ["task_received", "task_prerun", "task_retry", "task_postrun(RETRY)"]
    failed = ["task_received", "task_prerun", "task_failure", "task_postrun(FAILURE)"]
    wait_until(lambda: len(told(bad)) >= 8, f"the signals of {bad}")
    assert told(bad) == [*retried, *failed]
