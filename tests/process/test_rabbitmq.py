"""RabbitMQ as the broker: the real server, the real worker command, kills and outages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dramatiq import Message
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from asyncworker import cancel
from asyncworker.errors import BrokerUnavailable
from asyncworker.ledger import Outcome
from asyncworker.producing import ToSend
from asyncworker.settings import child_environment
from tests import operating
from tests.conftest import missing
from tests.rabbitmq import PASSWORD, RabbitDeployment, RabbitServer, rabbit_server, why_missing
from tests.site import BehaviourSite
from tests.waiting import BUSY_S, wait_until
from tests.workers import HOME, Running

#: As plain Dramatiq writes a message; some of it is missing in each of these.
NO_MESSAGES = [b"\xff\x00 no text", b"[]", b'{"actor_name": "add"}', b'"text"', b"7" * 5_000]


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    """One for all tests of a process: it takes 8 s of a core to start."""
    reason, is_failure = why_missing()
    if reason is not None:
        missing(reason) if is_failure else pytest.skip(reason)
    with rabbit_server() as server:
        server.start()
        yield server


@pytest.fixture(scope="module")
def deployment(server: RabbitServer, module_state_dir: Path) -> Iterator[RabbitDeployment]:
    with deployed(module_state_dir, server.url) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def worker(deployment: RabbitDeployment) -> Iterator[Running]:
    """A worker of the queue `plain`, whose hooks are written down."""
    hooks = {"HOOKS_FILE": str(deployment.directory / "hooks"), "dramatiq_restart_delay": "300"}
    with deployment.worker("-p", "1", "-t", "2", "-Q", "plain", environment=hooks) as worker:
        worker.ready()
        wait_until(lambda: deployment.waiting("plain.XQ") == 0, "the worker has created its queue")
        yield worker
        assert worker.stop() == 0


@contextlib.contextmanager
def deployed(directory: Path, url: str, **settings: object) -> Iterator[RabbitDeployment]:
    deployment = RabbitDeployment(directory, url, **settings)
    try:
        yield deployment
    finally:
        deployment.broker.close()


def done(deployment: RabbitDeployment, message: Message[Any]) -> bool:
    return [row.outcome for row in deployment.rows(message)] == [Outcome.succeeded]


@pytest.mark.needs_browser
def test_an_attempt_that_fails_is_run_again_with_its_seed_and_each_has_its_row(
    deployment: RabbitDeployment, site: BehaviourSite
) -> None:
    message = deployment.send("probe.visit", site.list_url, fail=1)
    with deployment.worker("-p", "1", "-t", "1", "-Q", "default") as worker:
        result = deployment.result(message)
        assert worker.stop() == 0
    first, second = deployment.rows(message)
    assert (first.outcome, second.outcome) == (Outcome.failed, Outcome.succeeded)
    assert first.seed == second.seed == result["seed"]
    assert result["attempt"] == 2
    assert deployment.waiting("default.XQ") == 0


def test_what_is_given_up_lies_in_the_dead_letters_after_its_retries(
    deployment: RabbitDeployment, worker: Running
) -> None:
    message = deployment.send("need", str(deployment.directory / "none"), queue="plain", seed=7)
    wait_until(lambda: deployment.waiting("plain.XQ") == 1, "a dead letter")
    body = json.loads(deployment.take("plain.XQ") or b"")
    assert body["message_id"] == message.message_id
    assert (body["kwargs"]["seed"], body["options"]["retries"]) == (7, 1)
    assert [row.outcome for row in deployment.rows(message)] == [Outcome.failed] * 2


def test_a_worker_that_is_killed_loses_nothing_and_the_ledger_numbers_the_attempt_on(
    deployment: RabbitDeployment,
) -> None:
    gate = deployment.directory / "gate"
    message = deployment.send("hold", str(gate), queue="held")
    with deployment.worker("-p", "1", "-t", "1", "-Q", "held") as first:
        wait_until(lambda: deployment.rows(message), "the first worker has it")
        with deployment.worker("-p", "1", "-t", "1", "-Q", "held") as second:
            second.ready()
            os.kill(first.workers[0], signal.SIGKILL)
            wait_until(lambda: len(deployment.rows(message)) == 2, "the other worker has it")
            gate.touch()
            wait_until(lambda: deployment.rows(message)[1].outcome is Outcome.succeeded, "it is done")
            assert second.stop() == 0
    assert [(row.attempt, row.outcome) for row in deployment.rows(message)] == [(1, "lost"), (2, "succeeded")]
    assert deployment.waiting("held") == 0


def test_a_message_that_kills_its_process_each_time_is_dead_lettered_and_stays_there(
    deployment: RabbitDeployment,
) -> None:
    gate = deployment.directory / "gate"
    deadly = deployment.send("die", str(gate), queue="deadly", seed=42)
    for number in range(1, 4):
        gate.unlink(missing_ok=True)
        with deployment.worker("-p", "1", "-t", "2", "-Q", "deadly") as worker:
            worker.ready()
            gate.touch()
            wait_until(lambda worker=worker: worker.command.poll() is not None, "it was killed")  # type: ignore[misc]
            outcomes = [row.outcome for row in deployment.rows(deadly)]
            assert outcomes == ["lost"] * (number - 1) + ["running"]
    with deployment.worker("-p", "1", "-t", "2", "-Q", "deadly") as last:
        wait_until(lambda: deployment.waiting("deadly.XQ") == 1, "a dead letter")
        last.wait_for_log(f"message_id={deadly.message_id} actor=die attempt=3 seed=42 outcome=lost")
        last.wait_for_log("losses=3 of 3: the worker process died under it; it is dead-lettered")
        assert last.stop() == 0
    assert [row.outcome for row in deployment.rows(deadly)] == ["lost"] * 3
    assert deployment.waiting("deadly") == 0
    deployment.take("deadly.XQ")


def test_what_was_only_fetched_ahead_by_a_worker_that_was_killed_is_not_lost(deployment: RabbitDeployment) -> None:
    gate = deployment.directory / "gate-of-the-first"
    options = ("-p", "1", "-t", "1", "-Q", "held", "noted")  # each queue has a message fetched, and one is begun
    begun = deployment.send("hold", str(gate), queue="held")
    with deployment.worker(*options) as first:
        wait_until(lambda: deployment.rows(begun), "the worker has begun one")
        ahead = deployment.send("note", str(deployment.directory / "notes"), 1, queue="noted")
        wait_until(lambda: deployment.waiting("noted") == 0, "and fetched the other")
        os.kill(first.workers[0], signal.SIGKILL)
    gate.touch()
    with deployment.worker(*options) as second:
        for each, outcomes in ((begun, ["lost", "succeeded"]), (ahead, ["succeeded"])):
            wait_until(lambda each=each: deployment.rows(each), "it has begun again")  # type: ignore[misc]
            wait_until(
                lambda each=each, outcomes=outcomes: [row.outcome for row in deployment.rows(each)] == outcomes,  # type: ignore[misc]
                f"its rows are {outcomes}",
            )
        assert second.stop() == 0


def test_a_cancelled_message_that_runs_is_ended_and_one_that_waits_is_dropped_by_the_worker_that_takes_it(
    deployment: RabbitDeployment,
) -> None:
    never = str(deployment.directory / "never")
    with deployment.worker("-p", "1", "-t", "1", "-Q", "held") as worker:
        running = deployment.send("hold", never, queue="held")
        wait_until(lambda: deployment.rows(running), "it runs")
        waiting = deployment.send("hold", never, queue="held")
        noted = operating.run(deployment, "cancel", waiting.message_id)
        assert (noted.returncode, "is noted as cancelled" in noted.stdout) == (0, True), noted
        answer = cancel(running, wait_ms=20_000, broker=deployment.broker)
        assert (answer.found, answer.is_cancelled, answer.outcome) == ("running", True, "rejected")
        wait_until(lambda: [row.outcome for row in deployment.rows(waiting)] == [Outcome.rejected], "it is dropped")
        assert cancel(waiting, broker=deployment.broker).found == "ended"
        assert worker.stop() == 0
    assert deployment.waiting("held") == 0


def test_a_delayed_message_is_run_when_it_is_due_and_not_before(deployment: RabbitDeployment, worker: Running) -> None:
    sent_ms = time.time() * 1000
    message = deployment.send("add", 1, 2, queue="plain", delay=1_000)
    assert deployment.result(message) == 3
    (row,) = wait_until(lambda: deployment.rows(message), "its row")
    assert row.opened_ms - sent_ms >= 990


def test_a_producer_on_an_event_loop_sends_one_and_many_and_awaits_their_results(
    deployment: RabbitDeployment, worker: Running
) -> None:
    broker = deployment.broker

    async def produce() -> list[int]:
        one = await broker.aenqueue(add(1, 1))
        many: list[ToSend] = [add(2, 2), (add(3, 3), 100), add(4, 4)]
        sent = [one, *await broker.asend_many(many)]
        return await asyncio.gather(*(message.aresult(timeout_ms=10_000, broker=broker) for message in sent))

    assert asyncio.run(produce()) == [2, 4, 6, 8]


def test_a_body_that_is_no_message_is_rejected_as_it_is_and_the_good_ones_go_on(
    deployment: RabbitDeployment, worker: Running
) -> None:
    for body in NO_MESSAGES:
        deployment.put("plain", body)
    assert deployment.result(deployment.send("add", 1, 2, queue="plain")) == 3
    wait_until(lambda: deployment.waiting("plain.XQ") == len(NO_MESSAGES), "all of them are dead letters")
    assert [deployment.take("plain.XQ") for _ in NO_MESSAGES] == NO_MESSAGES


def test_a_message_that_was_moved_to_another_queue_is_run_there(deployment: RabbitDeployment, worker: Running) -> None:
    moved = deployment.send("add", 1, 2, queue="elsewhere")
    deployment.put("plain", deployment.take("elsewhere") or b"")
    wait_until(lambda: done(deployment, moved), "it is done")
    wait_until(lambda: deployment.waiting("plain") == 0, "and acknowledged")


def test_the_hook_of_a_received_message_fires_once_also_for_a_delayed_one(
    deployment: RabbitDeployment, worker: Running
) -> None:
    hooks = deployment.directory / "hooks"
    before = len(hooks.read_text().splitlines())
    message = deployment.send("add", 1, 2, queue="plain", delay=10)
    assert deployment.result(message) == 3
    wait_until(lambda: done(deployment, message), "its row is closed, after the hooks")
    seen = [line for line in hooks.read_text().splitlines()[before:] if "enqueue" not in line]
    assert seen == ["after_receive_message add", "before_process_message add", "after_process_message(NoneType) add"]


def test_a_plain_dramatiq_producer_is_served_by_our_worker(
    deployment: RabbitDeployment, server: RabbitServer, worker: Running
) -> None:
    plain = RabbitmqBroker(url=server.url, middleware=[], confirm_delivery=True)
    messages = [plain.enqueue(add(1, 2)), plain.enqueue(add(3, 4), delay=100)]
    plain.close()
    for message in messages:
        wait_until(lambda message=message: done(deployment, message), "it is done")  # type: ignore[misc]


#: A worker of plain Dramatiq, which writes down what it was sent.
PLAIN = """
import os, dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

