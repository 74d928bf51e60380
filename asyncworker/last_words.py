"""A worker process that ends before it is ready ends a little later, so that its command can show why.

Dramatiq's command reads what its workers log in a thread that it starts when each has booted, or failed to, and stops
as soon as one has ended. Where the two come together that thread has read nothing, and the command ends without a word.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.util import Finalize

from dramatiq import Broker, Worker
from dramatiq.middleware import Middleware

#: Seconds that the command has to begin to read, on a busy machine, too.
LINGER_S = 0.5


class LastWords(Middleware):
    """Made when a worker process begins to boot; a member of the broker's middleware as soon as there is one."""

    def __init__(self) -> None:
        is_worker = multiprocessing.parent_process() is not None
        self._linger = Finalize(None, time.sleep, args=(LINGER_S,), exitpriority=0) if is_worker else None

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if self._linger is not None:
            self._linger.cancel()
