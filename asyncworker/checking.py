"""Check: one thing that `asyncworker doctor` looked at, and what it found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class State(StrEnum):
    """What a check found: `failed` means that a worker would not run."""

    ok = "ok"
    warning = "warning"
    failed = "failed"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `remedy` is what to do when it is not ok."""

    name: str
    state: State
    detail: str
    remedy: str | None = None

    def facts(self) -> dict[str, str | None]:
        """As JSON takes it."""
        return {**asdict(self), "state": self.state.value}
