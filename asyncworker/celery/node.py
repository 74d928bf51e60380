"""Celery's own worker and consumer objects, in a worker process of this package.

The worker is made and never started: its messages come from Dramatiq's consumers. What is taken from it is what Celery
does around a task: requests and their acknowledgements, unknown and invalid tasks, revokes, remote control, events.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from celery import bootsteps, signals
from celery.apps.worker import Worker
from celery.utils.nodenames import nodename
from celery.utils.timer2 import Timer as CeleryTimer
from celery.worker import consumer as consuming
from celery.worker.consumer.connection import Connection
from celery.worker.consumer.control import Control
from celery.worker.consumer.events import Events
from celery.worker.consumer.heart import Heart
from celery.worker.request import create_request_cls
from celery.worker.strategy import hybrid_to_proto2, proto1_to_proto2
from kombu.common import QoS
from kombu.serialization import prepare_accept_content
from kombu.utils.imports import symbol_by_name

from asyncworker.celery.control import Revoked, as_set, handlers
from asyncworker.celery.delivery import Delivery, current_delivery
from asyncworker.celery.pool import Pool, lost

logger = logging.getLogger("asyncworker.celery")

#: The thread of remote control looks this often whether it shall end, in s.
LISTEN_S = 1.0


class ControlStep(Control):
    """Remote control, without Celery's own consumption of tasks, which it waits for elsewhere."""

    requires = (Events,)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        self.box.node.handlers = handlers(c)
        self.box.node.state.tset = as_set


class Listen(bootsteps.StartStopStep):
    """Takes what remote control sends until the worker ends."""

    label = "listen"
    last = True

    def start(self, c: Any) -> None:
        c.listen()


class Timer(CeleryTimer):
    """Celery's timer, but for the eta of tasks: their messages come when that is over."""

    def call_at(
        self, eta: float, fun: Callable[..., Any], args: Any = (), kwargs: Any = None, priority: int = 0
    ) -> Any:
        delivery = current_delivery.get()
        if delivery is None:
            return super().call_at(eta, fun, args, kwargs, priority)
        delivery.due = (eta, lambda: fun(*args, **(kwargs or {})))
        return None


