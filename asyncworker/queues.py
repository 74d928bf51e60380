"""The queues in the store, as whoever operates a deployment sees and changes them."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import redis

from asyncworker import embedded
from asyncworker.broker import make_redis_broker
from asyncworker.errors import BrokerUnavailable, ConfigurationError, NotThere
from asyncworker.redis_broker import PLAIN_TIMEOUT_MS, WorkerBroker
from asyncworker.settings import Settings

#: No command moves or reads more messages than this at once: the store serves others in between.
SLICE = 500

#: Keys that one step of a scan looks at.
KEYS_AT_ONCE = 1_000

#: A queue that no one has consumed for this long, and that holds nothing, is known no more.
REMEMBERED_MS = 7 * 86_400_000

#: What the keys of a queue end with.
_ENDING = re.compile(r"(?:\.[DX]Q)?\.(?:msgs|due|wake|paused)$|\.[DX]Q$")


@dataclass(frozen=True)
class Queue:
    """How a queue stands.

    Attributes:
        paused_ms: For how long it is paused; None: it is not.
        waiting: Messages that a worker with a free thread would fetch.
        delayed: Messages that are not due yet.
        running: Messages that living workers have fetched, begun or not.
        lost: Messages that dead workers had fetched, until another one takes them back.
        dead: Its dead letters.
        oldest_ms: How long the message at the front has waited; None: none waits, or its body is no message.
    """

    name: str
    paused_ms: int | None
    waiting: int
    delayed: int
    running: int
    lost: int
    dead: int
    oldest_ms: int | None

    @property
    def paused(self) -> bool:
        return self.paused_ms is not None

    def facts(self) -> dict[str, Any]:
        """Everything, for a program."""
        return {
            "queue": self.name,
            "paused": self.paused,
            "paused_ms": self.paused_ms,
            "waiting": self.waiting,
            "delayed": self.delayed,
            "running": self.running,
            "lost": self.lost,
            "dead": self.dead,
            "oldest_ms": self.oldest_ms,
        }


@dataclass(frozen=True)
class Purged:
    """How many messages a purge has dropped, or would drop."""

    waiting: int
    delayed: int
    dead: int = 0

    @property
    def total(self) -> int:
        return self.waiting + self.delayed + self.dead


class Queues:
    """The queues that a broker's store knows, whoever declares them; plain Dramatiq's too.

    All methods raise redis.RedisError when the store does not answer; see `open_broker`.
    """

    def __init__(self, broker: WorkerBroker) -> None:
        self._broker = broker
        self._client: Any = broker.client

    def names(self) -> list[str]:
        """The queues that hold something, are paused, or were consumed by a worker in the last seven days."""
        namespace = f"{self._broker.namespace}:"
        now = now_ms(self._broker)
        found = {
            _text(name) for name in self._client.zrangebyscore(f"{namespace}__queues__", now - REMEMBERED_MS, "inf")
        }
        for key in self._client.scan_iter(match=f"{namespace}*", count=KEYS_AT_ONCE):
            name = _queue_of(_text(key).removeprefix(namespace))
            if name:
                found.add(name)
        return sorted(found)

    def known(self, name: str) -> str:
        """The name of a queue that is there; `night.DQ` is the queue `night`.

        Raises:
            NotThere: When the store knows no such queue; it names the nearest.
        """
        name, names = name.removesuffix(".DQ"), self.names()
        if name in names:
            return name
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(names) or 'none'}"
        raise NotThere(f"the broker ({self._broker.where}) knows no queue {name!r}; {hint}", name=name)

    def all(self) -> list[Queue]:
        """How every queue stands, by name."""
        return [self.look(name) for name in self.names()]

    def look(self, name: str) -> Queue:
        """How a queue stands, at one moment."""
        timeout_ms = self._broker.heartbeat_timeout
        now, since, waiting, delayed, running, lost, dead, first = self._broker.do_overview(
            name, timeout_ms, max(timeout_ms, PLAIN_TIMEOUT_MS)
        )
        paused_ms = None if since is None else max(0, now - int(since))
        return Queue(name, paused_ms, waiting, delayed, running, lost, dead, _waited_ms(first, now))

    def pause(self, name: str) -> bool:
        """Have no worker fetch a queue's messages until `resume`; returns False when it was paused already.

        Sending goes on, what runs is not interrupted, and what becomes due waits. Workers of plain Dramatiq know
        nothing of it.
        """
        new, _ = self._broker.do_pause(name)
        return bool(new)

    def resume(self, name: str) -> bool:
        """Have a queue's messages fetched again, at once; returns False when it was not paused."""
        return bool(self._broker.do_resume(name))

    def would_purge(self, name: str, *, dead: bool = False) -> Purged:
        """What `purge` would drop now."""
        stands = self.look(name)
        return Purged(stands.waiting, stands.delayed, stands.dead if dead else 0)

    def purge(self, name: str, *, dead: bool = False) -> Purged:
        """Drop what waits and what is delayed, and with `dead` the dead letters; what runs is left alone.

        Drops as many as there are when it begins: a busy producer does not keep it from ending.
        """
        do, most = self._broker, self.would_purge(name, dead=dead)
        delayed = _in_slices(do.do_drop_delayed, name, most.delayed)
        # What has become due meanwhile waits now.
        waiting = _in_slices(do.do_drop_waiting, name, most.waiting + most.delayed - delayed)
        return Purged(waiting, delayed, _in_slices(do.do_drop_dead, name, most.dead))


