"""Redelivery: whether a message that RabbitMQ delivers again was lost.

RabbitMQ says that a message was delivered before. It knows neither whether that worker had begun it, nor whether the
worker died: a connection that broke looks the same, and so does what a stopping worker had only fetched ahead. The
ledger knows: where a message's last row is open its attempt had begun, and who began it says each second that it lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dramatiq import Message, MessageProxy

from asyncworker.accounting import LOSSES_OPTION, NOTED_LOSSES_OPTION
from asyncworker.ledger import BEAT_MS, Ledger, Outcome, Row

#: Between two looks at whether a worker lives, in s.
LOOK_S = 0.1


def count_losses(
    ledger: Ledger, message: Message[Any] | MessageProxy, *, most: int, gives_up: Callable[[], bool] = lambda: False
) -> None:
    """Have the options of a message that is delivered again say how often it was lost; waits for `BEAT_MS` at most.

    Parameters:
        most: It may be lost so often; what someone has sent again by hand after that is lost no more than before.
        gives_up: Asked meanwhile; True: the message is taken for one that was not lost.

    Raises:
        RedisError: When the ledger's store does not say.
    """
    rows = ledger.rows(message.message_id)
    last = rows.pop() if rows and rows[-1].outcome is Outcome.running else None
    noted = message.options.get(LOSSES_OPTION, 0)  # a retry carries those from before it
    for row in reversed(rows):
        if row.outcome is not Outcome.lost:
            break
        noted += 1
    is_lost = last is not None and not is_alive(ledger, last, gives_up=gives_up)
    if not is_lost:
        noted = min(noted, most - 1)
    message.options[NOTED_LOSSES_OPTION] = noted
    message.options[LOSSES_OPTION] = noted + is_lost


def is_alive(ledger: Ledger, row: Row, *, gives_up: Callable[[], bool] = lambda: False) -> bool:
    """Whether the worker process lives that has opened a row: True as soon as it says so again, False when it does not.

    Also True when it is not known.
    """
    first = ledger.last_beat(row.worker)
    beat, ends = first, time.monotonic() + 2 * BEAT_MS / 1000
    while beat is not None and beat.born_ms <= row.opened_ms:  # else its name is another process's now
        if beat != first or gives_up() or time.monotonic() >= ends:
            return True
        time.sleep(LOOK_S)
        beat = ledger.last_beat(row.worker)
    return False
