"""A Redis or Valkey as the broker, and another one as the store of all else."""

from __future__ import annotations

from pathlib import Path

import redis

from asyncworker import embedded
from asyncworker.ledger import Outcome
from tests.waiting import wait_until
from tests.workers import Deployment


def test_a_redis_broker_may_have_its_results_its_ledger_and_its_seed_in_another_store(state_dir: Path) -> None:
    for name in ("broker", "store"):
        (state_dir / name).mkdir()
    try:
        store = embedded.ensure(state_dir / "store")
        deployment = Deployment(state_dir / "broker", store_url=f"unix://{store}")
        message = deployment.send("add", 1, 2, queue="plain")
        with deployment.worker("-p", "1", "-t", "1", "-Q", "plain"):
            assert deployment.result(message) == 3
            # The result is there before the row: the worker must not be killed between the two.
            wait_until(
                lambda: [row.outcome for row in deployment.rows(message)] == [Outcome.succeeded], "its row is closed"
            )
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