@contextlib.contextmanager
def open_broker(settings: Settings) -> Iterator[WorkerBroker]:
    """The deployment's broker for the time of a command; its actors are not imported.

    Raises:
        BrokerUnavailable: When it does not answer, now or later in the block.
        ConfigurationError: When none is configured, and none has ever been started here, or it is RabbitMQ.
    """
    if settings.broker_url is not None and settings.broker_url.is_rabbitmq:
        raise ConfigurationError(
            f"the broker {settings.broker_url} is RabbitMQ, whose queues have tools of their own: `rabbitmqctl "
            "list_queues` and `purge_queue`, and the management UI, which also moves messages. Queue Q has its delayed "
            "messages in Q.DQ, its dead letters in Q.XQ",
            name="ASYNCWORKER_BROKER_URL",
        )
    if settings.broker_url is None and not embedded.socket_path(settings.state_dir).exists():
        _refuse_to_be_first(settings)
    broker = make_redis_broker(settings)
    try:
        yield broker
    except redis.RedisError as error:
        is_away = isinstance(error, redis.ConnectionError | redis.TimeoutError)
        what = "is away" if is_away else "refuses what it is asked"
        reason = str(error).partition(" script: ")[0]  # which script it was means nothing to anyone
        raise BrokerUnavailable(
            f"the broker ({broker.where}) {what}: {reason}; what it did before that stays done; `asyncworker doctor` "
            "says more",
            url=broker.where,
        ) from error
    finally:
        broker.close()
        broker.client.close()


def now_ms(broker: WorkerBroker) -> int:
    """The time of the store, in UNIX milliseconds: by it messages die and are due."""
    seconds, micros = broker.client.time()
    return int(seconds * 1000 + micros // 1000)


def _refuse_to_be_first(settings: Settings) -> None:
    """Looking at queues in the wrong directory shall not leave a server there."""
    if not any(settings.state_dir.glob("appendonlydir/*")):
        raise ConfigurationError(
            f"there is no broker here: none has ever been started in {settings.state_dir}; go to the deployment's "
            "directory, or set ASYNCWORKER_STATE_DIR or ASYNCWORKER_BROKER_URL",
            name="ASYNCWORKER_STATE_DIR",
        )


def _in_slices(drop: Callable[[str, int], int], name: str, most: int) -> int:
    dropped = 0
    while dropped < most and (count := drop(name, min(SLICE, most - dropped))):
        dropped += count
    return dropped


def _queue_of(key: str) -> str | None:
    """The queue that a key, without its namespace, belongs to; None: to no queue, or to one with better keys."""
    if key.startswith("__acks__."):
        return key.split(".", 2)[-1].removesuffix(".DQ")
    if key.startswith("__") or not (ending := _ENDING.search(key)):
        return None
    return key[: ending.start()]


def _waited_ms(body: bytes | None, now: int) -> int | None:
    """For how long a message has waited: since it was sent, or became due, or was sent again."""
    try:
        message = json.loads(body or b"")
        times = [message["message_timestamp"], *(message["options"].get(name) for name in ("eta", "requeue_timestamp"))]
        return max(0, now - int(max(at for at in times if isinstance(at, int | float))))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
