"""Fitness: a worker does not begin at a store that cannot be used, and says why."""

from __future__ import annotations

import logging
from typing import Any

import redis
from dramatiq import Worker
from dramatiq.middleware import Middleware

from asyncworker.errors import BrokerUnavailable, UnfitBroker
from asyncworker.middleware import BootFailed
from asyncworker.permissions import check_permissions

logger = logging.getLogger("asyncworker.broker")


class Fitness(Middleware):
    """Asks the store at boot. One that is away is waited for later, as at any other time."""

    def before_worker_boot(self, broker: Any, worker: Worker) -> None:
        try:
            check_permissions(broker.client, broker.namespace)
        except UnfitBroker as error:
            raise BootFailed(f"this worker cannot start: the broker ({broker.where}): {error}") from error
        except (redis.RedisError, BrokerUnavailable) as error:
            logger.warning("the broker (%s) is away: %s", broker.where, error)
