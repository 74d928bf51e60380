"""taskiq on a Redis stream, with acknowledgements."""

from __future__ import annotations

from _stamps import parameters
from _taskiq import set_up
from taskiq_redis import RedisStreamBroker

broker = RedisStreamBroker(parameters["url"])
send, opened = set_up(broker)
