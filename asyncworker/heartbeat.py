"""Heartbeat: says that a worker process lives, and takes back what dead ones hold."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import redis
from dramatiq import Broker, Worker
from dramatiq.common import q_name
from dramatiq.middleware import Middleware

from asyncworker.errors import BrokerUnavailable

logger = logging.getLogger("asyncworker.broker")

#: What came back is to be run within the heartbeat timeout and two of these.
EVERY_S = 1.0


class Heartbeat(Middleware):
    """A thread of each worker process, beside its consumers: these say nothing while their worker is busy."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def before_worker_boot(self, broker: Any, worker: Worker) -> None:
        broker.is_stopping = False
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run, args=(broker, worker), name="asyncworker-heartbeat", daemon=True
        )
        self._thread.start()

    def before_worker_shutdown(self, broker: Any, worker: Worker) -> None:
        broker.is_stopping = True

    def after_worker_shutdown(self, broker: Any, worker: Worker) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * EVERY_S)
            self._thread = None
        broker.alarm.stop()
        broker.settling.stop()
        with contextlib.suppress(redis.RedisError, BrokerUnavailable):  # then it is noticed by its silence
            broker.leave()

    def _run(self, broker: Any, worker: Worker) -> None:
        away = False
        while not self._stop.wait(EVERY_S):
            try:
                for queue_name in consumed_queues(broker, worker):
                    if recovered := broker.recover(queue_name):
                        logger.warning(
                            "queue %r: messages of dead workers that are run again: %d", queue_name, recovered
                        )
                away = False
            except (redis.RedisError, BrokerUnavailable) as error:
                if not away:
                    logger.warning("the broker (%s) is away: %s", broker.where, error)
                away = True


def consumed_queues(broker: Broker, worker: Worker) -> set[str]:
    """The declared queues that the worker consumes."""
    wanted = {q_name(queue) for queue in worker.consumer_whitelist or ()}
    return {queue for queue in broker.get_declared_queues() if not wanted or queue in wanted}
