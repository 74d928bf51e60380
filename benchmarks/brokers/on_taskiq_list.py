"""taskiq on a Redis list. It acknowledges nothing: what a worker that dies has taken is lost."""

from __future__ import annotations

from _stamps import parameters
from _taskiq import set_up
from taskiq_redis import ListQueueBroker

# It waits in the store without an end, and redis-py 8 ends every wait after 5 s unless told otherwise: the idle worker
# would break down and be started again each time.
broker = ListQueueBroker(parameters["url"], socket_timeout=None)
send, opened = set_up(broker)
