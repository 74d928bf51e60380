"""What a bridge takes Celery's messages from: what Redis and RabbitMQ have in common for it.

A source gives each message out once, keeps it until it is acknowledged, and has it again when the bridge dies at any
point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import redis
from kombu.exceptions import OperationalError

from asyncworker.errors import BrokerUnavailable

#: What is raised when a source is away, beside what kombu's transport says.
AWAY = (OperationalError, redis.RedisError, OSError)

#: A source that does not answer for this long is away.
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Taken:
    """A message that was taken.

    Attributes:
        payload: It, as kombu's virtual transports have it; None when it cannot be read.
        receipt: What the source knows it by.
        publication: What its publisher gave to this one sending of it; empty where there is no such thing.
        may_be_known: It may have been taken before.
        problem: Why it cannot be read.
    """

    queue: str
    payload: dict[str, Any] | None
    receipt: Any
    publication: str = ""
    may_be_known: bool = True
    problem: str = ""


class Source(Protocol):
    """What both do; each raises BrokerUnavailable when the source does not answer."""

    where: str

    def take(self, most: int) -> list[Taken]:
        """Take so many messages at the most, and do not wait for any."""

    def acknowledge(self, taken: Sequence[Taken]) -> None:
        """These are safe elsewhere."""

    def is_drained(self) -> bool:
        """After `take` has given nothing: true when nothing is to come back from a bridge that has died."""

    def stay(self) -> None:
        """Say that this bridge lives."""

    def reopen(self) -> None:
        """After BrokerUnavailable: connect again, and have what was taken and not acknowledged in its queue."""

    def with_workers(self) -> int:
        """How many messages Celery's own workers hold, or have held when they died; as far as the source can say."""

    def close(self) -> None:
        """Give back what was taken and not acknowledged, to the end of its queue."""


class asking:
    """Turns what a source raises when it is away into one error of ours, without its URL's password."""

    def __init__(self, where: str, errors: tuple[type[BaseException], ...] = ()) -> None:
        self._where, self._errors = where, (*AWAY, *errors)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and isinstance(error, self._errors):
            raise BrokerUnavailable(f"the source ({self._where}) does not answer: {error}", url=self._where) from error
