"""A worker process and who stands above it: the supervisor that it answers to, and process 1 that reaps orphans."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from dramatiq import Broker, Worker
from dramatiq.middleware import Middleware

from asyncworker.middleware import BootFailed, serves_sessions
from asyncworker.settings import EngineName, Settings, foreign

logger = logging.getLogger("asyncworker.worker")

#: Names the file by which a supervisor learns that its worker is ready. No setting, as its first letter says.
READY_VARIABLE = "_ASYNCWORKER_READY"

#: How often is looked whether the command above a worker lives.
LOOK_EVERY_S = 0.5

#: The process that adopts all orphans of a container.
INIT = 1


class Supervised(Middleware):
    """Refuses to begin below a dramatiq that is process 1; tells a supervisor when this worker is ready.

    Parameters:
        settings: The deployment's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        command = multiprocessing.parent_process()
        if command is None:  # not a child of the command dramatiq
            return
        if command.pid == INIT:
            self._below_init(launches=serves_sessions(broker, worker))
        if foreign(READY_VARIABLE):
            # A fork server, where Python has one, is the parent, and ends with the command.
            parent = os.getppid()
            threading.Thread(target=_end_with, args=(command, parent), name="asyncworker-parent", daemon=True).start()

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if not (name := foreign(READY_VARIABLE)):
            return
        try:
            Path(name).write_text(str(os.getpid()))
        except OSError as error:
            logger.warning("the supervisor does not learn that this worker is ready: %s", error)

    def _below_init(self, *, launches: bool) -> None:
        """Dramatiq is the init of this container and reaps no orphans, which a browser that crashes leaves."""
        what = (
            "the command dramatiq is process 1 here and reaps no orphans, so each browser that crashes leaves zombies, "
            "until no process can be started; run it under an init (`docker run --init`, or `tini -- dramatiq "
            "asyncworker.actors …`), or make `asyncworker up -p N` process 1, which reaps them"
        )
        if launches and self._settings.engine is not EngineName.remote:
            raise BootFailed(f"this worker cannot start: {what}")
        logger.warning("%s", what)


def _end_with(command: BaseProcess, parent: int) -> None:
    """Stop in order when the command has died, which alone is told what the supervisor wants. Never returns before.

    The kernel's own signal for that would come twice, and a second one shortens the stop: the command has several
    threads, and as each of them ends this process gets another parent.
    """
    while os.getppid() == parent and command.is_alive():
        time.sleep(LOOK_EVERY_S)
    # Nobody reads its log any more: once the pipe is full, whoever writes a line would wait for ever.
    with Path(os.devnull).open("wb") as nowhere, contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    with contextlib.suppress(OSError):  # what the command's own stderr was is still the supervisor's to read
        os.write(
            2, f"process {os.getpid()}: the command dramatiq has died; stopping in order, without a log\n".encode()
        )
    os.kill(os.getpid(), signal.SIGTERM)
