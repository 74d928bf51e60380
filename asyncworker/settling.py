"""What a worker's threads have done is told to the store by one thread, together: messages that are done, and rows.

A thread that acknowledged its message itself would wait for the store before it takes the next one, and four threads
would ask four times. Here they only say what is done. While one round trip is under way more comes together, and goes
with the next; where that was more than one, the next waits a moment for more. Each round trip costs a worker of short
messages what several of them do. A message's row goes before its acknowledgement or with
it, so who finds a message settled finds how it ended, too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import redis

from asyncworker.ledger import KEPT, ClosedRow, text
from asyncworker.patience import passes, patiently

logger = logging.getLogger("asyncworker.broker")

#: So much goes in one round trip at most: the store serves others in between.
MOST = 200

#: Seconds from the end of a round trip in which more than one had come together to the next. So much longer is what a
#: killed worker has just done not known to be done.
PAUSE_S = 0.005

#: Seconds that a stopping worker waits for what was not taken yet.
STOP_S = 10.0

#: Rows that a full store refuses are tried again each second, or with what comes; so many are kept meanwhile.
REFUSED_AGAIN_S = 1.0
MOST_REFUSED = 10_000


#: Attributes of a message's proxy: its retry is being enqueued; and once it was, together with the acknowledgement,
#: whether the message was still this worker's.
RETRYING = "is_retrying"
SETTLED = "was_settled"


@dataclass(frozen=True)
class Done:
    """A message that is done: acknowledged, or rejected to the dead letters.

    Attributes:
        identifier: The message's in the store.
        message_id: Its own.
        taken: Called when the store has it: True when the message was this worker's, False when another has it or
            has dealt with it, None when that is not known.
        refused: Called when the store will never have it.
    """

    queue_name: str
    identifier: str
    message_id: str
    rejected: bool
    taken: Callable[[bool | None], None]
    refused: Callable[[], None]


@dataclass(frozen=True)
class Settled:
    """What the store says: which ids were this worker's, in order; and each row that it refused, with why."""

    were_ours: list[bool]
    refused: list[tuple[ClosedRow, str]]


#: Tells the store of the ids of a queue that are done, all acknowledged or all rejected, and of rows.
Settle = Callable[[str, bool, list[str], list[ClosedRow]], Settled]


class Settling:
    """The thread that settles for a worker process; it begins with the first that there is to settle.

    Parameters:
        settle: Tells the store; may be repeated.
    """

    def __init__(self, settle: Settle) -> None:
        self._settle = settle
        self._waiting: SimpleQueue[ClosedRow | Done | None] = SimpleQueue()
        self._refused: deque[ClosedRow] = deque(maxlen=MOST_REFUSED)
        self._is_refusing = False
        #: What the store is being told of, and is to be told next, by queue and whether it is rejected.
        self._together: dict[tuple[str, bool], list[Done]] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, what: ClosedRow | Done) -> None:
        """Have it settled; waits for nothing."""
        self._waiting.put(what)
        if self._thread is None:
            self._start()

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Settle what there is and end the thread; False when the store did not take it in time."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._waiting.put(None)
        thread.join(timeout_s)
        if thread.is_alive():
            left = [one for ones in list(self._together.values()) for one in ones]
            left += [one for one in self._come_together(0.0) if isinstance(one, Done)]
            logger.error(
                "the store did not take in %d s what this worker has done; these messages are run again: %s",
                timeout_s,
                ", ".join(one.message_id for one in left) or "none",
            )
        return not thread.is_alive()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="asyncworker-settling", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            rows, done, is_last = self._next()
            has_company = len(done) > 1
            together = self._together = {}
            for one in done:
                together.setdefault((one.queue_name, one.rejected), []).append(one)
            if rows and not done:
                together["", False] = []
            for queue_name, rejected in list(together):
                self._tell(queue_name, rejected, together[queue_name, rejected], rows)
                del together[queue_name, rejected]
                rows = []
            if has_company and not is_last:
                time.sleep(PAUSE_S)

    def _next(self) -> tuple[list[ClosedRow], list[Done], bool]:
        """What has come together, and whether the thread shall end then."""
        rows, done = list(self._refused), list[Done]()
        self._refused.clear()
        for one in self._come_together(REFUSED_AGAIN_S if rows else None):
            if one is None:
                return rows, done, True
            if isinstance(one, ClosedRow):
                rows.append(one)
            else:
                done.append(one)
        return rows, done, False

    def _come_together(self, wait_s: float | None) -> Iterator[ClosedRow | Done | None]:
        """What there is now; if there is nothing, what comes next."""
        with contextlib.suppress(Empty):
            yield self._waiting.get(timeout=wait_s)
            for _ in range(MOST):
                yield self._waiting.get_nowait()

    def _tell(self, queue_name: str, rejected: bool, done: list[Done], rows: list[ClosedRow]) -> None:
        identifiers, tries = [one.identifier for one in done], 0

        def settle() -> Settled:
            nonlocal tries
            tries += 1
            return self._settle(queue_name, rejected, identifiers, rows)

        try:
            settled = patiently(settle, "settle what is done")
        except Exception:  # whatever it is: the next messages are to be settled by this thread, too
            logger.exception(
                "the store refuses to settle messages of the queue %r, which are run again when this worker is "
                "restarted: %s",
                queue_name,
                ", ".join(identifiers) or "none",
            )
            for one in done:
                one.refused()
            return
        self._keep(settled.refused)
        for one, was_ours in zip(done, settled.were_ours, strict=True):
            # Of what is repeated the first may have been taken.
            one.taken(was_ours if was_ours or tries == 1 else None)

    def _keep(self, refused: list[tuple[ClosedRow, str]]) -> None:
        """Keep rows that may be taken later; no message waits for them."""
        for row, reason in refused:
            if not passes(redis.ResponseError(reason)):
                logger.error("the ledger's store refuses a row of %s: %s", row.key, reason)
                continue
            if not self._is_refusing:
                logger.warning("the ledger's store refuses rows, which are tried again: %s", reason)
                self._is_refusing = True
            self._refused.append(row)
        if not refused:
            self._is_refusing = False


def as_words(identifiers: list[str], rows: list[ClosedRow], *, how: str = "ack") -> list[Any]:
    """What is done, and rows, as the script takes them."""
    written = [part for row in rows for part in (row.key, row.number, row.text)]
    kept = rows[0].kept if rows else KEPT
    return [how, len(identifiers), *identifiers, kept.ms, kept.rows, *written]


def as_settled(answer: Sequence[Any], identifiers: list[str], rows: list[ClosedRow]) -> Settled:
    """What the script has answered to `as_words` of these."""
    were_ours, refused = answer[: len(identifiers)], answer[len(identifiers) :]
    return Settled(
        [bool(each) for each in were_ours],
        [(rows[place], text(reason)) for place, reason in zip(refused[::2], refused[1::2], strict=True)],
    )