class Consumer(consuming.Consumer):
    """Celery's consumer: it listens to remote control, and deals with the messages that it is handed."""

    class Blueprint(bootsteps.Blueprint):
        name = "Consumer"
        default_steps = (Connection, Events, Heart, ControlStep, Listen)

        def shutdown(self, parent: Any) -> None:
            self.send_all(parent, "shutdown")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.disable_rate_limits = True  # they are kept before Celery sees the message
        self.qos = QoS(lambda prefetch_count: None, 0)
        self.task_consumer = None
        self._accept = prepare_accept_content(self.app.conf.accept_content)
        self.is_ending = False
        self.queues: list[str] = []
        self.revoked = Revoked(self.app.conf.broker_write_url or self.app.conf.broker_url)
        self._handler: Callable[[Any], Any] | None = None
        self._dispatcher: Any = None
        self._changing = threading.Lock()

    def call_soon(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do what an acknowledgement asks for at once: Celery 5.4 would leave it to its loop, after the message."""
        if current_delivery.get() is None:
            return super().call_soon(p, *args, **kwargs)
        return p(*args, **kwargs)

    def listen(self) -> None:
        while not self.is_ending:
            self.perform_pending_operations()
            self.revoked.look()
            try:
                self.connection.drain_events(timeout=LISTEN_S)
            except TimeoutError:
                continue
        self.stop()

    def handle(self, message: Any) -> None:
        """Do with a message what Celery's worker does."""
        message.accept = self._accept
        if message.errors:
            message._reraise_error(self.on_decode_error)
            return
        self._handle(message)

    def _handle(self, message: Any) -> None:
        """The strategies of tasks hold what sends events, which is another one with each connection."""
        with self._changing:
            if self._handler is None or self._dispatcher is not self.event_dispatcher:
                self._dispatcher = self.event_dispatcher
                self.update_strategies()
                self._handler = self.create_task_handler()
            handler = self._handler
        handler(message)

    def on_decode_error(self, message: Any, exc: BaseException) -> None:
        super().on_decode_error(message, exc)
        signals.task_rejected.send(sender=self, message=message, exc=exc)

    def request(self, message: Any) -> Any:
        """Celery's request for a message, without any of what follows its reception.

        Raises:
            KeyError: When its task is unknown.
        """
        message.accept = self._accept
        payload, body, headers, decoded, utc = None, message.body, message.headers, False, self.app.uses_utc_timezone()
        if "task" not in headers:
            payload = message.payload
            convert = hybrid_to_proto2 if "args" in payload else proto1_to_proto2
            body, headers, decoded, utc = convert(message, payload)
        task = self.app.tasks[headers["task"]]
        make = create_request_cls(
            symbol_by_name(task.Request), task, self.pool, self.hostname, self.event_dispatcher, app=self.app
        )
        return make(
            message,
            on_ack=message.ack_log_error,
            on_reject=message.reject_log_error,
            app=self.app,
            hostname=self.hostname,
            eventer=self.event_dispatcher,
            task=task,
            connection_errors=self.connection_errors,
            body=body,
            headers=headers,
            decoded=decoded,
            utc=utc,
        )

    def lose(self, delivery: Delivery, message: Any, *, most: int) -> None:
        """Tell Celery that the process of a task has died under it; it says whether it is run again.

        Parameters:
            most: A task whose process has died so often is not run again, whatever Celery says.
        """
        request = self.request(message)
        how = lost(f"the worker process died under it, {delivery.all_losses} of {most} times at most")
        request.on_failure(how)
        if delivery.requeue and delivery.all_losses >= most:
            delivery.requeue = False
            self._give_up(request, how)
        delivery.losses_are_told()

    def _give_up(self, request: Any, how: Any) -> None:
        """Celery would run it again for ever."""
        exception = how.exception
        request.task.backend.mark_as_failure(
            request.id, exception, request=request._context, store_result=request.store_errors
        )
        signals.task_failure.send(
            sender=request.task,
            task_id=request.id,
            exception=exception,
            args=request.args,
            kwargs=request.kwargs,
            traceback=how.traceback,
            einfo=how,
        )


class Node(Worker):
    """Celery's worker of one app in this process, with its name, pool and consumer."""

    def __init__(self, app: Any, *, broker: Any, worker: Any, place: int) -> None:
        self.broker, self.worker = broker, worker
        # A name of its own for each process, by which remote control and events tell them apart.
        name = f"celery-{os.getpid()}" + (f"-{place}" if place else "")
        app.conf.worker_hijack_root_logger = False  # Dramatiq's handlers stay
        super().__init__(
            app=app,
            hostname=nodename(name, socket.gethostname()),
            pool_cls=Pool,
            consumer_cls=Consumer,
            timer_cls=Timer,
            concurrency=worker.worker_threads,
            quiet=True,
            use_eventloop=False,
            redirect_stdouts=False,
            loglevel=logging.getLevelName(logging.getLogger().getEffectiveLevel()),
            without_mingle=True,
            without_gossip=True,
        )

    def on_start(self) -> None:
        """Nothing: `announce` has done it, in the main thread."""

    def announce(self) -> None:
        super().on_start()

    def ready(self) -> None:
        super().on_consumer_ready(self.consumer)

    def on_consumer_ready(self, consumer: Any) -> None:
        """Nothing: the worker is ready when Dramatiq's is."""

    def install_platform_tweaks(self, worker: Any) -> None:
        """Nothing: signals of the operating system are Dramatiq's."""

    def set_process_status(self, info: str) -> None:
        """Nothing: the process is not Celery's."""
