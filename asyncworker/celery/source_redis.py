"""Redis or Valkey as the source of a bridge.

Kombu's own consumer takes a message off its list in one step and notes in another that it has it, so one that is killed
in between loses it. Here a message moves from its list to one of the bridge's own in a single step of the store.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import kombu
import redis
from kombu.utils.json import loads

from asyncworker.celery.sources import CONNECT_TIMEOUT_S, SOCKET_TIMEOUT_S, Taken, asking
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.urls import SecretUrl

#: Bridges, and what they hold, have keys in the source that begin so.
PREFIX = "asyncworker.bridge"


class RedisSource:
    """Celery's lists in Redis or Valkey, each priority of a queue a list.

    What a bridge holds of a list lies in a list of its own, `asyncworker.bridge.<id>:<list>`. The set
    `asyncworker.bridge` names all such; `asyncworker.bridge.<id>` is there while the bridge lives.
    """

    def __init__(self, url: SecretUrl, queues: Sequence[str], *, options: Mapping[str, Any], lease_ms: int) -> None:
        self.where = str(url)
        self._lease_ms = lease_ms
        self._id = f"{PREFIX}.{uuid4().hex}"
        bounds = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": CONNECT_TIMEOUT_S}
        with asking(self.where):
            self._connection = kombu.Connection(url.value, transport_options=bounds | dict(options))
            self._channel: Any = self._connection.channel()
        self._client: Any = redis.Redis(connection_pool=self._channel.pool, decode_responses=False)
        #: kombu restores what Celery's dead workers held; only who says after how long may know that they have died.
        self._restores = "visibility_timeout" in options
        prefix = self._channel.global_keyprefix
        # The most urgent of all queues first, as kombu's consumer does it.
        self._lists = {
            prefix + self._channel._q_for_pri(queue, step): queue
            for step in self._channel.priority_steps
            for queue in queues
        }
        self._announced: set[str] = set()
        #: What is held by bridges that have died just now is free when their leases are over.
        self._look_until = time.monotonic() + lease_ms / 1000
        self._looked_at = float("-inf")
        self.stay()
        self._try_out()

    def _try_out(self) -> None:
        try:
            with asking(self.where):
                self._client.lmove(self._own(""), self._own(""), "LEFT", "RIGHT")
                self._lengths(self._lists)
        except BrokerUnavailable as error:
            if not isinstance(error.__cause__, redis.ResponseError):
                raise
            raise ConfigurationError(
                f"the source ({self.where}) cannot be used: {error.__cause__}; it has to be Redis 6.2 or later, or "
                "Valkey, and each --queue a list of Celery's",
                name="--from",
            ) from error

    def take(self, most: int) -> list[Taken]:
        self.stay()
        self._look_after_the_dead()
        taken: list[Taken] = []
        with asking(self.where):
            for name, length in zip(self._lists, self._lengths(self._lists), strict=True):
                count = min(length, most - len(taken))
                if count > 0:
                    taken += [_read(self._lists[name], name, raw) for raw in self._claim(name, count)]
        return taken

    def _claim(self, name: str, count: int) -> list[bytes]:
        own = self._own(name)
        if own not in self._announced:
            self._client.sadd(PREFIX, own)
            self._announced.add(own)
        with self._client.pipeline(transaction=False) as pipe:
            for _ in range(count):
                pipe.lmove(name, own, "RIGHT", "LEFT")
            return [raw for raw in pipe.execute() if raw is not None]

    def acknowledge(self, taken: Sequence[Taken]) -> None:
        if not taken:
            return
        with asking(self.where), self._client.pipeline(transaction=False) as pipe:
            for each in taken:
                name, raw = each.receipt
                pipe.lrem(self._own(name), 1, raw)
            pipe.execute()

    def is_drained(self) -> bool:
        if time.monotonic() >= self._look_until:
            return True
        with asking(self.where):
            others = [name for name in self._held() if name not in self._announced]
            return not any(self._lengths(others))

    def with_workers(self) -> int:
        with asking(self.where):
            return int(self._client.hlen(self._channel.global_keyprefix + self._channel.unacked_key))

    def stay(self) -> None:
        with asking(self.where):
            self._client.set(self._id, "", px=self._lease_ms)

    def reopen(self) -> None:
        """redis-py connects by itself; an answer that did not come may have been of messages that were claimed."""
        self.stay()
        with asking(self.where):
            for name in self._announced:
                self._give_back(name)

    def close(self) -> None:
        try:
            with asking(self.where):
                for name in self._announced:
                    self._give_back(name, to_the_end=True)
                    self._client.srem(PREFIX, name)
                self._client.delete(self._id)
        finally:
            self._connection.release()

    def _look_after_the_dead(self) -> None:
        """Put back what bridges that have died held, several times in a lease."""
        if time.monotonic() < self._looked_at + self._lease_ms / 4000:
            return
        self._looked_at = time.monotonic()
        with asking(self.where):
            for name in self._held():
                owner = name.partition(":")[0]
                if name not in self._announced and not self._client.exists(owner):
                    self._give_back(name)
                    self._client.srem(PREFIX, name)
            if self._restores:
                self._channel.qos.restore_visible(num=1_000, interval=1)

    def _give_back(self, name: str, *, to_the_end: bool = False) -> None:
        """The one that was taken first is the first again, unless what is given back should be the last."""
        target = name.partition(":")[2]
        while self._client.lmove(name, target, *(("RIGHT", "LEFT") if to_the_end else ("LEFT", "RIGHT"))) is not None:
            pass

    def _held(self) -> list[str]:
        return [_text(name) for name in self._client.smembers(PREFIX)]

    def _lengths(self, names: Sequence[str] | Mapping[str, str]) -> list[int]:
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.llen(name)
            return list(pipe.execute())

    def _own(self, name: str) -> str:
        return f"{self._id}:{name}"


def _read(queue: str, name: str, raw: bytes) -> Taken:
    receipt = (name, raw)
    try:
        payload = loads(raw.decode())
        if not isinstance(payload, dict) or not isinstance(payload.get("properties"), dict) or "body" not in payload:
            raise ValueError("it is no message of kombu's: there are no properties, or no body")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        shown = raw[:60].decode(errors="replace")
        return Taken(queue, None, receipt, problem=f"{shown!r}: {error}")
    return Taken(queue, payload, receipt, publication=str(payload["properties"].get("delivery_tag") or ""))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
