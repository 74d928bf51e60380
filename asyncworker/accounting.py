"""The account that a worker process gives of its attempts: a row of the ledger for each, and a line in its log.

A row is opened before the attempt of an actor with a session, gains its identity at the attempt's first session, and
is closed with the outcome. There a message is also compared with who it was when it first ran, and told who that was.

Where an actor has no session its attempts may be short beside a round trip to the store: their row is opened with the
first session that the code itself opens, or after a second, and else written with the outcome.

What phase an attempt is at is written with its row, with its identity, and once a second where that is another by then:
no message waits for it. How long a context took to close is written behind, since no result waits for that either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import redis
from dramatiq import Broker, Message, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Shutdown, TimeLimitExceeded

from asyncworker.at_most_once import was_cut_off
from asyncworker.attempt_log import AttemptLog
from asyncworker.backlog import Backlog
from asyncworker.cancellations import Cancelled
from asyncworker.errors import (
    BrowserCrashed,
    BrowserRecycled,
    ExitDrifted,
    PaceDeferred,
    PageCrashed,
    RefusedMessage,
    UnknownOutcome,
)
from asyncworker.identity import Identity
from asyncworker.ledger import Beat, Ledger, Outcome, Row
from asyncworker.patience import patiently
from asyncworker.phases import Phase, Phases, current_phases
from asyncworker.session import Attempt
from asyncworker.threads import in_thread
from asyncworker.visitor import Visitor, change

logger = logging.getLogger("asyncworker.worker")

#: The row of an attempt that still runs after this is opened, whatever it does; looked for this often.
LATE_MS = 1_000

#: A session waits this long for its identity to be in the ledger: then it is there also if the worker is killed.
WRITE_TIMEOUT_S = 2.0

#: Options of a dead letter: what its last attempt raised, in a sentence and as Dramatiq's retries keep it.
ERROR_OPTION = "last_error"
TRACEBACK_OPTION = "traceback"

#: The option of a message that carries something else's, with the name that its attempts are known by.
NAME_OPTION = "carries"

#: The option of a message that counts how often it was lost: begun by a worker process that died then.
LOSSES_OPTION = "losses"

#: How many of these the ledger and the log have: a retry, which keeps its options, was not lost again.
NOTED_LOSSES_OPTION = "noted_losses"

#: Of so many attempts that have ended it is waited for how long their context takes to close.
MOST_CLOSING = 1_000

#: As many frames as Dramatiq's retries keep.
FRAMES = 30


@dataclass
class _Running:
    """What a worker thread is at."""

    message: MessageProxy
    row: Row
    phases: Phases
    #: True when the ledger has the row; `failed` when its store did not take it: then the backlog has it.
    recorded: bool = False
    failed: bool = False
    #: The phase that the ledger knows of.
    told: Phase | None = None
    #: Who the message was when it first ran; None: this is the first time, or no one knows.
    before: Visitor | None = None
    generation: int | None = None
    has_met: bool = False
    closed: bool = False
    #: Held while the row is written: a closed one must not be overwritten by what was known before.
    writing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.begun_as = self.key

    @property
    def key(self) -> tuple[str, int]:
        return self.row.message_id, self.row.attempt

    def as_known(self) -> Row:
        """The row of the attempt that runs, with the phase that it is at."""
        self.told = self.phases.at
        self.row = replace(self.row, generation=self.generation, phase=self.told)
        return self.row

    def concerns(self, identity: Identity) -> bool:
        """True for the message's own identity: code may open sessions of other seeds beside it."""
        if self.row.seed is not None:
            return identity.seed == self.row.seed
        return self.before is None or identity.seed == self.before.seed

    def meet(self, identity: Identity, changed: str | None) -> None:
        """Have the row know who the attempt is, and the message who it was at first."""
        visitor = Visitor.of(identity)
        if visitor is not None and (self.before is None or self.before.seed != visitor.seed):
            visitor.write(self.message.options)
        self.row = replace(
            self.row, identity=identity.digest, drawn_by=identity.drawn_by, identity_changed=changed is not None
        )


