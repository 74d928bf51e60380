"""What takes messages off a queue in a worker, at once and without losing any."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import redis
from dramatiq import ConnectionClosed, Message, MessageProxy
from dramatiq.brokers.redis import _RedisConsumer
from dramatiq.common import q_name
from dramatiq.errors import DecodeError

from asyncworker.errors import BrokerUnavailable
from asyncworker.losses import add_losses
from asyncworker.middleware import BrowserMiddleware, emit_receive
from asyncworker.patience import patiently, remedy
from asyncworker.prefetch import Prefetch
from asyncworker.settling import SETTLED, Done

logger = logging.getLogger("asyncworker.broker")

T = TypeVar("T")

#: An idle consumer looks for itself this often: a producer that is plain Dramatiq wakes no one.
POLL_S = 1.0

#: What was just handed out begins before the consumer asks for more, which needs the interpreter's lock, too.
LET_BEGIN_S = 0.001

#: What was fetched ahead goes back when no thread is done with anything for so long.
STUCK_S = 0.05


class WorkerConsumer(_RedisConsumer):
    """Dramatiq's consumer, woken by what comes instead of looking for it.

    Where its worker has no room it waits for a thread to become free, and while the browser is launched it takes
    nothing; else it blocks in the store until it is woken, or until the next delayed message is due. Every failure of
    the store is a connection error, so that the worker tries it again.
    """

    broker: Any  # a WorkerBroker: what makes it stands below it in the map

    #: Seconds that it waits before it looks for itself.
    poll_s = POLL_S

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._freed = threading.Event()
        self._browser = next((each for each in self.broker.middleware if isinstance(each, BrowserMiddleware)), None)
        self._prefetch = Prefetch(self.prefetch)  # Dramatiq's `prefetch` is the worker's threads here
        #: A connection of its own: one that blocks serves no one else, and taking one from the pool costs as much as
        #: a command.
        self._client: redis.Redis | None = None
        #: When the next delayed message is due, by the monotonic clock; None: there is none.
        self._due_at: float | None = None
        #: True when the last look left nothing: what comes wakes this consumer.
        self._is_dry = False
        #: What this worker holds of the queue, by id in the store; it outlives the consumer, which ends with each
        #: failure of the store.
        self._held: set[str] = self.broker.held(self.queue_name)
        #: Of these, what is done and what the store does not let go of: it takes no room, and is not run again here.
        self._stranded: set[str] = self.broker.stranded(self.queue_name)
        #: Fetched and not handed out yet: (id, body).
        self._fetched: deque[tuple[str, bytes | None]] = deque()
        #: What the store takes for fetched ahead, and of that what has been handed out since.
        self._ahead: set[str] = set()
        self._begun: list[str] = []
        #: True where other queues of this worker are served before this one.
        self._is_after_others = bool(self.broker.precedence.before(self.queue_name))
        self.broker.precedence.join(self.queue_name, self)
        #: True where no message has begun before its worker has said so (`begin`), whatever was handed out.
        self._says_begin: bool = self.queue_name in self.broker.queues_that_say_begin
        #: How often a message was lost: begun by a worker that died then. By id, for what was fetched.
        self._losses: dict[str, int] = {}
        #: The fences of what was fetched, by id.
        self._fences: dict[str, int] = {}

    @property
    def out(self) -> int:
        """How many of its messages the threads have, or are about to have."""
        return self._prefetch.out

    @property
    def has_more(self) -> bool:
        """Whether it has fetched messages that it has not handed out."""
        return bool(self._fetched)

    def wake(self) -> None:
        """Have it look again at what there is to do."""
        self._freed.set()

    def ack(self, message: MessageProxy) -> None:
        """Have a message acknowledged, soon and for certain; this waits for nothing."""
        self._settle(message, rejected=False)

    def nack(self, message: MessageProxy) -> None:
        """Have a message moved to the dead letters, soon and for certain; this waits for nothing."""
        self._settle(message, rejected=True)

    def _settle(self, message: MessageProxy, *, rejected: bool) -> None:
        identifier = message.options["redis_message_id"]
        gave_up, settled = self.broker.patience.gave_up(), getattr(message, SETTLED, None)
        if settled is not None:  # with its next attempt
            self.broker.riding.get_off()
            self._prefetch.done(identifier)
            self._settled(message, identifier, settled)
            self._freed.set()
            self.broker.precedence.freed(self.queue_name)
            return
        if gave_up:
            self.broker.riding.get_off()
            logger.error(
                "message %s (%s) was done, but not what follows it: the store was away when this worker had to stop, "
                "so it is run again",
                message.message_id,
                message.actor_name,
            )
            return

        def taken(was_ours: bool | None) -> None:
            self._settled(message, identifier, was_ours)

        def refused() -> None:
            self._stranded.add(identifier)
            self._freed.set()

        if not self._fetched and self._prefetch.out <= self._prefetch.threads:  # none is about to begin
            self.broker.riding.get_off()
        self.broker.riding.put(Done(self.queue_name, identifier, message.message_id, rejected, taken, refused))
        if self._prefetch.done(identifier):
            self._freed.set()
        self.broker.precedence.freed(self.queue_name)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        self._give_back([message.options["redis_message_id"] for message in messages])

    def close(self) -> None:
        """Give back what was fetched and handed to no one."""
        try:
            self._give_back_fetched()
        except ConnectionClosed as error:
            logger.info("queue %r: messages are reclaimed later: %s", self.queue_name, error)
        if self._client is not None:
            self._client.close()
            self._client = None

    def __next__(self) -> MessageProxy | None:
        while True:
            self._freed.clear()  # before the look at what there is: what is done from here on ends the wait
            if self.broker.is_stopping or self._keeps_waiting():
                self._give_back_fetched()
                self._freed.wait(STUCK_S)
                return None
            if self._is_after_others and not self._is_its_turn():
                self._give_back_fetched()
                return None
            if not self._fetched and (room := self._room()) > 0:
                self._fetch(room)
                if self.broker.is_stopping:  # it was told to stop while it waited for one
                    continue
                if not self._fetched:
                    return None
                continue  # a launch may have begun while it waited
            if not self._fetched or not self._prefetch.may_hand_out():
                self._wait_for_a_thread()
                return None
            identifier, body = self._fetched.popleft()
            message = self._read(identifier, body)
            if message is not None:
                self._prefetch.hand_out(identifier)
                if identifier in self._ahead:
                    self._ahead.discard(identifier)
                    if not self._says_begin:
                        self._begun.append(identifier)
                emit_receive(self.broker, message)
                return message

    def _is_its_turn(self) -> bool:
        """Whether a thread is free, and nothing more urgent waits; else this waits a while for that."""
        order = self.broker.precedence
        if not order.has_free_thread(self.queue_name, self._prefetch.threads):
            self._freed.wait(self.poll_s)
            return False
        if order.is_there_more_urgent(self._own_client(), self.broker.namespace, self.queue_name):
            self._freed.wait(STUCK_S)
            return False
        return True

    def _keeps_waiting(self) -> bool:
        """What is taken while the browser is launched would be late; another worker's may be up."""
        return self._browser is not None and self._browser.keeps_waiting(self.broker, self.queue_name)

    def _fetch(self, room: int) -> None:
        """Take up to `room` messages; where the last look left none, after waiting for one."""
        if self._is_dry and self._due_at is not None and self._due_at < time.monotonic() + self.poll_s:
            self.broker.alarm.set(self.queue_name, self._due_at)
        wait_s = self.poll_s if self._is_dry else 0.0
        if self._is_dry and self._prefetch.out:
            time.sleep(LET_BEGIN_S)
        # Others only ever take away from `held`, and only after the store has: so it is never less than there.
        held, begun = len(self._held), tuple(self._begun)
        free = 0 if self._says_begin else min(room, max(0, self._prefetch.threads - self._prefetch.out))
        next_due_ms, astray, losses, fence, *rest = self._as_connection_error(
            lambda: self.broker.fetch(
                self._own_client(), self.queue_name, room, held=held, free=free, begun=begun, wait_s=wait_s
            )
        )
        self._begun.clear()
        self._due_at = time.monotonic() + next_due_ms / 1000 if next_due_ms >= 0 else None
        self._take_in(rest, free, fence, dict(zip(losses[::2], losses[1::2], strict=True)))
        self._is_dry = len(rest) < 2 * room
        if astray:
            self._reclaim()

    def _take_in(self, found: list[Any], free: int, fence: int, losses: dict[int, int]) -> None:
        for place, (raw, body) in enumerate(zip(found[::2], found[1::2], strict=True)):
            try:
                identifier = raw.decode()
            except UnicodeDecodeError:
                self._reject(raw, body, "its id in the store is no text")
                continue
            self._fetched.append((identifier, body))
            self._fences[identifier] = fence + place
            if place >= free:
                self._ahead.add(identifier)
            if place in losses:
                self._losses[identifier] = losses[place]
        self._held.update(identifier for identifier, _ in self._fetched)

    def _reclaim(self) -> None:
        known = list(self._held)
        count = self._as_connection_error(lambda: self.broker.do_reclaim(self.queue_name, *known))
        logger.warning("queue %r: %d fetched messages had got lost on the way here; put back", self.queue_name, count)
        self._is_dry = False

    def _own_client(self) -> redis.Redis:
        if self._client is None:
            self._client = self.broker.client.client()
        return self._client

    def _wait_for_a_thread(self) -> None:
        if not self._fetched:
            self._freed.wait(self.poll_s)
            return
        out = self._prefetch.out
        if not self._freed.wait(STUCK_S) and self._prefetch.out == out:
            self._prefetch.stuck()
            self._give_back_fetched()

    def _room(self) -> int:
        room: int = self._prefetch.most - len(self._held) + len(self._stranded)
        return room

    def _read(self, identifier: str, body: bytes | None) -> MessageProxy | None:
        """The message in `body`; None when it is none: it is in the dead letters then."""
        fence = self._fences.pop(identifier)
        if body is None:  # its id was in the queue, its body is gone: flushed meanwhile
            patiently(
                lambda: self.broker.do_ack(self.queue_name, identifier),
                "forget a flushed message",
                self.broker.patience,
            )
            self._held.discard(identifier)
            return None
        try:
            message = Message.decode(body)
            reason = misfit(message)
        except DecodeError as error:
            reason = str(error.error)
        if reason is None:
            message = _undelayed(message, identifier)
            if losses := self._losses.pop(identifier, 0):
                add_losses(message, losses)
            proxy: Any = MessageProxy(message)
            proxy.fencing = self.broker.fence(self.queue_name, identifier, fence)
            return proxy  # type: ignore[no-any-return]
        self._reject(identifier, body, reason)
        self._held.discard(identifier)
        return None

    def _reject(self, identifier: str | bytes, body: bytes | None, reason: str) -> None:
        logger.error(
            "queue %r held a body that is no Dramatiq message (%s); it is in the dead letters as %s: %.200r",
            self.queue_name,
            reason,
            identifier,
            body,
        )
        patiently(lambda: self.broker.do_nack(self.queue_name, identifier), "reject a body", self.broker.patience)

    def _settled(self, message: MessageProxy, identifier: str, was_ours: bool | None) -> None:
        self._held.discard(identifier)
        if not self._fetched:  # else there is no room that it waits for
            self._freed.set()
        if was_ours is False:
            logger.warning(
                "message %s (%s) was no longer this worker's when it was done: the worker had been taken for dead, and "
                "another has it, or has run it too",
                message.message_id,
                message.actor_name,
            )

    def _give_back_fetched(self) -> None:
        fetched = [identifier for identifier, _ in self._fetched]
        self._fetched.clear()
        self._fences.clear()
        self._give_back(fetched)

    def _give_back(self, identifiers: list[str]) -> None:
        if not identifiers:
            return
        # Known no more, whatever becomes of the command: what it does not give back is reclaimed by the next fetch.
        self._held.difference_update(identifiers)
        self._ahead.difference_update(identifiers)
        for identifier in identifiers:
            self._losses.pop(identifier, None)
        self._as_connection_error(lambda: self.broker.do_requeue(self.queue_name, *identifiers))

    def _as_connection_error(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except redis.RedisError as error:
            raise ConnectionClosed(f"{self.broker.where}: {error}{remedy(error)}") from error
        except BrokerUnavailable as error:
            raise ConnectionClosed(error) from error


def _undelayed(message: Message[Any], identifier: str) -> Message[Any]:
    """A message whose delay is over lies in its queue as it was delayed."""
    options = {name: value for name, value in message.options.items() if name != "eta"}
    # Its id in the store is the one that it was fetched by, whatever its body says.
    options["redis_message_id"] = identifier
    return Message(
        queue_name=q_name(message.queue_name),
        actor_name=message.actor_name,
        args=message.args,
        kwargs=message.kwargs,
        options=options,
        message_id=message.message_id,
        message_timestamp=message.message_timestamp,
    )


def misfit(message: Message[Any]) -> str | None:
    """Why a decoded body is still no message; None: it is one."""
    wanted = {
        "actor_name": str,
        "message_id": str,
        "queue_name": str,
        "kwargs": dict,
        "options": dict,
        "message_timestamp": int | float,
    }
    for name, kind in wanted.items():
        if not isinstance(getattr(message, name), kind):
            return f"its {name} is {getattr(message, name)!r}"
    return None
