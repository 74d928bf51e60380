"""Effects in a database outside, under kill -9 and SIGSTOP: what is guarded takes place once, or a person is asked."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Message

from asyncworker.redis_broker import WorkerBroker
from tests import operating
from tests.waiting import wait_until
from tests.workers import Deployment, Running

QUEUE = "effects"

TIMEOUT_MS = 2_000


class Effects(Deployment):
    """A deployment with a database beside it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, close_timeout_ms=8_000, heartbeat_timeout_ms=TIMEOUT_MS)
        with closing(sqlite3.connect(directory / "effects.db")) as database, database:
            database.execute("CREATE TABLE effects (key TEXT, once TEXT UNIQUE)")

    def count(self, key: str) -> int:
        """How often the effect took place."""
        with closing(sqlite3.connect(self.directory / "effects.db")) as database:
            (count,) = database.execute("SELECT count(*) FROM effects WHERE key = ?", (key,)).fetchone()
        return int(count)

    def events(self) -> list[str]:
        path = self.directory / "events"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, event: str, *, times: int = 1) -> None:
        wait_until(lambda: sum(each.startswith(event) for each in self.events()) >= times, f"{times} x {event}")

    def go(self) -> None:
        (self.directory / "go").touch()

    def buy(self, key: str, **options: Any) -> Message[Any]:
        return self.send("effects.buy", str(self.directory), key, queue=QUEUE, **options)


@pytest.fixture
def effects(state_dir: Path) -> Iterator[Effects]:
    deployment = Effects(state_dir)
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


def one_worker(effects: Effects) -> Any:
    return effects.worker("-p", "1", "-t", "1", "-Q", QUEUE)


def kill(worker: Running) -> None:
    for pid in worker.workers:
        os.kill(pid, signal.SIGKILL)


# Steps that are done once.


@pytest.mark.needs_browser
def test_a_long_message_runs_once_and_when_its_worker_is_frozen_another_takes_over_and_its_step_is_refused(
    effects: Effects,
) -> None:
    with one_worker(effects) as first:
        message = effects.buy("k", confirm=True)
        effects.wait_for("entered")
        with one_worker(effects) as second:
            second.ready()
            beaten = effects.broker.client.time()[0] + 3 * TIMEOUT_MS / 1000  # type: ignore[index]  # not awaitable
            wait_until(lambda: effects.broker.client.time()[0] > beaten, "three timeouts pass")  # type: ignore[index]
            assert len(effects.events()) == 1, "its worker is busy, not dead"
            (pid,) = first.workers
            os.kill(pid, signal.SIGSTOP)
            try:
                effects.wait_for("entered", times=2)
                effects.go()
                result = effects.result(message)
                os.kill(pid, signal.SIGCONT)
                first.wait_for_log("StaleAttempt")
                first.wait_for_log("is not retried from here")
            finally:
                os.kill(pid, signal.SIGCONT)
            assert effects.count("k") == 1
            fences = [int(event.split()[1]) for event in effects.events()]
            assert fences == sorted(set(fences))
            assert result == {"was_done": False, "value": {"by": message.message_id}, "fence": fences[-1]}
            again = effects.result(effects.buy("k"))
            assert (again["was_done"], again["value"]) == (True, {"by": message.message_id})
            assert first.stop() == 0
            assert second.stop() == 0
    # What the first one says of its attempt as it goes on leaves that lost.
    outcomes = [row.outcome for row in effects.rows(message)]
    assert (outcomes, effects.count("k"), effects.dead_letters(QUEUE)) == (["lost", "succeeded"], 1, {})


@pytest.mark.needs_browser
@pytest.mark.parametrize("pause", ["before", "after"])
def test_a_step_whose_worker_was_killed_is_entered_by_the_next_attempt_with_a_greater_fence(
    effects: Effects, pause: str
) -> None:
    with one_worker(effects) as first:
        message = effects.buy("k", pause=pause)
        effects.wait_for("entered" if pause == "before" else "inserted")
        kill(first)
    with one_worker(effects):
        effects.wait_for("entered", times=2)
        effects.go()
        assert effects.result(message)["was_done"] is False
    assert effects.count("k") == 1, "where it was killed after the effect, the database has refused the second"
    before, after = (int(event.split()[1]) for event in effects.events() if event.startswith("entered"))
    assert before < after


@pytest.mark.needs_browser
def test_a_step_that_was_left_to_a_person_runs_no_more_until_that_has_decided(effects: Effects) -> None:
    with one_worker(effects) as first:
        message = effects.buy("k", on_lost="unknown", pause="after")
        effects.wait_for("inserted")
        kill(first)
    effects.go()
    with one_worker(effects):
        wait_until(lambda: effects.dead_letters(QUEUE), "it is a dead letter")
        (letter,) = operating.facts(effects, "dead", "list")["dead"]
        step = "effects.buy:insert:k"
        assert letter["error"].startswith(f"UnknownOutcome: no one knows whether step {step} took place: message ")
        (listed,) = operating.facts(effects, "once", "list")["steps"]
        assert (listed["step"], listed["state"], listed["message"]) == (step, "unknown", message.message_id)
        refused = operating.run(effects, "once", "resolve", step, "done", "--value", "{")
        assert (refused.returncode, "is no JSON" in refused.stderr) == (2, True)
        decided = operating.facts(effects, "once", "resolve", step, "done", "--value", '{"by": "hand"}')
        assert decided == {"step": step, "state": "done"}
        assert "there is nothing to decide" in operating.run(effects, "once", "resolve", step, "open").stderr
        assert operating.run(effects, "once", "list").stdout == "there is nothing to decide\n"
        effects.broker.get_results_backend().client.delete(
            effects.broker.get_results_backend().build_message_key(message)
        )
        operating.run(effects, "dead", "retry", message.message_id)
        assert effects.result(message)["value"] == {"by": "hand"}
    assert (effects.count("k"), len(effects.events())) == (1, 2)


