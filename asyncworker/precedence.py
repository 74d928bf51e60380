"""Precedence: queues of a worker of which one is served before another, as priorities need it.

Each queue has a consumer of its own, and none knows of the others. A consumer that comes after others takes a message
only for a thread that is free, and while none waits in the queues before its own; what it has taken at the same moment
as another it gives back. The first of them does as any consumer does.
"""

from __future__ import annotations

from typing import Any

import redis


class Precedence:
    """Of all queues of a broker in this process; a queue that was not named comes after none."""

    def __init__(self) -> None:
        self._groups: dict[str, list[str]] = {}
        self._consumers: dict[str, Any] = {}

    def order(self, queues: list[str]) -> None:
        """Have these queues served in this order."""
        self._groups |= dict.fromkeys(queues, queues)

    def join(self, queue: str, consumer: Any) -> None:
        """A consumer of this worker begins with its queue."""
        self._consumers[queue] = consumer

    def before(self, queue: str) -> list[str]:
        """The queues that are served before this one."""
        group = self._groups.get(queue, [queue])
        return group[: group.index(queue)]

    def has_free_thread(self, queue: str, threads: int) -> bool:
        """Whether the messages of this queue and its like leave a thread free."""
        group = self._groups.get(queue, [queue])
        out: int = sum(self._consumers[each].out for each in group if each in self._consumers)
        return out < threads

    def freed(self, queue: str) -> None:
        """A thread is done with a message of this queue: the others look again, unless one before them has more."""
        for each in self._groups.get(queue, ()):
            consumer = self._consumers.get(each)
            if consumer is None:
                continue
            if each != queue:
                consumer.wake()
            if consumer.has_more:
                return

    def is_there_more_urgent(self, client: Any, namespace: str, queue: str) -> bool:
        """Whether messages wait in the queues before this one."""
        before = self.before(queue)
        if not before:
            return False
        if any(self._consumers[each].has_more for each in before if each in self._consumers):
            return True
        try:
            with client.pipeline(transaction=False) as pipe:
                for each in before:
                    pipe.llen(f"{namespace}:{each}")
                return any(pipe.execute())
        except redis.RedisError:  # said by the fetch, which comes next
            return False
