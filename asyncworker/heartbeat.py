"""Heartbeat: says that a worker process lives, and takes back what dead ones hold."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import redis
from dramatiq import Broker, Worker
from dramatiq.common import q_name
from dramatiq.middleware import Middleware
from redis.backoff import NoBackoff
from redis.retry import Retry

from asyncworker.errors import BrokerUnavailable
from asyncworker.patience import locked_out, remedy
from asyncworker.settling import STOP_S

logger = logging.getLogger("asyncworker.broker")

#: A worker is heard of this often at least, and so many times within the heartbeat timeout.
EVERY_S = 1.0
TIMES = 6

#: Of the heartbeat timeout so much is waited for an answer, and for a connection: a worker whose connection hangs has
#: then a new one, and was heard of, in time.
PATIENCE = 1 / 4

#: What is done is told to a store that answers also when the attempts took all the time for stopping.
LEAST_S = 1.0


class Heartbeat(Middleware):
    """A thread of each worker process, beside its consumers: these say nothing while their worker is busy.

    Parameters:
        stop_timeout_ms: How long a worker that has to stop waits for a store that is away.
    """

    def __init__(self, *, stop_timeout_ms: int = 30_000) -> None:
        self._stop_timeout_s = stop_timeout_ms / 1000
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def before_worker_boot(self, broker: Any, worker: Worker) -> None:
        broker.is_stopping = False
        broker.patience.renew()
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run, args=(broker, worker), name="asyncworker-heartbeat", daemon=True
        )
        self._thread.start()

    def before_worker_shutdown(self, broker: Any, worker: Worker) -> None:
        broker.is_stopping = True
        broker.patience.end_in(self._stop_timeout_s)

    def after_worker_shutdown(self, broker: Any, worker: Worker) -> None:
        broker.alarm.stop()
        # Of what was interrupted at the last moment its thread may still send the retry: what is left when this
        # process has gone is given to another, and would be there twice.
        ends = time.monotonic() + max(LEAST_S, min(STOP_S, broker.patience.left_s))
        for thread in worker.workers:
            thread.join(max(0.0, ends - time.monotonic()))
        broker.riding.stop()
        broker.settling.stop(max(LEAST_S, min(STOP_S, broker.patience.left_s)))
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * EVERY_S)
            self._thread = None
        client = hasty(broker)
        with contextlib.suppress(redis.RedisError, BrokerUnavailable):  # then it is noticed by its silence
            broker.leave(client, queues=consumed_queues(broker, worker))
        client.close()

    def _run(self, broker: Any, worker: Worker) -> None:
        client, away = hasty(broker), False
        while True:  # at once for the first time: who was never heard of is not missed when the store goes away
            try:
                if dead := broker.bury_siblings(client):
                    logger.warning("worker processes of this host that were found dead: %d", dead)
                for queue_name in consumed_queues(broker, worker):
                    if recovered := broker.recover(queue_name, client):
                        logger.warning(
                            "queue %r: messages of dead workers that are run again: %d", queue_name, recovered
                        )
                away = False
            except (redis.RedisError, BrokerUnavailable) as error:
                if not away:
                    level = logging.ERROR if locked_out(error) else logging.WARNING
                    logger.log(level, "the broker (%s) is away: %s%s", broker.where, error, remedy(error))
                away = True
            if self._stop.wait(every_s(broker.heartbeat_timeout)):
                break
        client.close()


def every_s(timeout_ms: float) -> float:
    """How often a worker says that it lives, for a heartbeat timeout."""
    return min(EVERY_S, timeout_ms / 1000 / TIMES)


def hasty(broker: Any) -> redis.Redis:
    """A client of the broker's store that gives up soon: who waits for a connection that hangs is taken for dead."""
    pool = broker.client.connection_pool
    timeout_s = broker.heartbeat_timeout / 1000 * PATIENCE
    changed = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": Retry(NoBackoff(), 0)}
    options = pool.connection_kwargs | changed
    return redis.Redis.from_pool(redis.ConnectionPool(connection_class=pool.connection_class, **options))


def consumed_queues(broker: Broker, worker: Worker) -> set[str]:
    """The declared queues that the worker consumes."""
    wanted = {q_name(queue) for queue in worker.consumer_whitelist or ()}
    return {queue for queue in broker.get_declared_queues() if not wanted or queue in wanted}
