"""When a worker is replaced, and how long stopping may take."""

from __future__ import annotations

from asyncworker.settings import load
from asyncworker.supervisor import MARGIN_MS, Policy


def test_the_pause_doubles_with_each_death_in_a_row_up_to_the_longest() -> None:
    policy = Policy(backoff_ms=500, max_backoff_ms=3_000)
    assert [policy.pause_ms(deaths) for deaths in (1, 2, 3, 4, 5)] == [500, 1_000, 2_000, 3_000, 3_000]
    assert policy.pause_ms(10**6) == 3_000


def test_a_stop_is_given_as_long_as_the_workers_own_limits_add_up_to() -> None:
    limits = {
        "cleanup_timeout_ms": 500,
        "stop_timeout_ms": 1_000,
        "launch_timeout_ms": 2_000,
        "close_timeout_ms": 3_000,
    }
    settings = load({}, **limits, crash_loop_deaths=7)
    policy = Policy.of(settings, shutdown_ms=100_000)
    assert policy.stop_ms == 100_000 + 500 + 1_000 + 2_000 + 3 * 3_000 + MARGIN_MS
    assert policy.short_stop_ms == 4_000
    assert policy.deaths == 7
