"""What `asyncworker doctor` says of the broker: what it is, and what of it would lose messages."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import redis
from redis.sentinel import SentinelConnectionPool

from asyncworker import embedded
from asyncworker.connecting import Sentinels, address_of, connect
from asyncworker.errors import AsyncworkerError, BrokerUnavailable, ConfigurationError, UnfitBroker
from asyncworker.fitness import check_permissions
from asyncworker.settings import Settings
from asyncworker.state_dirs import refuse_another_users
from asyncworker.stores import StoreAddress
from asyncworker.urls import SecretUrl

#: The age of messages and the delays of retries are told by each machine's own clock.
TOLERATED_CLOCK_MS = 1_000

BROKER_TIMEOUT_MS = 2_000

#: So often it is asked how long a round trip takes.
ROUND_TRIPS = 9


class State(StrEnum):
    """What a check found: `failed` means that a worker would not run."""

    ok = "ok"
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `remedy` is what to do when it is not ok."""

    name: str
    state: State
    detail: str
    remedy: str | None = None

    def facts(self) -> dict[str, str | None]:
        """As JSON takes it."""
        return {**asdict(self), "state": self.state.value}


def broker_checks(settings: Settings) -> Iterator[Check]:
    """Look at the broker and the store that the settings name, or at what the embedded one needs."""
    if settings.store_url is not None:
        as_broker = settings.model_copy(update={"broker_url": settings.store_url})
        yield from (_of_the_store(check) for check in _at(as_broker))
    if settings.broker_url is None:
        yield _embedded(settings)
    elif settings.broker_url.is_rabbitmq:
        yield _rabbitmq(settings.broker_url)
    else:
        yield from _at(settings)


def _of_the_store(check: Check) -> Check:
    remedy = check.remedy and check.remedy.replace("ASYNCWORKER_BROKER_URL", "ASYNCWORKER_STORE_URL")
    return replace(check, name="store" if check.name == "broker" else check.name, remedy=remedy)


def _rabbitmq(url: SecretUrl) -> Check:
    try:
        from asyncworker.rabbitmq import version_of
    except ModuleNotFoundError:
        remedy = f"`{sys.executable} -m pip install 'asyncworker[rabbitmq]'`"
        return Check("broker", State.failed, f"{url} is RabbitMQ, and pika is not installed", remedy)
    try:
        version = version_of(url, timeout_s=BROKER_TIMEOUT_MS / 1000)
    except (BrokerUnavailable, ConfigurationError) as error:
        remedy = "start it, or correct ASYNCWORKER_BROKER_URL; a worker would wait for it"
        return Check("broker", State.failed, f"{url} does not answer: {error}", remedy)
    return Check("broker", State.ok, f"{version} at {url}")


