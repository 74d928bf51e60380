"""Workers that are killed under their messages: the losses are counted, and a message that kills each time ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dramatiq import Message

from asyncworker.dead_letters import DeadLetters, Wanted
from asyncworker.settling import RETRYING
from tests.stores import QUEUE, Store, consumer_of, identifier, message, silence, take
from tests.waiting import wait_until
from tests.workers import Deployment

WORKER = ("-p", "1", "-t", "4", "-Q", "deadly")

LOSSES = f"dramatiq:{QUEUE}.losses"


@pytest.fixture
def deployment(state_dir: Path) -> Iterator[Deployment]:
    deployment = Deployment(state_dir, heartbeat_timeout_ms=1_000)
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


def outcomes(deployment: Deployment, message: Message[Any]) -> list[str]:
    return [row.outcome for row in deployment.rows(message)]


def gate(deployment: Deployment) -> Path:
    """The file that deadly messages wait for."""
    return deployment.directory / "gate"


def work_until_done(deployment: Deployment, *, workers: int) -> list[str]:
    """Start one worker after another as long as they die, so many at most; returns their logs."""
    logs = []
    for _ in range(workers):
        gate(deployment).unlink(missing_ok=True)
        with deployment.worker(*WORKER) as worker:
            worker.ready()
            gate(deployment).touch()

            def over(worker: Any = worker) -> bool:
                return worker.command.poll() is not None or deployment.broker.do_qsize("deadly") == 0

            wait_until(over, "it was killed, or everything is done")
            is_done = worker.command.poll() is None
            if is_done:
                assert worker.stop() == 0
            logs.append(worker.log)
        if is_done:
            return logs
    raise AssertionError(f"{workers} workers were killed")


def test_a_message_that_kills_its_process_each_time_is_dead_lettered_with_the_reason_and_stays_there(
    deployment: Deployment,
) -> None:
    deadly = deployment.send("die", str(gate(deployment)), queue="deadly", seed=42)
    logs = work_until_done(deployment, workers=4)
    assert len(logs) == 4
    assert f"message_id={deadly.message_id} actor=die attempt=3 seed=42 outcome=lost" in logs[-1]
    assert outcomes(deployment, deadly) == ["lost", "lost", "lost"]
    (letter,) = DeadLetters(deployment.broker).find(Wanted())
    assert "was lost 3 times" in (letter.error or "")
    assert letter.message is not None
    assert letter.message.kwargs["seed"] == 42
    assert deployment.broker.do_qsize("deadly") == 0
    assert not deployment.broker.client.exists("dramatiq:deadly.losses"), "and nothing is kept of it"


def test_those_that_ran_beside_it_are_told_from_it(deployment: Deployment) -> None:
    beside: list[Message[Any]] = [deployment.send("linger", 1_500, queue="deadly") for _ in range(3)]
    deadly = deployment.send("die", str(gate(deployment)), queue="deadly")
    work_until_done(deployment, workers=5)
    assert outcomes(deployment, deadly) == ["lost", "lost", "lost"]
    for each in beside:
        assert deployment.result(each) == 1_500
        assert outcomes(deployment, each)[-1] == "succeeded"


@pytest.mark.needs_browser
def test_a_loss_is_told_with_its_message_seed_attempt_and_last_phase(deployment: Deployment, site: Any) -> None:
    deadly = deployment.send(
        "deadly.die_in_page", f"{site.url}/cookie/get", queue="deadly", seed=7, options={"max_losses": 1}
    )
    logs = work_until_done(deployment, workers=2)
    assert (
        f"message_id={deadly.message_id} actor=deadly.die_in_page attempt=1 seed=7 outcome=lost phase=code" in logs[-1]
    )
    (row,) = deployment.rows(deadly)
    assert (row.outcome, row.seed, row.phase) == ("lost", 7, "code")


# --- in the store


def test_what_was_only_fetched_ahead_is_not_lost(store: Store) -> None:
    producer, dead, alive = store.ours(), store.ours(), store.ours()
    sent = [producer.enqueue(message(number)) for number in range(5)]
    dead.do_fetch(QUEUE, 5, 0, 2)
    dead.do_fetch(QUEUE, 5, 5, 0, identifier(sent[3]))  # begun since
    silence(store, dead, for_ms=16_000)
    assert alive.recover(QUEUE) == 5
    begun = {identifier(sent[number]).encode() for number in (0, 1, 3)}
    assert set(store.client.hgetall(LOSSES)) == begun
    assert not list(store.client.scan_iter("*__ahead__*"))


def test_a_worker_is_told_how_often_what_it_fetches_was_lost_and_the_count_ends_with_the_message(store: Store) -> None:
    producer, alive = store.ours(), store.ours()
    sent = [producer.enqueue(message(number)) for number in range(3)]
    for _ in range(2):
        dead = store.ours()
        its_consumer = consumer_of(dead, prefetch=2)
        for _ in range(2):
            dead.begin(take(its_consumer))
        silence(store, dead, for_ms=16_000)
        alive.recover(QUEUE)
    consumer = consumer_of(alive)
    received = [take(consumer) for _ in range(3)]
    assert [each.options.get("losses") for each in received] == [2, 2, None]
    consumer.ack(received[0])
    consumer.nack(received[1])
    wait_until(lambda: store.fetched(alive) == {identifier(sent[2])}, "two are settled")
    assert not store.client.exists(LOSSES)


def test_the_count_of_what_a_plain_worker_was_done_with_is_forgotten_with_the_next_loss(store: Store) -> None:
    producer, alive, plain = store.ours(), store.ours(), store.plain()
    for name in ("a", "b"):
        sent, dead = producer.enqueue(message(name)), store.ours()
        dead.begin(take(consumer_of(dead)))
        silence(store, dead, for_ms=16_000)
        assert alive.recover(QUEUE) == 1
        if name == "a":
            plain.do_fetch(QUEUE, 1)
            plain.do_ack(QUEUE, identifier(sent))
            assert store.client.hkeys(LOSSES) == [identifier(sent).encode()]
    assert store.client.hgetall(LOSSES) == {identifier(sent).encode(): b"1"}


def test_what_was_lost_before_is_not_lost_again_until_its_worker_has_begun_it(store: Store) -> None:
    producer, alive = store.ours(), store.ours()
    sent = producer.enqueue(message("a"))
    for begins in (True, False, True):
        dead = store.ours()
        received = take(consumer_of(dead))
        if begins:
            dead.begin(received)
        silence(store, dead, for_ms=16_000)
        alive.recover(QUEUE)
    assert store.client.hget(LOSSES, identifier(sent)) == b"2"


def test_what_a_plain_worker_took_back_unbegun_is_lost_when_it_was_begun_the_next_time(store: Store) -> None:
    producer, ours, alive = store.ours(), store.ours(), store.ours()
    sent = producer.enqueue(message("a"))
    ours.do_fetch(QUEUE, 1, 0, 0)
    store.client.smove(f"dramatiq:__acks__.{ours.broker_id}.{QUEUE}", "taken", identifier(sent))
    store.client.lpush(f"dramatiq:{QUEUE}", identifier(sent))
    ours.do_fetch(QUEUE, 1, 0, 1)
    silence(store, ours, for_ms=16_000)
    assert alive.recover(QUEUE) == 1
    assert store.client.hget(LOSSES, identifier(sent)) == b"1"


@pytest.mark.parametrize("delay", [None, 60_000])
def test_a_worker_that_dies_once_the_retry_is_enqueued_has_lost_nothing_and_the_retry_is_there_once(
    store: Store, delay: int | None
) -> None:
    producer, dead, alive = store.ours(), store.ours(), store.ours()
    producer.enqueue(message("a"))
    consumer = consumer_of(dead)
    received = take(consumer)
    setattr(received, RETRYING, True)
    dead.enqueue(received, delay=delay)
    silence(store, dead, for_ms=16_000)
    assert alive.recover(QUEUE) == 0
    assert not store.client.exists(LOSSES)
    assert received.options["redis_message_id"] not in [*store.waiting(), *store.due(), *store.fetched(dead)]
    assert alive.do_qsize(QUEUE) == 1
    consumer.ack(received)
    assert alive.do_qsize(QUEUE) == 1, "which is acknowledged already, and its next attempt is not"


def test_a_retry_of_what_another_worker_has_taken_is_not_enqueued(store: Store, caplog: Any) -> None:
    producer, frozen, alive = store.ours(), store.ours(), store.ours()
    producer.enqueue(message("a"))
    consumer = consumer_of(frozen)
    received = take(consumer)
    silence(store, frozen, for_ms=16_000)
    assert alive.recover(QUEUE) == 1
    setattr(received, RETRYING, True)
    frozen.enqueue(received, delay=10)
    consumer.ack(received)
    assert "was no longer this worker's" in caplog.text
    assert alive.do_qsize(QUEUE) == 1


def test_a_worker_that_left_in_order_has_lost_nothing(store: Store) -> None:
    producer, left, alive = store.ours(), store.ours(), store.ours()
    producer.enqueue(message("a"))
    left.do_fetch(QUEUE, 1, 0, 1)
    left.leave()
    assert alive.recover(QUEUE) == 1
    assert take(consumer_of(alive)).options.get("losses") is None


def test_what_a_worker_gives_back_and_what_never_reached_it_is_not_lost(store: Store) -> None:
    producer, worker = store.ours(), store.ours()
    sent = [producer.enqueue(message(number)) for number in range(4)]
    worker.do_fetch(QUEUE, 4, 0, 1)
    worker.do_requeue(QUEUE, *[identifier(each) for each in sent[:2]])
    worker.do_reclaim(QUEUE)
    assert not store.client.exists(LOSSES)
    assert not list(store.client.scan_iter("*__ahead__*"))
    assert set(store.waiting()) == {identifier(each) for each in sent}
