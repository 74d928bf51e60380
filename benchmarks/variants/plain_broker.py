"""Plain Dramatiq on the run's Valkey, as its manual sets it up: the default middleware, AsyncIO and Results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

parameters: dict[str, Any] = json.loads(Path("parameters.json").read_text())


def make_broker(namespace: str) -> RedisBroker:
    """A broker of its own namespace, made global."""
    client = redis.Redis(unix_socket_path=parameters["socket"])
    broker = RedisBroker(client=client, namespace=namespace)  # type: ignore[no-untyped-call]
    broker.add_middleware(AsyncIO())
    results = RedisBackend(client=client, namespace=f"{namespace}-results")
    broker.add_middleware(Results(backend=results))  # type: ignore[no-untyped-call]
    dramatiq.set_broker(broker)
    return broker
