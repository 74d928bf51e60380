"""The kombu transport `asyncworker://`: each Celery message becomes one Dramatiq message."""

from __future__ import annotations

from typing import Any

from kombu.transport import redis as kombu_redis

from asyncworker.celery.channel import Channel


class Transport(kombu_redis.Transport):
    """kombu's Redis transport over the connections of this package, whose channel gives tasks to its broker."""

    Channel = Channel
    can_parse_url = True
    #: Celery sends events by fanout where it says so.
    driver_type = "redis"
    driver_name = "asyncworker"

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {}
