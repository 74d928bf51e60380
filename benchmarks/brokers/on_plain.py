"""Plain Dramatiq as its manual sets it up: the Redis broker with its default middleware, and AsyncIO."""

from __future__ import annotations

import dramatiq
from _stamps import parameters
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO

broker = RedisBroker(url=parameters["url"])  # type: ignore[no-untyped-call]
broker.add_middleware(AsyncIO())
dramatiq.set_broker(broker)

from _dramatiq import held, hold, later, note, send  # noqa: E402 -- actors are declared on the broker that is there

__all__ = ["held", "hold", "later", "note", "send"]
