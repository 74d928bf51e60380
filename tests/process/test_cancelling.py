"""Cancelling in a real store, with real workers and browsers: from where a message lies to what its producer sees."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.results.errors import ResultFailure

from asyncworker import Cancellation, acancel, embedded, processes
from asyncworker import cancel as cancel_message
from asyncworker.cancelling import Found, cancel_many
from asyncworker.producing import aresult
from asyncworker.watchdog import EXIT_REPLACED
from tests import operating
from tests.hung import browsers, suspend
from tests.operating import dead_letter, facts, run
from tests.site import BehaviourSite
from tests.stores import QUEUE
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment

HELD = operating.QUEUE

#: A message that is cancelled has this long to live, whatever it would do.
LONG = {"time_limit": 90_000}


def cancel(deployment: Deployment, message: Message[Any], *, wait_ms: int = 20_000) -> Cancellation:
    return cancel_message(message, wait_ms=wait_ms, broker=deployment.broker)


def outcomes(deployment: Deployment, message: Message[Any]) -> list[str]:
    return [str(row.outcome) for row in deployment.rows(message)]


def is_gone(deployment: Deployment, queue: str) -> bool:
    stand = operating.stands(deployment, queue) if _knows(deployment, queue) else {}
    return not any(stand.get(part) for part in operating.PARTS)


def _knows(deployment: Deployment, queue: str) -> bool:
    return any(each["queue"] == queue for each in facts(deployment, "queues")["queues"])


# --- what waits


@pytest.mark.parametrize("where", ["waiting", pytest.param("delayed", marks=pytest.mark.long)])
def test_what_waits_is_dropped_by_the_command_and_its_producer_is_told(deployment: Deployment, where: str) -> None:
    delay = 60_000 if where == "delayed" else None
    message = deployment.send("add", 1, 2, queue="plain", delay=delay, options={"store_results": True})
    other = deployment.send("add", 3, 4, queue="plain")
    ended = run(deployment, "cancel", message.message_id)
    assert (ended.returncode, ended.stdout) == (0, f"message {message.message_id} was {where} and is dropped\n")
    with pytest.raises(ResultFailure, match=f"Cancelled: it was cancelled, and is not run again; it was {where}"):
        asyncio.run(aresult(message, timeout_ms=5_000, broker=deployment.broker))
    with deployment.worker("-p", "1", "-t", "1", "-Q", "plain") as worker:
        assert deployment.result(other) == 7
        assert worker.stop() == 0
    assert outcomes(deployment, message) == ["rejected"]
    assert is_gone(deployment, "plain")


def test_each_message_of_a_command_is_told_of_and_the_code_says_whether_all_are_cancelled(
    deployment: Deployment,
) -> None:
    waiting, dead = deployment.send("add", 1, 2, queue="plain"), operating.message("gone")
    done = deployment.send("add", 1, 2, queue="plain")
    with deployment.worker("-p", "1", "-t", "1", "-Q", "plain") as worker:
        deployment.result(done)
        worker.stop()
    waiting = deployment.send("add", 1, 2, queue="plain")
    dead_letter(deployment, "letter", dead)
    ids = [waiting.message_id, dead.message_id, done.message_id, "no-such-id"]
    told = facts(deployment, "cancel", *ids, code=1)["cancelled"]
    assert [each["message_id"] for each in told] == ids
    assert [each["found"] for each in told] == ["waiting", "dead", "ended", "unknown"]
    assert [each["is_cancelled"] for each in told] == [True, False, False, False]
    said = run(deployment, "cancel", *ids)
    assert said.returncode == 1
    assert [line.partition(ids[place])[2] for place, line in enumerate(said.stdout.splitlines())] == [
        " had been cancelled already",
        " is a dead letter, which no worker takes; `asyncworker dead discard` drops it",
        " had ended already: succeeded",
        "; should one come with that id, it is dropped",
    ]


def test_a_store_that_does_not_answer_is_said_by_the_command(deployment: Deployment) -> None:
    ended = run(deployment, "cancel", "some", ASYNCWORKER_BROKER_URL="redis://127.0.0.1:1/0")
    assert ended.returncode == 2
    assert "127.0.0.1:1" in ended.stderr


def test_a_retry_that_waits_is_dropped(deployment: Deployment, tmp_path: Path) -> None:
    options = {"min_backoff": 60_000, "max_backoff": 60_000}
    with deployment.worker("-p", "1", "-t", "1", "-Q", HELD) as worker:
        message = deployment.send("need", str(tmp_path / "none"), queue=HELD, options=options)
        wait_until(lambda: operating.stands(deployment)["delayed"] == 1, "its retry waits")
        assert cancel(deployment, message).found is Found.delayed
        assert worker.stop() == 0
    assert outcomes(deployment, message) == ["failed", "rejected"]
    assert is_gone(deployment, HELD)


def test_a_message_that_was_cancelled_when_it_waited_leaves_its_unique_key(deployment: Deployment) -> None:
    sent = [_single(deployment) for _ in range(2)]
    assert sent[0].message_id == sent[1].message_id
    assert cancel(deployment, sent[0]).is_cancelled
    assert _single(deployment).message_id != sent[0].message_id


def _single(deployment: Deployment) -> Message[Any]:
    actors = deployment.broker.actors
    if "single" not in actors:
        dramatiq.Actor(
            lambda key: None,
            broker=deployment.broker,
            actor_name="single",
            queue_name=QUEUE,
            priority=0,
            options={"unique": "{key}"},
        )
    message: Message[Any] = actors["single"].send("a")
    return message


def test_a_dead_letter_is_not_cancelled_and_runs_when_it_is_retried(deployment: Deployment, tmp_path: Path) -> None:
    there = tmp_path / "there"
    with deployment.worker("-p", "1", "-t", "1", "-Q", HELD) as worker:
        message = deployment.send("need", str(there), queue=HELD)
        wait_until(lambda: deployment.dead_letters(HELD), "it is given up")
        assert cancel(deployment, message).found is Found.dead
        there.touch()
        assert facts(deployment, "dead", "retry", message.message_id)["retried"] == 1
        wait_until(lambda: outcomes(deployment, message)[-1] == "succeeded", "it is done")
        assert worker.stop() == 0


# --- what a worker has


def test_what_was_fetched_ahead_never_begins(deployment: Deployment, tmp_path: Path) -> None:
    gates = [tmp_path / name for name in ("first", "second")]
    with deployment.worker("-p", "1", "-t", "1", "-Q", HELD) as worker:
        first, second = (deployment.send("hold", str(gate), queue=HELD) for gate in gates)
        wait_until(lambda: deployment.rows(first), "the first runs")
        answer = cancel(deployment, second)
        assert (answer.found, answer.is_cancelled) == (Found.waiting, True)
        gates[0].touch()
        wait_until(lambda: outcomes(deployment, first) == ["succeeded"], "the first is done")
        assert worker.stop() == 0
    assert outcomes(deployment, second) == ["rejected"]


def test_a_retry_that_is_sent_while_the_end_of_its_message_is_waited_for_is_dropped(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, looked = deployment.broker, threading.Event()
    do_cancel = broker.do_cancel

    def looking(*words: Any) -> Any:
        answer = do_cancel(*words)
        looked.set()
        return answer

    monkeypatch.setattr(broker, "do_cancel", looking, raising=False)
    message = deployment.send("need", "none", queue=QUEUE)
    consumer = broker.consume(QUEUE, prefetch=1, timeout=1_000)
    taken = wait_until(lambda: next(consumer), "a worker has it")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cancel, deployment, message)
        assert looked.wait(30)
        broker.enqueue(taken, delay=60_000)
        consumer.ack(taken)
        assert answer.result(20).found is Found.delayed
    assert broker.do_qsize(QUEUE) == 0
    consumer.close()
    broker.settling.stop()
    broker.alarm.stop()


def test_synchronous_code_that_runs_is_interrupted_by_the_command(deployment: Deployment, tmp_path: Path) -> None:
    with deployment.worker("-p", "1", "-t", "1", "-Q", HELD) as worker:
        message = deployment.send("hold", str(tmp_path / "never"), queue=HELD)
        wait_until(lambda: deployment.rows(message), "it runs")
        (told,) = facts(deployment, "cancel", message.message_id)["cancelled"]
        assert (told["found"], told["outcome"]) == ("running", "rejected")
        assert told["worker"].endswith(f":{worker.workers[0]}")
        assert told["took_ms"] < 3_000 + BUSY_S * 1000
        assert worker.stop() == 0
    assert outcomes(deployment, message) == ["rejected"]
    assert deployment.dead_letters(HELD) == {}
    assert is_gone(deployment, HELD)


@pytest.fixture
def hasty(state_dir: Path) -> Any:
    """A deployment whose limits are short."""
    deployment = Deployment(
        state_dir,
        close_timeout_ms=2_000,
        context_timeout_ms=3_000,
        cleanup_timeout_ms=1_000,
        heartbeat_timeout_ms=3_000,
    )
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


@pytest.mark.long
def test_a_message_of_a_frozen_worker_is_dropped_when_that_is_taken_for_dead_and_no_one_runs_it(
    hasty: Deployment, tmp_path: Path
) -> None:
    with hasty.worker("-p", "1", "-t", "1", "-Q", HELD) as worker:
        message = hasty.send("hold", str(tmp_path / "never"), queue=HELD)
        wait_until(lambda: hasty.rows(message), "it runs")
        os.kill(worker.workers[0], signal.SIGSTOP)
        early = cancel(hasty, message, wait_ms=100)
        assert (early.found, early.is_cancelled, early.outcome) == (Found.running, False, None)
        late = cancel(hasty, message)
        assert (late.found, late.is_cancelled) == (Found.lost, True)
        assert outcomes(hasty, message) == ["lost", "rejected"]
        with hasty.worker("-p", "1", "-t", "1", "-Q", HELD) as second:
            os.kill(worker.workers[0], signal.SIGCONT)
            worker.wait_for_log("was cancelled; its thread is interrupted")
            other = tmp_path / "other"
            other.touch()
            for sent in [hasty.send("hold", str(other), queue=HELD) for _ in range(2)]:
                wait_until(lambda sent=sent: outcomes(hasty, sent) == ["succeeded"], "others run")  # type: ignore[misc]
            assert (worker.stop(), second.stop()) == (0, 0)
        assert message.message_id not in second.log
    assert len(hasty.rows(message)) == 2


def test_a_message_of_a_killed_worker_is_dropped_by_the_next_and_no_dead_letter(
    hasty: Deployment, tmp_path: Path
) -> None:
    with hasty.worker("-p", "1", "-t", "1", "-Q", HELD) as worker:
        message = hasty.send("hold", str(tmp_path / "never"), queue=HELD, options={"max_losses": 1})
        wait_until(lambda: hasty.rows(message), "it runs")
        os.kill(worker.workers[0], signal.SIGKILL)
        assert cancel(hasty, message, wait_ms=0).found is Found.running
        with hasty.worker("-p", "1", "-t", "1", "-Q", HELD) as second:
            wait_until(lambda: outcomes(hasty, message)[-1] == "rejected", "it is settled")
            assert second.stop() == 0
    assert outcomes(hasty, message) == ["lost", "rejected"]
    assert hasty.dead_letters(HELD) == {}


def test_a_call_that_sees_no_interrupt_has_its_process_replaced_and_the_next_one_drops_the_message(
    hasty: Deployment,
) -> None:
    with hasty.worker("-p", "1", "-t", "1", "-Q", "blocked") as worker:
        message = hasty.send("block_thread", 60, queue="blocked", options=LONG | {"store_results": True})
        wait_until(lambda: hasty.rows(message), "it runs")
        assert not cancel(hasty, message, wait_ms=0).is_cancelled
        assert worker.command.wait(30) == EXIT_REPLACED
    with hasty.worker("-p", "1", "-t", "1", "-Q", "blocked") as second:
        assert "Cancelled" in hasty.failure(message)
        wait_until(lambda: outcomes(hasty, message)[-1] == "rejected", "it is settled")
        assert second.stop() == 0
    assert hasty.dead_letters("blocked") == {}


@pytest.mark.long
def test_each_of_many_that_end_meanwhile_has_one_outcome_and_its_producer_sees_that(deployment: Deployment) -> None:
    draw = random.Random(6)
    with deployment.worker("-p", "2", "-t", "4", "-Q", "plain", "deadly") as worker:
        worker.ready()
        sent = [deployment.send("linger", draw.randrange(300), queue="deadly") for _ in range(120)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda message: cancel(deployment, message), draw.sample(sent, len(sent))))
        ends = {message.message_id: _end(deployment, message) for message in sent}
        wait_until(lambda: all(deployment.rows(message) for message in sent), "all have rows")
        assert worker.stop() == 0
    assert len(ends) == 120
    for answer in answers:
        assert answer.is_cancelled == (ends[answer.message_id] == "Cancelled"), answer
    for message in sent:
        assert outcomes(deployment, message) == [
            "rejected" if ends[message.message_id] == "Cancelled" else "succeeded"
        ], message
    assert set(ends.values()) == {"Cancelled", "done"}
    assert is_gone(deployment, "deadly")


def _end(deployment: Deployment, message: Message[Any]) -> str:
    try:
        deployment.result(message)
    except ResultFailure as error:
        return str(error.orig_exc_type)
    return "done"


# --- with a browser


@pytest.mark.needs_browser
def test_code_that_catches_everything_and_calls_the_page_again_is_refused_and_launches_nothing(
    hasty: Deployment, site: BehaviourSite
) -> None:
    with hasty.worker() as worker:
        hasty.result(hasty.send("probe.visit", site.product_url(1)))  # the browser is up
        messages = [hasty.send("ladder.stubborn", f"{site.url}/never", options=LONG) for _ in range(4)]
        wait_until(lambda: site.requests["/never"] >= 4, "four pages load")
        answers = cancel_many(messages, wait_ms=20_000, broker=hasty.broker)
        assert [(each.found, each.is_cancelled) for each in answers] == [(Found.running, True)] * 4
        longest_ms = max(each.took_ms or 0 for each in answers)
        assert longest_ms < 1_000 + 2 * 1_000 + 2_000 + BUSY_S * 1000  # heard, two cleanups, close
        for message in messages:
            assert "Cancelled" in hasty.failure(message)
            assert outcomes(hasty, message) == ["rejected"]
        worker.wait_for_log("stubborn: ", times=4)
        for _ in range(4):
            assert hasty.result(hasty.send("probe.text", f"{site.url}/slow?ms=100")) == "slow"
        assert len(worker.tokens("browser")) == 1
        worker.stop()
    refused = set(re.findall(r"stubborn: (.*?) \[", worker.log))
    assert refused
    assert all("went through" not in line for line in refused)
    for call in ("page.goto", "context.new_page", "browser_type.launch", "kept browser"):
        assert f"{call}: SessionOver" in worker.log
    counts = hasty.counts()
    assert (counts["browsers_launched"], counts["contexts_opened"]) == (1, counts["contexts_closed"])
    assert hasty.slots() == {"slots": 4, "slots_in_use": 0}


@pytest.mark.needs_browser
@pytest.mark.long
def test_a_browser_that_hangs_under_cancelled_messages_is_killed_and_all_slots_come_back(
    hasty: Deployment, site: BehaviourSite
) -> None:
    with hasty.worker() as worker:
        messages = [hasty.send("probe.text", f"{site.url}/never", options=LONG) for _ in range(4)]
        wait_until(lambda: site.requests["/never"] >= 4, "four pages load")
        hung = suspend(browsers(worker))
        began = time.monotonic()
        assert all(each.is_cancelled for each in cancel_many(messages, wait_ms=20_000, broker=hasty.broker))
        wait_until(lambda: not any(processes.lives(each.pid) for each in hung), "the hung browser is killed")
        assert time.monotonic() - began < 10 + BUSY_S
        again = [hasty.send("probe.text", f"{site.url}/slow?ms=100") for _ in range(4)]
        assert [hasty.result(message) for message in again] == ["slow"] * 4
        assert worker.stop() == 0
    assert [outcomes(hasty, message) for message in messages] == [["rejected"]] * 4
    assert hasty.counts()["browsers_launched"] == 2
    assert hasty.slots() == {"slots": 4, "slots_in_use": 0}


@pytest.mark.needs_browser
def test_a_page_whose_script_loops_for_ever_is_ended_from_an_event_loop(hasty: Deployment, site: BehaviourSite) -> None:
    async def cancelled(message: Message[Any]) -> Cancellation:
        return await acancel(message, wait_ms=20_000, broker=hasty.broker)

    with hasty.worker() as worker:
        message = hasty.send("ladder.spin", f"{site.url}/spin", options=LONG)
        wait_until(lambda: site.requests["/spin"], "it loads")
        answer = asyncio.run(cancelled(message))
        assert (answer.found, answer.is_cancelled, answer.outcome) == (Found.running, True, "rejected")
        assert hasty.result(hasty.send("probe.text", f"{site.url}/slow?ms=10")) == "slow"
        assert worker.stop() == 0
    assert hasty.slots() == {"slots": 4, "slots_in_use": 0}


# --- other brokers


def test_with_a_store_apart_from_the_broker_a_running_message_is_cancelled(state_dir: Path, tmp_path: Path) -> None:
    url = f"unix://{embedded.ensure(state_dir)}"
    apart = Deployment(state_dir, broker_url=f"{url}?db=1", store_url=f"{url}?db=2")
    with apart.worker("-p", "1", "-t", "1", "-Q", HELD) as worker:
        message = apart.send("hold", str(tmp_path / "never"), queue=HELD)
        waiting = apart.send("hold", str(tmp_path / "never"), queue=HELD)
        wait_until(lambda: apart.rows(message), "it runs")
        assert [each.is_cancelled for each in cancel_many([message, waiting], broker=apart.broker)] == [True, True]
        assert worker.stop() == 0
    assert [outcomes(apart, each) for each in (message, waiting)] == [["rejected"], ["rejected"]]
    apart.broker.close()
    apart.broker.client.close()
