"""Rates: the rate_limit of a task, by the whole deployment, or as Celery has it by each worker process.

A task that is too early gets the next slot of its kind there is, and goes back to the broker until then: its time is
its own by then. The deployment's account is that of paces, whose key is the task's name; `asyncworker pace` shows it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import redis
from celery.utils.time import rate as per_second

from asyncworker.limiter import WITHOUT_END_MS, Limiter
from asyncworker.pace import MOST_PER_MS, Pace, Rate, Terms, key_of
from asyncworker.patience import Patience, patiently

logger = logging.getLogger("asyncworker.celery")

#: The exit of a key that is no site's.
EXIT = "celery"

#: While a kind is held, its tasks look again this often at most.
LOOK_S = 60.0

#: A limit that was lifted at run time: also for workers that begin later and know the declared one.
UNLIMITED = Rate(1_000, 1_000)

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}


@dataclass(frozen=True)
class Wait:
    """How long a task has to wait, in s, and whether it may begin then."""

    seconds: float
    has_slot: bool


class Rates(Protocol):
    """The rates of a worker process."""

    def wait(self, consumer: Any, task: str, *, has_slot: bool) -> Wait:
        """When a task may begin.

        Parameters:
            consumer: Celery's, whose buckets say which tasks have a limit.
            has_slot: It was told so before, and its time has come.
        """

    def begin(self, consumer: Any) -> None:
        """A consumer begins: it is to know the limits that were set at run time."""

    def changed(self, consumer: Any, task: str) -> None:
        """Remote control has set another limit."""


class WorkerRates:
    """Those of this worker process alone, as Celery has them: so many begin in a second."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[Any, float]] = {}
        self._lock = threading.Lock()

    def wait(self, consumer: Any, task: str, *, has_slot: bool) -> Wait:
        bucket = consumer.task_buckets[task]  # another one when the rate is changed
        if bucket is None or has_slot:
            return Wait(0.0, has_slot=True)
        now = time.monotonic()
        with self._lock:
            _, free_at = self._next.get(id(bucket), (bucket, now))
            begins = max(now, free_at)
            self._next[id(bucket)] = (bucket, begins + 1 / bucket.fill_rate)
        return Wait(begins - now, has_slot=True)

    def begin(self, consumer: Any) -> None:
        """Nothing: what was set at run time is known to those who ran then."""

    def changed(self, consumer: Any, task: str) -> None:
        """Nothing: the consumer has another bucket."""


class DeploymentRates:
    """Those of all workers together.

    Parameters:
        limiter: Where they are counted.
        patience: With a store that is away.
    """

    def __init__(self, limiter: Limiter, patience: Patience | None = None) -> None:
        self._limiter = limiter
        self._patience = patience

    def wait(self, consumer: Any, task: str, *, has_slot: bool) -> Wait:
        if consumer.task_buckets[task] is None or (rate := rate_of(consumer.app.tasks[task].rate_limit)) is None:
            return Wait(0.0, has_slot=True)
        key = key_of(task, EXIT)
        held_ms = self._ask(lambda: self._limiter.held_ms(key))
        if held_ms > 0:
            return Wait(min(LOOK_S, held_ms / 1000), has_slot=has_slot)
        if has_slot:
            return Wait(0.0, has_slot=True)
        terms = Terms.of(Pace(rate, jitter=0.0))
        answer = self._ask(lambda: self._limiter.commit(key, terms, hold_ms=0, most_ms=WITHOUT_END_MS))
        return Wait(answer.wait_ms / 1000, has_slot=True)

    def begin(self, consumer: Any) -> None:
        try:
            rates = self._limiter.rates()
        except redis.RedisError as error:
            logger.warning("rate limits that were set at run time are not known to this worker: %s", error)
            return
        for name, task in consumer.app.tasks.items():
            if (rate := rates.get(key_of(name, EXIT))) is not None:
                task.rate_limit = None if rate == str(UNLIMITED) else _celerys(Rate.parse(rate))
        consumer.reset_rate_limits()

    def changed(self, consumer: Any, task: str) -> None:
        rate = rate_of(consumer.app.tasks[task].rate_limit)
        try:
            self._limiter.set_rate(key_of(task, EXIT), rate or UNLIMITED)
        except redis.RedisError as error:
            logger.warning("workers that begin later do not know of the rate limit of %s: %s", task, error)

    def _ask(self, ask: Callable[[], Any]) -> Any:
        return patiently(ask, "keep a rate limit", self._patience)


def rate_of(limit: object) -> Rate | None:
    """Celery's `10/m`, `0.5/s`, or a number a second; None: there is no limit, or more than one a millisecond.

    Raises:
        ValueError: When it is no rate.
    """
    if not per_second(limit):
        return None
    many, _, unit = str(limit).partition("/")
    of = Fraction(many).limit_denominator(1_000) / _UNITS_MS[unit or "s"]
    if of > 1:
        return None
    count = Fraction(many).limit_denominator(1_000)
    per_ms = _UNITS_MS[unit or "s"] * count.denominator
    if not count or per_ms > MOST_PER_MS:
        return Rate(1, MOST_PER_MS)
    return Rate(count.numerator, per_ms) if count.numerator <= 10**6 else Rate(of.numerator, of.denominator)


def _celerys(rate: Rate) -> float:
    return rate.count * 1_000 / rate.per_ms
