"""When an alarm rings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from asyncworker.alarm import Alarm
from tests.waiting import wait_until


class Rung:
    def __init__(self) -> None:
        self.queues: list[str] = []
        self.refuses = False

    def ring(self, queue_name: str) -> None:
        self.queues.append(queue_name)
        if self.refuses:
            raise redis.ConnectionError("away")


@pytest.fixture
def rung() -> Rung:
    return Rung()


@pytest.fixture
def alarm(rung: Rung) -> Iterator[Alarm]:
    before = set(threading.enumerate())
    alarm = Alarm(rung.ring)
    yield alarm
    alarm.stop()
    assert set(threading.enumerate()) <= before


def test_each_queue_is_rung_for_at_its_time(alarm: Alarm, rung: Rung) -> None:
    now = time.monotonic()
    alarm.set("later", now + 0.2)
    alarm.set("soon", now + 0.1)
    alarm.set("never", now + 3_600)
    wait_until(lambda: len(rung.queues) == 2, "both have rung")
    assert rung.queues == ["soon", "later"]
    assert time.monotonic() - now >= 0.2


def test_the_earlier_time_stays(alarm: Alarm, rung: Rung) -> None:
    alarm.set("queue", time.monotonic() + 0.05)
    alarm.set("queue", time.monotonic() + 3_600)
    wait_until(lambda: rung.queues == ["queue"], "it has rung")


def test_a_time_that_has_passed_rings_at_once_and_once(alarm: Alarm, rung: Rung) -> None:
    alarm.set("first", 0.0)
    alarm.set("second", time.monotonic() + 0.1)
    wait_until(lambda: "second" in rung.queues, "it has rung")
    assert rung.queues == ["first", "second"]


def test_a_store_that_is_away_does_not_end_it(alarm: Alarm, rung: Rung) -> None:
    rung.refuses = True
    alarm.set("queue", 0.0)
    wait_until(lambda: rung.queues == ["queue"], "it has rung")
    alarm.set("queue", 0.0)
    wait_until(lambda: rung.queues == ["queue"] * 2, "it has rung again")


def test_an_alarm_that_was_stopped_may_be_set_again(alarm: Alarm, rung: Rung) -> None:
    alarm.set("queue", time.monotonic() + 3_600)
    alarm.stop()
    alarm.set("queue", 0.0)
    wait_until(lambda: rung.queues == ["queue"], "it has rung")