dramatiq.set_broker(RabbitmqBroker(url=os.environ["URL"]))

@dramatiq.actor(queue_name="for_plain")
def add(left, right):
    with open("sums", "a") as file:
        file.write(f"{left + right}\\n")
"""


def test_a_plain_dramatiq_worker_serves_our_producer(
    deployment: RabbitDeployment, server: RabbitServer, tmp_path: Path
) -> None:
    (tmp_path / "plain_actors.py").write_text(PLAIN)
    deployment.broker.send_many([add(1, 2, queue="for_plain"), (add(3, 4, queue="for_plain"), 100)])
    command = [sys.executable, "-m", "dramatiq", "plain_actors", "-p", "1", "-t", "1"]
    with (tmp_path / "log").open("wb") as log:
        plain = subprocess.Popen(command, cwd=tmp_path, env=child_environment(URL=server.url), stdout=log, stderr=log)
        try:
            sums = tmp_path / "sums"
            wait_until(
                lambda: sums.exists() and sums.read_text() == "3\n7\n", "both were run, in the order of their times"
            )
        finally:
            plain.send_signal(signal.SIGTERM)
            plain.wait(30)


def test_a_worker_that_stops_leaves_what_it_has_not_begun_to_the_others(deployment: RabbitDeployment) -> None:
    queue = "left"
    with deployed(deployment.directory, deployment.url) as other:
        stopping, sent = other.broker, [deployment.broker.enqueue(add(1, 2, queue=queue)) for _ in range(3)]
        mine = stopping.consume(queue, 3, 200)
        first = wait_until(lambda: next(mine), "the first message")
        stopping.emit_before("worker_shutdown", None)
        assert next(mine) is None
        theirs = deployment.broker.consume(queue, 3, 200)
        got = [wait_until(lambda: next(theirs), "what the other has not begun") for _ in sent[1:]]
        assert {first.message_id, *(each.message_id for each in got)} == {each.message_id for each in sent}
        mine.ack(first)
        mine.close()
        for each in got:
            theirs.ack(each)
        theirs.close()
    assert deployment.waiting(queue) == 0, "what it had begun is acknowledged, too"


def test_a_done_message_is_acknowledged_to_no_other_connection_than_its_own(deployment: RabbitDeployment) -> None:
    broker, queue = deployment.broker, "reconnected"
    broker.enqueue(add(1, 2, queue=queue))
    before = broker.consume(queue, 1, 200)
    message = wait_until(lambda: next(before), "a message")
    before.close()
    after = broker.consume(queue, 1, 200)
    again = wait_until(lambda: next(after), "the same message")
    assert (again.message_id, again._tag) == (message.message_id, message._tag), "so the tag alone does not tell"
    after.ack(message)
    assert next(after) is None
    after.close()
    assert deployment.waiting(queue) == 1, "the worker that has it now has not acknowledged it"


def test_a_fork_sends_by_a_connection_of_its_own(deployment: RabbitDeployment) -> None:
    broker, queue = deployment.broker, "forked"
    broker.enqueue(add(0, 0, queue=queue))
    if (child := os.fork()) == 0:
        code = 1
        try:
            broker.enqueue(add(1, 1, queue=queue))
            broker.close()
            code = 0
        finally:
            os._exit(code)
    broker.enqueue(add(2, 2, queue=queue))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    broker.enqueue(add(3, 3, queue=queue))
    wait_until(lambda: deployment.waiting(queue) == 4, "all four")


def test_wrong_credentials_are_refused_at_once_and_shown_nowhere(deployment: RabbitDeployment) -> None:
    wrong = deployment.url.replace(PASSWORD, "wr0ng-password")
    with deployed(deployment.directory, wrong, send_timeout_ms=30_000) as locked_out:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable) as caught:
            locked_out.send("add", 1, 2, queue="plain")
        assert time.monotonic() - began < 10
        assert caught.value.sent is False
        assert "wr0ng" not in f"{caught.value} {caught.value.url} {caught.getrepr(chain=True, style='short')}"


def test_the_first_of_several_hosts_that_answers_is_the_broker(
    deployment: RabbitDeployment, server: RabbitServer
) -> None:
    closed = server.url.replace(f":{server.port}", ":1")
    with deployed(deployment.directory, f"{closed};{server.url}") as several:
        several.broker.enqueue(add(1, 2, queue="several"))
        assert PASSWORD not in several.broker.where
    assert deployment.waiting("several") == 1


def test_the_commands_send_and_doctor_know_rabbitmq(deployment: RabbitDeployment, worker: Running) -> None:
    sent = operating.run(deployment, "send", "add", "1", "2", "--wait", cwd=HOME)
    assert (sent.returncode, sent.stdout) == (0, "3\n"), sent.stderr
    examined = operating.run(deployment, "doctor", "--json", cwd=HOME)
    checks = {check["name"]: check for check in json.loads(examined.stdout)["checks"]}
    assert (checks["broker"]["state"], checks["store"]["state"]) == ("ok", "ok"), checks
    assert re.search(r"RabbitMQ \d+\.\d+", checks["broker"]["detail"])
    assert PASSWORD not in examined.stdout


def test_a_producer_waits_for_a_server_that_hangs_no_longer_than_it_wants(
    deployment: RabbitDeployment, server: RabbitServer
) -> None:
    queue = "hanging"
    with deployed(deployment.directory, server.url) as hasty:
        hasty.broker.enqueue(add(0, 0, queue=queue))
        hasty.broker.send_timeout_ms = 2_000
        with server.stopped():
            assert refusal(hasty, queue) is None, "it went out, and no answer came"
            assert refusal(hasty, queue) is False, "it waited behind the first"
        hasty.broker.send_timeout_ms = 10_000
        hasty.broker.enqueue(add(1, 1, queue=queue))
        wait_until(lambda: deployment.waiting(queue) == 3, "that of the unknown fate, and the two that were taken")


def test_workers_wait_for_a_server_that_is_away_and_go_on_and_producers_are_told_in_time(
    deployment: RabbitDeployment, server: RabbitServer, worker: Running
) -> None:
    with deployed(deployment.directory, server.url, send_timeout_ms=1_000) as hasty:
        kept = hasty.send("hold", __file__, queue="held")
        server.kill()
        with deployment.worker(
            "-p", "1", "-t", "1", "-Q", "held", environment={"dramatiq_restart_delay": "300"}
        ) as late:
            assert refusal(hasty, "plain") is False
            given: list[ToSend] = [add(1, 2), (add(3, 4), 50)]
            with pytest.raises(BrokerUnavailable) as caught:
                hasty.broker.send_many(given)
            assert (caught.value.taken, caught.value.untaken) == ([], given)
            late.wait_for_log("Restarting consumer")
            server.start()
            hasty.broker.send_timeout_ms = 10_000
            assert hasty.result(hasty.send("add", 3, 4, queue="plain")) == 7
            wait_until(lambda: done(hasty, kept), "what was sent before is run, by a worker that was started meanwhile")
            assert len(set(late.workers)) == len(set(worker.workers)) == 1, "no worker process was replaced"
            assert PASSWORD not in late.log + worker.log


def test_a_message_that_is_delivered_again_since_the_server_was_restarted_is_not_lost(
    deployment: RabbitDeployment, server: RabbitServer
) -> None:
    gate = deployment.directory / "gate-of-the-restart"
    message = deployment.send("hold", str(gate), queue="held")
    environment = {"dramatiq_restart_delay": "300"}
    with deployment.worker("-p", "1", "-t", "2", "-Q", "held", environment=environment) as worker:
        wait_until(lambda: deployment.rows(message), "it has begun")
        server.kill()
        server.start()
        wait_until(lambda: len(deployment.rows(message)) == 2, "it was delivered again")
        gate.touch()
        wait_until(
            lambda: [row.outcome for row in deployment.rows(message)] == ["succeeded"] * 2, "both attempts have ended"
        )
        wait_until(lambda: deployment.waiting("held") == 0, "it is acknowledged")
        assert worker.stop() == 0
    assert "outcome=lost" not in worker.log


def add(left: int, right: int, *, queue: str = "plain") -> Message[Any]:
    return Message(queue, "add", (left, right), {}, {})


def refusal(deployment: RabbitDeployment, queue: str) -> bool | None:
    """Send in vain; returns whether the message may have been sent."""
    message, began = add(9, 9, queue=queue), time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        deployment.broker.enqueue(message)
    assert time.monotonic() - began < deployment.broker.send_timeout_ms / 1000 + BUSY_S
    assert PASSWORD not in str(caught.value)
    assert caught.value.untaken == [message]
    return caught.value.sent
