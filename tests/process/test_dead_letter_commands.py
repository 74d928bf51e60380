"""The commands about dead letters, as a shell runs them: of our workers, of plain Dramatiq's, and of no one's."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import Message, Worker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis
from dramatiq.middleware import Retries

from asyncworker.dead_letters import DeadLetters, Selection, Wanted
from asyncworker.identity import MAX_SEED
from asyncworker.queues import SLICE
from asyncworker.redis_broker import WorkerBroker
from tests.operating import COMMAND, QUEUE, connect, dead_letter, environment, facts, message, run, stands
from tests.waiting import wait_until
from tests.workers import Deployment


def test_a_dead_letter_of_a_worker_is_shown_with_all_that_is_known_and_retried_as_it_was(
    deployment: Deployment, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    with deployment.worker("-p", "1", "-t", "1", "-Q", QUEUE) as worker:
        sent = deployment.send("need", str(there), seed=MAX_SEED, queue=QUEUE, options={"note": "mine"})
        wait_until(lambda: deployment.dead_letters(QUEUE), "it is given up")
        short = sent.message_id[:8]
        (listed,) = facts(deployment, "dead", "list")["dead"]
        assert (listed["id"], listed["actor"], listed["queue"]) == (sent.message_id, "need", QUEUE)
        assert (listed["seed"], listed["retries"]) == (MAX_SEED, 1)
        error = f"FileNotFoundError: no file there, seed {MAX_SEED}"
        assert listed["error"] == error
        shown = facts(deployment, "dead", "show", short)
        assert (shown["args"], shown["kwargs"], shown["options"]["note"]) == ([str(there)], {"seed": MAX_SEED}, "mine")
        assert shown["traceback"].rstrip().endswith(error)
        assert [(row["attempt"], row["outcome"], row["error"]) for row in shown["attempts"]] == [
            (1, "failed", error),
            (2, "failed", error),
        ]
        assert shown["sent_ms"] <= shown["attempts"][0]["opened_ms"] <= shown["died_ms"]
        text = run(deployment, "dead", "show", sent.message_id).stdout
        for part in (str(MAX_SEED), "attempt 2: failed on", "Traceback (most recent call last)", '{"note": "mine"}'):
            assert part in text
        assert facts(deployment, "dead", "retry", short)["retried"] == 1
        wait_until(lambda: len(deployment.rows(sent)) == 4, "it has its retry again")
        wait_until(lambda: deployment.dead_letters(QUEUE), "it is given up again")
        there.touch()
        run(deployment, "dead", "retry", short)
        wait_until(lambda: len(deployment.rows(sent)) == 5 and deployment.broker.do_qsize(QUEUE) == 0, "it is done")
        assert worker.stop() == 0
    assert {row.seed for row in deployment.rows(sent)} == {MAX_SEED}
    assert deployment.rows(sent)[-1].outcome == "succeeded"
    assert deployment.dead_letters(QUEUE) == {}


def test_a_message_for_an_unknown_actor_says_so_in_its_dead_letter(deployment: Deployment) -> None:
    with deployment.worker("-p", "1", "-t", "1", "-Q", QUEUE) as worker:
        deployment.send("nobody", queue=QUEUE)
        wait_until(lambda: deployment.dead_letters(QUEUE), "it is given up")
        assert worker.stop() == 0
    (listed,) = facts(deployment, "dead", "list", "--error", "actornotfound")["dead"]
    assert "nobody" in listed["error"]


@pytest.mark.needs_browser
def test_a_dead_letter_has_the_seed_that_its_worker_gave_it_and_what_its_only_attempt_raised(
    deployment: Deployment,
) -> None:
    with deployment.worker("-p", "1", "-t", "1", "-Q", "default") as worker:
        sent = deployment.send("probe.text", "no-url")
        wait_until(lambda: deployment.dead_letters(), "it is given up")
        assert worker.stop() == 0
    (listed,) = facts(deployment, "dead", "list")["dead"]
    (row,) = deployment.rows(sent)
    assert isinstance(listed["seed"], int)
    assert (listed["seed"], listed["error"]) == (row.seed, row.error)


def test_only_who_holds_a_message_writes_into_it(deployment: Deployment) -> None:
    deployment.broker.do_enqueue(QUEUE, "m", b"sent")
    with contextlib.closing(connect(deployment)) as client:
        other = WorkerBroker(client=client, where="the test's store")
        assert other.do_fetch(QUEUE, 1, 0, 1)[4] == b"m"
        key = f"dramatiq:{QUEUE}.msgs"
        assert (deployment.broker.do_rewrite(QUEUE, "m", b"his"), client.hget(key, "m")) == (0, b"sent")
        assert (other.do_rewrite(QUEUE, "m", b"its own"), client.hget(key, "m")) == (1, b"its own")
        other.do_ack(QUEUE, "m")
        assert (other.do_rewrite(QUEUE, "m", b"late"), client.hget(key, "m")) == (0, None)


def test_a_retried_message_is_what_it_was_but_for_what_its_attempts_have_used_up(deployment: Deployment) -> None:
    identity = {"identity_seed": 5, "identity_digest": "abc", "identity_drawn_by": "x 1"}
    kept = identity | {"pipe_target": {"a": 1}, "max_retries": 3}
    spent = {"retries": 3, "crashes": 2, "traceback": "T", "last_error": "E", "eta": 1, "redis_message_id": "else"}
    before = Message(f"{QUEUE}.DQ", "need", ("é\ud800", 2**60), {"seed": MAX_SEED}, kept | spent, message_timestamp=99)
    dead_letter(deployment, "the-id", before)
    shown = facts(deployment, "dead", "show", "the-id")
    assert shown["identity"] == {"seed": 5, "digest": "abc", "drawn_by": "x 1"}
    assert "abc, drawn by x 1 for seed 5" in run(deployment, "dead", "show", "the-id").stdout
    asked_at = current_millis()
    assert facts(deployment, "dead", "retry", "the-id")["retried"] == 1
    client: Any = deployment.broker.client
    assert client.lrange(f"dramatiq:{QUEUE}", 0, -1) == [b"the-id"]
    after: Message[Any] = Message.decode(client.hget(f"dramatiq:{QUEUE}.msgs", "the-id"))
    assert after.options.pop("requeue_timestamp") >= asked_at
    assert after.options == kept | {"redis_message_id": "the-id"}
    assert after.asdict() | {"options": {}} == before.asdict() | {"options": {}, "queue_name": QUEUE}


def test_dead_letters_of_plain_dramatiq_are_listed_shown_and_retried_by_its_own_worker(deployment: Deployment) -> None:
    calls: list[int] = []

    def fail(number: int) -> None:
        calls.append(number)
        raise ValueError(f"number {number}")

    with contextlib.closing(connect(deployment)) as client:
        broker = RedisBroker(client=client, middleware=[Retries(max_retries=1, min_backoff=20, max_backoff=40)])
        dramatiq.actor(fail, broker=broker, queue_name=QUEUE)
        worker = Worker(broker, worker_timeout=100, worker_threads=1)
        worker.start()
        try:
            sent = broker.enqueue(message(3, actor="fail"))
            wait_until(lambda: deployment.dead_letters(QUEUE), "it is given up")
            (listed,) = facts(deployment, "dead", "list", "--actor", "fail")["dead"]
            assert (listed["id"], listed["error"]) == (sent.message_id, "ValueError: number 3")
            assert facts(deployment, "dead", "show", sent.message_id)["attempts"] == []
            assert facts(deployment, "dead", "retry", "--actor", "fail", "--yes")["retried"] == 1
            wait_until(lambda: len(calls) == 4 and deployment.dead_letters(QUEUE), "it has its retry again")
        finally:
            worker.stop()
            broker.close()
    assert facts(deployment, "dead", "discard", sent.message_id[:8])["discarded"] == 1
    assert deployment.dead_letters(QUEUE) == {}


def test_however_many_retry_at_the_same_time_each_dead_letter_is_put_back_once(deployment: Deployment) -> None:
    for number in range(2_000):
        dead_letter(deployment, f"d{number}", message(number))
    begun = [
        subprocess.Popen(
            [*COMMAND, "dead", "retry", "--all", "--yes", "--json"],
            cwd=deployment.directory,
            env=environment(deployment),
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    told = [json.loads(each.communicate(timeout=60)[0]) for each in begun]
    assert sum(each["retried"] for each in told) == 2_000
    assert [each.returncode for each in begun] == [1 if each["gone"] else 0 for each in told]
    assert (stands(deployment)["waiting"], stands(deployment)["dead"]) == (2_000, 0)
    assert deployment.broker.do_qsize(QUEUE) == 2_000


def test_what_died_again_meanwhile_is_another_dead_letter(deployment: Deployment) -> None:
    letters = DeadLetters(deployment.broker)
    dead_letter(deployment, "d", message(1), age_ms=60_000)
    places = Selection.of(letters.find(Wanted())).places
    dead_letter(deployment, "d", message(1))
    assert (letters.discard(places).gone, letters.retry(places).gone) == (1, 1)
    assert stands(deployment)["dead"] == 1


def test_a_body_that_is_no_message_is_shown_safely_not_retried_and_discarded(deployment: Deployment) -> None:
    body = b"\x1b[2J\xff not json \xe2\x80\xae"
    dead_letter(deployment, "junk", body)
    dead_letter(deployment, "good", message(1))
    shown = run(deployment, "dead", "show", "junk")
    assert shown.returncode == 0
    assert repr(body)[2:-1] in shown.stdout
    assert base64.b64decode(facts(deployment, "dead", "show", "junk")["body_base64"]) == body
    told = facts(deployment, "dead", "retry", "--all", "--yes", code=1)
    assert (told["retried"], [each["id"] for each in told["refused"]]) == (1, ["junk"])
    refused = run(deployment, "dead", "retry", "junk")
    assert (refused.returncode, "junk cannot be retried: its body is no message" in refused.stderr) == (1, True)
    assert "Traceback" not in refused.stderr
    assert facts(deployment, "dead", "discard", "junk")["discarded"] == 1
    assert deployment.dead_letters(QUEUE) == {}


def test_a_dead_letter_without_a_body_or_with_an_id_that_is_no_text_can_only_be_discarded(
    deployment: Deployment,
) -> None:
    client: Any = deployment.broker.client
    client.zadd(f"dramatiq:{QUEUE}.XQ", {b"\xff\x1b": 1, b"bodiless": 2})
    client.hset(f"dramatiq:{QUEUE}.XQ.msgs", b"\xff\x1b", message().encode())
    told = facts(deployment, "dead", "retry", "--all", "--yes", code=1)
    assert (told["retried"], told["gone"]) == (0, 1)
    assert [each["reason"] for each in told["refused"]] == ["its id in the store is no text"]
    assert "its body is gone" in run(deployment, "dead", "show", "bodiless").stdout
    assert facts(deployment, "dead", "discard", "bodiless", "\\xff")["discarded"] == 2


def test_a_dead_letter_that_is_named_twice_is_meant_once(deployment: Deployment) -> None:
    dead_letter(deployment, "one", given := message())
    assert facts(deployment, "dead", "retry", "one", given.message_id, given.message_id[:6])["retried"] == 1


@pytest.mark.parametrize("words", [["dead", "list"], ["dead", "show", "nasty"], ["dead", "retry", "--all"], ["queues"]])
def test_what_comes_from_outside_is_not_obeyed_by_the_terminal(deployment: Deployment, words: list[str]) -> None:
    nasty = "\x1b]0;title\x07 \x9b31m \u202e [bold]x[/y] \r\n second \ud800"
    dead_letter(deployment, "nasty", message(nasty, actor=nasty, options={"last_error": nasty, "traceback": nasty}))
    deployment.broker.client.zadd("dramatiq:\x1b[1m.XQ", {"x": 1})
    for more in ([], ["--json"]):
        ended = run(deployment, *words, *more)
        said = ended.stdout + ended.stderr
        assert "\\x1b" in said or "\\u001b" in said
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(said)
        assert "Traceback" not in said


def test_filters_select_by_actor_queue_error_seed_and_age(deployment: Deployment) -> None:
    hour_ms = 3_600_000
    dead_letter(deployment, "a", message(seed=1, options={"last_error": "TimeoutError: page 1"}), age_ms=3 * hour_ms)
    dead_letter(deployment, "b", message(seed=2, options={"traceback": "...\nOSError: no\n"}), age_ms=2 * hour_ms)
    dead_letter(deployment, "c", message(seed=2, actor="other", queue="night"), queue="night", age_ms=hour_ms)
    dead_letter(deployment, "d", b"junk")

    def selected(*words: str) -> str:
        return "".join(each["store_id"] for each in facts(deployment, "dead", "list", *words)["dead"])

    assert selected() == "dcba", "the latest first"
    assert selected("--actor", "need") == "ba"
    assert selected("--queue", "night") == "c"
    assert selected("--error", "timeouterror") == "a"
    assert selected("--error", "oserror: NO") == "b"
    assert selected("--error", "no message") == "d"
    assert selected("--seed", "2") == "cb"
    assert selected("--older-than", "90m") == "ba"
    assert selected("--younger-than", "90m") == "dc"
    assert selected("--older-than", "90m", "--younger-than", "150min") == "b"
    assert selected("--seed", "2", "--actor", "need") == "b"
    assert selected("--limit", "2") == "dc"
    assert facts(deployment, "dead", "list", "--limit", "2")["more"] is True
    assert facts(deployment, "dead", "list", "--limit", "4")["more"] is False
    told = facts(deployment, "dead", "discard", "--limit", "2", "--yes")
    assert (told["selected"], selected()) == (2, "ba")


def test_put_back_are_those_that_died_first_in_front(deployment: Deployment) -> None:
    for number in range(2 * SLICE + 10):
        dead_letter(deployment, f"d{number}", message(number), age_ms=1_000_000 - number)
    assert facts(deployment, "dead", "retry", "--all", "--yes")["retried"] == 2 * SLICE + 10
    client: Any = deployment.broker.client
    order = [each.decode() for each in client.lrange(f"dramatiq:{QUEUE}", 0, -1)]
    assert order == [f"d{number}" for number in range(2 * SLICE + 10)]


def test_many_that_died_in_the_same_moment_are_each_found_once_and_held_in_slices(deployment: Deployment) -> None:
    count, client = 20 * SLICE, deployment.broker.client
    padding = "x" * 4_000
    with client.pipeline(transaction=False) as pipe:
        for number in range(count):
            pipe.zadd(f"dramatiq:{QUEUE}.XQ", {f"d{number}": 1_700_000_000_000 + number // (3 * SLICE)})
            pipe.hset(f"dramatiq:{QUEUE}.XQ.msgs", f"d{number}", message(number, padding).encode())
        pipe.execute()
    letters = DeadLetters(deployment.broker)
    tracemalloc.start()
    try:
        selection = Selection.of(letters.find(Wanted(actor="need")))
        done = letters.retry(selection.places)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(selection.places)) == len(selection.places) == done.count == count
    assert peak < count * len(padding) / 2, "all bodies together are more than twice as much"
