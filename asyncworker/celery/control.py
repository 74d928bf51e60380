"""Remote control: Celery's commands, where they mean something here; the others are refused and say what to do instead.

A revoke is also noted in the store, so that a worker process that begins later knows of it, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import redis
from celery.worker import control as celerys
from celery.worker import state as celery_state
from dramatiq import Message, MessageProxy
from dramatiq.errors import DecodeError
from kombu import Queue
from kombu.utils.functional import maybe_list

from asyncworker.cancellations import Cancellations, RedisCancelRecords
from asyncworker.celery import names
from asyncworker.celery.delivery import Delivery
from asyncworker.celery.envelope import OPTION
from asyncworker.celery.stores import store_of
from asyncworker.redis_broker import WorkerBroker

logger = logging.getLogger("asyncworker.celery")

#: Where the ids of revoked tasks lie in the store, apart from those of `asyncworker cancel`.
PREFIX = "asyncworker:celery:"

#: A list of delayed messages ends here.
MOST_SCHEDULED = 1_000

#: What is not supported, and what is to be done instead.
INSTEAD = {
    "pool_grow": "start another worker process, or set ASYNCWORKER_CELERY_THREADS",
    "pool_shrink": "stop a worker process, or set ASYNCWORKER_CELERY_THREADS",
    "pool_restart": "restart the worker command; `asyncworker up` replaces what has ended",
    "autoscale": "the number of processes is dramatiq's --processes",
    "add_consumer": "name the queue in task_queues or task_routes, and restart the workers",
    "cancel_consumer": "pause the queue for all workers: `asyncworker pause`",
    "election": "there are no elections among these workers",
}


class Revoked:
    """The revoked tasks of an app's deployment, which Celery keeps in each of its workers."""

    def __init__(self, url: str | None) -> None:
        self._known = Cancellations(RedisCancelRecords(store_of(url), prefix=PREFIX))
        self._is_away = False

    def look(self) -> None:
        """Have Celery know those that others have noted."""
        try:
            self._known.look()
        except redis.RedisError as error:
            if not self._is_away:
                logger.warning("which tasks were revoked by others is not known for now: %s", error)
            self._is_away = True
            return
        self._is_away = False
        for task_id in self._known.all():
            if task_id not in celery_state.revoked:
                celery_state.revoked.add(task_id)

    def note(self, task_ids: list[str]) -> None:
        try:
            self._known.records.add(task_ids)
        except redis.RedisError as error:
            logger.warning("workers that begin later do not know of %d revoked tasks: %s", len(task_ids), error)


def handlers(consumer: Any) -> dict[str, Callable[..., Any]]:
    """Celery's commands by name, for the consumer of a worker process."""
    own: dict[str, Callable[..., Any]] = {
        "revoke": lambda state, task_id, **how: _revoke(consumer, state, task_id, **how),
        "time_limit": lambda state, **how: _change_limits(consumer, state, **how),
        "rate_limit": lambda state, **how: _change_rate(consumer, state, **how),
        "reserved": lambda state, **_: [_info(consumer, proxy) for proxy in reserved(consumer)],
        "scheduled": lambda state, **_: scheduled(consumer),
        "active_queues": lambda state, **_: [_queue(consumer, name) for name in consumer.queues],
    }
    own |= {"dump_reserved": own["reserved"], "dump_schedule": own["scheduled"]}
    refused = {name: _refused(name, instead) for name, instead in INSTEAD.items()}
    return {**celerys.Panel.data, **own, **refused}


def _queue(consumer: Any, name: str) -> Any:
    """All that Celery tells of a queue; Flower asks for it by name."""
    declared = consumer.app.amqp.queues.get(name) or Queue(name, routing_key=name)
    return declared.as_dict(recurse=True)


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def refuse(state: Any, **_: Any) -> Any:
        raise NotImplementedError(f"{name} is not supported by workers of asyncworker; {instead}")

    return refuse


def _revoke(consumer: Any, state: Any, task_id: Any, **how: Any) -> Any:
    consumer.revoked.note([str(each) for each in maybe_list(task_id) or []])
    return celerys.revoke(state, task_id, **how)


def _change_limits(consumer: Any, state: Any, **how: Any) -> Any:
    answer = celerys.time_limit(state, **how)
    consumer.update_strategies()  # which hold the limits of their tasks
    return answer


def _change_rate(consumer: Any, state: Any, **how: Any) -> Any:
    answer = celerys.rate_limit(state, **how)
    if "ok" in answer:
        consumer.rates.changed(consumer, how["task_name"])
    return answer


def reserved(consumer: Any) -> list[MessageProxy]:
    """The Celery messages that this process has taken, and that wait for a thread."""
    worker = consumer.controller.worker
    items = list(worker.work_queue.queue) if worker is not None else []
    return [item.message for item in items if OPTION in item.message.options]


def scheduled(consumer: Any) -> list[dict[str, Any]]:
    """The delayed messages of the app's queues, which lie in the store: each worker names them all."""
    broker = consumer.controller.broker
    if not isinstance(broker, WorkerBroker):
        return []
    client: Any = broker.client
    found: list[dict[str, Any]] = []
    for queue in consumer.queues:
        for name in names.all_steps(queue):
            for _, body in client.hscan_iter(f"{broker.namespace}:{name}.DQ.msgs"):
                if len(found) >= MOST_SCHEDULED:
                    return found
                if (entry := _entry(consumer, body)) is not None:
                    found.append(entry)
    return found


def _entry(consumer: Any, body: bytes) -> dict[str, Any] | None:
    try:
        message = Message.decode(body)
    except DecodeError:
        return None
    if OPTION not in message.options:
        return None
    info = _info(consumer, MessageProxy(message))
    due_s = message.options.get("eta", time.time() * 1000) / 1000
    return {"eta": message.options[OPTION]["headers"].get("eta"), "due": due_s, "priority": 6, "request": info}


def _info(consumer: Any, proxy: MessageProxy) -> dict[str, Any]:
    try:
        info: dict[str, Any] = consumer.request(Delivery(consumer.controller.broker, proxy).message()).info()
    except Exception as error:  # noqa: BLE001 -- whatever it is, the others are shown
        return {"id": proxy.message_id, "name": None, "error": repr(error)}
    return info


def as_set(requests: Any) -> set[Any]:
    """A set of Celery's that other threads change meanwhile."""
    while True:
        try:
            return set(requests)
        except RuntimeError:  # it has changed while it was read
            continue
