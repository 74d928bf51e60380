"""Dead letters: messages that were given up, found, shown, put back or dropped."""

from __future__ import annotations

import base64
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple

from dramatiq import Message
from dramatiq.errors import DecodeError

from asyncworker.accounting import ERROR_OPTION, LOSSES_OPTION, NOTED_LOSSES_OPTION, TRACEBACK_OPTION
from asyncworker.at_most_once import BEGUN_BY_OPTION, BEGUN_OPTION
from asyncworker.consumer import misfit
from asyncworker.errors import NotThere
from asyncworker.ledger import Row
from asyncworker.middleware import ledger_of
from asyncworker.queues import SLICE, Queues, now_ms
from asyncworker.redis_broker import WorkerBroker
from asyncworker.visitor import Visitor

#: Options that a message has from its earlier attempts: without them it gets all of its retries again.
SPENT = (
    "retries",
    "crashes",
    LOSSES_OPTION,
    NOTED_LOSSES_OPTION,
    TRACEBACK_OPTION,
    ERROR_OPTION,
    BEGUN_OPTION,
    BEGUN_BY_OPTION,
    "eta",
)

#: A preview shows as many.
EXAMPLES = 5


class Place(NamedTuple):
    """Where a dead letter lies: all that is kept of one while there are many.

    Attributes:
        key: Its id in the store.
        died: When it died, as the store writes it: what has died again since then is another dead letter.
    """

    queue: str
    key: bytes
    died: bytes

    @property
    def died_ms(self) -> int:
        return int(float(self.died))


@dataclass(frozen=True)
class Letter:
    """A dead letter.

    Attributes:
        message: None when its body is no message.
        unreadable: Why it is none.
    """

    place: Place
    body: bytes | None
    message: Message[Any] | None
    unreadable: str | None

    @classmethod
    def read(cls, place: Place, body: bytes | None) -> Letter:
        if body is None:
            return cls(place, None, None, "its body is gone")
        try:
            message: Message[Any] = Message.decode(body)
            reason = misfit(message)
        except DecodeError as error:
            reason = f"its body is no message: {error.error}"
        if reason is None and not _is_text(place.key):
            reason = "its id in the store is no text"
        return cls(place, body, message if reason is None else None, reason)

    @property
    def store_id(self) -> str:
        return self.place.key.decode(errors="backslashreplace")

    @property
    def id(self) -> str:
        """What it is called: the message's id, by which logs and the ledger know it too."""
        return self.message.message_id if self.message else self.store_id

    @property
    def actor(self) -> str | None:
        return self.message.actor_name if self.message else None

    @property
    def seed(self) -> int | None:
        seed = self.message.kwargs.get("seed") if self.message else None
        return seed if type(seed) is int else None

    @property
    def options(self) -> dict[str, Any]:
        return self.message.options if self.message else {}

    @property
    def traceback(self) -> str | None:
        """Of its last attempt; plain Dramatiq's workers leave that of the attempt before."""
        return _text(self.options.get(TRACEBACK_OPTION))

    @property
    def error(self) -> str | None:
        """What it died of, as a sentence; None: its worker has left no word of it."""
        if self.unreadable is not None:
            return self.unreadable
        lines = (self.traceback or "").strip().splitlines()
        return _text(self.options.get(ERROR_OPTION)) or (lines[-1] if lines else None)

    @property
    def visitor(self) -> Visitor | None:
        """Who it was at its first session."""
        return Visitor.in_options(self.options)

    def facts(self) -> dict[str, Any]:
        """What a list tells of it."""
        return {
            "id": self.id,
            "store_id": self.store_id,
            "queue": self.place.queue,
            "actor": self.actor,
            "seed": self.seed,
            "retries": _count(self.options.get("retries")),
            "crashes": _count(self.options.get("crashes")),
            "sent_ms": self.message.message_timestamp if self.message else None,
            "died_ms": self.place.died_ms,
            "error": self.error,
            "unreadable": self.unreadable,
        }

    def all_facts(self) -> dict[str, Any]:
        """Everything that its body tells."""
        message, visitor = self.message, self.visitor
        return self.facts() | {
            "args": list(message.args) if message else None,
            "kwargs": message.kwargs if message else None,
            "options": self.options if message else None,
            "identity": visitor and {"seed": visitor.seed, "digest": visitor.digest, "drawn_by": visitor.drawn_by},
            "traceback": self.traceback,
            "body_base64": None if message or self.body is None else base64.b64encode(self.body).decode(),
        }

    def revived(self, at_ms: int) -> bytes | None:
        """The body with which it goes back to its queue; None when it is no message."""
        if self.message is None:
            return None
        options = {name: value for name, value in self.message.options.items() if name not in SPENT}
        options |= {"redis_message_id": self.store_id, "requeue_timestamp": at_ms}
        fields = self.message.asdict() | {"queue_name": self.place.queue, "options": options}
        body: bytes = Message(**fields).encode()
        return body


@dataclass(frozen=True)
class Wanted:
    """Which dead letters are meant; None: any. Ages are in ms, since it died.

    Attributes:
        error: A part of what it died of, or of its traceback; upper and lower case are the same.
    """

    queue: str | None = None
    actor: str | None = None
    error: str | None = None
    seed: int | None = None
    older_than_ms: int | None = None
    younger_than_ms: int | None = None

    def takes(self, letter: Letter) -> bool:
        if self.actor is not None and letter.actor != self.actor:
            return False
        if self.seed is not None and letter.seed != self.seed:
            return False
        said = f"{letter.error or ''}\n{letter.traceback or ''}".casefold()
        return self.error is None or self.error.casefold() in said


