"""RabbitMQ as the broker: the real server, the real worker command, kills and outages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncworker import embedded
from asyncworker.errors import BrokerUnavailable
from asyncworker.ledger import Outcome
from tests import operating
from tests.conftest import missing
from tests.rabbitmq import PASSWORD, RabbitDeployment, RabbitServer, is_installed, rabbit_server
from tests.site import BehaviourSite
from tests.waiting import wait_until

#: As plain Dramatiq writes a message; some of it is missing in each of these.
NO_MESSAGES = [b"\xff\x00 no text", b"[]", b'{"actor_name": "add"}', b'"text"', b"7" * 5_000]


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RabbitServer]:
    """One for all tests of a process, each of which gets a virtual host of it."""
    if not is_installed():
        missing("no RabbitMQ server on this machine: `make rabbitmq` gets one")
    with rabbit_server() as server:
        yield server


@pytest.fixture
def deployment(shared_server: RabbitServer, state_dir: Path) -> Iterator[RabbitDeployment]:
    with deployed(state_dir, shared_server.new_url()) as deployment:
        yield deployment


@contextlib.contextmanager
def deployed(directory: Path, url: str, **settings: object) -> Iterator[RabbitDeployment]:
    deployment = RabbitDeployment(directory, url, **settings)
    try:
        yield deployment
    finally:
        deployment.broker.close()


@pytest.mark.needs_browser
def test_an_attempt_that_fails_is_run_again_with_its_seed_and_each_has_its_row(
    deployment: RabbitDeployment, site: BehaviourSite
) -> None:
    message = deployment.send("probe.visit", site.list_url, fail=1)
    with deployment.worker() as worker:
        result = deployment.result(message)
        assert worker.stop() == 0
    first, second = deployment.rows(message)
    assert (first.outcome, second.outcome) == (Outcome.failed, Outcome.succeeded)
    assert first.seed == second.seed == result["seed"]
    assert result["attempt"] == 2
    assert deployment.waiting("default.XQ") == 0


def test_what_is_given_up_lies_in_the_dead_letters_after_its_retries(deployment: RabbitDeployment) -> None:
    message = deployment.send("need", str(deployment.directory / "none"), queue="held", seed=7)
    with deployment.worker("-p", "1", "-t", "2", "-Q", "held"):
        wait_until(lambda: deployment.waiting("held.XQ") == 1, "a dead letter")
    body = json.loads(deployment.take("held.XQ") or b"")
    assert body["message_id"] == message.message_id
    assert (body["kwargs"]["seed"], body["options"]["retries"]) == (7, 1)
    assert [row.outcome for row in deployment.rows(message)] == [Outcome.failed] * 2
