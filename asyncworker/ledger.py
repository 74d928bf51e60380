"""The account of attempts: a row is opened before an attempt and closed with its outcome; memory and Redis.

It also holds what each worker process has launched, opened and closed, so that anyone with the store can see
whether a worker that is gone had closed all that it opened.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from asyncworker.phases import Phase

_OPEN_SCRIPT = (Path(__file__).parent / "ledger.lua").read_text()
_REPLACE_SCRIPT = (Path(__file__).parent / "ledger_replace.lua").read_text()


@dataclass(frozen=True)
class Kept:
    """How much a ledger keeps.

    Attributes:
        ms: A message's rows and a worker's counts are kept this long after their last change.
        rows: Of more rows than so many the oldest are forgotten; newer ones of their message keep their numbers.
    """

    ms: int = 24 * 3_600_000
    rows: int = 1_500_000


KEPT = Kept()


class Outcome(StrEnum):
    """How an attempt ended. `running` is a row that is still open."""

    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    crashed = "crashed"  # the browser died under the attempt
    timed_out = "timed_out"
    deferred = "deferred"  # put off through no one's fault, such as a proxy whose exit changed
    interrupted = "interrupted"  # by the worker's shutdown
    lost = "lost"  # the worker process died under the attempt
    rejected = "rejected"  # no retry can help, or none is left


#: Who was heard of within so many ms lives; a worker says so each second.
BEAT_MS = 4_000

#: Rows that are written at once: what follows may end this process, too.
AT_ONCE = (Outcome.running, Outcome.lost)


@dataclass(frozen=True)
class Row:
    """One attempt of one message. Times are UNIX milliseconds.

    Attributes:
        identity: The digest of the identity that its session had; None before there was one, and with engines that
            draw none.
        drawn_by: Which version of what drew that identity.
        identity_changed: True when the seed was another visitor on an earlier attempt, or on an earlier run.
        phase: What the attempt was at when that was last written, which is known to a second; how far it came, when it
            is closed.
        phases: The ms in each of the phases, in the order of `Phase`, once the row is closed; that of the close comes a
            second after it. Empty where there was no session.
    """

    message_id: str
    attempt: int
    actor: str
    seed: int | None
    worker: str
    opened_ms: int
    closed_ms: int | None = None
    outcome: Outcome = Outcome.running
    generation: int | None = None
    error: str | None = None
    identity: str | None = None
    drawn_by: str | None = None
    identity_changed: bool = False
    phase: str | None = None
    phases: tuple[int, ...] = ()

    def closed(self, outcome: Outcome, at_ms: int) -> Row:
        """The row at its end."""
        return replace(self, outcome=outcome, closed_ms=at_ms)

    @property
    def took_ms(self) -> int | None:
        """Duration in ms; None while it runs."""
        return None if self.closed_ms is None else self.closed_ms - self.opened_ms

    @property
    def phases_ms(self) -> dict[str, int]:
        """The known durations by phase."""
        return {str(phase): took_ms for phase, took_ms in zip(Phase, self.phases, strict=False)}

    def is_of(self, other: Row) -> bool:
        """True when both are of the same attempt, whatever its number."""
        return (self.message_id, self.worker, self.opened_ms) == (other.message_id, other.worker, other.opened_ms)


@dataclass(frozen=True)
class Beat:
    """What a worker process says of itself, in UNIX ms: when it began, and that it lived at a time."""

    born_ms: int
    at_ms: int


@dataclass(frozen=True)
class ClosedRow:
    """A row as Redis keeps it: the key of its message's list, its number there (0: it is the next), and its text."""

    key: str
    number: int
    text: str
    kept: Kept = KEPT


class Ledger(Protocol):
    """What both ledgers do."""

    @property
    def writes_behind(self) -> bool:
        """True when the rows of attempts that have ended, and notes, are written soon, in order, and none waits."""

    def open(self, row: Row) -> Row:
        """Append a row; the returned one has its attempt number, counted from 1 within its message.

        Opened again, it is the row that is there: whoever got no answer asks once more.
        """

    def close(self, row: Row) -> None:
        """Replace the row of the same message and attempt; nothing happens when it is known no more.

        Nor where it is lost: a worker that was frozen, and goes on, has nothing to say about it.

        For the row's end, and before it to add what became known meanwhile, such as the identity. A row whose
        attempt is 0 was never opened: it becomes the message's next.
        """

    def note(self, row: Row, *, at_any_cost: bool = False) -> None:
        """Have what is known of an attempt written soon, where that costs no round trip; else only `at_any_cost`."""

    def mend(self, row: Row) -> Row:
        """Write a row of which it is not known whether it was opened; the returned one has its attempt number."""

    def rows(self, message_id: str) -> list[Row]:
        """The rows of one message, first attempt first; empty when none is known."""

    def count(self, worker: str, counts: Mapping[str, int]) -> None:
        """Store a worker process's counts in place of its earlier ones."""

    def counts(self) -> dict[str, dict[str, int]]:
        """The last known counts of every worker process."""

    def beat(self, worker: str, beat: Beat) -> None:
        """Say that a worker process lives; this is known for `BEAT_MS`."""

    def last_beat(self, worker: str) -> Beat | None:
        """What the worker process of that name has said last; None: it was not heard of for `BEAT_MS`."""


