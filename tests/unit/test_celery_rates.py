"""Rate limits of Celery tasks, by all workers together or by each alone."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker.consumer.consumer import Consumer

from asyncworker.celery.rates import DeploymentRates, WorkerRates, rate_of
from asyncworker.memory_limiter import MemoryLimiter
from asyncworker.pace import key_of

NAME = "proj.visit"
KEY = key_of(NAME, "celery")


class FakeConsumer:
    """Celery's, as far as rates ask it."""

    bucket_for_task = Consumer.bucket_for_task
    reset_rate_limits = Consumer.reset_rate_limits

    def __init__(self, limit: Any) -> None:
        self.task = SimpleNamespace(rate_limit=limit)
        self.app = SimpleNamespace(tasks={NAME: self.task})
        self.task_buckets: dict[str, Any] = defaultdict(lambda: None)
        self.reset_rate_limits()

    def sets(self, limit: Any) -> None:
        """As remote control does."""
        self.task.rate_limit = limit
        self.reset_rate_limits()


@pytest.fixture
def now() -> list[int]:
    return [1_767_268_800_000_000]


@pytest.fixture
def rates(now: list[int]) -> DeploymentRates:
    return DeploymentRates(MemoryLimiter(lambda: now[0]))


def seconds(rates: Any, consumer: FakeConsumer, **how: bool) -> float:
    return round(rates.wait(consumer, NAME, **({"has_slot": False} | how)).seconds, 2)


@pytest.mark.parametrize(
    ("limit", "written"),
    [
        ("10/m", "10/m"), ("100/h", "100/h"), ("5/s", "5/s"), ("0.5/s", "1/2s"), ("7", "7/s"), (3, "3/s"),
        (0.25, "1/4s"), ("1/h", "1/h"), ("0.001/h", "1/31day"), (None, None), (0, None), ("0/s", None),
        ("2000/s", None), ("3600000/h", "1/ms"),
    ],
)  # fmt: skip
def test_celerys_rates_are_read(limit: object, written: str | None) -> None:
    rate = rate_of(limit)
    assert (None if rate is None else str(rate)) == written


def test_what_is_no_rate_is_refused_as_celery_does() -> None:
    with pytest.raises((ValueError, KeyError)):
        rate_of("often")


def test_workers_share_the_rate_of_a_task(rates: DeploymentRates) -> None:
    workers = [FakeConsumer("10/m"), FakeConsumer("10/m")]
    assert [seconds(rates, workers[number % 2]) for number in range(4)] == [0.0, 6.03, 12.06, 18.09]
    assert seconds(rates, workers[0], has_slot=True) == 0.0
    assert seconds(rates, FakeConsumer(None)) == 0.0


def test_by_name_each_worker_keeps_it_alone() -> None:
    one, other = WorkerRates(), WorkerRates()
    waits = [seconds(rates, FakeConsumer("10/m")) for rates in (one, other)]
    assert waits == [0.0, 0.0]
    consumer = FakeConsumer("10/m")
    assert [seconds(one, consumer) for _ in range(3)] == [0.0, 6.0, 12.0]
    assert seconds(one, consumer, has_slot=True) == 0.0


def test_a_task_that_is_held_takes_no_slot_and_looks_again(rates: DeploymentRates, now: list[int]) -> None:
    consumer = FakeConsumer("10/m")
    rates._limiter.hold(KEY, for_ms=3_600_000)
    for has_slot in (False, True):
        wait = rates.wait(consumer, NAME, has_slot=has_slot)
        assert (wait.seconds, wait.has_slot) == (60.0, has_slot)
    rates._limiter.release(KEY)
    assert [seconds(rates, consumer) for _ in range(2)] == [0.0, 6.03]


def test_what_remote_control_sets_holds_for_all_and_for_workers_that_begin_later(rates: DeploymentRates) -> None:
    running, other = FakeConsumer("10/m"), FakeConsumer("10/m")
    running.sets("1/m")
    rates.changed(running, NAME)
    assert [seconds(rates, each) for each in (running, other)] == [0.0, 60.3]
    later = FakeConsumer(None)
    rates.begin(later)
    assert later.task.rate_limit == pytest.approx(1 / 60)
    assert seconds(rates, later) == 120.6
    running.sets(0)
    rates.changed(running, NAME)
    lifted = FakeConsumer("10/m")
    rates.begin(lifted)
    assert lifted.task.rate_limit is None
    assert seconds(rates, lifted) == 0.0