class Accounting:
    """The open attempts of this process.

    Attributes:
        backlog: What the ledger's store did not take.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.backlog = Backlog()
        self._ledger = ledger
        self._born_ms = now_ms()
        self._worker: str | None = None
        self._closing: deque[tuple[Row, Phases]] = deque(maxlen=MOST_CLOSING)
        self._thread = threading.local()
        self._stopping = threading.Event()
        self._open: dict[tuple[str | None, int], _Running] = {}
        self._log = AttemptLog()

    def start(self, *, beats_as: str | None = None) -> None:
        """Look for attempts that run for long, until `stop`.

        Parameters:
            beats_as: The worker's name, where the ledger has to know that it lives.
        """
        self._stopping.clear()
        self._worker, self._born_ms = beats_as, now_ms()
        self._beat()
        threading.Thread(target=self._look_for_late, name="asyncworker-accounting", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        self._log.next_period()
        self.backlog.stop()
        self._tell_closed()

    def _look_for_late(self) -> None:
        while not self._stopping.wait(LATE_MS / 1000):
            self._log.next_period()
            self._beat()
            if self.backlog.write():
                self.record_late(at_ms=now_ms())
                self._tell_closed()

    def _beat(self) -> None:
        if self._worker is not None:
            with contextlib.suppress(redis.RedisError):  # said by who has something to write
                self._ledger.beat(self._worker, Beat(self._born_ms, now_ms()))

    def begin(self, message: MessageProxy, row: Row, *, at_once: bool, has_session: bool = False) -> Row:
        """Begin the account of the attempt that this thread begins.

        Parameters:
            row: Numbered as far as the message knows.
            at_once: Open it in the ledger, too; the returned one has its number there.
            has_session: It waits for a session first.
        """
        phases = Phases(has_session=has_session)
        current_phases.set(phases)
        running = _Running(message, row, phases, before=Visitor.in_options(message.options))
        self._thread.running = running
        if at_once:
            self._record(running)
        self._open[running.key] = running
        return running.row

    def _record(self, running: _Running) -> None:
        """Open the row in the ledger."""
        with running.writing:
            if running.closed or running.recorded:
                return
            if self.backlog.is_away:
                self._put_off(running)
                return
            row = running.as_known()
            try:
                running.row, running.recorded = self._ledger.open(row), True
                if running.before is None and running.row.attempt > 1:
                    # A worker that was killed has told the ledger, and could not tell the message.
                    running.before = Visitor.in_rows(self._ledger.rows(row.message_id), row.seed)
                    if running.before is not None:
                        running.before.write(running.message.options)
            except redis.RedisError as error:
                self._put_off(running, error)

    def _put_off(self, running: _Running, error: BaseException | None = None) -> None:
        """Have the row written when the store takes it, as it is known then."""
        running.failed = True
        self.backlog.add(running.begun_as, lambda: self._mend(running), error)

    def _mend(self, running: _Running) -> None:
        with running.writing:
            row = running.row if running.closed else running.as_known()
            if running.closed and row.phases:  # its context may have closed meanwhile
                row = replace(row, phases=running.phases.ms())
            running.row, running.recorded = self._ledger.mend(row), True
            if running.closed and running.phases.is_closing:
                self._closing.append((running.row, running.phases))

    def record_late(self, *, at_ms: int) -> None:
        """Open the rows of attempts that run for long and have none yet."""
        for running in list(self._open.values()):
            if at_ms - running.row.opened_ms < LATE_MS:
                continue
            if not running.recorded and not running.failed:
                self._record(running)
            elif running.phases.at is not running.told:
                try:
                    self._tell_phase(running)
                except redis.RedisError:
                    return  # the row's end says it again, and a store that is away is asked once

    def _tell_phase(self, running: _Running) -> None:
        with running.writing:
            if running.recorded and not running.closed:
                self._ledger.note(running.as_known(), at_any_cost=True)

    def _tell_closed(self) -> None:
        """Write how long the contexts of attempts took to close that had ended before."""
        for _ in range(len(self._closing)):
            row, phases = self._closing.popleft()
            if phases.is_closing:  # for so long at most as it may take
                self._closing.append((row, phases))
                continue
            try:
                self._ledger.note(replace(row, phases=phases.ms()), at_any_cost=True)
            except redis.RedisError:
                self._closing.append((row, phases))
                return  # a store that is away is asked once

    async def numbered(self, attempt: Attempt) -> Attempt:
        """The attempt with its number in the ledger, where its row is opened now if it has none yet."""
        running = self._open.get((attempt.message_id, attempt.number))
        if running is None or running.recorded or running.failed:
            return attempt
        await in_thread(self._record, running)
        self._open[running.key] = running
        return replace(attempt, number=running.row.attempt)

    async def session_began(self, attempt: Attempt, generation: int, identity: Identity) -> None:
        """Note the browser and the identity of an attempt's session; warns when its seed is another visitor now."""
        running = self._open.get((attempt.message_id, attempt.number))
        if running is None:  # a session outside any message
            return
        running.generation = generation
        if running.has_met or not running.concerns(identity):
            return
        running.has_met = True
        running.as_known()
        changed = change(running.before, identity)
        if changed is not None:
            logger.warning("message %s (%s): %s", running.row.message_id, running.row.actor, changed)
        elif identity.digest is None:
            self._note(running)
            return
        running.meet(identity, changed)
        writing = asyncio.ensure_future(in_thread(self._write, running))
        await asyncio.wait({writing}, timeout=WRITE_TIMEOUT_S)  # a store that hangs is waited for by `close`

    def close(self, outcome: Outcome, exception: BaseException | None, *, at_ms: int) -> bool:
        """Close the row of this thread's attempt; False when it has begun none."""
        running: _Running | None = getattr(self._thread, "running", None)
        self._thread.running = None
        current_phases.set(None)
        if running is None:  # skipped before its attempt began
            return False
        for key in (running.key, running.begun_as):
            self._open.pop(key, None)
        is_closing = running.phases.is_closing
        row = self._ended(running, outcome, _sentence(exception) if exception is not None else None, at_ms)
        self._close_in_ledger(running, row)
        if is_closing and row.attempt:
            self._closing.append((row, running.phases))
        return True

    def interrupt_all(self, *, at_ms: int) -> None:
        """Close the rows of all attempts that this process leaves behind as it ends, as far as their store answers."""
        for running in {id(each): each for each in list(self._open.values())}.values():
            row = self._ended(running, Outcome.interrupted, "the worker process ended before it", at_ms)
            with contextlib.suppress(redis.RedisError):
                self._ledger.close(row)

    def _ended(self, running: _Running, outcome: Outcome, error: str | None, at_ms: int) -> Row:
        """The last row of an attempt, which is in the log then."""
        with running.writing:
            running.closed = True
            number, phases = running.row.attempt, running.phases
            row = running.row = replace(
                running.row,
                attempt=number if running.recorded else 0,
                closed_ms=at_ms,
                outcome=outcome,
                generation=running.generation,
                error=error,
                phase=phases.reached if phases.ms() else None,
                phases=phases.ms(),
            )
        self._log.ended(row, number)
        return row

    def _close_in_ledger(self, running: _Running, row: Row) -> None:
        """Have the row written, for which no message waits: not even where the store is away."""
        # What is known of a row goes one way: a ledger that writes behind may have more of it to write before its end.
        is_on_its_way = self._ledger.writes_behind and running.recorded
        if self.backlog.is_away and not is_on_its_way:
            self._put_off(running)
            return
        try:
            self._ledger.close(row)
        except redis.RedisError as error:
            self._put_off(running, error)

    def _note(self, running: _Running) -> None:
        if running.recorded and not running.closed:
            self._ledger.note(running.row)

    def _write(self, running: _Running) -> None:
        with running.writing:
            if running.closed or not running.recorded:
                return
            try:
                self._ledger.close(running.row)
            except redis.RedisError as error:
                logger.warning("the identity of message %s is not in the ledger: %s", running.row.message_id, error)