# At most once.


def pay(effects: Effects, **options: Any) -> Message[Any]:
    return effects.send("pay", str(effects.directory), "k", queue=QUEUE, **options)


def test_an_interrupted_at_most_once_message_is_an_unknown_outcome_and_never_runs_by_itself(effects: Effects) -> None:
    with one_worker(effects) as first:
        message = pay(effects)
        effects.wait_for("paid")
        kill(first)
    with one_worker(effects) as second:
        wait_until(lambda: effects.dead_letters(QUEUE), "it is a dead letter")
        (letter,) = operating.facts(effects, "dead", "list", "--error", "UnknownOutcome")["dead"]
        assert (letter["id"], letter["actor"]) == (message.message_id, "pay")
        assert "it is not run again. Look, then say `asyncworker dead retry" in letter["error"]
        assert second.stop() == 0
    assert effects.count("k") == 1
    effects.go()
    with one_worker(effects):
        assert operating.run(effects, "dead", "retry", message.message_id).returncode == 0
        effects.wait_for("paid", times=2)
        wait_until(lambda: effects.broker.do_qsize(QUEUE) == 0, "it is done")
    assert (effects.count("k"), effects.dead_letters(QUEUE)) == (2, {}), "a person has said so"


def test_an_at_most_once_message_that_raised_is_not_run_again_whatever_its_message_says(effects: Effects) -> None:
    with one_worker(effects):
        pay(effects, fail=True, options={"max_retries": 3})
        wait_until(lambda: effects.dead_letters(QUEUE), "it is a dead letter")
    (letter,) = operating.facts(effects, "dead", "list")["dead"]
    assert letter["error"] == "RuntimeError: after the effect", "how it ended is known"
    assert effects.count("k") == 1


# Unique messages.


def producers(effects: Effects, count: int) -> Iterator[Any]:
    """The actor as so many producers have it."""
    for _ in range(count):
        broker: WorkerBroker = effects.make_broker()
        yield dramatiq.actor(
            lambda directory, key, *, failures=0: None,
            broker=broker,
            actor_name="single",
            queue_name=QUEUE,
            unique="{key}",
        )


@pytest.fixture
def singles(effects: Effects) -> Iterator[list[Any]]:
    actors = list(producers(effects, 3))
    yield actors
    for actor in actors:
        actor.broker.close()
        actor.broker.client.close()


def test_the_same_unique_message_sent_ten_times_during_one_run_is_that_run(
    effects: Effects, singles: list[Any]
) -> None:
    directory = str(effects.directory)
    with one_worker(effects) as worker:
        worker.ready()
        with ThreadPoolExecutor(3) as threads:
            sends = [threads.submit(singles[number % 3].send, directory, "k") for number in range(10)]
            sent = [each.result() for each in sends]
        effects.wait_for("ran")
        assert len({message.message_id for message in sent}) == 1
        effects.go()
        assert [effects.result(message) for message in sent] == [1] * 10
        wait_until(lambda: effects.broker.do_qsize(QUEUE) == 0, "it is acknowledged")
        later = singles[0].send(directory, "k")
        assert later.message_id != sent[0].message_id
        assert effects.result(later) == 2
        wait_until(lambda: not effects.broker.client.exists(f"dramatiq:{QUEUE}.unique"), "nothing is left of the keys")


def test_a_unique_key_outlives_the_worker_that_ran_it_and_is_free_when_the_message_has_ended(
    effects: Effects, singles: list[Any]
) -> None:
    directory = str(effects.directory)
    with one_worker(effects) as first:
        message = singles[0].send(directory, "k")
        effects.wait_for("ran")
        kill(first)
    assert singles[1].send(directory, "k").message_id == message.message_id
    with one_worker(effects):
        effects.wait_for("ran", times=2)
        assert singles[2].send(directory, "k").message_id == message.message_id
        effects.go()
        assert effects.result(message) == 2
        wait_until(lambda: effects.broker.do_qsize(QUEUE) == 0, "it is acknowledged")
        assert singles[0].send(directory, "k").message_id != message.message_id


def test_a_unique_message_keeps_its_key_over_its_retries(effects: Effects, singles: list[Any]) -> None:
    directory = str(effects.directory)
    effects.go()
    with one_worker(effects):
        message = singles[0].send(directory, "k", failures=2)
        for times in (1, 2):
            effects.wait_for("ran", times=times)
            assert singles[1].send(directory, "k").message_id == message.message_id
        assert effects.result(message) == 3
        wait_until(lambda: effects.broker.do_qsize(QUEUE) == 0, "it is acknowledged")
    assert effects.count("k") == 3
