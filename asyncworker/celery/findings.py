"""What there is to say about one thing of a Celery app that comes to these workers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How much of a decision it needs."""

    #: It runs as it is.
    same = "same"
    #: It runs without a change, and behaves differently: whoever operates it should know.
    differs = "differs"
    #: It does not run as it is meant, or not as anyone would expect: someone has to decide.
    attention = "attention"


@dataclass(frozen=True)
class Finding:
    """One sentence about one thing.

    Attributes:
        subject: The option, setting, signal or call that it is about, as the code names it.
        what: What is different, or why it is not.
        where: `file:line` where that is known.
    """

    level: Level
    subject: str
    what: str
    where: str | None = None

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def same(subject: str, what: str, where: str | None = None) -> Finding:
    return Finding(Level.same, subject, what, where)


def differs(subject: str, what: str, where: str | None = None) -> Finding:
    return Finding(Level.differs, subject, what, where)


def attention(subject: str, what: str, where: str | None = None) -> Finding:
    return Finding(Level.attention, subject, what, where)
