"""Delivery: one Celery message in a worker, and what Celery decides about it: acknowledged, rejected, or run again.

Celery acknowledges most tasks before it runs them. Nothing is acknowledged in the broker then: a message that a dead
worker held has to come back, for Celery to be told that it was lost. It ends when the worker thread is done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import redis
from dramatiq import Broker, Message, MessageProxy
from kombu.transport.virtual import Base64
from kombu.transport.virtual import Message as VirtualMessage

from asyncworker.accounting import LOSSES_OPTION
from asyncworker.celery.envelope import STATE_OPTION, opened
from asyncworker.patience import patiently
from asyncworker.settling import RETRYING, SETTLED

_CODECS = {"base64": Base64()}


class Delivery:
    """Stands where kombu has the channel that a message was received on.

    Attributes:
        requeue: True when Celery has rejected the message, to be run again.
        is_settled: True when it was acknowledged or rejected.
    """

    no_ack_consumers = None

    def __init__(self, broker: Broker, proxy: MessageProxy) -> None:
        self.broker = broker
        self.proxy = proxy
        self.state: dict[str, Any] = proxy.options.setdefault(STATE_OPTION, {})
        self.requeue = False
        self.is_settled = False
        #: When Celery wants it to run, in UNIX s, and how it does.
        self.due: tuple[float, Callable[[], Any]] | None = None
        #: What it has sent under its own id, with the delay in ms.
        self.held: list[tuple[Message[Any], int | None]] = []
        self.is_over = False

    @cached_property
    def payload(self) -> dict[str, Any]:
        """The Celery message as it was sent."""
        return opened(self.proxy.options)

    @property
    def all_losses(self) -> int:
        """How often its worker process has died under it."""
        return int(self.proxy.options.get(LOSSES_OPTION, 0))

    @property
    def losses(self) -> int:
        """How often that was without Celery being told."""
        return self.all_losses - int(self.state.get("losses", 0))

    @property
    def has_ended(self) -> bool:
        """Celery was told of its end before its thread had come to it, and the process was replaced."""
        return bool(self.state.get("ended"))

    def losses_are_told(self) -> None:
        self.state["losses"] = self.proxy.options.get(LOSSES_OPTION, 0)
        self.state["redelivered"] = True

    def message(self) -> Any:
        """The message as kombu would deliver it; undecodable bodies are in its `errors`."""
        properties = self.payload["properties"]
        properties.setdefault("delivery_tag", self.proxy.message_id)
        if self.state.get("redelivered"):
            properties.setdefault("delivery_info", {})["redelivered"] = True
        return VirtualMessage(self.payload, channel=self)

    # --- what kombu calls

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        return _CODECS[encoding.lower()].decode(body) if encoding and encoding.lower() in _CODECS else body

    def basic_ack(self, delivery_tag: object, multiple: bool = False) -> None:
        self.is_settled, self.requeue = True, False

    def basic_reject(self, delivery_tag: object, requeue: bool = False) -> None:
        self.is_settled, self.requeue = True, requeue

    # --- what becomes of it

    def again(self, *, delay_ms: int | None = None, **state: Any) -> None:
        """Enqueue it again, to be acknowledged here with that."""
        self.state.update(state)
        setattr(self.proxy, RETRYING, True)
        try:
            self.broker.enqueue(self.proxy, delay=delay_ms)  # type: ignore[arg-type]  # as Dramatiq's retries do
        finally:
            setattr(self.proxy, RETRYING, False)

    def hold(self, message: Message[Any], delay_ms: int | None) -> bool:
        """Keep what a task sends under its own id, a retry or what replaces it, until it has ended; True when it is.

        Celery sends a retry before it stores that there is one: with two workers, the state of the retry's end may be
        overwritten then. What is sent with the end is sent, and this run acknowledged, in one step of the store.
        """
        if message.message_id != self.proxy.message_id or self.is_over:
            return False
        self.held.append((message, delay_ms))
        return True

    def end(self) -> None:
        """Send what was kept."""
        self.is_over = True
        for place, (message, delay_ms) in enumerate(self.held):
            if place == 0 and message.queue_name == self.proxy.queue_name:
                self._follow(message, delay_ms)
            else:
                self.broker.enqueue(message, delay=delay_ms)
        self.held.clear()

    def _follow(self, message: Message[Any], delay_ms: int | None) -> None:
        held = self.proxy.options.get("redis_message_id")
        following: Any = MessageProxy(message.copy(options={"redis_message_id": held}))
        setattr(following, RETRYING, True)
        self.broker.enqueue(following, delay=delay_ms)
        if (settled := getattr(following, SETTLED, None)) is not None:
            setattr(self.proxy, SETTLED, settled)

    def note_end(self) -> None:
        """Have the message in the store say that Celery knows of its end: its process is about to be replaced."""
        self.state["ended"] = True
        rewrite = getattr(self.broker, "do_rewrite", None)
        if rewrite is None:
            return
        identifier = self.proxy.options["redis_message_id"]
        body = _as_message(self.proxy).encode()
        try:
            patiently(
                lambda: rewrite(self.proxy.queue_name, identifier, body),
                "note that a task has ended",
                getattr(self.broker, "patience", None),
            )
        except redis.RedisError:  # then Celery hears of it twice
            return


def _as_message(proxy: MessageProxy) -> Message[Any]:
    return proxy._message


#: What this worker thread, and what it has started on the loop, is at.
current_delivery: ContextVar[Delivery | None] = ContextVar("asyncworker_celery_delivery", default=None)