@dataclass
class Selection:
    """Dead letters to do something with: where they lie, and what a preview tells of them."""

    places: list[Place] = field(default_factory=list)
    examples: list[Letter] = field(default_factory=list)
    #: By actor and queue; the actor is None for bodies that are no message.
    counts: Counter[tuple[str | None, str]] = field(default_factory=Counter)

    @classmethod
    def of(cls, letters: Iterable[Letter]) -> Selection:
        selection = cls()
        for letter in letters:
            selection.places.append(letter.place)
            selection.counts[letter.actor, letter.place.queue] += 1
            if len(selection.examples) < EXAMPLES:
                selection.examples.append(letter)
        return selection


@dataclass
class Done:
    """What became of a selection.

    Attributes:
        gone: How many were there no longer: someone else has retried or discarded them.
        refused: (id, why) of those that cannot be retried.
    """

    count: int = 0
    gone: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)

    def add(self, answers: list[int]) -> None:
        self.count += sum(answers)
        self.gone += len(answers) - sum(answers)


class DeadLetters:
    """The dead letters in a broker's store, also those that plain Dramatiq has put there.

    All methods raise redis.RedisError when the store does not answer; see `queues.open_broker`.
    """

    def __init__(self, broker: WorkerBroker) -> None:
        self._broker = broker
        self._queues = Queues(broker)

    def find(self, wanted: Wanted) -> Iterator[Letter]:
        """The dead letters that are meant, the latest first, read from the store in slices.

        Raises:
            NotThere: When the store knows no such queue.
        """
        names = [self._queues.known(wanted.queue)] if wanted.queue is not None else self._queues.names()
        now = now_ms(self._broker)
        latest = "+inf" if wanted.older_than_ms is None else str(now - wanted.older_than_ms)
        earliest = "-inf" if wanted.younger_than_ms is None else str(now - wanted.younger_than_ms)
        by_queue = [self._letters(name, latest, earliest) for name in names]
        merged = heapq.merge(*by_queue, key=lambda letter: -letter.place.died_ms)
        return (letter for letter in merged if wanted.takes(letter))

    def named(self, words: Iterable[str]) -> list[Letter]:
        """The dead letters with these ids, the message's or the store's, or with ids that begin so.

        Raises:
            NotThere: When there is none, or several begin so.
        """
        found: dict[str, list[Letter]] = {word: [] for word in words}
        for letter in self.find(Wanted()):
            for word, letters in found.items():
                if letter.id.startswith(word) or letter.store_id.startswith(word):
                    letters.append(letter)
        only = [self._only(word, letters) for word, letters in found.items()]
        return list({letter.place: letter for letter in only}.values())

    def attempts(self, letter: Letter) -> list[Row]:
        """What the ledger knows of its attempts, first to last."""
        return ledger_of(self._broker).rows(letter.id) if letter.message else []

    def retry(self, places: Iterable[Place]) -> Done:
        """Put dead letters back at the end of their queues, those that died first in front.

        Each is put back once, however many do so at the same time. It keeps its id, arguments, seed and options, but
        for those of its earlier attempts: it gets all of its retries again.
        """
        done, now = Done(), now_ms(self._broker)
        for queue, slice_ in _slices(places):
            given: list[bytes] = []
            ids: set[str] = set()
            bodies = self._broker.client.hmget(
                f"{self._broker.namespace}:{queue}.XQ.msgs", [each.key for each in slice_]
            )
            for place, body in zip(slice_, bodies, strict=True):
                letter = Letter.read(place, body)
                revived = letter.revived(now)
                if revived is not None:
                    given += [place.key, place.died, revived]
                    ids.add(letter.id)
                elif body is None:
                    done.gone += 1
                else:
                    done.refused.append((letter.id, letter.unreadable or ""))
            if given:
                self._broker.cancellations.records.remove(ids)  # else a worker would drop what was cancelled when dead
                done.add(self._broker.do_revive(queue, *given))
        return done

    def discard(self, places: Iterable[Place]) -> Done:
        """Drop dead letters for good."""
        done = Done()
        for queue, slice_ in _slices(places):
            done.add(self._broker.do_discard(queue, *(word for each in slice_ for word in (each.key, each.died))))
        return done

    def _letters(self, queue: str, latest: str, earliest: str) -> Iterator[Letter]:
        """Those of a queue. A slice begins where the last one ended: others may come and go meanwhile."""
        end: bytes | str = latest
        at_end = 0
        while True:
            answer = self._broker.do_letters(queue, end, earliest, at_end, SLICE)
            for key, died, body in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
                at_end, end = (at_end + 1 if died == end else 1), died
                yield Letter.read(Place(queue, key, died), body)
            if len(answer) < 3 * SLICE:
                return

    def _only(self, word: str, letters: list[Letter]) -> Letter:
        exact = [letter for letter in letters if word in (letter.id, letter.store_id)]
        chosen = exact or letters
        if len(chosen) == 1:
            return chosen[0]
        if not chosen:
            raise NotThere(
                f"there is no dead letter {word!r} in the broker ({self._broker.where}); `asyncworker dead list` shows "
                "those that are there",
                name=word,
            )
        ids = ", ".join(letter.store_id if exact else letter.id for letter in chosen[:EXAMPLES])
        raise NotThere(f"{word!r} may be {len(chosen)} dead letters; name one of them: {ids}", name=word)


def _slices(places: Iterable[Place]) -> Iterator[tuple[str, list[Place]]]:
    in_order = sorted(places, key=lambda place: (place.queue, place.died_ms))
    for queue, group in groupby(in_order, attrgetter("queue")):
        while slice_ := list(islice(group, SLICE)):
            yield queue, slice_


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int:
    return value if type(value) is int else 0