class MemoryLedger:
    """A ledger that ends with its process: for tests."""

    writes_behind = False

    def __init__(self, *, kept: Kept = KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._rows: dict[str, list[Row | None]] = {}
        self._in_order: deque[tuple[str, int]] = deque()
        self._counts: dict[str, dict[str, int]] = {}
        self._beats: dict[str, tuple[Beat, float]] = {}

    def open(self, row: Row) -> Row:
        with self._lock:
            rows = self._rows.setdefault(row.message_id, [])
            for known in rows:
                if known is not None and known.is_of(row):
                    return replace(row, attempt=known.attempt)
            return self._append(row, rows)

    def _append(self, row: Row, rows: list[Row | None]) -> Row:
        opened = replace(row, attempt=len(rows) + 1)
        rows.append(opened)
        self._in_order.append((row.message_id, opened.attempt))
        while len(self._in_order) > self._kept.rows:
            self._forget(*self._in_order.popleft())
        return opened

    def _forget(self, message_id: str, number: int) -> None:
        rows = self._rows[message_id]
        rows[number - 1] = None
        if number == len(rows):
            del self._rows[message_id]

    def close(self, row: Row) -> None:
        with self._lock:
            if row.attempt == 0:
                self._append(row, self._rows.setdefault(row.message_id, []))
                return
            rows = self._rows.get(row.message_id, [])
            former = rows[row.attempt - 1] if 1 <= row.attempt <= len(rows) else None
            if former is not None and former.outcome is not Outcome.lost:
                rows[row.attempt - 1] = row

    def note(self, row: Row, *, at_any_cost: bool = False) -> None:
        self.close(row)

    def mend(self, row: Row) -> Row:
        return _mend(self, row)

    def rows(self, message_id: str) -> list[Row]:
        with self._lock:
            return [row for row in self._rows.get(message_id, ()) if row is not None]

    def count(self, worker: str, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._counts[worker] = dict(counts)

    def counts(self) -> dict[str, dict[str, int]]:
        with self._lock:
            return {worker: dict(counts) for worker, counts in self._counts.items()}

    def beat(self, worker: str, beat: Beat) -> None:
        self._beats[worker] = beat, time.monotonic() + BEAT_MS / 1000

    def last_beat(self, worker: str) -> Beat | None:
        beat, until = self._beats.get(worker, (None, 0.0))
        return beat if time.monotonic() < until else None


class RedisLedger:
    """A ledger in the broker's store.

    Keys: a list `<namespace>:attempts:<message_id>` of JSON rows, empty where one is forgotten; the list
    `<namespace>:attempts` of all rows as `<message_id> <number>`, oldest first; a JSON object
    `<namespace>:counts:<worker>`; the set `<namespace>:workers` of those who have counted; and
    `<namespace>:beat:<worker>` of those who live.

    Parameters:
        behind: Takes the rows of attempts that have ended and has them written soon; None: `close` writes them.
        kept: How much is kept.
    """

    def __init__(
        self,
        client: Any,
        *,
        namespace: str = "asyncworker",
        behind: Callable[[ClosedRow], None] | None = None,
        kept: Kept = KEPT,
    ) -> None:
        self._client = client
        self._kept = kept
        self._open_script = client.register_script(_OPEN_SCRIPT)
        self._replace_script = client.register_script(_REPLACE_SCRIPT)
        self._namespace = namespace
        self._behind = behind

    @property
    def writes_behind(self) -> bool:
        return self._behind is not None

    def open(self, row: Row) -> Row:
        return self._append(row, _own_words(row))

    def _append(self, row: Row, unless_there: str) -> Row:
        key = self._key(row.message_id)
        # The number of a row is its place in the list, so pushing it is what numbers it.
        number = self._open_script(
            keys=[key, f"{self._namespace}:attempts"],
            args=[_written(row), self._kept.ms, self._kept.rows, unless_there],
        )
        return replace(row, attempt=int(number))

    def close(self, row: Row) -> None:
        if row.attempt < 0:  # Redis would count such a place from the end
            return
        key = self._key(row.message_id)
        if self._behind is not None and row.outcome not in AT_ONCE:
            self._behind(ClosedRow(key, row.attempt, _written(row), self._kept))
        elif row.attempt == 0:
            self._append(row, _NOWHERE)
        else:
            self._replace(key, row)

    def _replace(self, key: str, row: Row) -> None:
        self._replace_script(keys=[key], args=[row.attempt - 1, _written(row), self._kept.ms])

    def note(self, row: Row, *, at_any_cost: bool = False) -> None:
        key = self._key(row.message_id)
        if row.attempt <= 0:
            return
        if self._behind is not None:
            self._behind(ClosedRow(key, row.attempt, _written(row), self._kept))
        elif at_any_cost:
            self._replace(key, row)

    def mend(self, row: Row) -> Row:
        return _mend(self, row, replace_row=lambda mended: self._replace(self._key(row.message_id), mended))

    def rows(self, message_id: str) -> list[Row]:
        texts = self._client.lrange(self._key(message_id), 0, -1)
        return [_read(text, message_id, number) for number, text in enumerate(texts, start=1) if text]

    def count(self, worker: str, counts: Mapping[str, int]) -> None:
        # A key of its own for each worker: the living must not keep the dead.
        with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(self._workers, worker)
            pipe.pexpire(self._workers, self._kept.ms)
            pipe.set(self._counts_key(worker), json.dumps(dict(counts)), px=self._kept.ms)
            is_new, _, _ = pipe.execute()
        if is_new:
            self.counts()  # forgets those that are known no more, also where no one ever asks

    def counts(self) -> dict[str, dict[str, int]]:
        workers = sorted(text(worker) for worker in self._client.smembers(self._workers))
        stored = self._client.mget([self._counts_key(worker) for worker in workers]) if workers else []
        known = {worker: json.loads(counts) for worker, counts in zip(workers, stored, strict=True) if counts}
        if forgotten := [worker for worker in workers if worker not in known]:
            self._client.srem(self._workers, *forgotten)
        return known

    def beat(self, worker: str, beat: Beat) -> None:
        self._client.set(f"{self._namespace}:beat:{worker}", f"{beat.born_ms} {beat.at_ms}", px=BEAT_MS)

    def last_beat(self, worker: str) -> Beat | None:
        said = self._client.get(f"{self._namespace}:beat:{worker}")
        return None if said is None else Beat(*map(int, said.split()))

    @property
    def _workers(self) -> str:
        return f"{self._namespace}:workers"

    def _counts_key(self, worker: str) -> str:
        return f"{self._namespace}:counts:{worker}"

    def _key(self, message_id: str) -> str:
        return f"{self._namespace}:attempts:{message_id}"


_FIELDS = tuple(field.name for field in fields(Row))

#: What a field is where its row, as it is written, does not say it.
_UNSAID = {field.name: field.default for field in fields(Row) if field.default is not MISSING} | {"seed": None}

#: No row is written with a line break.
_NOWHERE = "\n"

#: What the place of a row says already.
_PLACED = ("message_id", "attempt")


def text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _written(row: Row) -> str:
    """A million messages a day have a row each, so what goes without saying is not written."""
    said = {
        name: value
        for name, value in vars(row).items()
        if name not in _PLACED and (name not in _UNSAID or value != _UNSAID[name])
    }
    return json.dumps(said, separators=(",", ":"))


def _own_words(row: Row) -> str:
    """What is written in the row of this attempt, and of no other of its message."""
    return f'"worker":{json.dumps(row.worker)},"opened_ms":{row.opened_ms}'


def _read(text: bytes | str, message_id: str, number: int) -> Row:
    """Workers of another version write to the same store: fields may be missing, and there may be more."""
    stored = json.loads(text)
    known = _UNSAID | {name: stored[name] for name in _FIELDS if name in stored}
    known |= {"message_id": message_id, "attempt": number}
    return Row(**(known | {"outcome": Outcome(known["outcome"]), "phases": tuple(known["phases"])}))


def _mend(ledger: Ledger, row: Row, replace_row: Callable[[Row], None] | None = None) -> Row:
    for known in ledger.rows(row.message_id):
        if known.is_of(row):
            mended = replace(row, attempt=known.attempt)
            (replace_row or ledger.close)(mended)
            return mended
    return ledger.open(row)
