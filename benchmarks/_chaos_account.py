"""What became of every message of a chaos run, read when all is over; and of the effects, the losses, the browsers."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _chaos_faults import Done
from _chaos_load import QUEUE, Sent
from _chaos_plan import HEARTBEAT_MS, Deed, Target
from dramatiq import Message
from dramatiq.results.errors import ResultFailure, ResultMissing

from asyncworker.ledger import Outcome, Row
from asyncworker.middleware import ledger_of
from asyncworker.redis_broker import WorkerBroker

#: A freeze this much shorter than the heartbeat timeout may cost a worker its messages: it was heard of before it.
SLACK_MS = 1_200

#: Within this after its worker was killed, or frozen, a loss is found: the message waits then for who runs it again.
FOUND_MS = HEARTBEAT_MS + 15_000


@dataclass
class Account:
    """The outcomes.

    Attributes:
        succeeded: Messages with a result, or an attempt that the ledger knows as succeeded.
        dead: Dead letters by id, with what they died of.
        broken: Which message broke which promise, in sentences.
        missing, both: How many messages have no outcome, or two.
        lost: Rows of attempts that were lost.
        false_losses: Of these, such as no kill and no long freeze of their worker explains.
        again: Attempts that succeeded after another one of the same message had.
        left_open: Rows that say that an attempt runs when all is over.
    """

    succeeded: set[str] = field(default_factory=set)
    dead: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    missing: int = 0
    both: int = 0
    wrong_effects: int = 0
    asked_again: int = 0
    refused_effects: int = 0
    lost: int = 0
    false_losses: int = 0
    again: int = 0
    left_open: int = 0
    attempts: Counter[str] = field(default_factory=Counter)


def account(broker: WorkerBroker, sent: Sent, folder: Path, journal: list[Done]) -> Account:
    """Read the store and the database."""
    client: Any = broker.client
    found = Account()
    left = {*client.hkeys(f"dramatiq:{QUEUE}.msgs"), *client.hkeys(f"dramatiq:{QUEUE}.DQ.msgs")}
    if left:
        found.broken.append(f"{len(left)} messages are still in the queue: {sorted(left)[:3]}")
    for body in client.hvals(f"dramatiq:{QUEUE}.XQ.msgs"):
        letter: Message[Any] = Message.decode(body)
        found.dead[letter.message_id] = str(letter.options.get("last_error", "no word of why"))
    for message_id in (*sent.messages, *sent.maybe):
        rows = ledger_of(broker).rows(message_id)
        _note_outcome(found, broker, message_id, rows, must=message_id in sent.messages)
        for row in rows:
            found.attempts[row.outcome] += 1
            if row.outcome is Outcome.lost:
                _note_loss(found, row, journal)
            if row.closed_ms is None:
                found.left_open += 1
                found.broken.append(f"is over, and has a row that was left open: {rows}")
    _note_effects(found, folder / "effects.db")
    return found


def _note_outcome(found: Account, broker: WorkerBroker, message_id: str, rows: list[Row], *, must: bool) -> None:
    successes = sum(row.outcome is Outcome.succeeded for row in rows)
    if successes or _has_result(broker, message_id):
        found.succeeded.add(message_id)
    found.again += max(0, successes - 1)
    is_dead, story = message_id in found.dead, f"{message_id}: {[str(row.outcome) for row in rows]}"
    if is_dead and message_id in found.succeeded:
        found.both += 1
        found.broken.append(f"succeeded, and is a dead letter ({found.dead[message_id]}): message {story}")
    elif must and not is_dead and message_id not in found.succeeded:
        found.missing += 1
        found.broken.append(f"has no outcome: message {story}")


def _has_result(broker: WorkerBroker, message_id: str) -> bool:
    message: Message[Any] = Message(QUEUE, "visits.visit", (), {}, {}, message_id=message_id)
    try:
        broker.get_results_backend().get_result(message)
    except (ResultMissing, ResultFailure):
        return False
    return True


def _note_loss(found: Account, row: Row, journal: list[Done]) -> None:
    """A loss is true when its worker was killed, or frozen for too long, while the attempt ran."""
    found.lost += 1
    pid = int(row.worker.rpartition(":")[2]) if row.worker else None
    for done in journal:
        fault = done.fault
        ends_it = fault.deed is Deed.kill or (done.until - done.at) * 1000 >= HEARTBEAT_MS - SLACK_MS
        if fault.target is not Target.worker or done.pid is None or not ends_it:
            continue
        # A row that has no worker was opened when the loss was found: its worker had no time to open one.
        since_ms = row.opened_ms - (HEARTBEAT_MS if pid is not None else FOUND_MS)
        if pid in (None, done.pid) and since_ms <= done.unix_ms <= (row.closed_ms or 0):
            return
    found.false_losses += 1
    found.broken.append(f"was lost, and its worker {row.worker} was neither killed nor frozen: message {row}")


def _note_effects(found: Account, path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        effects = Counter(message_id for (message_id,) in database.execute("SELECT message_id FROM effects"))
        asked = Counter(once for (once,) in database.execute("SELECT once FROM asked"))
        (added,) = database.execute("SELECT coalesce(sum(added), 0) FROM asked").fetchone()
    found.asked_again = sum(asked.values()) - len(asked)
    found.refused_effects = sum(asked.values()) - added
    for message_id in sorted(found.succeeded):
        if effects[message_id] != 1:
            found.wrong_effects += 1
            found.broken.append(f"succeeded, and had {effects[message_id]} effects: message {message_id}")


def recoveries_ms(folder: Path, journal: list[Done]) -> tuple[list[float], int]:
    """From the SIGKILL of a browser's main process to the next page done in that worker, in ms.

    Returns:
        The times, and how many kills tell none: the worker or the store met another fault before that page, or was not
        over an earlier one when the browser was killed.
    """
    pages: dict[int, list[tuple[float, float]]] = {}
    for line in (folder / "pages").read_text().splitlines():
        pid, began, done = line.split()
        pages.setdefault(int(pid), []).append((float(began), float(done)))
    took, disturbed = [], 0
    for kill in journal:
        if (kill.fault.deed, kill.fault.target) != (Deed.kill, Target.browser) or kill.pid is None:
            continue
        mine = pages.get(kill.worker or 0, [])
        served = _next_page(mine, kill.at)
        if served is None or any(_disturbs(other, kill, served, mine) for other in journal if other is not kill):
            disturbed += 1
        else:
            took.append((served - kill.at) * 1000)
    return took, disturbed


def _next_page(pages: list[tuple[float, float]], after: float) -> float | None:
    """When the first page was done that began after this."""
    return min((done for began, done in pages if began > after), default=None)


def _disturbs(other: Done, kill: Done, served: float, pages: list[tuple[float, float]]) -> bool:
    """Whether another fault, from its time to the next page that this worker began and ended, met this one."""
    if other.fault.target is not Target.store and other.worker != kill.worker:
        return False
    over = _next_page(pages, other.until) or served
    return other.at <= served and over >= kill.at
