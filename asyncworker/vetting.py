"""Connections that look at whom they reach, once each: a store that cannot be used is refused with a sentence.

The server says what it is in the answer that greets each new connection, so looking costs no round trip of its own,
and a command none at all.
"""

from __future__ import annotations

import ssl
from typing import Any

import redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from asyncworker.errors import UnfitBroker
from asyncworker.stores import CLUSTER_REMEDY, NO_CLUSTER, SENTINEL_EXAMPLE

#: LPOP with a count and HELLO without arguments came with it.
OLDEST = (6, 2)

#: What a user of the store needs; README has it too. Dramatiq keeps a result under 32 hex digits, without its name.
KEYS = f"~dramatiq* ~asyncworker:* ~{32 * '?'}"
PERMISSIONS = f"{KEYS} +@read +@write +@transaction +@scripting +@connection -@dangerous +keys +info +time"

URL_SETTING = "ASYNCWORKER_BROKER_URL"


class Unfit(UnfitBroker, redis.RedisError):
    """UnfitBroker as a connection raises it: whoever waits for a store that is away waits for this one, too.

    It is no ConnectionError of redis-py, which would try again.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}", name=URL_SETTING, remedy=remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self).removesuffix(f"; {self.remedy}"), self.remedy)


class Vetted:
    """A mixin for redis-py's connections."""

    username: str | None
    handshake_metadata: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"redis_connect_func": Vetted._greet})

    def _connect(self) -> Any:
        try:
            return super()._connect()  # type: ignore[misc]
        except ssl.SSLCertVerificationError as error:
            raise Unfit(
                f"the certificate of {self._name()} is not trusted ({error.verify_message})",
                "name the authority that signed it, as in rediss://…?ssl_ca_certs=/path/ca.pem, or correct the host",
            ) from error
        except ssl.SSLError as error:
            raise Unfit(
                f"{self._name()} does not speak TLS as it should ({error.reason or error})",
                "write redis:// for a server without TLS, or correct the port or the certificates in the URL",
            ) from error
        except TimeoutError as error:
            if "handshake" not in str(error):
                raise
            raise redis.TimeoutError(
                f"{self._name()} began no TLS in time; write redis:// if it has none (ASYNCWORKER_BROKER_URL)"
            ) from error
        except FileNotFoundError as error:
            if not hasattr(self, "ca_certs"):  # a unix socket: its server is away
                raise
            raise Unfit(
                "a certificate or key that the broker URL names is no file here", "correct the path after ssl_…="
            ) from error

    def _greet(self: Any) -> None:
        """What redis-py does with a new connection, and then a look at what answers."""
        try:
            self.on_connect()
            said = self.handshake_metadata or self._hello()
        except AuthenticationError as error:
            raise Unfit(
                f"{self._name()} refuses {self._user()} ({error})", "correct the user and the password in the URL"
            ) from error
        except NoPermissionError:
            raise  # has its sentence
        except ResponseError as error:
            if "DB index" in str(error):
                raise Unfit(f"{self._name()} has no database {self.db}", "correct the URL") from error
            if "HELLO" not in str(error).upper():
                raise
            raise _too_old(self._name(), "it does not know HELLO") from error
        refuse(self._name(), facts(said))

    def _hello(self: Any) -> Any:
        """Of redis-py before 8, and of connections without RESP3, none has said it."""
        self.send_command("HELLO", check_health=False)
        return self.read_response()

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            if not isinstance(error, NoPermissionError) and "NOPERM" not in str(error):
                raise
            raise NoPermissionError(
                f"{self._user()} may not do something that asyncworker does ({error}); give it what it needs: "
                f"ACL SETUSER {self.username or 'default'} {PERMISSIONS}"
            ) from error

    def _name(self) -> str:
        host = getattr(self, "host", None)
        return f"{host}:{getattr(self, 'port', '')}" if host else f"unix://{getattr(self, 'path', '')}"

    def _user(self) -> str:
        return f"the user {self.username!r}" if self.username else "the default user"


def facts(said: Any) -> dict[str, str]:
    """The answer to HELLO, in RESP2 or RESP3, with or without decoding."""
    pairs = said.items() if isinstance(said, dict) else zip(said[::2], said[1::2], strict=True)
    return {_text(name): _text(value) for name, value in pairs}


def refuse(name: str, said: dict[str, str]) -> None:
    """Refuse what says that it cannot be used.

    Raises:
        Unfit: When it is a cluster, a sentinel, or older than Redis 6.2.
    """
    if said.get("mode") == "cluster":
        raise Unfit(f"{name}: {NO_CLUSTER}", CLUSTER_REMEDY)
    if said.get("mode") == "sentinel":
        raise Unfit(f"{name} is a sentinel, not a broker", f"write {SENTINEL_EXAMPLE}")
    version = said.get("version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < OLDEST:
        raise _too_old(name, f"it is {version}")


def _too_old(name: str, why: str) -> Unfit:
    oldest = ".".join(map(str, OLDEST))
    return Unfit(f"{name} is older than Redis {oldest} ({why})", f"name a Redis from {oldest} on, or a Valkey")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class VettedConnection(Vetted, redis.Connection):
    """Over TCP."""


class _AgreesOnTLS:
    """To agree on TLS is a part of connecting, and has its time limit: a server without TLS may say nothing at all."""

    socket_timeout: float | None
    socket_connect_timeout: float | None

    def _wrap_socket_with_ssl(self, sock: Any) -> Any:
        sock.settimeout(self.socket_connect_timeout)
        wrapped = super()._wrap_socket_with_ssl(sock)  # type: ignore[misc]
        wrapped.settimeout(self.socket_timeout)
        return wrapped


class VettedSSLConnection(_AgreesOnTLS, Vetted, redis.SSLConnection):
    """Over TLS."""


class VettedUnixConnection(Vetted, redis.UnixDomainSocketConnection):
    """Over a unix socket."""


class _LeavesReplicas(Vetted):
    """Behind sentinels, a master that has become a replica is left for the one that is master now.

    redis-py does so by the error's class, which Redis before 7 does not give to what a script is refused.
    """

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except ResponseError as error:
            if "READONLY" not in str(error):
                raise
            self.disconnect()  # type: ignore[attr-defined]
            raise redis.ConnectionError("the master has become a replica") from error


class VettedSentinelConnection(_LeavesReplicas, SentinelManagedConnection):
    """To the master that sentinels name."""


class VettedSentinelSSLConnection(_AgreesOnTLS, _LeavesReplicas, SentinelManagedSSLConnection):
    """The same over TLS."""
