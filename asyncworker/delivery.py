"""Delivery: has the store take messages, each once, and knows what became of each when it does not."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis
from redis.exceptions import NoScriptError

from asyncworker.exchange import Answer, Exchange, NotSent, Unanswered
from asyncworker.ledger import text
from asyncworker.patience import PAUSE_S, passes

#: So many messages are taken in one step of the store, all or none of them; it serves others in between.
MOST_TOGETHER = 200

#: A try gets no less time than this, in s, where there is so much.
LEAST_S = 0.5


class Item(NamedTuple):
    """A message on its way, as the store gets it."""

    queue_name: str
    identifier: str
    body: bytes
    #: Named where a message of those that are sent together is unique.
    message_id: str = ""
    #: While another message with this key waits or runs, this one is not taken; empty: it is.
    unique: str = ""
    #: It is what a worker sends after an attempt: the retry of a message takes its key over.
    follows: bool = False


class Undelivered(Exception):
    """The store did not take everything in time; the cause is why.

    Attributes:
        taken: Which messages it took, by their place.
        may_be_sent: True when it may have taken others nevertheless.
    """

    def __init__(self, taken: set[int], may_be_sent: bool) -> None:
        super().__init__(f"{len(taken)} were taken")
        self.taken = taken
        self.may_be_sent = may_be_sent


@dataclass
class Parcel:
    """Messages of one queue that are taken together, or not at all.

    Attributes:
        slot: Where the store remembers it.
        is_unclear: It was sent once without an answer.
    """

    places: list[int]
    items: list[Item]
    slot: int
    is_unclear: bool = False
    is_taken: bool = False
    #: By place: the id of the message that was there already, where the store took none for it.
    there: dict[int, str] | None = None

    def command(self, head: Sequence[Any], who: str, kept_ms: int) -> tuple[Any, ...]:
        queue_name, slot = self.items[0].queue_name, f"{os.getpid()}.{self.slot}"
        if self.items[0].message_id:
            fours = [part for item in self.items for part in (item.identifier, item.body, item.unique, item.message_id)]
            return (*head, "send_unique", queue_name, who, slot, kept_ms, int(self.items[0].follows), *fours)
        pairs = [part for item in self.items for part in (item.identifier, item.body)]
        return (*head, "send", queue_name, who, slot, kept_ms, *pairs)

    def take(self, answer: Answer) -> None:
        """Note what the store says that has taken it."""
        self.is_taken = True
        if isinstance(answer, list):  # else a number: nothing of it is unique
            named = zip(self.places, answer, strict=True)
            self.there = {place: text(message_id) for place, message_id in named if message_id}


#: Messages that are sent together, over all repeats; what was taken is not sent again.
Shipment = list[Parcel]


class Slots:
    """Numbers of which each is used by one parcel at a time.

    The store remembers the last parcel of each slot, so what it remembers of a producer does not grow with what that
    sends.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> int:
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)
            self._next += 1
            return self._next

    def give_back(self, slot: int) -> None:
        with self._lock:
            heapq.heappush(self._free, slot)


class Delivery:
    """Sends for one producer.

    A parcel that got no answer is sent again in the same slot, where the store knows whether it has had it: also when
    its messages have been run and forgotten in between.

    Parameters:
        exchange: The connections.
        namespace: Of the broker's keys.
        who: The broker's id.
        script: The text of broker.lua.
        sha: How the store calls it.
    """

    def __init__(self, exchange: Exchange, *, namespace: str, who: str, script: str, sha: str) -> None:
        self._exchange = exchange
        self._who = who
        self._script = script
        self._head = ("EVALSHA", sha, 1, namespace)
        self._slots = Slots()

    def pack(self, items: Sequence[Item]) -> Shipment:
        """Put messages together, in their order, by queue; they are on their way until `done`."""
        by_queue: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            by_queue.setdefault(item.queue_name, []).append(place)
        shipment: Shipment = []
        for places in by_queue.values():
            for start in range(0, len(places), MOST_TOGETHER):
                some = places[start : start + MOST_TOGETHER]
                shipment.append(Parcel(some, [items[place] for place in some], self._slots.take()))
        return shipment

    def done(self, shipment: Shipment) -> None:
        """Forget a shipment. What went unanswered may still be under way, so its slot is never used again."""
        for parcel in shipment:
            if not parcel.is_unclear:
                self._slots.give_back(parcel.slot)

    def send(self, shipment: Shipment, deadline: float, *, kept_ms: int) -> None:
        """Have the store take what it has not taken yet; may be repeated.

        Parameters:
            deadline: By the monotonic clock, in seconds; what fails in a way that passes is tried again until then.
            kept_ms: How long the store remembers what it has taken: as long as it may be sent again.

        Raises:
            Undelivered: When it did not take everything.
        """
        while pending := [parcel for parcel in shipment if not parcel.is_taken]:
            error = self._try(pending, _half_way(deadline), kept_ms)
            if error is None:
                continue
            if isinstance(error, redis.RedisError) and passes(error) and time.monotonic() + PAUSE_S < deadline:
                time.sleep(PAUSE_S)
                continue
            left = [parcel for parcel in pending if not parcel.is_taken]
            taken = {place for parcel in shipment if parcel.is_taken for place in parcel.places}
            raise Undelivered(taken, any(parcel.is_unclear for parcel in left)) from error

    def _try(self, pending: list[Parcel], deadline: float, kept_ms: int) -> BaseException | None:
        """Send once; returns why something was not taken."""
        commands = [parcel.command(self._head, self._who, kept_ms) for parcel in pending]
        error = None
        try:
            answers = self._exchange.ask(commands, deadline)
            if any(isinstance(answer, NoScriptError) for answer in answers):
                error = self._note(pending, answers)
                return self._load(deadline) if isinstance(error, NoScriptError) else error
        except NotSent as reason:
            return reason.__cause__
        except Unanswered as reason:
            answers, error = reason.answers, reason.__cause__
            for parcel in pending[len(answers) :]:
                parcel.is_unclear = True
        return self._note(pending, answers) or error

    def _note(self, pending: list[Parcel], answers: list[Answer]) -> BaseException | None:
        """Note what was taken; returns the first refusal that will not pass by itself, else any."""
        refusals = []
        for parcel, answer in zip(pending, answers, strict=False):
            if isinstance(answer, Exception):
                refusals.append(answer)
            else:
                parcel.take(answer)
        return next(_worst_first(refusals), None)

    def _load(self, deadline: float) -> BaseException | None:
        """Tell the store the script, which it forgets when it restarts."""
        try:
            (answer,) = self._exchange.ask([("SCRIPT", "LOAD", self._script)], deadline)
        except (NotSent, Unanswered) as reason:
            return reason.__cause__
        return answer if isinstance(answer, Exception) else None


def _half_way(deadline: float) -> float:
    """Until when one try waits: a connection may hang, to a master that hangs itself, say, where another would not."""
    left_s = deadline - time.monotonic()
    return deadline - (left_s / 2 if left_s / 2 > LEAST_S else 0)


def _worst_first(refusals: list[Exception]) -> Iterator[Exception]:
    yield from sorted(refusals, key=lambda each: (passes(each), isinstance(each, NoScriptError)))
