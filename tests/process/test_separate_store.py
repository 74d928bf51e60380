"""A Redis or Valkey as the broker, and another one as the store of all else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq import Message

from asyncworker import embedded
from asyncworker.ledger import Outcome, Row
from tests.outage import Server, server_in
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


class Apart:
    """A deployment whose ledger's store is a server that goes away, and whose broker stays."""

    def __init__(self, directory: Path, server: Server) -> None:
        (directory / "broker").mkdir()
        self.server = server
        # A seed, so that no one has to ask the store for one.
        self.deployment = Deployment(
            directory / "broker", store_url=server.url, seed=7, heartbeat_timeout_ms=1_000, max_losses=1
        )
        self._notes = directory / "notes"

    def send(self, *numbers: int, actor: str = "note", queue: str = "noted", **kwargs: Any) -> list[Message[Any]]:
        path = str(self._notes)
        return [self.deployment.send(actor, path, number, queue=queue, **kwargs) for number in numbers]

    def wait_for_notes(self, *numbers: int) -> None:
        def are_noted() -> bool:
            lines = self._notes.read_text().splitlines() if self._notes.exists() else []
            return set(numbers) <= {int(line.split()[0]) for line in lines}

        wait_until(are_noted, f"notes of {numbers}", timeout_ms=20_000)

    def rows(self, messages: list[Message[Any]], *, of: Callable[[Row], Any]) -> list[list[Any]]:
        return [[of(row) for row in self.deployment.rows(message)] for message in messages]

    def are_done(self, messages: list[Message[Any]]) -> None:
        done = [[Outcome.succeeded]] * len(messages)
        wait_until(lambda: self.rows(messages, of=lambda row: row.outcome) == done, "one closed row for each")


@pytest.fixture
def apart(state_dir: Path) -> Iterator[Apart]:
    (state_dir / "store").mkdir()
    with server_in(state_dir / "store") as server:
        server.start()
        apart = Apart(state_dir, server)
        yield apart
        apart.deployment.broker.close()
        apart.deployment.broker.client.close()
        embedded.stop(state_dir / "broker")


@pytest.mark.needs_browser
@pytest.mark.parametrize("how", ["is stopped", "hangs"])
def test_workers_go_on_while_the_ledgers_store_is_away_say_so_and_repair_the_account_when_it_is_back(
    apart: Apart, how: str
) -> None:
    with apart.deployment.worker("-p", "1", "-t", "2", "-Q", "noted", "looked") as worker:
        before = [*apart.send(1), *apart.send(2, actor="noted.look_and_note", queue="looked")]
        apart.wait_for_notes(1, 2)
        apart.are_done(before)
        apart.server.stop() if how == "is stopped" else apart.server.hang()
        plain = apart.send(3, 4, 5)
        browsing = apart.send(6, 7, 8, actor="noted.look_and_note", queue="looked")
        apart.wait_for_notes(*range(3, 9))
        worker.wait_for_log("the ledger's store does not take rows")
        apart.server.start() if how == "is stopped" else apart.server.go_on()
        worker.wait_for_log("the ledger's store takes rows again")
        apart.are_done(before + plain + browsing)
        after = apart.send(9, actor="noted.look_and_note", queue="looked")
        apart.are_done(after)
        wait_until(
            lambda: all("close" in times for (times,) in apart.rows(browsing, of=lambda row: row.phases_ms)),
            "the times of all phases",
        )
        assert worker.stop() == 0
    assert ", 0 were dropped" in worker.log
    assert worker.log.count("the ledger's store does not take rows") == 1


def test_a_loss_is_counted_while_the_ledgers_store_is_away_and_is_in_the_ledger_when_it_is_back(apart: Apart) -> None:
    with apart.deployment.worker("-p", "1", "-t", "1", "-Q", "noted") as first:
        (message,) = apart.send(1, ms=60_000)
        wait_until(lambda: apart.rows([message], of=lambda row: row.outcome) == [["running"]], "its row is open")
        apart.server.stop()
        os.kill(first.ready().workers[0], signal.SIGKILL)
    with apart.deployment.worker("-p", "1", "-t", "1", "-Q", "noted") as second:
        second.wait_for_log(f"message_id={message.message_id} actor=note attempt=None seed=None outcome=lost")
        (other,) = apart.send(2)
        apart.wait_for_notes(2)
        apart.server.start()
        second.wait_for_log("the ledger's store takes rows again")
        wait_until(lambda: apart.rows([message], of=lambda row: row.outcome) == [["lost"]], "its row is closed")
        apart.are_done([other])
        assert second.stop() == 0
