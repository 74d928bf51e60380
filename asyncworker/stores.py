"""StoreAddress: a Redis or Valkey URL, taken apart; what cannot work is refused here, before anything connects."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.connection import parse_url

from asyncworker.urls import RABBITMQ_SCHEMES, SecretUrl, taken_apart

#: What a store's URL starts with.
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")

SENTINEL_PORT = 26379

SENTINEL_EXAMPLE = "redis+sentinel://user:password@host:26379,host:26379/service/0"

NO_CLUSTER = (
    "the broker is a cluster, and asyncworker needs one server that has all keys of a queue: Dramatiq's names for "
    "them hash to different slots"
)
CLUSTER_REMEDY = "name a server without cluster mode, or sentinels for fail-over (redis+sentinel://)"

#: The options after the ? of a URL, which are redis-py's. Others of its would change what this package is answered.
OPTIONS = {
    "db",
    "username",
    "password",
    "socket_timeout",
    "socket_connect_timeout",
    "socket_keepalive",
    "health_check_interval",
    "max_connections",
    "client_name",
    "protocol",
}
TLS_OPTIONS = {
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_ca_data",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_ciphers",
    "ssl_keyfile",
    "ssl_min_version",
    "ssl_password",
}
SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}

#: The longest that a command waits in the store is 2 s; an answer that takes longer than this is none.
LEAST_SOCKET_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class StoreAddress:
    """Where a store is.

    Attributes:
        options: redis-py's arguments of a pool and its connections; of sentinels' the host and port are theirs to say.
        service: What sentinels call the server; empty without sentinels.
        sentinels: Their hosts and ports.
        sentinel_options: redis-py's arguments of a connection to one.
        scheme: What the URL began with.
    """

    scheme: str
    options: dict[str, Any] = field(repr=False)
    service: str = ""
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_tls(self) -> bool:
        return self.scheme.startswith("rediss")

    @property
    def shape(self) -> str:
        """In a few words, for a person."""
        if self.sentinels:
            count = len(self.sentinels)
            words = f"{self.service} behind {count} sentinel{'' if count == 1 else 's'}"
        else:
            words = "unix socket" if self.scheme == "unix" else "single server"
        return f"{words}, TLS" if self.is_tls else words

    @classmethod
    def parse(cls, url: str) -> StoreAddress:
        """Take a store's URL apart. No error quotes it: it may hold a password.

        Raises:
            ValueError: When the scheme, the database or an option cannot be used; it says which.
        """
        parts = taken_apart(url)
        _check_scheme(parts.scheme)
        if parts.fragment:
            raise ValueError("a # in a broker URL is written %23")
        rest = url.partition("://")[2]
        if parts.scheme.endswith("+sentinel"):
            return cls._of_sentinels(url)
        path, database = (parts.path, "") if parts.scheme == "unix" else ("", parts.path.strip("/"))
        if parts.scheme == "unix" and not path.strip("/"):
            raise ValueError("a unix:// URL names a socket, as in unix:///run/valkey/valkey.sock?db=0")
        _check_database(database)
        return cls(scheme=parts.scheme, options=_options(f"{parts.scheme}://{rest}"))

    @classmethod
    def _of_sentinels(cls, url: str) -> StoreAddress:
        parts = taken_apart(url)
        who, at, hosts = parts.netloc.rpartition("@")
        service, _, database = parts.path.strip("/").partition("/")
        sentinels = [urlsplit(f"//{host}") for host in hosts.split(",")]
        if not service or not all(each.hostname for each in sentinels):
            raise ValueError(f"a URL of sentinels names each of them and the service, as in {SENTINEL_EXAMPLE}")
        _check_database(database)
        plain = parts.scheme.removesuffix("+sentinel")
        options = _options(f"{plain}://{who}{at}sentinels/{database}?{parts.query}", more=frozenset(SENTINEL_OPTIONS))
        del options["host"]
        options.pop("connection_class", None)
        own = {name.removeprefix("sentinel_"): options.pop(name) for name in SENTINEL_OPTIONS & options.keys()}
        if plain == "rediss":
            own |= {"ssl": True} | {name: value for name, value in options.items() if name.startswith("ssl_")}
        return cls(
            scheme=parts.scheme,
            options=options,
            service=unquote(service),
            sentinels=tuple((each.hostname or "", each.port or SENTINEL_PORT) for each in sentinels),
            sentinel_options=own,
        )


def as_store_url(url: SecretUrl) -> SecretUrl:
    """Raise ValueError unless a store can be reached by it."""
    StoreAddress.parse(url.value)
    return url


def as_broker_url(url: SecretUrl) -> SecretUrl:
    """Raise ValueError unless it is a store's, or RabbitMQ's."""
    if not url.is_rabbitmq:
        return as_store_url(url)
    if not all(taken_apart(part).scheme in RABBITMQ_SCHEMES for part in url.parts):
        raise ValueError("each host of RabbitMQ is amqp://… or amqps://…")
    return url


def _check_scheme(scheme: str) -> None:
    if scheme in SCHEMES:
        return
    if "cluster" in scheme:
        raise ValueError(f"{NO_CLUSTER}; {CLUSTER_REMEDY}")
    known = ", ".join(f"{each}://" for each in SCHEMES)
    hint = f"; sentinels are written {SENTINEL_EXAMPLE}" if "sentinel" in scheme else ""
    raise ValueError(f"a store's URL starts with {known}, and a broker's may be RabbitMQ's amqp:// or amqps://{hint}")


def _check_database(database: str) -> None:
    """redis-py takes any other text for database 0, and 1/2 for 12."""
    if database and not (database.isascii() and database.isdigit()):
        raise ValueError(f"a database is a number, as in redis://host:6379/0, not {database!r}")


def _options(url: str, *, more: frozenset[str] = frozenset()) -> dict[str, Any]:
    is_tls = url.startswith("rediss")
    known = OPTIONS | more | (TLS_OPTIONS if is_tls else set())
    for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name in TLS_OPTIONS and not is_tls:
            raise ValueError(f"{name} is an option of TLS, whose URLs start with rediss")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
            raise ValueError(f"{name} is no option of a broker URL; the nearest is {near}")
        if name == "ssl_cert_reqs" and value not in ("none", "optional", "required"):
            raise ValueError("ssl_cert_reqs is none, optional or required")
    try:
        options: dict[str, Any] = parse_url(url)
    except ValueError:  # its text may quote what it stumbled over
        raise ValueError("an option after the ? has a value that is not of its kind") from None
    if options.get("socket_timeout", LEAST_SOCKET_TIMEOUT_S) < LEAST_SOCKET_TIMEOUT_S:
        raise ValueError(f"socket_timeout is at least {LEAST_SOCKET_TIMEOUT_S:g} (seconds): workers wait in the store")
    return options
