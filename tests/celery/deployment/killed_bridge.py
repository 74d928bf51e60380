"""A bridge that is killed at a step of its way: `killed_bridge.py STEP COUNT OPTION...`, at the COUNTth such step."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from asyncworker import cli
from asyncworker.celery import bridge
from asyncworker.celery.source_amqp import AmqpSource
from asyncworker.celery.source_redis import RedisSource

STEPS = {
    "taken": [(RedisSource, "take"), (AmqpSource, "take")],
    "enqueued": [(bridge.Bridge, "_mark")],
}


def main(step: str, count: int) -> None:
    bridge.MOST_TOGETHER = 20
    for owner, name in STEPS[step]:
        _kill_after(owner, name, count)
    cli.main()


def _kill_after(owner: Any, name: str, count: int) -> None:
    real, calls = getattr(owner, name), []

    def called(self: Any, *args: Any) -> Any:
        answer = real(self, *args)
        calls.append(answer)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, called)


if __name__ == "__main__":
    step, count = sys.argv[1:3]
    sys.argv[1:] = ["celery", "bridge", *sys.argv[3:]]
    main(step, int(count))
