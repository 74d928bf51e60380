"""WorkerRabbitmqBroker: Dramatiq's RabbitMQ broker, whose failures are bounded and said in sentences.

Needs pika, from the extra `rabbitmq`; only a deployment that names RabbitMQ imports this.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from threading import local
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pika
import pika.exceptions
from dramatiq import ConnectionClosed, Message, Worker
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.common import current_millis, dq_name
from dramatiq.middleware import Middleware
from dramatiq.worker import ConsumerThread

from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.patience import PAUSE_S, PatientAfterAttempts, patiently
from asyncworker.producing import ProducerBroker
from asyncworker.rabbitmq_consumer import RabbitmqConsumer, reason
from asyncworker.speaking import Speaker
from asyncworker.urls import SecretUrl

#: What a URL's query does not say: a host that does not answer for this long is passed over.
CONNECT_TIMEOUT_S = 5.0

#: What will be refused again, whoever repeats it.
REFUSALS = (
    pika.exceptions.AuthenticationError,
    pika.exceptions.ProbableAuthenticationError,
    pika.exceptions.ProbableAccessDeniedError,
    pika.exceptions.ChannelClosedByBroker,
)

#: What the server says of a message that it has not taken.
NOT_TAKEN = (
    pika.exceptions.UnroutableError,
    pika.exceptions.NackError,
    pika.exceptions.ChannelClosedByBroker,
    pika.exceptions.ChannelWrongStateError,
    pika.exceptions.ConnectionWrongStateError,
)


class WorkerRabbitmqBroker(PatientAfterAttempts, ProducerBroker, RabbitmqBroker):
    """Dramatiq's RabbitMQ broker, whose failures are bounded and said in sentences.

    A message is sent when the server has confirmed it. Queues, dead letters and delayed messages are Dramatiq's own.

    Attributes:
        leaves_losses_to_ledger: What has begun, and which worker lives, is known by the ledger alone.

    Parameters:
        url: One or several hosts, tried in this order.
        heartbeat_timeout_ms: A process that was not heard of for this long is taken for dead by the server.
        send_timeout_ms: How long a producer tries to have a message taken.
    """

    leaves_losses_to_ledger = True

    def __init__(self, *, url: SecretUrl, heartbeat_timeout_ms: int = 15_000, send_timeout_ms: int = 10_000) -> None:
        quieten()
        super().__init__(parameters=[], confirm_delivery=True, middleware=[])
        self.parameters = parameters_of(url, heartbeat_s=max(1, heartbeat_timeout_ms // 1000))
        self.where = str(url)
        self.send_timeout_ms = send_timeout_ms
        self.speaker = Speaker(self)
        #: True when this process's worker takes no more messages.
        self.is_stopping = False
        _reset_in_forks(self)

    @property
    def consumer_class(self) -> type[RabbitmqConsumer]:
        return RabbitmqConsumer

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue a message, `delay` ms from now.

        Raises:
            BrokerUnavailable: When the broker did not take it in time; `sent` says whether it may have. What may have
                been sent is not repeated. Not after an attempt: the retry, the next of a pipeline and a callback wait
                for the broker, since what is not enqueued then is lost.
            ConnectionClosed: The same, for a delayed message that is due: its consumer begins again.
        """
        given, queue_name = message, message.queue_name
        self.declare_queue(queue_name)
        if delay is not None:
            queue_name = dq_name(queue_name)
            message = message.copy(queue_name=queue_name, options={"eta": current_millis() + delay})
        self.emit_before("enqueue", message, delay)
        try:
            if self.is_after_attempt:
                patiently(lambda: self._publish(message, queue_name, wait_s=None), "enqueue what follows an attempt")
            else:
                self._deliver(message, queue_name)
        except BrokerUnavailable as error:
            if isinstance(threading.current_thread(), ConsumerThread):
                raise ConnectionClosed(error) from error
            error.taken, error.untaken = [], [given if delay is None else (given, delay)]
            raise
        self.emit_after("enqueue", message, delay)
        return message

    def _deliver(self, message: Message[Any], queue_name: str) -> None:
        """Have a message taken, within `send_timeout_ms`; repeated while it is certain that it was not sent."""
        deadline = self.deadline()
        while True:
            try:
                self._publish(message, queue_name, wait_s=max(0.0, deadline - time.monotonic()))
                return
            except BrokerUnavailable as error:
                is_over = time.monotonic() + PAUSE_S >= deadline
                if error.sent is None or is_over or isinstance(error.__cause__, REFUSALS):
                    raise
                time.sleep(PAUSE_S)

    def _publish(self, message: Message[Any], queue_name: str, *, wait_s: float | None) -> None:
        """Have a message taken, once; `wait_s` None: however long that takes."""
        publication = _Publication(self, message, queue_name)
        future = self.speaker.ask(publication)
        try:
            future.result(wait_s)
        except (pika.exceptions.AMQPError, ConnectionClosed, OSError) as error:
            if future.done() and future.exception() is None:  # it was taken while the wait for it ended
                return
            future.cancel()
            is_clear = isinstance(error, NOT_TAKEN) or publication.give_up()
            raise BrokerUnavailable(
                f"the broker ({self.where}) did not take message {message.message_id} for {message.actor_name} "
                f"within {self.send_timeout_ms} ms (ASYNCWORKER_SEND_TIMEOUT_MS): {reason(error)}; "
                f"{'it was not sent' if is_clear else 'it may have been sent nevertheless'}",
                url=self.where,
                sent=False if is_clear else None,
            ) from error

    def _ensure_queue(self, canonical_queue_name: str) -> None:
        """Called by consumers, which connect themselves only where there is a server.

        Raises:
            ConnectionClosed: When there is none.
        """
        future = self.speaker.ask(lambda: self.create_queue(canonical_queue_name))
        try:
            future.result(self.send_timeout_ms / 1000)
        except (pika.exceptions.AMQPError, OSError) as error:
            future.cancel()
            raise ConnectionClosed(f"{self.where}: {reason(error)}") from error

    def create_queue(self, name: str) -> None:
        """Create a queue, and those of its delayed messages and dead letters; on the speaker's thread."""
        if name in self.queues_pending:
            self._declare_queue(name)
            self._declare_dq_queue(name)
            self._declare_xq_queue(name)
            self.queues_pending.discard(name)

    def close(self) -> None:
        self.speaker.stop()
        super().close()

    def forked(self) -> None:
        """Leave to the parent what is the parent's: closing it here would close it there."""
        self._inherited = (self.speaker, self.state, self.connections, self.channels)
        self.state, self.connections, self.channels = local(), set(), set()
        self.speaker = Speaker(self)


