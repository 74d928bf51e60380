"""What people who run queues have reported of retries: each is a claim here."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncworker.ledger import Outcome
from asyncworker.processes import lives
from tests.waiting import wait_until
from tests.workers import READY, Deployment, Running

#: When a worker is killed is drawn from this seed.
SEED = 5

MESSAGES, FAILURES, KILLS = 200, 4, 5


@pytest.fixture
def deployment(state_dir: Path) -> Iterator[Deployment]:
    deployment = Deployment(state_dir, heartbeat_timeout_ms=1_000, crash_loop_ready_ms=1, max_losses=100)
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


def kill_at_random(up: Running, choice: random.Random) -> int:
    """Kill one of the workers, as soon as two are there; returns its pid."""
    alive = wait_until(
        lambda: alive if len(alive := [pid for pid in up.workers if lives(pid)]) == 2 else None, "two are ready"
    )
    time.sleep(choice.random())  # the fact tested: at any moment
    os.kill(pid := choice.choice(alive), signal.SIGKILL)
    wait_until(lambda: not lives(pid), "it is dead")
    return pid


@pytest.mark.long
def test_retries_that_wait_while_their_workers_are_killed_at_random_each_run_once(deployment: Deployment) -> None:
    """Reported as Bogdanp/dramatiq#431 and #692. 800 retries of 200 messages here, and 5,000 there."""
    notes = deployment.directory / "notes"
    assert deployment.broker.do_qsize("retried") == 0  # the store is up, and does not end with the command
    with deployment.up("-p", "2", "-t", "4", "-Q", "retried") as up:
        up.ready()
        messages = [deployment.send("retried", str(notes), FAILURES, queue="retried") for _ in range(MESSAGES)]
        choice = random.Random(SEED)
        for _ in range(KILLS):
            kill_at_random(up, choice)
        up.wait_for_log(READY, times=2 + KILLS)  # a stop that comes before a death was noticed is not in order
        wait_until(lambda: deployment.broker.do_qsize("retried") == 0, "everything is done")
        assert up.stop() == 0
    ran: dict[str, Counter[str]] = defaultdict(Counter)
    for line in notes.read_text().splitlines():
        message_id, retries = line.split()
        ran[message_id][retries] += 1
    for message in messages:
        runs, rows = ran[message.message_id], deployment.rows(message)
        lost = sum(row.outcome is Outcome.lost for row in rows)
        assert sorted(runs) == [str(number) for number in range(FAILURES + 1)]
        assert runs.total() - len(runs) <= lost, f"seed {SEED}: {runs} with {lost} losses"
        assert len({row.attempt for row in rows}) == len(rows)
    assert deployment.dead_letters("retried") == {}
