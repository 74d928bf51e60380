"""A worker's log of its attempts: a line for each, and one line for many where they are short."""

from __future__ import annotations

import logging
import threading

from asyncworker.ledger import Outcome, Row

logger = logging.getLogger("asyncworker.worker")

#: Where the code began later than this the line says what the attempt was at meanwhile, as where it failed.
SLOW_MS = 1_000

#: So many attempts of a period that did without a browser and succeeded have a line each; the others are summed up. A
#: line takes longer to write than a short attempt takes, and no one reads thousands.
LINES = 20


class AttemptLog:
    """The lines of a worker process. At the log level DEBUG (`dramatiq -v`) each attempt has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = 0
        #: By actor: how many had no line in this period, and how long they took together, in ms.
        self._summed: dict[str, tuple[int, int]] = {}

    def ended(self, row: Row, number: int) -> None:
        """Log the attempt of this number by its closed row, or sum it up."""
        if _may_be_summed(row) and self._is_summed(row):
            return
        logger.info(
            "message_id=%s actor=%s attempt=%d seed=%s%s browser=%s outcome=%s ms=%s%s",
            row.message_id,
            row.actor,
            number,
            row.seed,
            f" identity={row.identity}" if row.identity else "",
            row.generation,
            row.outcome,
            row.took_ms,
            _phases(row),
        )

    def next_period(self) -> None:
        """Log what was summed up in this period, and begin the next; to be called each second, and at the end."""
        with self._lock:
            summed, self._summed, self._lines = self._summed, {}, 0
        for actor, (count, took_ms) in sorted(summed.items()):
            logger.info(
                "actor=%s outcome=%s attempts=%d ms_each=%.1f (more short attempts than have a line each; the ledger "
                "has them all)",
                actor,
                Outcome.succeeded,
                count,
                took_ms / count,
            )

    def _is_summed(self, row: Row) -> bool:
        with self._lock:
            if self._lines < LINES:
                self._lines += 1
                return False
            count, took_ms = self._summed.get(row.actor, (0, 0))
            self._summed[row.actor] = count + 1, took_ms + (row.took_ms or 0)
            return True


def _phases(row: Row) -> str:
    before_code_ms = sum(row.phases[:3])
    if not row.phases or (row.outcome is Outcome.succeeded and before_code_ms < SLOW_MS):
        return ""
    times = ",".join(f"{phase}:{took_ms}" for phase, took_ms in row.phases_ms.items())
    return f" phase={row.phase} phases_ms={times}"


def _may_be_summed(row: Row) -> bool:
    return row.generation is None and row.outcome is Outcome.succeeded and not logger.isEnabledFor(logging.DEBUG)
