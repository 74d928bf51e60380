"""connect(): a client of the deployment's store, wherever that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis

from asyncworker import embedded
from asyncworker.settings import Settings

#: A store that answers nothing for this long is away.
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0


def connect(settings: Settings) -> redis.Redis:
    """A client of the deployment's store; it connects, and starts the embedded server, with its first command."""
    if settings.broker_url is not None:
        return redis.Redis.from_url(
            settings.broker_url.value,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            health_check_interval=30,
        )
    pool = redis.ConnectionPool(
        connection_class=EmbeddedConnection, state_dir=settings.state_dir, socket_timeout=SOCKET_TIMEOUT_S
    )
    return redis.Redis(connection_pool=pool)


class EmbeddedConnection(redis.UnixDomainSocketConnection):
    """A connection to the embedded server, which it starts when none is running."""

    def __init__(self, *, state_dir: Path, **options: Any) -> None:
        super().__init__(path=str(embedded.socket_path(state_dir)), **options)
        self._state_dir = state_dir

    def _connect(self) -> Any:
        embedded.ensure(self._state_dir)
        return super()._connect()
