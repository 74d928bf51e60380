"""Stores of every shape: TLS, users, unix sockets, databases, several products, and those that are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from asyncworker.broker import make_broker
from asyncworker.connecting import connect
from asyncworker.errors import BrokerUnavailable, UnfitBroker
from asyncworker.permissions import check_permissions
from asyncworker.settings import Settings, load
from asyncworker.vetting import PERMISSIONS
from tests.conftest import missing
from tests.servers import PRODUCTS, Certificates, Store, binary_of, greeting, running, stand_in
from tests.workers import Deployment


def settings(url: str, **more: object) -> Settings:
    return load({}, broker_url=url, **more)


def works(url: str) -> None:
    """Send to the store there, have a worker run it, and get its result."""


def run_one(directory: Path, url: str) -> None:
    """A worker process runs a message there, a delayed one too, and one that fails and is retried."""
    deployment = Deployment(directory, broker_url=url)
    with deployment.worker() as worker:
        messages = [
            deployment.send("need", "a", queue="held"),
            deployment.send("need", "b", queue="held", delay=300),
        ]
        for message in messages:
            deployment.result(message)
        assert worker.stop() == 0
    assert deployment.broker.do_qsize("held") == 0
    deployment.broker.client.close()


def refusal(url: str) -> str:
    """What a producer is told, which is what a connection is told."""
    broker = make_broker(settings(url, send_timeout_ms=3_000))
    began = time.monotonic()
    with pytest.raises(UnfitBroker) as refused:
        Deployment.send(_Sender(broker), "need", queue="held")  # type: ignore[arg-type]
    assert time.monotonic() - began < 2, "it does not wait for what will not pass"
    broker.client.close()
    return str(refused.value)
