"""Workers killed at random moments under load, two hundred times: no message is lost."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from dramatiq import Message

from asyncworker.redis_broker import WorkerBroker
from tests.forked import COUNTS, QUEUE, Zygote, forking
from tests.stores import Store
from tests.waiting import wait_until

KILLS = 200
WORKERS = 5
THREADS = 2
HEARTBEAT_MS = 600

#: Between two kills, at the most: a worker lives for some 0.2 s then, of which its start takes a fifth.
LONGEST_PAUSE_S = 0.06

#: Where the choice of whom to kill, and when, begins.
SEED = 20_261_202

#: The producer waits while so much waits: what lies in a long queue is in no danger.
BACKLOG = 60


class Producer(threading.Thread):
    """Keeps workers busy until it is told to stop; every fourth message is delayed, some are sent together."""

    def __init__(self, broker: WorkerBroker) -> None:
        super().__init__()
        self._broker = broker
        self._random = random.Random(SEED)
        self.sent = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            if self._broker.do_qsize(QUEUE) >= BACKLOG:
                self.over.wait(0.005)
                continue
            count = self._random.choice((1, 1, 8))
            self._broker.send_many([self._message(self.sent + number) for number in range(count)])
            self.sent += count

    def _message(self, number: int) -> tuple[Message[Any], int | None]:
        message: Message[Any] = Message(QUEUE, "record", (number,), {}, {})
        return message, self._random.randrange(500) if number % 4 == 0 else None


def kill_at_random(zygote: Zygote, choice: random.Random) -> list[int]:
    """Kill any of the workers at any moment, and start another, so often; returns those that are left."""
    alive = [zygote.fork() for _ in range(WORKERS)]
    for _ in range(KILLS):
        time.sleep(choice.random() * LONGEST_PAUSE_S)  # the fact tested: at any moment
        zygote.kill(alive.pop(choice.randrange(WORKERS)))
        alive.append(zygote.fork())
    return alive


@pytest.mark.timeout(300)  # for a machine that does other things, too
@pytest.mark.long
def test_two_hundred_random_kills_of_workers_under_load_lose_no_message(store: Store, state_dir: Path) -> None:
    producer = Producer(store.ours())
    with forking(state_dir, heartbeat_ms=HEARTBEAT_MS, threads=THREADS) as zygote:
        producer.start()
        try:
            alive = kill_at_random(zygote, random.Random(SEED))
        finally:
            producer.over.set()
            producer.join()
        runs = _settled(store, producer)
        assert [zygote.stop(pid) for pid in alive] == [0] * WORKERS
    more = sum(count - 1 for count in runs.values())
    print(f"{producer.sent} messages, {KILLS} kills of {WORKERS} workers, {more} runs more than messages")
    assert producer.sent > 2 * KILLS, "there was no load"
    assert 0 < more < producer.sent, "some were killed between the work and its acknowledgement"
    left = [key for key in store.client.scan_iter("dramatiq:*") if b"__sent__" not in key and b".wake" not in key]
    assert not [key for key in left if b"__acks__" in key or QUEUE.encode() in key], f"left in the store: {left}"


def _settled(store: Store, producer: Producer) -> dict[int, int]:
    """How often each message was run, when nothing is left to run."""
    broker = store.ours()
    try:
        wait_until(lambda: broker.do_qsize(QUEUE) == 0, "everything is acknowledged", timeout_ms=20_000)
    finally:
        runs = {int(number): int(count) for number, count in store.client.hgetall(COUNTS).items()}
        lost = sorted(set(range(producer.sent)) - runs.keys())
        places = broker.do_overview(QUEUE, HEARTBEAT_MS, HEARTBEAT_MS)
        assert not lost, f"seed {SEED}: of {producer.sent} messages {len(lost)} were never run: {lost[:20]}; {places}"
    return runs
