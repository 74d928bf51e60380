"""The commands about queues, as a shell runs them: how they stand, pausing and purging, beside real workers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from asyncworker import embedded
from asyncworker.consumer import WorkerConsumer
from asyncworker.dead_letters import DeadLetters, Letter, Wanted
from asyncworker.queues import SLICE, Queues
from asyncworker.redis_broker import WorkerBroker
from tests.operating import (
    PARTS,
    QUEUE,
    blocked,
    connect,
    dead_letter,
    everything,
    facts,
    in_terminal,
    message,
    run,
    stands,
)
from tests.process.test_queue_model import QUEUE as MODEL_QUEUE
from tests.process.test_queue_model import Fleet, hold
from tests.waiting import wait_until
from tests.workers import Deployment

# --- pausing


def test_workers_also_later_ones_fetch_nothing_of_a_paused_queue_until_it_is_resumed(
    deployment: Deployment, tmp_path: Path
) -> None:
    over, there = tmp_path / "over", tmp_path / "there"
    there.touch()
    with deployment.worker("-p", "1", "-t", "2", "-Q", QUEUE) as early:
        deployment.send("hold", str(over), queue=QUEUE)
        wait_until(lambda: early.ready() and stands(deployment)["running"] == 1, "one is running")
        paused = facts(deployment, "pause", QUEUE)
        assert (paused["changed"], paused["paused"], paused["running"]) == (True, True, 1)
        sent = [deployment.send("need", str(there), queue=QUEUE) for _ in range(3)]
        sent.append(deployment.send("need", str(there), queue=QUEUE, delay=200))
        with deployment.worker("-p", "1", "-t", "2", "-Q", QUEUE) as late:
            late.ready()
            wait_until(lambda: blocked(deployment) == 2, "both have looked")
            wait_until(lambda: stands(deployment)["waiting"] == 4, "what became due waits, too")
            assert stands(deployment)["running"] == 1, "what ran goes on"
            over.touch()
            wait_until(lambda: stands(deployment)["running"] == 0, "and ends")
            assert stands(deployment)["waiting"] == 4
            assert f"queue {QUEUE} was paused" in run(deployment, "pause", QUEUE).stdout
            assert facts(deployment, "resume", QUEUE)["changed"] is True
            wait_until(lambda: all(deployment.rows(each) for each in sent), "all were run")
            assert "was not paused" in run(deployment, "resume", QUEUE).stdout
            assert (early.stop(), late.stop()) == (0, 0)
    assert [len(deployment.rows(each)) for each in sent] == [1, 1, 1, 1]
    assert stands(deployment)["paused"] is False


def _has_grown_to(found: list[Any], length: int) -> bool:
    return len(found) >= length


def consume(
    deployment: Deployment, *, stop: threading.Event, looks: list[Any], took: list[Any], poll_s: float = 1.0
) -> None:
    """Take messages as a worker with one thread does; notes each look, and what it took."""
    with contextlib.closing(connect(deployment)) as client:
        broker = WorkerBroker(client=client, where="the test's store")
        broker.declare_queue(QUEUE)
        consumer = broker.consume(QUEUE, prefetch=1, timeout=1_000)
        assert isinstance(consumer, WorkerConsumer)
        consumer.poll_s = poll_s
        while not stop.is_set():
            found = next(consumer)
            looks.append(found)
            if found is not None:
                took.append(found)
                consumer.ack(found)


def test_a_paused_queue_is_looked_at_once_a_second_however_much_is_sent_to_it(deployment: Deployment) -> None:
    queues, stop = Queues(deployment.broker), threading.Event()
    looks: list[Any] = []
    took: list[Any] = []
    for _ in range(50):
        deployment.send("need", "x", queue=QUEUE)
    assert queues.pause(QUEUE)
    thread = threading.Thread(target=partial(consume, deployment, stop=stop, looks=looks, took=took))
    began, sent = time.monotonic(), 50
    thread.start()
    while len(looks) < 3 or sent < 150:
        deployment.send("need", "x", queue=QUEUE)
        deployment.send("need", "x", queue=QUEUE, delay=1)
        sent += 2
    stop.set()
    thread.join()
    assert took == []
    assert len(looks) <= time.monotonic() - began + 1, "the first look is at once"
    assert queues.look(QUEUE).waiting + queues.look(QUEUE).delayed == sent


@contextlib.contextmanager
def idle_consumers(deployment: Deployment, count: int) -> Iterator[list[Any]]:
    """Consumers that take whatever they are woken for, and look for themselves too late; yields what came."""
    stop, took = threading.Event(), []
    consuming = partial(consume, deployment, stop=stop, looks=[], took=took, poll_s=90.0)
    threads = [threading.Thread(target=consuming) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: blocked(deployment) == count, "all wait")
        yield took
    finally:
        stop.set()
        for _ in threads:
            deployment.send("need", "x", queue=QUEUE)  # wakes one
        for thread in threads:
            thread.join()


def come_when_told(
    deployment: Deployment, took: list[Any], *, prepare: Callable[[], Any], act: Callable[[], Any]
) -> None:
    """What is prepared comes with `act`, five times."""
    for turn in range(1, 6):
        prepare()
        wait_until(lambda: blocked(deployment) == 3, "all wait")
        assert len(took) == 6 * (turn - 1)
        act()
        wait_until(partial(_has_grown_to, took, 6 * turn), "all came")


def test_resuming_wakes_idle_consumers_at_once(deployment: Deployment) -> None:
    queues = Queues(deployment.broker)

    def send_six() -> None:
        queues.pause(QUEUE)
        for _ in range(6):
            deployment.send("need", "x", queue=QUEUE)

    with idle_consumers(deployment, 3) as took:
        come_when_told(deployment, took, prepare=send_six, act=lambda: queues.resume(QUEUE))


def test_retried_dead_letters_wake_idle_consumers_at_once(deployment: Deployment) -> None:
    letters = DeadLetters(deployment.broker)

    def reject_six() -> None:
        for number in range(6):
            dead_letter(deployment, f"d{number}", message())

    def retry() -> None:
        letters.retry([letter.place for letter in letters.find(Wanted())])

    with idle_consumers(deployment, 3) as took:
        come_when_told(deployment, took, prepare=reject_six, act=retry)


# --- how queues stand


def test_every_queue_of_the_store_is_shown_whoever_uses_it(deployment: Deployment, tmp_path: Path) -> None:
    with contextlib.closing(connect(deployment)) as client:
        plain = RedisBroker(client=client, middleware=[])
        for name in ("default", "night.shift"):
            plain.declare_queue(name)
        for number in range(3):
            plain.enqueue(message(number, queue="night.shift"))
        plain.enqueue(message(3, queue="night.shift"), delay=60_000)
        taken = plain.consume("night.shift", prefetch=1)
        assert next(taken) is not None
        deployment.send("need", "x", queue="ours", delay=60_000)
        dead_letter(deployment, "d", message(), queue="given-up")
        client.set("dramatiq:someone-else", "a string")
        found = {each["queue"]: each for each in facts(deployment, "queues")["queues"]}
        numbers = {name: [each[part] for part in PARTS] for name, each in found.items()}
        assert numbers == {"night.shift": [2, 1, 1, 0, 0], "ours": [0, 1, 0, 0, 0], "given-up": [0, 0, 0, 0, 1]}
        assert 0 <= found["night.shift"]["oldest_ms"] < 60_000
        assert found["ours"]["oldest_ms"] is None
        client.zadd("dramatiq:__heartbeats__", {plain.broker_id: current_millis() - 61_000})
        assert [stands(deployment, "night.shift")[part] for part in ("running", "lost")] == [0, 1], "its worker is dead"


def test_a_queue_that_is_empty_is_known_by_the_workers_that_consume_it(deployment: Deployment) -> None:
    with deployment.worker("-p", "1", "-t", "1", "-Q", QUEUE) as worker:
        worker.ready()
        wait_until(lambda: QUEUE in [each["queue"] for each in facts(deployment, "queues")["queues"]], "it is known")
        assert worker.stop() == 0
    assert stands(deployment)["waiting"] == 0


def test_the_oldest_has_waited_since_it_was_sent_or_became_due(deployment: Deployment) -> None:
    hour_ms, queues = 3_600_000, Queues(deployment.broker)
    now = current_millis()
    half_ago = now - hour_ms // 2
    for queue, sent_at, options in [("sent", now - hour_ms, {}), ("due", now - 2 * hour_ms, {"eta": half_ago})]:
        body = Message(queue, "need", (), {}, options, message_timestamp=sent_at).encode()
        deployment.broker.do_enqueue(queue, "1", body)
    deployment.broker.do_enqueue("junk", "1", b"\xff")
    waited_ms = {queue: queues.look(queue).oldest_ms for queue in ("sent", "due", "junk")}
    assert waited_ms["junk"] is None
    assert abs((waited_ms["sent"] or 0) - hour_ms) < 60_000
    assert abs((waited_ms["due"] or 0) - hour_ms // 2) < 60_000


def test_a_narrow_terminal_shows_lines_in_the_place_of_tables(deployment: Deployment) -> None:
    deployment.send("need", "x", queue=QUEUE)
    dead_letter(deployment, "one", message(seed=7, options={"last_error": "ValueError: " + "long " * 40}))
    run(deployment, "pause", QUEUE)
    wide, narrow = run(deployment, "queues"), run(deployment, "queues", COLUMNS="40")
    assert wide.stdout.split()[:3] == ["queue", "waiting", "delayed"]
    assert narrow.stdout.startswith(f"{QUEUE}: 1 waiting, oldest ")
    assert "1 dead; paused" in narrow.stdout
    for columns in (40, 80, 120):
        lines = run(deployment, "dead", "list", COLUMNS=str(columns)).stdout.splitlines()
        assert lines[-1].endswith("…"), lines
        assert max(map(len, lines)) <= max(columns, 60)


# --- purging


@pytest.fixture
def busy(deployment: Deployment, tmp_path: Path) -> Iterator[Path]:
    """A deployment with one message running, 1,200 waiting, 700 delayed, and one dead letter; yields what ends it."""
    over = tmp_path / "over"
    with deployment.worker("-p", "1", "-t", "1", "-Q", QUEUE) as worker:
        deployment.send("hold", str(over), queue=QUEUE)
        worker.ready()
        wait_until(lambda: stands(deployment)["running"] == 1, "one is running")
        for _ in range(1_200):
            deployment.send("need", "x", queue=QUEUE)
        for _ in range(700):
            deployment.send("need", "x", queue=QUEUE, delay=3_600_000)
        dead_letter(deployment, "d", message())
        yield over
        over.touch()
        assert worker.stop() == 0


def test_a_purge_drops_what_waits_and_is_delayed_and_nothing_that_runs(deployment: Deployment, busy: Path) -> None:
    dry = facts(deployment, "purge", QUEUE, "--dry-run")
    assert dry == {"queue": QUEUE, "dry_run": True, "waiting": 1_200, "delayed": 700, "dead": 0}
    refused = run(deployment, "purge", QUEUE)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "1200 waiting and 700 delayed messages would be dropped for good" in refused.stderr
    assert "left alone: 1 running, 1 dead letter: add --yes" in refused.stderr
    assert [stands(deployment)[part] for part in PARTS] == [1_200, 700, 1, 0, 1]
    assert facts(deployment, "purge", QUEUE, "--yes") == dry | {"dry_run": False}
    assert [stands(deployment)[part] for part in PARTS] == [0, 0, 1, 0, 1]
    assert deployment.broker.do_qsize(QUEUE) == 1, "no body is left over"
    busy.touch()
    wait_until(lambda: stands(deployment)["running"] == 0, "what ran ends")
    assert facts(deployment, "purge", QUEUE, "--yes", "--dead")["dead"] == 1
    assert (stands(deployment)["dead"], deployment.dead_letters(QUEUE)) == (0, {})


def test_a_dry_run_changes_nothing(deployment: Deployment) -> None:
    deployment.send("need", "x", queue=QUEUE)
    dead_letter(deployment, "d", message())
    before = everything(deployment)
    for words in (["purge", QUEUE, "--dead"], ["dead", "retry", "--all"], ["dead", "discard", "d"]):
        assert run(deployment, *words, "--dry-run").returncode == 0
        assert run(deployment, *words, "--dry-run", "--yes").returncode == 0
    assert everything(deployment) == before


def test_a_purge_ends_while_a_producer_goes_on(deployment: Deployment) -> None:
    stop, queues = threading.Event(), Queues(deployment.broker)
    for _ in range(3 * SLICE):
        deployment.send("need", "x", queue=QUEUE)

    def produce() -> None:
        with contextlib.closing(connect(deployment)) as client:
            broker = WorkerBroker(client=client, where="the test's store")
            while not stop.is_set():
                broker.enqueue(message())

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        wait_until(lambda: queues.look(QUEUE).waiting > 3 * SLICE + 50, "it produces")
        purged = queues.purge(QUEUE)
    finally:
        stop.set()
        thread.join()
    assert purged.waiting > 3 * SLICE
    assert queues.look(QUEUE).waiting == deployment.broker.do_qsize(QUEUE)


# --- asking


def test_a_question_is_asked_in_a_terminal_and_no_is_no(deployment: Deployment) -> None:
    dead_letter(deployment, "d", message(seed=3, options={"last_error": "ValueError: three"}))
    code, said = in_terminal(deployment, "dead", "discard", "--seed", "3", answer="n")
    assert code == 1
    for part in ("1  need, queue held", "ValueError: three", "1 dead letter would be dropped for good", "[y/N]"):
        assert part in said
    assert said.rstrip().endswith("nothing was changed")
    assert stands(deployment)["dead"] == 1
    code, said = in_terminal(deployment, "dead", "retry", "--all", answer="y")
    assert (code, "1 dead letter put back" in said) == (0, True)
    code, said = in_terminal(deployment, "purge", QUEUE, answer="y")
    assert (code, "dropped 1 waiting" in said) == (0, True)
    code, said = in_terminal(deployment, "purge", QUEUE, answer="y")
    assert (code, "[y/N]" in said) == (0, False), "there is nothing to ask about"


# --- what cannot be done


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pause", "hedl"], "knows no queue 'hedl'; did you mean held?"),
        (["purge", "zzz", "--yes"], "knows no queue 'zzz'; there are: held"),
        (["dead", "list", "--queue", "hell"], "did you mean held?"),
        (["dead", "show", "nothing"], "there is no dead letter 'nothing'"),
        (["dead", "retry", "d1", "nothing"], "there is no dead letter 'nothing'"),
        (["dead", "show", "d"], "'d' may be 2 dead letters; name one of them: "),
        (
            ["dead", "retry"],
            "say which dead letters: by their ids, by filters such as --actor or --limit, or all of them",
        ),
        (["dead", "discard", "d1", "--all"], "not in two ways at once"),
        (["dead", "discard", "--all"], "2 dead letters would be dropped for good: add --yes to do it"),
        (["dead", "list", "--older-than", "5"], "'5' is no age; write it as 500ms, 90s, 15m, 2h or 3d"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_changes_nothing(
    deployment: Deployment, words: list[str], said: str
) -> None:
    for identifier in ("d1", "d2"):
        dead_letter(deployment, identifier, b"junk")
    before = everything(deployment)
    ended = run(deployment, *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert everything(deployment) == before


@pytest.mark.parametrize("words", [["queues"], ["pause", "held"], ["dead", "retry", "--all", "--yes"]])
def test_a_broker_that_is_away_is_one_sentence_without_its_password(deployment: Deployment, words: list[str]) -> None:
    ended = run(deployment, *words, ASYNCWORKER_BROKER_URL="redis://user:hunter2@127.0.0.1:1/0")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "the broker (redis://user:***@127.0.0.1:1/0) is away: " in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert "hunter2" not in ended.stderr


def test_looking_where_no_broker_ever_was_starts_none(deployment: Deployment, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    ended = run(deployment, "queues", ASYNCWORKER_STATE_DIR=str(elsewhere))
    assert (ended.returncode, f"none has ever been started in {elsewhere}" in ended.stderr) == (2, True)
    assert not elsewhere.exists()
    deployment.send("need", "x", queue=QUEUE)
    embedded.stop(deployment.settings.state_dir, for_good=False)
    assert stands(deployment)["waiting"] == 1, "one that was stopped has its data"


# --- in whatever order


class Operated(Fleet):
    """The model of the queue, with someone who operates it as the command line does."""

    @rule()
    def pause(self) -> None:
        with self.refusable():
            Queues(self.producer).pause(MODEL_QUEUE)

    @rule()
    def resume(self) -> None:
        with self.refusable():
            Queues(self.producer).resume(MODEL_QUEUE)

    def chosen(self, limit: int) -> list[Letter]:
        return list(DeadLetters(self.producer).find(Wanted()))[:limit]

    @precondition(lambda self: not self.is_full)
    @rule(limit=st.integers(1, 3))
    def retry(self, limit: int) -> None:
        chosen = self.chosen(limit)
        sound = {each.store_id for each in chosen if not each.store_id.startswith("bad-")}
        assert DeadLetters(self.producer).retry([each.place for each in chosen]).count == len(sound)
        self.dead -= sound

    @rule(limit=st.integers(1, 3))
    def discard(self, limit: int) -> None:
        chosen = self.chosen(limit)
        assert DeadLetters(self.producer).discard([each.place for each in chosen]).count == len(chosen)
        self.dead -= {each.store_id for each in chosen}
        self.expected -= {each.store_id for each in chosen}

    @rule()
    def purge(self) -> None:
        held = set(self.ids(*self.client.keys("dramatiq:__acks__.*")))
        Queues(self.producer).purge(MODEL_QUEUE)
        self.expected &= held | self.dead


def test_whoever_operates_the_queue_each_message_is_in_exactly_one_place(state_dir: Path) -> None:
    embedded.ensure(state_dir)
    hold(Operated, embedded.socket_path(state_dir), examples=30)
