"""What takes messages off a queue of RabbitMQ in a worker."""

from __future__ import annotations

import logging
from typing import Any

import pika.exceptions
from dramatiq import ConnectionClosed, Message, MessageProxy
from dramatiq.brokers.rabbitmq import _RabbitmqConsumer, _RabbitmqMessage
from dramatiq.common import dq_name, q_name
from dramatiq.errors import DecodeError

from asyncworker.consumer import misfit
from asyncworker.middleware import emit_receive

logger = logging.getLogger("asyncworker.broker")


class _Received(_RabbitmqMessage):
    """A message, and who has to acknowledge it."""

    def __init__(self, redelivered: bool, tag: int, message: Message[Any], consumer: RabbitmqConsumer) -> None:
        super().__init__(redelivered, tag, message)
        self.consumer = consumer


class RabbitmqConsumer(_RabbitmqConsumer):
    """Dramatiq's consumer, which also says what it received, and takes nothing more while its worker stops.

    Tags count from 1 in each connection, so a message is acknowledged to the consumer that it came from, or not at
    all: after a reconnection the same tag is another message's.
    """

    def __init__(self, broker: Any, queue_name: str, prefetch: int, timeout: int) -> None:
        self._idle_s = timeout / 1000
        self._is_cancelled = False
        try:
            super().__init__(broker, queue_name, prefetch, timeout)
        except (ConnectionClosed, OSError) as error:
            raise ConnectionClosed(f"{broker.where}: {reason(error)}") from error

    def ack(self, message: MessageProxy) -> None:
        if self._is_ours(message):
            super().ack(message)

    def nack(self, message: MessageProxy) -> None:
        if self._is_ours(message):
            super().nack(message)

    def _is_ours(self, message: Any) -> bool:
        if message.consumer is self:
            return True
        logger.warning(
            "message %s (%s) was done when the connection that it came by had ended: RabbitMQ has given it to another "
            "worker, or to this one again",
            message.message_id,
            message.actor_name,
        )
        return False

    def __next__(self) -> MessageProxy | None:
        try:
            if self.broker.is_stopping:
                self._take_no_more()
                return None
            method, _, body = next(self.iterator)
        except (AssertionError, pika.exceptions.AMQPError, OSError) as error:
            if getattr(error, "reply_code", None) == 404:  # someone has deleted the queue
                self.broker.queues_pending.add(q_name(self.queue_name))
            raise ConnectionClosed(f"{self.broker.where}: {reason(error)}") from error
        return None if method is None else self._read(method, body)

    def _take_no_more(self) -> None:
        """What was delivered and not handed out goes to others now, not when the last attempt here has ended."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self.channel.cancel()
        self.connection.process_data_events(time_limit=self._idle_s)  # what is done is acknowledged by this

    def _read(self, method: Any, body: bytes) -> MessageProxy | None:
        """The message in `body`; None when it is none: it is in the dead letters then."""
        try:
            message = Message.decode(body)
            why = misfit(message)
        except DecodeError as error:
            why = str(error.error)
        if why is not None:
            logger.error(
                "queue %r held a body that is no Dramatiq message (%s); it is in the dead letters: %.200r",
                self.queue_name,
                why,
                body,
            )
            self._nack(method.delivery_tag)
            return None
        if message.queue_name != self.queue_name:  # moved here by RabbitMQ's own tools
            message = message.copy(queue_name=self.queue_name)
        received = _Received(method.redelivered, method.delivery_tag, message, self)
        self.known_tags.add(method.delivery_tag)
        if self.queue_name != dq_name(self.queue_name):
            emit_receive(self.broker, received)
        return received


def reason(error: BaseException) -> str:
    """What went wrong, in the words of the innermost error: pika's own say nothing, or the same three times."""
    seen: BaseException = error
    while True:
        inner = [each for each in (*seen.args, getattr(seen, "exception", None)) if isinstance(each, BaseException)]
        if not inner:
            break
        seen = inner[-1]
    if isinstance(seen, TimeoutError) and not str(seen):
        return "no answer"
    return str(seen) or type(seen).__name__