def outcome_of(exception: BaseException | None) -> Outcome:
    """How an attempt ended that raised this."""
    match exception:
        case None:
            return Outcome.succeeded
        case TimeLimitExceeded():
            return Outcome.timed_out
        case Shutdown() | BrowserRecycled():
            return Outcome.interrupted
        case BrowserCrashed() | PageCrashed():
            return Outcome.crashed
        case ExitDrifted() | PaceDeferred():
            return Outcome.deferred
        case RefusedMessage() | Cancelled():
            return Outcome.rejected
    return Outcome.failed


def _sentence(exception: BaseException) -> str:
    return f"{type(exception).__name__}: {exception}"[:500]


def keep_in_dead_letter(broker: Broker, message: MessageProxy) -> None:
    """Have the stored body, which becomes the dead letter, carry what its last attempt has found out.

    That is its seed, who the message was at its first session, and what the attempt raised.
    """
    found = _found_out(message)
    if not found or not isinstance(broker, RedisBroker):
        return
    client: Any = broker.client
    key, identifier = f"{broker.namespace}:{message.queue_name}.msgs", message.options["redis_message_id"]

    def keep() -> None:
        body = client.hget(key, identifier)
        if body is None:  # another worker has dealt with it
            return
        stored: Message[object] = Message.decode(body)
        stored.options.update(found)
        if (seed := message.kwargs.get("seed")) is not None:  # where its producer gave it none, its worker did
            stored.kwargs["seed"] = seed
        broker.do_rewrite(message.queue_name, identifier, stored.encode())

    patiently(keep, "write into a dead letter what became of it", getattr(broker, "patience", None))


def _found_out(message: MessageProxy) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (visitor := Visitor.in_options(message.options)) is not None:
        visitor.write(found)
    if (exception := message._exception) is not None:
        unknown = f"{UnknownOutcome.__name__}: " if was_cut_off(message, exception) else ""
        found[ERROR_OPTION] = unknown + _sentence(exception)
        found[TRACEBACK_OPTION] = "".join(traceback.format_exception(exception, limit=FRAMES))
    return found


def known_as(message: Message[Any] | MessageProxy) -> str:
    """What its attempts are known by in rows, logs and steps: its actor's name, or that of what it carries."""
    return str(message.options.get(NAME_OPTION) or message.actor_name)


def now_ms() -> int:
    """UNIX milliseconds, as rows have them."""
    return int(time.time() * 1000)
