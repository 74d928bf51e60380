"""What sites say by Retry-After."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from asyncworker.retry_after import MOST_MS, retry_after_ms

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("said", "ms"),
    [
        ("20", 20_000),
        (" 20 ", 20_000),
        ("1.5", 1_500),
        ("0", None),
        ("-5", None),
        ("99999999999999999999", MOST_MS),
        ("1e400", MOST_MS),
        ("soon", None),
        ("2 minutes", None),
        ("", None),
        ("Thu, 01 Jan 2026 12:00:20 GMT", 20_000),
        ("Thursday, 01-Jan-26 12:00:20 GMT", 20_000),
        ("Thu Jan  1 12:00:20 2026", 20_000),
        ("Thu, 01 Jan 2026 11:59:00 GMT", None),
        ("Thu, 01 Jan 9999 12:00:00 GMT", MOST_MS),
    ],
)
def test_seconds_and_dates_are_read_and_nonsense_says_nothing(said: str, ms: int | None) -> None:
    assert retry_after_ms({"retry-after": said}, now=NOON) == ms


def test_a_date_is_compared_with_the_sites_own_clock() -> None:
    """The site's is seven minutes fast."""
    headers = {"retry-after": "Thu, 01 Jan 2026 12:07:20 GMT", "date": "Thu, 01 Jan 2026 12:07:00 GMT"}
    assert retry_after_ms(headers, now=NOON) == 20_000


def test_without_the_header_nothing_is_said() -> None:
    assert retry_after_ms({"date": "Thu, 01 Jan 2026 12:07:00 GMT"}) is None