class _Publication:
    """A message on its way to the server, on the speaker's thread; whoever waits may give up until it goes out."""

    def __init__(self, broker: WorkerRabbitmqBroker, message: Message[Any], queue_name: str) -> None:
        self._broker, self._message, self._queue_name = broker, message, queue_name
        self._going = threading.Lock()

    def give_up(self) -> bool:
        """True: it has not gone out, and never will."""
        return self._going.acquire(blocking=False)

    def __call__(self) -> None:
        broker, canonical = self._broker, self._message.queue_name.removesuffix(".DQ")
        broker.create_queue(canonical)
        channel, body = broker.channel, self._message.encode()
        priority = self._message.options.get("broker_priority")
        if not self._going.acquire(blocking=False):
            return
        try:
            channel.basic_publish(
                exchange="",
                routing_key=self._queue_name,
                body=body,
                properties=pika.BasicProperties(delivery_mode=2, priority=priority),
                mandatory=True,
            )
        except pika.exceptions.UnroutableError:
            broker.queues_pending.add(canonical)  # someone has deleted it; created again with the next
            raise


class Stopping(Middleware):
    """Tells the consumers of a worker that is shut down to take no more."""

    def before_worker_boot(self, broker: Any, worker: Worker) -> None:
        broker.is_stopping = False

    def before_worker_shutdown(self, broker: Any, worker: Worker) -> None:
        broker.is_stopping = True


def parameters_of(url: SecretUrl, *, heartbeat_s: int, timeout_s: float = CONNECT_TIMEOUT_S) -> list[Any]:
    """pika's parameters of each host, with our bounds where its query sets none.

    Raises:
        ConfigurationError: When a URL cannot be used.
    """
    bounds = {"heartbeat": heartbeat_s, "socket_timeout": timeout_s, "stack_timeout": timeout_s}
    hosts = []
    for number, part in enumerate(url.parts, start=1):
        try:
            parameters = pika.URLParameters(part)
            given = parse_qs(urlsplit(part).query)
        except (ValueError, TypeError, AttributeError):  # their text may hold the password
            which = "" if len(url.parts) == 1 else f" of host {number}"
            raise ConfigurationError(
                f"ASYNCWORKER_BROKER_URL: the URL{which} is not amqp://user:password@host:port/vhost?name=value with "
                f"names and values that pika takes: {url}",
                name="ASYNCWORKER_BROKER_URL",
            ) from None
        for name, value in bounds.items():
            if name not in given:
                setattr(parameters, name, value)
        hosts.append(parameters)
    return hosts


def version_of(url: SecretUrl, *, timeout_s: float) -> str:
    """Which product and version answers, such as `RabbitMQ 3.13.7`.

    Raises:
        BrokerUnavailable: When none does.
    """
    quieten()
    hosts = parameters_of(url, heartbeat_s=60, timeout_s=timeout_s)
    try:
        connection = pika.BlockingConnection(hosts)
    except (pika.exceptions.AMQPError, OSError) as error:
        raise BrokerUnavailable(reason(error), url=str(url), sent=False) from error
    facts = getattr(connection._impl, "server_properties", None) or {}
    connection.close()
    return f"{_text(facts.get('product', 'RabbitMQ'))} {_text(facts.get('version', ''))}".strip()


def quieten() -> None:
    """pika logs a dozen lines for each connection, and tracebacks for each that fails: we say it in one."""
    logger = logging.getLogger("pika")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)


def _reset_in_forks(broker: WorkerRabbitmqBroker) -> None:
    method = weakref.WeakMethod(broker.forked)

    def reset() -> None:
        if (forked := method()) is not None:
            forked()

    os.register_at_fork(after_in_child=reset)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
