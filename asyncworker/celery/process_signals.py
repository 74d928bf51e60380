"""The signals of a worker process: which of Celery's are sent when, and in which thread.

`worker_process_init` and `worker_process_shutdown` are sent in the thread that runs the bodies of plain functions,
before its first message and after its last: a synchronous browser that is made there works in these bodies. All others
are sent in the main thread. No handler has a time limit.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from typing import Any

from celery import signals

from asyncworker.celery.node import Node

logger = logging.getLogger("asyncworker.celery")

#: How long the thread of remote control may take to end, in s.
END_S = 3.0


class ProcessSignals:
    """What Celery is told of this worker process.

    Parameters:
        nodes: A worker of Celery's for each app.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self._first: Any = None
        self._choosing = threading.Lock()
        self._is_up = threading.Event()
        self._is_told = threading.Event()
        self._listeners: list[threading.Thread] = []

    def thread_began(self, thread: Any) -> None:
        """In a worker thread before its first message; all wait until what they share is there."""
        with self._choosing:
            is_first = self._first is None
            if is_first:
                self._first = thread
        if not is_first:
            self._is_up.wait()
            return
        try:
            for node in self._nodes:
                node.app.set_current()
                signals.worker_process_init.send(sender=node.hostname)
        finally:
            self._is_up.set()

    def began(self) -> None:
        """In the main thread, when the worker has begun."""
        self._is_up.wait()
        for node in self._nodes:
            node.announce()
            listener = threading.Thread(target=_listen, args=(node,), name="asyncworker-celery-control", daemon=True)
            listener.start()
            self._listeners.append(listener)
            node.ready()

    def stops(self) -> None:
        """In the main thread, when the worker was told to stop."""
        for node in self._nodes:
            signals.worker_shutting_down.send(sender=node.hostname, sig="SIGTERM", how="Warm", exitcode=0)
        self._is_told.set()

    def thread_ends(self, thread: Any) -> None:
        """In a worker thread after its last message."""
        if thread is self._first:
            self._is_told.wait(END_S)  # the thread hears of the end first, and Celery's order is another
            for node in self._nodes:
                signals.worker_process_shutdown.send(sender=node.hostname, pid=os.getpid(), exitcode=0)

    def ended(self) -> None:
        """In the main thread, when the worker has ended."""
        for node in self._nodes:
            node.consumer.is_ending = True
        for listener in self._listeners:
            listener.join(END_S)
        for node in self._nodes:
            node._send_worker_shutdown()


def _listen(node: Node) -> None:
    """Take remote control, until the worker ends; Celery connects again whenever it has to."""
    node.app.set_current()
    try:
        node.consumer.start()
        node.consumer.shutdown()
        node.timer.stop()
    except SystemExit:  # the command `shutdown`
        parent = multiprocessing.parent_process()
        pid = os.getpid() if parent is None else parent.pid
        logger.warning("told to shut down by remote control; the worker command %s and all its processes stop", pid)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
    except Exception:
        logger.exception("remote control and events of %s have ended; tasks go on", node.hostname)
