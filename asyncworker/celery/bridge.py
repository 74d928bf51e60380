"""The bridge: messages of an existing Celery broker are enqueued here, for producers that cannot change yet.

A message is acknowledged at its source when it is enqueued here, and not before. In between three things happen to it,
in three stores, so that a bridge which dies takes no message with it:

1. it is taken, and the source keeps it as this bridge's;
2. it is enqueued here, and its mark is set in the deployment's store, for a day;
3. it is acknowledged at its source.

One that died before 2 has its messages taken again by the next. One that died between 2 and 3 has them taken again,
too; their marks say that they are here, so they are acknowledged and no more. What remains possible is a message that
is here twice: the bridge died after the enqueue and before the mark, which is one round trip to the store for a hundred
messages; the store answered no more while it took them, so that they had to be sent again; or a bridge was frozen for
longer than its lease, another has taken back what it held, and both send it. Tasks that must not run twice say so
themselves, as with Celery.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import redis

from asyncworker.celery.envelope import enveloped, facts_of
from asyncworker.celery.source_amqp import AmqpSource
from asyncworker.celery.source_redis import RedisSource
from asyncworker.celery.sources import Source, Taken
from asyncworker.errors import AsyncworkerError, BrokerUnavailable, ConfigurationError
from asyncworker.producing import ProducerBroker, ToSend
from asyncworker.urls import SecretUrl

#: So many messages are taken, enqueued and acknowledged together.
MOST_TOGETHER = 100

#: How often an empty source is looked at, and one that is away, or a broker here that is, is tried again.
LOOK_S = 0.2
PAUSE_S = 1.0

#: How long the store remembers what has come over.
KEPT_MS = 24 * 3_600_000

MARK = "asyncworker:bridged:"

#: Kombu's transports that messages are taken from.
REDIS = ("redis", "rediss", "sentinel")
AMQP = ("amqp", "amqps", "pyamqp")

Say = Callable[[str], None]


@dataclass
class Report:
    """What a bridge has done.

    Attributes:
        moved: How many messages were enqueued here.
        known: How many had been, by a bridge that died before it could acknowledge them.
        left: Those that are left at the source, each as `queue: which, and why`.
        with_workers: How many Celery's own workers held at the end, or have held when they died.
    """

    moved: int = 0
    known: int = 0
    left: list[str] = field(default_factory=list)
    with_workers: int = 0

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def open_source(
    url: SecretUrl,
    queues: Sequence[str],
    *,
    options: Mapping[str, Any] | None = None,
    max_priority: int | None = None,
    lease_ms: int,
) -> Source:
    """Connect to a source.

    Parameters:
        options: The app's `broker_transport_options`.
        max_priority: With RabbitMQ, its queues' `x-max-priority`; None: they have none, and ignore priorities.
        lease_ms: A bridge that was not heard of for this long has died, and what it held is taken back.

    Raises:
        BrokerUnavailable: When it does not answer.
        ConfigurationError: When it is neither Redis nor RabbitMQ.
        NotThere: When RabbitMQ has no such queue.
    """
    scheme = url.value.partition("://")[0].partition("+")[0].lower()
    if scheme in REDIS:
        return RedisSource(url, queues, options=options or {}, lease_ms=lease_ms)
    if scheme in AMQP:
        return AmqpSource(url, queues, options=options or {}, max_priority=max_priority)
    raise ConfigurationError(
        f"--from {url}: messages are taken from {', '.join(f'{each}://' for each in (*REDIS, *AMQP))} as Celery has "
        "them in its broker_url, and from nothing else",
        name="--from",
    )


class Bridge:
    """Moves messages from a source to a broker of this package.

    Parameters:
        marks: A client of the deployment's store.
        on_news: Is told, in a line, what a person may want to know.
    """

    def __init__(
        self, source: Source, broker: ProducerBroker, marks: redis.Redis, *, on_news: Say = lambda line: None
    ) -> None:
        self._source, self._broker, self._marks = source, broker, marks
        self._say = on_news
        self._stopped = threading.Event()
        self.report = Report()

    def stop(self) -> None:
        """End `run` when the messages that it is at are where they belong; from a signal handler or another thread."""
        self._stopped.set()

    def run(self, *, once: bool = False) -> Report:
        """Move messages until `stop` is called.

        Parameters:
            once: End when the source is empty.

        Raises:
            BrokerUnavailable: With `once`, when either side does not answer; else it is tried for as long as it takes.
        """
        try:
            while not self._stopped.is_set() and not self._step(once):
                pass
            if once:
                self.report.with_workers = self._source.with_workers()
        finally:
            self._source.close()
        return self.report

    def _step(self, once: bool) -> bool:
        """Move some messages; True when there are none, and none are to come."""
        try:
            taken = self._source.take(MOST_TOGETHER)
            if taken:
                self._move(taken, once)
                return False
            if once and self._source.is_drained():
                return True
        except BrokerUnavailable as error:
            if once:
                raise
            self._say(f"{error}; trying again")
            self._reopen()
            return False
        self._stopped.wait(LOOK_S)
        return False

    def _reopen(self) -> None:
        while not self._stopped.wait(PAUSE_S):
            try:
                self._source.reopen()
            except BrokerUnavailable:
                continue
            self._say(f"the source ({self._source.where}) answers again")
            return

    def _move(self, taken: Sequence[Taken], once: bool) -> None:
        """Enqueue these and acknowledge them; what cannot be read stays taken, and goes back when the bridge ends."""
        waiting: dict[str, tuple[Taken, ToSend]] = {}
        twice: list[Taken] = []
        for each in taken:
            to_send = self._readable(each)
            if to_send is None:
                continue
            mark = mark_of(each)
            if mark in waiting:
                if not each.may_be_known:
                    mark = f"{mark}.{len(waiting)}"  # sent twice by its producer, and not delivered twice
                else:
                    twice.append(each)
                    continue
            waiting[mark] = (each, to_send)
        self._source.acknowledge([*self._drop_known(waiting, once), *twice])
        self.report.known += len(twice)
        while waiting and not self._enqueue(waiting, once):
            self._source.stay()
            if self._stopped.wait(PAUSE_S):
                return

    def _readable(self, taken: Taken) -> ToSend | None:
        problem, message = taken.problem, None
        if taken.payload is not None:
            try:
                facts = facts_of(taken.payload)
                if facts.get("task"):
                    message = enveloped(taken.payload, taken.queue)
                else:
                    problem = f"{_shown(taken.payload)}: it names no task"
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                problem = f"{_shown(taken.payload)}: {type(error).__name__}: {error}"
        if message is not None:
            one, delay = message
            return one if delay is None else (one, delay)
        line = f"{taken.queue}: {problem}"
        if line not in self.report.left:  # RabbitMQ gives it out again after each lost connection
            self.report.left.append(line)
            self._say(f"left at the source, in the queue {line}")
        return None

    def _drop_known(self, waiting: dict[str, tuple[Taken, ToSend]], once: bool) -> list[Taken]:
        """Take those out that are here already, and return them."""
        asked = [mark for mark, (taken, _) in waiting.items() if taken.may_be_known]
        while asked:
            try:
                found: list[Any] = self._marks.mget([MARK + mark for mark in asked])
            except redis.RedisError as error:
                self._source.stay()
                self._away(BrokerUnavailable(f"the store of the deployment does not answer: {error}"), once)
                if self._stopped.wait(PAUSE_S):
                    waiting.clear()  # they go back
                    return []
                continue
            known = [mark for mark, value in zip(asked, found, strict=True) if value is not None]
            self.report.known += len(known)
            return [waiting.pop(mark)[0] for mark in known]
        return []

    def _enqueue(self, waiting: dict[str, tuple[Taken, ToSend]], once: bool) -> bool:
        """Enqueue what waits, as far as the broker takes it; True when it took all."""
        failure: AsyncworkerError | None = None
        left: set[int] = set()
        try:
            self._broker.send_many([to_send for _, to_send in waiting.values()])
        except BrokerUnavailable as error:
            # Where it says nothing of them, it was not the messages that were refused, and none was sent.
            failure, left = error, {id(each) for each in error.untaken or (one for _, one in waiting.values())}
        here = {mark: taken for mark, (taken, to_send) in waiting.items() if id(to_send) not in left}
        self._mark(list(here))
        for mark in here:
            del waiting[mark]
        self.report.moved += len(here)
        self._source.acknowledge(list(here.values()))
        if failure is not None:
            self._away(failure, once)
        return failure is None

    def _mark(self, marks: Sequence[str]) -> None:
        """A mark that cannot be set is missed by no one, unless the bridge dies before it acknowledges."""
        try:
            with self._marks.pipeline(transaction=False) as pipe:
                for mark in marks:
                    pipe.set(MARK + mark, "", px=KEPT_MS)
                pipe.execute()
        except redis.RedisError as error:
            self._say(f"the store of the deployment does not note what has come over: {error}")

    def _away(self, error: AsyncworkerError, once: bool) -> None:
        if once:
            raise error
        self._say(f"{error}; trying again")


def mark_of(taken: Taken) -> str:
    """What one sending of a message is known by.

    A retry and what replaces a task keep its id, and a producer may send with one id as often as it likes: so the
    number of the retry, the body, and what kombu gave to this sending are in it, too.
    """
    payload = taken.payload or {}
    facts = facts_of(payload)
    parts = [facts.get("id"), facts.get("retries"), facts.get("eta"), payload.get("body"), taken.publication]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _shown(payload: dict[str, Any]) -> str:
    facts = facts_of(payload)
    which = facts.get("id") or payload["properties"].get("correlation_id")
    return str(which) if which else f"{payload.get('body')!s:.60}"
