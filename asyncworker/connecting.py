"""connect(): a client of the deployment's store, wherever that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from asyncworker import embedded
from asyncworker.settings import Settings
from asyncworker.stores import StoreAddress
from asyncworker.vetting import (
    Unfit,
    VettedConnection,
    VettedSentinelConnection,
    VettedSentinelSSLConnection,
    VettedSSLConnection,
    VettedUnixConnection,
)

#: A store that answers nothing for this long is away.
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0

#: A sentinel that is away shall not hold up the question to the next.
SENTINEL_TIMEOUT_S = 1.0


def connect(settings: Settings, **options: Any) -> redis.Redis:
    """A client of the deployment's store; it connects, and starts the embedded server, with its first command.

    Parameters:
        options: More of redis-py's options of a connection; what the URL says wins.
    """
    options = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S} | options
    if settings.broker_url is None:
        pool = redis.ConnectionPool(
            connection_class=EmbeddedConnection,
            state_dir=settings.state_dir,
            socket_timeout=options["socket_timeout"],
        )
        return redis.Redis.from_pool(pool)
    address = StoreAddress.parse(settings.broker_url.value)
    options = {"health_check_interval": 30} | options | address.options
    if address.sentinels:
        return redis.Redis.from_pool(_sentinel_pool(address, options))
    return redis.Redis.from_pool(redis.ConnectionPool(**options | {"connection_class": _class_for(address)}))


def _class_for(address: StoreAddress) -> type[redis.connection.AbstractConnection]:
    if address.scheme == "unix":
        return VettedUnixConnection
    return VettedSSLConnection if address.is_tls else VettedConnection


def _sentinel_pool(address: StoreAddress, options: dict[str, Any]) -> SentinelConnectionPool:
    timeouts = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
    sentinels = Sentinels(
        address.sentinels, sentinel_kwargs=timeouts | address.sentinel_options | {"retry": Retry(NoBackoff(), 0)}
    )
    connection_class = VettedSentinelSSLConnection if address.is_tls else VettedSentinelConnection
    return SentinelConnectionPool(address.service, sentinels, **options | {"connection_class": connection_class})


class Sentinels(Sentinel):
    """redis-py's sentinels, which say in a sentence that they name no master."""

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)
        except MasterNotFoundError as error:
            raise self._why_none(service_name) from error

    def _why_none(self, service_name: str) -> redis.RedisError:
        silent: dict[str, redis.RedisError] = {}
        for sentinel in self.sentinels:
            try:
                known = sentinel.sentinel_masters()
            except redis.RedisError as error:
                silent[address_of(sentinel)] = error
                continue
            if service_name in known or not known:
                return MasterNotFoundError(
                    f"the sentinels know no master of {service_name!r} that is up; they may be choosing another"
                )
            names = ", ".join(sorted(map(repr, known)))
            return Unfit(
                f"the sentinel {address_of(sentinel)} knows no service {service_name!r}, but {names}",
                "correct the service in the URL",
            )
        said = ", ".join(f"{where} ({error})" for where, error in silent.items())
        if any(isinstance(error, AuthenticationError) for error in silent.values()):
            remedy = "name a user of theirs: redis+sentinel://…?sentinel_username=…&sentinel_password=…"
            return Unfit(f"the sentinels refuse who asks: {said}", remedy)
        return MasterNotFoundError(f"no sentinel answers: {said}")


def address_of(sentinel: redis.Redis) -> str:
    where = sentinel.connection_pool.connection_kwargs
    return f"{where['host']}:{where['port']}"


class EmbeddedConnection(VettedUnixConnection):
    """A connection to the embedded server, which it starts when none is running."""

    def __init__(self, *, state_dir: Path, **options: Any) -> None:
        super().__init__(path=str(embedded.socket_path(state_dir)), **options)
        self._state_dir = state_dir

    def _connect(self) -> Any:
        embedded.ensure(self._state_dir)
        return super()._connect()
