"""One thread of a process speaks to RabbitMQ for all others, so that none has to wait for longer than it wants.

A connection belongs to the thread that opened it, and has to be attended to: one that no thread reads from is closed
by the server after its heartbeat, and whoever finds that out with the next message cannot tell whether that was taken.
Here an idle connection is read from all the time. Whoever waits can give up, whatever the thread hangs in.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

import pika.exceptions
from dramatiq.brokers.rabbitmq import RabbitmqBroker

#: An idle connection is attended to this often; what comes ends the wait.
IDLE_S = 5.0

#: Seconds that the end of the thread is waited for.
STOP_S = 5.0

#: What is done, and where its outcome goes.
_Wanted = tuple[Callable[[], Any], "Future[Any]"]


class Speaker:
    """The thread; it begins with the first that there is to do, and connects for it.

    Use it in the process that made it: a fork has no threads but its own, and must leave the connection alone.

    Parameters:
        broker: Its `connection` and `channel`, which are this thread's own there, are what is spoken through.
    """

    def __init__(self, broker: RabbitmqBroker) -> None:
        self._broker = broker
        self._wanted: SimpleQueue[_Wanted | None] = SimpleQueue()
        self._connection: pika.BlockingConnection | None = None
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self, work: Callable[[], Any]) -> Future[Any]:
        """Have `work` done on the thread, in order; it may be cancelled until then."""
        future: Future[Any] = Future()
        self._wanted.put((work, future))
        if self._thread is None:
            self._start()
        self._wake()
        return future

    def stop(self) -> None:
        """Close the connection and end the thread, when it has done what it was asked for."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._wanted.put(None)
            self._wake()
            thread.join(STOP_S)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="asyncworker-rabbitmq", daemon=True)
                self._thread.start()
                pid = os.getpid()
                atexit.register(lambda: self.stop() if os.getpid() == pid else None)

    def _wake(self) -> None:
        connection = self._connection
        if connection is not None:
            try:
                connection.add_callback_threadsafe(lambda: None)
            except pika.exceptions.ConnectionWrongStateError:  # closed: then the thread waits for what comes
                return

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            work, future = wanted
            if not future.set_running_or_notify_cancel():
                continue
            try:
                answer = work()
                self._connection = getattr(self._broker.state, "connection", None)
            except Exception as error:  # noqa: BLE001 -- it is raised for whoever asked
                self._disconnect()
                future.set_exception(error)
            else:
                future.set_result(answer)
        self._disconnect()

    def _next(self) -> _Wanted | None:
        while self._connection is not None:
            try:
                return self._wanted.get_nowait()
            except Empty:
                try:
                    self._connection.process_data_events(time_limit=IDLE_S)
                except (pika.exceptions.AMQPError, OSError):
                    self._disconnect()
        return self._wanted.get()

    def _disconnect(self) -> None:
        self._connection = None
        del self._broker.connection
