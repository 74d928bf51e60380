"""Retry-After: how long a site wants to be left alone, as it says it in seconds or by a date."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

#: No site is obeyed for longer by itself.
MOST_MS = 86_400_000


def retry_after_ms(headers: Mapping[str, str], *, now: datetime | None = None) -> int | None:
    """How long a response says to wait; None: it does not say, or nothing that can be read, or no time at all.

    A date is compared with the response's own Date, since clocks of hosts differ; where that is missing, with ours.

    Parameters:
        headers: By their names in lower case.
        now: None: the time of this host.
    """
    said = headers.get("retry-after", "").strip()
    ms = _seconds(said) if said[:1].isdigit() else _until(said, headers.get("date", ""), now)
    return None if ms is None or ms <= 0 else min(ms, MOST_MS)


def _seconds(said: str) -> int | None:
    try:
        return round(min(float(said), MOST_MS) * 1000)
    except ValueError:
        return None


def _until(said: str, date: str, now: datetime | None) -> int | None:
    until = _read(said)
    if until is None:
        return None
    since = _read(date) or now or datetime.now(UTC)
    return round((until - since).total_seconds() * 1000)


def _read(date: str) -> datetime | None:
    try:
        read = parsedate_to_datetime(date)
    except (ValueError, TypeError, IndexError):
        return None
    return read if read.tzinfo is not None else read.replace(tzinfo=UTC)
