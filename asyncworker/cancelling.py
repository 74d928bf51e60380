"""Cancelling messages: `asyncworker.cancel(message)`, and what the command `asyncworker cancel` does.

First the ids are noted as cancelled, so that no worker begins one from then on (cancellations.py); then the messages
are looked for. What waits is dropped here, and gets its row and its error. What runs is ended by its worker, which
hears of it within a second, and is waited for. Looking takes a pass over the bodies that the broker holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import dramatiq
import redis
from dramatiq import Broker, Message
from dramatiq.common import q_name
from dramatiq.errors import DecodeError

from asyncworker.accounting import known_as, now_ms
from asyncworker.cancellations import SENTENCE, TOLD_BY_WORKER, Cancellations, Cancelled
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.interrupts import store_error
from asyncworker.ledger import Ledger, Outcome, Row, text
from asyncworker.middleware import ledger_of
from asyncworker.redis_broker import PLAIN_TIMEOUT_MS, WorkerBroker

#: How long the end of what runs is waited for, unless told otherwise; it is looked for this often.
WAIT_MS = 10_000
LOOK_S = 0.05

#: So much of the store is read in one step: it serves others in between.
KEYS_AT_ONCE, BODIES_AT_ONCE = 1_000, 500

#: What the error of a row begins with whose message was cancelled.
_MARK = f"{Cancelled.__name__}:"

#: Outcomes after which a message is not run again by itself.
_FINAL = (Outcome.succeeded, Outcome.rejected)


class Found(StrEnum):
    """Where a message was when it was cancelled."""

    waiting = "waiting"
    delayed = "delayed"  # a retry that waits for its time, too
    lost = "lost"  # a worker had it that died
    running = "running"  # a living worker has it
    ended = "ended"  # before it could be cancelled, or it was cancelled before
    dead = "dead"  # a dead letter, which no worker takes
    noted = "noted"  # in a queue that cannot be looked into: the worker that takes it drops it
    unknown = "unknown"


_DROPPED = (Found.waiting, Found.delayed, Found.lost)


@dataclass(frozen=True)
class Cancellation:
    """What became of a message that was to be cancelled.

    Attributes:
        is_cancelled: True when it will not run, or no more: it was dropped, or its attempt has ended without success.
        outcome: How its last attempt ended; None: there was none, or it has not ended, or the ledger knows nothing.
        worker: Which worker process had it last.
        took_ms: From the call to its end, of one that was running.
    """

    message_id: str
    found: Found
    is_cancelled: bool
    outcome: str | None = None
    worker: str | None = None
    took_ms: int | None = None

    def facts(self) -> dict[str, Any]:
        """Everything, for a program."""
        return asdict(self)


def cancel(message: Message[Any] | str, *, wait_ms: int = WAIT_MS, broker: Broker | None = None) -> Cancellation:
    """Cancel a message, whether it waits or runs; it is never run again by itself, and is no failure.

    Parameters:
        message: The message, or its id.
        wait_ms: How long to wait for the end of one that runs; its worker ends it also when that was too short.
        broker: Whose; None: the global one.

    Raises:
        ConfigurationError: When there is no store that its workers would be told by.
        BrokerUnavailable: When the store does not answer.
    """
    return cancel_many([message], wait_ms=wait_ms, broker=broker)[0]


async def acancel(message: Message[Any] | str, *, wait_ms: int = WAIT_MS, broker: Broker | None = None) -> Cancellation:
    """`cancel` from any event loop, without blocking it. When this is cancelled, the message may be nevertheless."""
    return await asyncio.to_thread(cancel, message, wait_ms=wait_ms, broker=broker)


def cancel_many(
    messages: Iterable[Message[Any] | str], *, wait_ms: int = WAIT_MS, broker: Broker | None = None
) -> list[Cancellation]:
    """`cancel` for several, which are looked for and waited for together; answers in their order."""
    broker = broker or dramatiq.get_broker()
    cancellations: Cancellations | None = getattr(broker, "cancellations", None)
    if cancellations is None:
        raise ConfigurationError(
            f"{type(broker).__name__} has no store by which workers hear that a message was cancelled; use the broker "
            "of `asyncworker.get_broker()`, with RabbitMQ and ASYNCWORKER_STORE_URL",
            name="ASYNCWORKER_STORE_URL",
        )
    ids = [each if isinstance(each, str) else each.message_id for each in messages]
    cases = {each: _Case(each) for each in ids}
    try:
        _Look(broker, cancellations, list(cases.values())).cancel(wait_ms)
    except redis.RedisError as error:
        where = getattr(broker, "where", type(broker).__name__)
        raise BrokerUnavailable(
            f"the store of the broker ({where}) does not answer: {error}; some of the messages may be cancelled, "
            "cancel them again",
            url=where,
        ) from error
    return [cases[each].answer() for each in ids]


@dataclass
class _Case:
    """One message on the way to being cancelled."""

    message_id: str
    #: Its bodies in the store: (queue, id in the store). A retry is another one than what is retried.
    places: set[tuple[str, str]] = field(default_factory=set)
    message: Message[Any] | None = None
    found: Found = Found.unknown
    is_settled: bool = False
    last: Row | None = None
    began: float = field(default_factory=time.monotonic)
    took_ms: int | None = None

    @property
    def outcome(self) -> Outcome | None:
        return self.last.outcome if self.last is not None and self.last.outcome is not Outcome.running else None

    @property
    def is_final(self) -> bool:
        """True when its last attempt was its last, unless a dead letter is retried."""
        return self.outcome in _FINAL

    def settle(self, found: Found) -> None:
        self.is_settled, self.found = True, found
        self.took_ms = round((time.monotonic() - self.began) * 1000) if found is Found.running else None

    def answer(self) -> Cancellation:
        return Cancellation(
            self.message_id,
            self.found,
            is_cancelled=self._is_cancelled(),
            outcome=str(self.outcome) if self.outcome is not None else None,
            worker=self.last.worker or None if self.last is not None else None,
            took_ms=self.took_ms,
        )

    def _is_cancelled(self) -> bool:
        match self.found:
            case Found.waiting | Found.delayed | Found.lost | Found.noted:
                return True
            case Found.running:
                return self.is_settled and self.outcome is not Outcome.succeeded
            case Found.ended:  # idempotent: it was cancelled by an earlier call
                return self.last is not None and (self.last.error or "").startswith(_MARK)
        return False


class _Look:
    """Looks for messages until all of them have ended, or the time has."""

    def __init__(self, broker: Broker, cancellations: Cancellations, cases: list[_Case]) -> None:
        self._broker = broker
        self._store = broker if isinstance(broker, WorkerBroker) else None
        self._cancellations = cancellations
        self._ledger: Ledger = ledger_of(broker)
        self._cases = cases

    def cancel(self, wait_ms: int) -> None:
        deadline = time.monotonic() + wait_ms / 1000
        self._cancellations.records.add(case.message_id for case in self._cases)
        for _ in range(2):  # what moves from one place to another may be overlooked once
            self._find([case for case in self._cases if not case.places])
        for case in self._cases:
            self._look(case)
        while (pending := [case for case in self._cases if not case.is_settled]) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            for case in pending:
                self._look(case)

    def _look(self, case: _Case) -> None:
        states = {self._drop(*place) for place in case.places}
        rows = self._ledger.rows(case.message_id)
        case.last = rows[-1] if rows else None
        if dropped := states.intersection(_DROPPED):
            self._dropped(case, Found(dropped.pop()))
        elif Found.running in states or (self._store is None and case.last is not None and case.outcome is None):
            case.found = Found.running
        elif Found.dead in states:
            case.settle(Found.dead)
        elif case.found is Found.running:
            self._ended(case)
        elif self._store is None and not case.is_final:
            case.settle(Found.noted)
        else:
            case.settle(Found.ended if case.last is not None else Found.unknown)

    def _ended(self, case: _Case) -> None:
        """What ran has ended, or it is on its way to where it waits for its retry."""
        known = set(case.places)
        if not case.is_final:
            self._find([case])
        if case.places == known:
            case.settle(Found.running)

    def _drop(self, queue: str, identifier: str) -> str:
        broker: Any = self._broker
        timeout_ms = broker.heartbeat_timeout
        return text(broker.do_cancel(queue, identifier, timeout_ms, max(timeout_ms, PLAIN_TIMEOUT_MS)))

    def _dropped(self, case: _Case, found: Found) -> None:
        """Close the account of what was dropped, as its worker would."""
        error, at_ms, message = Cancelled(f"{SENTENCE}; it was {found}"), now_ms(), case.message
        if message is not None and TOLD_BY_WORKER in message.options:
            self._have_it_told(message)
            case.settle(found)
            return
        if case.last is not None and case.outcome is None:
            self._ledger.close(case.last.closed(Outcome.lost, at_ms))
        if message is not None:
            seed = message.kwargs.get("seed")
            case.last = self._ledger.open(
                Row(
                    message_id=case.message_id,
                    attempt=0,
                    actor=known_as(message),
                    seed=seed if isinstance(seed, int) else None,
                    worker=case.last.worker if case.last is not None else "",
                    opened_ms=at_ms,
                    closed_ms=at_ms,
                    outcome=Outcome.rejected,
                    error=f"{_MARK} {error}",
                )
            )
            store_error(self._broker, message, error, may_store=True)
        case.settle(found)

    def _have_it_told(self, message: Message[Any]) -> None:
        """Send it at once: the worker that takes it tells its library and lets it not begin."""
        options = {name: value for name, value in message.options.items() if name not in ("eta", "redis_message_id")}
        self._broker.enqueue(
            Message(**message.asdict() | {"queue_name": q_name(message.queue_name), "options": options})
        )

    def _find(self, cases: list[_Case]) -> None:
        """Find where these lie."""
        wanted = {case.message_id.encode(): case for case in cases}
        if self._store is None or not wanted:
            return
        for queue, identifier, body in _bodies(self._store):
            if not any(each in body for each in wanted):
                continue
            try:
                message: Message[Any] = Message.decode(body)
            except DecodeError:
                continue
            case = wanted.get(str(message.message_id).encode())
            if case is not None:
                case.places.add((queue, identifier))
                case.message = message


def _bodies(broker: WorkerBroker) -> Iterator[tuple[str, str, bytes]]:
    """Each body in the store with its queue and its id, those of dead letters last."""
    client: Any = broker.client
    prefix = f"{broker.namespace}:"
    keys = [text(key) for key in client.scan_iter(match=f"{prefix}*.msgs", count=KEYS_AT_ONCE)]
    for key in sorted(keys, key=lambda key: (key.endswith(".XQ.msgs"), key)):
        queue = key.removeprefix(prefix).removesuffix(".msgs").removesuffix(".DQ").removesuffix(".XQ")
        for identifier, body in client.hscan_iter(key, count=BODIES_AT_ONCE):
            yield queue, identifier.decode(errors="replace"), body
