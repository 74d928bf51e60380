"""Cancelling messages: `asyncworker.cancel(message)`, and what the command `asyncworker cancel` does.

First the ids are noted as cancelled, so that no worker begins one from then on (cancellations.py); then the messages are
looked for. What waits is dropped here, and gets its row and its error. What runs is ended by its worker, which hears of
it within a second, and is waited for. Looking takes one pass over the bodies that the broker holds, however many ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import dramatiq
import redis
from dramatiq import Broker, Message
from dramatiq.errors import DecodeError

from asyncworker.accounting import now_ms
from asyncworker.cancellations import BY_COMMAND, KEPT_MS, Cancellations, Cancelled
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.interrupts import store_error
from asyncworker.ledger import Ledger, Outcome, Row, text
from asyncworker.middleware import ledger_of
from asyncworker.producing import aside
from asyncworker.redis_broker import PLAIN_TIMEOUT_MS, WorkerBroker

#: How long the end of what runs is waited for, unless told otherwise; it is looked for this often.
WAIT_MS = 10_000
LOOK_S = 0.05

#: So much of the store is read in one step: it serves others in between.
KEYS_AT_ONCE, BODIES_AT_ONCE = 1_000, 500

#: What the error of a row begins with whose message was cancelled.
_MARK = f"{Cancelled.__name__}:"


class Found(StrEnum):
    """Where a message was when it was cancelled."""

    waiting = "waiting"
    delayed = "delayed"  # a retry that waits for its time, too
    lost = "lost"  # a worker had it that died
    running = "running"  # a living worker has it, begun or not
    ended = "ended"  # before it could be cancelled
    dead = "dead"  # a dead letter, which is not cancelled
    noted = "noted"  # in a queue that cannot be looked into: dropped by the worker that takes it
    unknown = "unknown"


@dataclass(frozen=True)
class Cancellation:
    """What became of a message that was to be cancelled.

    Attributes:
        is_cancelled: True when it is not run, or no more: it was dropped, or its attempt has ended by this.
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
    broker = broker or dramatiq.get_broker()
    return await aside(broker, lambda: cancel(message, wait_ms=wait_ms, broker=broker))


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
            f"the store of the broker ({where}) does not answer: {error}; some of the messages may be cancelled, cancel "
            "them again",
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
    found: Found | None = None
    is_settled: bool = False
    last: Row | None = None
    began: float = field(default_factory=time.monotonic)
    took_ms: int | None = None

    def settle(self, found: Found | None = None) -> None:
        self.is_settled, self.found = True, self.found or found
        self.took_ms = round((time.monotonic() - self.began) * 1000)

    def answer(self) -> Cancellation:
        found, row = self.found or Found.unknown, self.last
        dropped = found in (Found.waiting, Found.delayed, Found.lost)
        outcome = row.outcome if row is not None and row.outcome is not Outcome.running else None
        by_this = row is not None and outcome is Outcome.rejected and (row.error or "").startswith(_MARK)
        no_more = outcome is not Outcome.succeeded and found is Found.running
        return Cancellation(
            self.message_id,
            found,
            is_cancelled=dropped or (self.is_settled and (no_more or (by_this and found is Found.running))),
            outcome=str(outcome) if outcome is not None else None,
            worker=row.worker or None if row is not None else None,
            took_ms=self.took_ms if found is Found.running and self.is_settled else None,
        )


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
        while (pending := self._pending()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            for case in pending:
                self._look(case)
        if dead := [case.message_id for case in self._cases if case.found is Found.dead]:
            self._cancellations.records.remove(dead)  # else none could be retried

    def _pending(self) -> list[_Case]:
        return [case for case in self._cases if not case.is_settled]

    def _look(self, case: _Case) -> None:
        states = {self._drop(case, *place) for place in case.places} if self._store is not None else set()
        rows = self._ledger.rows(case.message_id)
        case.last = rows[-1] if rows else None
        is_open = case.last is not None and case.last.outcome is Outcome.running
        if dropped := states & {"waiting", "delayed", "lost"}:
            self._dropped(case, Found(dropped.pop()))
        elif states & {"begun", "fetched"}:
            case.found = Found.running
        elif "dead" in states:
            case.settle(Found.dead)
        elif self._store is None and is_open:
            case.found = Found.running
        elif case.found is Found.running:
            self._ended(case)
        elif self._store is None and (case.last is None or case.last.outcome not in _FINAL):
            case.settle(Found.noted)
        else:
            case.settle(Found.ended if case.last is not None else Found.unknown)

    def _ended(self, case: _Case) -> None:
        """What ran has ended, or it is on its way to where it waits for its retry."""
        known = set(case.places)
        if case.last is not None and case.last.outcome not in _FINAL:
            self._find([case])
        if case.places == known:
            case.settle()

    def _drop(self, case: _Case, queue: str, identifier: str) -> str:
        broker: Any = self._broker
        timeout_ms = broker.heartbeat_timeout
        words = (identifier, case.message_id, KEPT_MS, timeout_ms, max(timeout_ms, PLAIN_TIMEOUT_MS))
        return text(broker.do_cancel(queue, *words))

    def _dropped(self, case: _Case, found: Found) -> None:
        """Close the account of what was dropped, as its worker would."""
        error, at_ms, message = Cancelled(f"{BY_COMMAND}; it was {found}"), now_ms(), case.message
        if case.last is not None and case.last.outcome is Outcome.running:
            self._ledger.close(case.last.closed(Outcome.lost, at_ms))
        if message is not None:
            seed = message.kwargs.get("seed")
            case.last = self._ledger.open(
                Row(
                    message_id=case.message_id,
                    attempt=0,
                    actor=message.actor_name,
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


#: Outcomes after which a message is not run again by itself.
_FINAL = (Outcome.succeeded, Outcome.rejected)


def _bodies(broker: WorkerBroker) -> Iterator[tuple[str, str, bytes]]:
    """Each body in the store with its queue and its id, those of dead letters last."""
    client: Any = broker.client
    prefix = f"{broker.namespace}:"
    keys = [text(key) for key in client.scan_iter(match=f"{prefix}*.msgs", count=KEYS_AT_ONCE)]
    for key in sorted(keys, key=lambda key: key.endswith(".XQ.msgs")):
        queue = key.removeprefix(prefix).removesuffix(".msgs").removesuffix(".DQ").removesuffix(".XQ")
        for identifier, body in client.hscan_iter(key, count=BODIES_AT_ONCE):
            yield queue, identifier.decode(errors="replace"), body
