"""RabbitMQ as the broker: the real server, the real worker command, kills and outages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from asyncworker import embedded
from asyncworker.errors import BrokerUnavailable
from asyncworker.ledger import Outcome
from tests import operating
from tests.conftest import missing
from tests.rabbitmq import PASSWORD, RabbitDeployment, RabbitServer, is_installed, rabbit_server
from tests.site import BehaviourSite
from tests.waiting import wait_until
from tests.workers import HOME, Deployment

#: As plain Dramatiq writes a message; some of it is missing in each of these.
NO_MESSAGES = [b"\xff\x00 no text", b"[]", b'{"actor_name": "add"}', b'"text"', b"7" * 5_000]


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RabbitServer]:
    """One for all tests of a process, each of which gets a virtual host of it."""
    if not is_installed():
        missing("no RabbitMQ server on this machine: `make rabbitmq` gets one")
    with rabbit_server() as server:
        server.start()
        yield server


@pytest.fixture
def deployment(shared_server: RabbitServer, state_dir: Path) -> Iterator[RabbitDeployment]:
    with deployed(state_dir, shared_server.new_url()) as deployment:
        yield deployment


@contextlib.contextmanager
def deployed(directory: Path, url: str, **settings: object) -> Iterator[RabbitDeployment]:
    deployment = RabbitDeployment(directory, url, **settings)
    try:
        yield deployment
    finally:
        deployment.broker.close()


@pytest.mark.needs_browser
def test_an_attempt_that_fails_is_run_again_with_its_seed_and_each_has_its_row(
    deployment: RabbitDeployment, site: BehaviourSite
) -> None:
    message = deployment.send("probe.visit", site.list_url, fail=1)
    with deployment.worker() as worker:
        result = deployment.result(message)
        assert worker.stop() == 0
    first, second = deployment.rows(message)
    assert (first.outcome, second.outcome) == (Outcome.failed, Outcome.succeeded)
    assert first.seed == second.seed == result["seed"]
    assert result["attempt"] == 2
    assert deployment.waiting("default.XQ") == 0


def test_what_is_given_up_lies_in_the_dead_letters_after_its_retries(deployment: RabbitDeployment) -> None:
    message = deployment.send("need", str(deployment.directory / "none"), queue="held", seed=7)
    with deployment.worker("-p", "1", "-t", "2", "-Q", "held"):
        wait_until(lambda: deployment.waiting("held.XQ") == 1, "a dead letter")
    body = json.loads(deployment.take("held.XQ") or b"")
    assert body["message_id"] == message.message_id
    assert (body["kwargs"]["seed"], body["options"]["retries"]) == (7, 1)
    assert [row.outcome for row in deployment.rows(message)] == [Outcome.failed] * 2


def test_a_worker_that_is_killed_loses_nothing_and_the_ledger_numbers_the_attempt_on(
    deployment: RabbitDeployment,
) -> None:
    gate = deployment.directory / "gate"
    message = deployment.send("hold", str(gate), queue="held")
    with deployment.worker("-p", "1", "-t", "2", "-Q", "held") as first:
        wait_until(lambda: deployment.rows(message), "the attempt of a second has its row")
        with deployment.worker("-p", "1", "-t", "2", "-Q", "held") as second:
            second.ready()
            os.kill(first.workers[0], signal.SIGKILL)
            wait_until(lambda: len(deployment.rows(message)) == 2, "the other worker has it", timeout_ms=10_000)
            gate.touch()
            wait_until(lambda: deployment.rows(message)[1].outcome is Outcome.succeeded, "it is done")
            assert second.stop() == 0
    assert [row.attempt for row in deployment.rows(message)] == [1, 2]
    assert deployment.waiting("held") == 0


def test_a_delayed_message_is_run_when_it_is_due_and_not_before(deployment: RabbitDeployment) -> None:
    with deployment.worker("-p", "1", "-t", "2", "-Q", "plain") as worker:
        worker.ready()
        sent_ms = time.time() * 1000
        message = deployment.send("add", 1, 2, queue="plain", delay=1_500)
        assert deployment.result(message) == 3
        (row,) = wait_until(lambda: deployment.rows(message), "its row")
        assert row.opened_ms - sent_ms >= 1_490


def test_a_body_that_is_no_message_is_rejected_as_it_is_and_the_good_ones_go_on(deployment: RabbitDeployment) -> None:
    deployment.send("add", 0, 0, queue="plain")  # creates the queue
    for body in NO_MESSAGES:
        deployment.put("plain", body)
    good = deployment.send("add", 1, 2, queue="plain")
    with deployment.worker("-p", "1", "-t", "1", "-Q", "plain") as worker:
        worker.ready()
        assert deployment.result(good) == 3
        assert "Restarting consumer" not in worker.log, "what is no message stalls no consumer"
        wait_until(lambda: deployment.waiting("plain.XQ") == len(NO_MESSAGES), "all of them are dead letters")
    assert [deployment.take("plain.XQ") for _ in NO_MESSAGES] == NO_MESSAGES


def test_a_message_that_was_moved_to_another_queue_is_run_there(deployment: RabbitDeployment) -> None:
    moved = deployment.send("add", 1, 2, queue="elsewhere")
    body = deployment.take("elsewhere") or b""
    with deployment.worker("-p", "1", "-t", "1", "-Q", "plain") as worker:
        wait_until(lambda: deployment.waiting("plain.XQ") == 0, "the worker has created its queue")
        deployment.put("plain", body)
        wait_until(lambda: [row.outcome for row in deployment.rows(moved)] == [Outcome.succeeded], "it is done")
        assert worker.stop() == 0
    assert deployment.waiting("plain") == 0


def test_a_worker_that_stops_leaves_what_it_has_not_begun_to_the_others(deployment: RabbitDeployment) -> None:
    gate = deployment.directory / "gate"
    first = deployment.send("hold", str(gate), queue="held")
    with deployment.worker("-p", "1", "-t", "1", "-Q", "held") as stopping:
        wait_until(lambda: deployment.rows(first), "it runs")
        stopping.command.send_signal(signal.SIGTERM)
        stopping.wait_for_log("Shutting down...")
        with deployment.worker("-p", "1", "-t", "1", "-Q", "held"):
            others = [deployment.send("hold", __file__, queue="held") for _ in range(3)]
            for other in others:
                wait_until(lambda other=other: deployment.rows(other), "another worker has run it")  # type: ignore[misc]
            assert deployment.rows(first)[0].outcome is Outcome.running
            gate.touch()
            assert stopping.command.wait(40) == 0
    assert deployment.rows(first)[0].outcome is Outcome.succeeded


def test_the_hook_of_a_received_message_fires(deployment: RabbitDeployment) -> None:
    lines = deployment.directory / "hooks"
    with deployment.worker("-p", "1", "-t", "1", "-Q", "plain", environment={"HOOKS_FILE": str(lines)}) as worker:
        message = deployment.send("add", 1, 2, queue="plain", delay=10)
        assert deployment.result(message) == 3
        assert worker.stop() == 0
    seen = [line for line in lines.read_text().splitlines() if line.endswith(" add") and "enqueue" not in line]
    assert seen == ["after_receive_message add", "before_process_message add", "after_process_message(NoneType) add"]


def test_a_done_message_is_acknowledged_to_no_other_connection_than_its_own(deployment: RabbitDeployment) -> None:
    broker = deployment.broker
    deployment.send("add", 1, 2, queue="plain")
    before = broker.consume("plain", 1, 200)
    message = wait_until(lambda: next(before), "a message")
    before.close()
    after = broker.consume("plain", 1, 200)
    again = wait_until(lambda: next(after), "the same message")
    assert (again.message_id, again._tag) == (message.message_id, message._tag), "so the tag alone does not tell"
    after.ack(message)
    assert next(after) is None
    after.close()
    assert deployment.waiting("plain") == 1, "the worker that has it now has not acknowledged it"


def test_a_fork_sends_by_a_connection_of_its_own(deployment: RabbitDeployment) -> None:
    deployment.send("add", 0, 0, queue="plain")
    if (child := os.fork()) == 0:
        code = 1
        try:
            deployment.send("add", 1, 1, queue="plain")
            deployment.broker.close()
            code = 0
        finally:
            os._exit(code)
    deployment.send("add", 2, 2, queue="plain")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    deployment.send("add", 3, 3, queue="plain")
    wait_until(lambda: deployment.waiting("plain") == 4, "all four")


def test_wrong_credentials_are_refused_at_once_and_shown_nowhere(shared_server: RabbitServer, state_dir: Path) -> None:
    wrong = shared_server.url("v0").replace(PASSWORD, "wr0ng-password")
    with deployed(state_dir, wrong, send_timeout_ms=30_000) as deployment:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable) as caught:
            deployment.send("add", 1, 2, queue="plain")
        assert time.monotonic() - began < 10
        assert caught.value.sent is False
        assert "wr0ng" not in f"{caught.value} {caught.value.url} {caught.getrepr(chain=True, style='short')}"
        ended = operating.run(deployment, "doctor")
        assert "wr0ng" not in ended.stdout + ended.stderr
        assert ended.returncode == 1


def test_the_first_of_several_hosts_that_answers_is_the_broker(shared_server: RabbitServer, state_dir: Path) -> None:
    url = shared_server.new_url()
    closed = shared_server.url("v0", port=1)
    with deployed(state_dir, f"{closed};{url}") as deployment:
        deployment.send("add", 1, 2, queue="plain")
        assert PASSWORD not in deployment.broker.where
    with deployed(state_dir, url) as deployment:
        assert deployment.waiting("plain") == 1


def test_the_commands_know_rabbitmq(deployment: RabbitDeployment) -> None:
    with deployment.worker("-p", "1", "-t", "1", "-Q", "plain"):
        sent = operating.run(deployment, "send", "add", "1", "2", "--wait", cwd=HOME)
        assert (sent.returncode, sent.stdout) == (0, "3\n"), sent.stderr
    for words in (["queues"], ["purge", "plain", "--yes"], ["dead", "list"]):
        refused = operating.run(deployment, *words)
        assert refused.returncode == 2
        assert "rabbitmqctl" in refused.stderr.replace("\n", "")
        assert PASSWORD not in refused.stderr
    examined = operating.run(deployment, "doctor", "--json", cwd=HOME)
    checks = {check["name"]: check for check in json.loads(examined.stdout)["checks"]}
    assert (checks["broker"]["state"], checks["store"]["state"]) == ("ok", "ok"), checks
    assert re.search(r"RabbitMQ \d+\.\d+", checks["broker"]["detail"])
    assert PASSWORD not in examined.stdout
    down = operating.run(deployment, "down")
    assert (down.returncode, "did not start" in down.stderr) == (2, True)


@pytest.fixture
def own_server() -> Iterator[RabbitServer]:
    """One that the test starts, stops and kills."""
    if not is_installed():
        missing("no RabbitMQ server on this machine: `make rabbitmq` gets one")
    with rabbit_server() as server:
        yield server


def test_workers_wait_for_a_server_that_is_away_and_go_on_and_producers_are_told_in_time(
    own_server: RabbitServer, state_dir: Path
) -> None:
    options, soon = ("-p", "1", "-t", "1", "-Q", "plain"), {"dramatiq_restart_delay": "300"}
    with (
        deployed(state_dir, own_server.new_url(), send_timeout_ms=1_500) as deployment,
        deployment.worker(*options, environment=soon) as worker,
    ):
        worker.ready().wait_for_log("Restarting consumer")
        assert refusal(deployment) is False

        own_server.start()
        assert deployment.result(deployment.send("add", 1, 2, queue="plain")) == 3

        own_server.kill()
        away = worker.log.count("connection error")
        worker.wait_for_log("connection error", times=away + 2)
        assert refusal(deployment) is False

        own_server.start()
        assert deployment.result(deployment.send("add", 3, 4, queue="plain")) == 7
        assert len(set(worker.workers)) == 1, "no worker process was replaced"
        assert PASSWORD not in worker.log
        assert worker.stop() == 0


def test_a_producer_waits_for_a_server_that_hangs_no_longer_than_it_wants(
    own_server: RabbitServer, state_dir: Path
) -> None:
    own_server.start()
    with deployed(state_dir, own_server.new_url(), send_timeout_ms=1_000) as deployment:
        deployment.send("add", 0, 0, queue="plain")
        own_server.signal(signal.SIGSTOP)
        assert refusal(deployment) is None, "it went out, and no answer came"
        assert refusal(deployment) is False, "it waited behind the first"
        own_server.signal(signal.SIGCONT)
        deployment.send("add", 1, 1, queue="plain")
        wait_until(lambda: deployment.waiting("plain") == 3, "that of the unknown fate, and the two that were taken")


def refusal(deployment: RabbitDeployment) -> bool | None:
    """Send in vain; returns whether the message may have been sent."""
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        deployment.send("add", 9, 9, queue="plain")
    assert time.monotonic() - began < deployment.settings.send_timeout_ms / 1000 + 0.5
    assert PASSWORD not in str(caught.value)
    return caught.value.sent


def test_a_redis_broker_may_have_its_results_its_ledger_and_its_seed_in_another_store(state_dir: Path) -> None:
    for name in ("broker", "store"):
        (state_dir / name).mkdir()
    try:
        store = embedded.ensure(state_dir / "store")
        deployment = Deployment(state_dir / "broker", store_url=f"unix://{store}")
        message = deployment.send("add", 1, 2, queue="plain")
        with deployment.worker("-p", "1", "-t", "1", "-Q", "plain"):
            assert deployment.result(message) == 3
        wait_until(lambda: deployment.rows(message)[0].outcome is Outcome.succeeded, "its row is closed")
        with redis.Redis(unix_socket_path=str(store)) as client:
            kept = {bytes(key).partition(b":")[0] for key in client.scan_iter()}
        here = {bytes(key).partition(b":")[0] for key in deployment.broker.client.scan_iter()}
        assert here == {b"dramatiq"}
        assert b"asyncworker" in kept
        assert b"dramatiq" not in kept
        deployment.broker.close()
        deployment.broker.client.close()
    finally:
        for name in ("broker", "store"):
            embedded.stop(state_dir / name)
