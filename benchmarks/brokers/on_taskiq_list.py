"""taskiq on a Redis list. It acknowledges nothing: what a worker that dies has taken is lost."""

from __future__ import annotations

from _stamps import parameters
from _taskiq import set_up
from taskiq_redis import ListQueueBroker

broker = ListQueueBroker(parameters["url"])
send, opened = set_up(broker)