def _at(settings: Settings) -> Iterator[Check]:
    timeout_s = BROKER_TIMEOUT_MS / 1000
    client = connect(settings, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    try:
        yield from _store(client, settings)
    except UnfitBroker as error:
        what = str(error).removesuffix(f"; {error.remedy}")
        yield Check("broker", State.failed, f"{settings.broker_url}: {what}", error.remedy)
    except (redis.RedisError, AsyncworkerError, OSError) as error:
        reason = str(error) or type(error).__name__
        remedy = "start it, or correct ASYNCWORKER_BROKER_URL; a worker would wait for it"
        yield Check("broker", State.failed, f"{settings.broker_url} does not answer: {reason}", remedy)
    finally:
        client.close()


def _embedded(settings: Settings) -> Check:
    server = embedded.binary()
    if server is None:
        remedy = "set ASYNCWORKER_BROKER_URL, or install valkey-server or redis-server"
        return Check("broker", State.failed, "none is configured, and no Valkey is here to embed", remedy)
    folder = settings.state_dir
    try:
        refuse_another_users(folder)
    except ConfigurationError as error:
        what, _, remedy = str(error).partition("; ")
        return Check("broker", State.failed, what, remedy)
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        detail = f"the state directory {folder} cannot be written"
        return Check("broker", State.failed, detail, "set ASYNCWORKER_STATE_DIR to one that can")
    running = embedded.answers(embedded.socket_path(folder))
    when = "running" if running else "started with the first message or worker"
    return Check("broker", State.ok, f"embedded Valkey in {folder} ({when}), from {server}")


def _store(client: redis.Redis, settings: Settings) -> Iterator[Check]:
    client.ping()
    address = StoreAddress.parse(settings.broker_url.value if settings.broker_url else "")
    info = _info(client)
    product = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    version = info.get("valkey_version") or info.get("redis_version") or "of an unknown version"
    detail = (
        f"{product} {version} at {settings.broker_url}: {address.shape}, round trip {_round_trip_ms(client):.2f} ms"
    )
    yield _fit(detail, info, client)
    yield _persistence(info, client)
    if isinstance(client.connection_pool, SentinelConnectionPool):
        yield _sentinels(client.connection_pool, info)
    yield clock(client)


def _info(client: redis.Redis) -> dict[str, Any]:
    """INFO, not CONFIG: hosted servers refuse the latter."""
    info: dict[str, Any] = client.info()
    return info


def _round_trip_ms(client: redis.Redis) -> float:
    took = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        client.ping()
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


def _fit(detail: str, info: dict[str, Any], client: redis.Redis) -> Check:
    if info.get("role") == "slave":
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        remedy = f"name its master, {master}, or sentinels (redis+sentinel://)"
        return Check("broker", State.failed, f"{detail}; it is a replica, which takes nothing", remedy)
    try:
        check_permissions(client, "dramatiq")
    except UnfitBroker as error:
        return Check("broker", State.failed, str(error).removesuffix(f"; {error.remedy}"), error.remedy)
    policy = info.get("maxmemory_policy")
    if info.get("maxmemory", 1) and policy not in (None, "noeviction"):
        detail += f"; its maxmemory-policy is {policy}: a key that it evicts is a lost message"
        return Check("broker", State.warning, detail, "`CONFIG SET maxmemory-policy noeviction`")
    return Check("broker", State.ok, detail)


def _persistence(info: dict[str, Any], client: redis.Redis) -> Check:
    """Of a server that does not say when it saves, what INFO tells is all there is."""
    if info.get("aof_enabled"):
        return Check("persistence", State.ok, "append-only file")
    try:
        saves = client.config_get("save").get("save")
    except redis.ResponseError:
        saves = None
    if saves:
        detail = "snapshots only: what came since the last is lost when the server dies"
        return Check("persistence", State.ok, detail)
    if saves is None:
        return Check("persistence", State.ok, "no append-only file; the server does not say whether it saves")
    remedy = "`CONFIG SET appendonly yes`, and in its configuration file"
    return Check("persistence", State.warning, "none: every message is lost when the server ends", remedy)


def _sentinels(pool: SentinelConnectionPool, info: dict[str, Any]) -> Check:
    faults = []
    sentinels: Sentinels = pool.sentinel_manager
    for sentinel in sentinels.sentinels:
        try:
            sentinel.ping()
        except redis.RedisError as error:
            faults.append(f"{address_of(sentinel)} does not answer ({error})")
    if not info.get("connected_slaves"):
        faults.append("there is no replica to fail over to")
    if faults:
        return Check("sentinels", State.warning, "; ".join(faults), "start what is missing")
    count = len(sentinels.sentinels)
    return Check("sentinels", State.ok, f"all {count} answer; replicas: {info['connected_slaves']}")


def clock(client: redis.Redis) -> Check:
    """Whether this machine's clock agrees with the broker's."""
    before = time.time()
    seconds, micros = client.time()
    # The broker read its clock between the two moments; what cannot be explained by the way is the difference.
    after, theirs = time.time(), seconds + micros / 1e6
    ahead = before - theirs if theirs < before else min(after - theirs, 0.0)
    if abs(ahead) * 1000 <= TOLERATED_CLOCK_MS:
        return Check("clock", State.ok, "agrees with the broker's")
    detail = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the broker's: delays and age limits are off"
    return Check("clock", State.warning, detail, "synchronise both by NTP")
