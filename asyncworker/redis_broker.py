"""WorkerBroker: Dramatiq's Redis broker, with commands of its own in the store (broker.lua)."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import redis
from dramatiq import Message, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, dq_name

from asyncworker.alarm import Alarm
from asyncworker.cancellations import Cancellations, RedisCancelRecords, serial_of
from asyncworker.consumer import WorkerConsumer
from asyncworker.delivery import Delivery, Item, Shipment, Undelivered
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.exchange import Exchange, OwnConnections, ask_together
from asyncworker.fencing import Claim, Fence
from asyncworker.ledger import ClosedRow
from asyncworker.limiter import PACING, PREFIX, Limiter, RedisLimiter
from asyncworker.paced import Pacing
from asyncworker.patience import Patience, PatientAfterAttempts, patiently
from asyncworker.precedence import Precedence
from asyncworker.producing import ProducerBroker, ToSend
from asyncworker.riding import Riding
from asyncworker.settling import RETRYING, SETTLED, Settled, Settling, as_settled, as_words
from asyncworker.siblings import as_texts, dead_ones, own_place
from asyncworker.unique import unique_keys

_SCRIPT = PACING + (Path(__file__).parent / "broker.lua").read_text()

#: By the start of its id a broker of ours is told from Dramatiq's own, which says nothing while its worker is busy
#: and is waited for this long.
OURS = "asyncworker-"
PLAIN_TIMEOUT_MS = 60_000

#: Where workers of a host live is forgotten so long after the last of them was heard of.
PLACES_KEPT_MS = 24 * 3_600_000

#: The store remembers what a producer has sent for the time in which that may send it again, and so much longer: a
#: connection that was given up may still deliver what was written to it.
KEPT_MS_AFTER = 60_000

#: A worker sends again for as long as it takes.
KEPT_MS_BY_WORKERS = 24 * 3_600_000

#: What the id of a unique message begins with: the store looks for a key that it holds only where this is.
UNIQUE_ID = "u."

#: The alarm goes on by itself where a line is due within this: a busy worker's consumer looks at nothing.
NEXT_PACE_MS = 1_000

R = TypeVar("R")


class WorkerBroker(PatientAfterAttempts, ProducerBroker, RedisBroker):
    """Dramatiq's Redis broker, with commands of its own in the store (broker.lua).

    An enqueue wakes an idle consumer, delayed messages wait in the store, and a worker that died has its messages
    taken back within the heartbeat timeout. The keys are Dramatiq's: its own workers and producers may stand on the
    other side of a queue.

    Parameters:
        where: The broker in words, without its password, for errors.
        heartbeat_timeout_ms: A worker that was not heard of for this long is taken for dead.
        send_timeout_ms: How long a producer tries to have a message taken.
        pacing: What is known of paces; None: actors' own only.
    """

    can_guard = True
    can_pace = True

    def __init__(
        self,
        *,
        client: redis.Redis,
        where: str,
        heartbeat_timeout_ms: int = 15_000,
        send_timeout_ms: int = 10_000,
        pacing: Pacing | None = None,
    ) -> None:
        super().__init__(client=client, middleware=[], heartbeat_timeout=heartbeat_timeout_ms)
        self.broker_id = f"{OURS}{uuid4()}"
        self.where = where
        self.send_timeout_ms = send_timeout_ms
        self._script = client.register_script(_SCRIPT)
        #: The connections of producers, whose wait is bounded.
        self.exchange = Exchange(client.connection_pool)
        self._delivery = Delivery(
            self.exchange, namespace=self.namespace, who=self.broker_id, script=_SCRIPT, sha=self._script.sha
        )
        self._held: defaultdict[str, set[str]] = defaultdict(set)
        self._stranded: defaultdict[str, set[str]] = defaultdict(set)
        self.patience = Patience()
        self._own_connections = OwnConnections(client)
        self.settling = Settling(self._settle)
        self.riding = Riding(self.settling.put)
        self.alarm = Alarm(self._ring)
        records = RedisCancelRecords(client, prefix=f"{self.namespace}:")
        #: Which messages were cancelled; what is fetched brings the news.
        self.cancellations: Cancellations = Cancellations(records, told_by_fetch=True)
        self._look = ("GET", records.serial_key)
        self.pacing = pacing or Pacing()
        self.pace_sleep = asyncio.sleep
        #: Who may go, by the paces.
        self.limiter: Limiter = RedisLimiter(client, prefix=f"{self.namespace}{PREFIX}")
        #: Which queues are served before which.
        self.precedence = Precedence()
        #: The queues whose messages begin when `begin` is called: so it is known for certain of each whether it had.
        self.queues_that_say_begin: set[str] = set()
        #: True when this process's worker takes no more messages.
        self.is_stopping = False

    @property
    def consumer_class(self) -> type[WorkerConsumer]:
        return WorkerConsumer

    def held(self, queue_name: str) -> set[str]:
        """The ids of what this process's worker holds of a queue."""
        return self._held[queue_name]

    def stranded(self, queue_name: str) -> set[str]:
        """The ids of those that it is done with and that the store has refused to settle for good."""
        return self._stranded[queue_name]

    def fence(self, queue_name: str, identifier: str, value: int) -> Fence:
        """The fence of an attempt of what this process's worker has fetched."""
        return Fence(value, claim=Claim(f"{self.namespace}:__acks__.{self.broker_id}.{queue_name}", identifier))

    def wake_key(self, queue_name: str) -> str:
        """The list by which an idle consumer of a queue is woken."""
        return f"{self.namespace}:{queue_name}.wake"

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue. Delayed messages wait in the store, so no consumer is made for them."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def flush(self, queue_name: str) -> None:
        """Drop all messages of a queue: waiting, delayed, and dead letters."""
        self.do_purge(queue_name)

    def recover(self, queue_name: str, client: redis.Redis | None = None) -> int:
        """Say that this process lives, and take back what dead workers hold of a queue; returns how many messages.

        Parameters:
            client: A connection of the caller's own; None: one of the broker's.
        """
        plain_timeout = max(self.heartbeat_timeout, PLAIN_TIMEOUT_MS)
        recovered: int = self._script(
            keys=[self.namespace],
            args=["recover", queue_name, self.broker_id, self.heartbeat_timeout, plain_timeout, self.dead_message_ttl],
            client=client,
        )
        return recovered

    def bury_siblings(self, client: redis.Redis) -> int:
        """Say where this process lives, and which of its siblings on the host are dead; returns how many of them.

        What those hold is taken back by the next `recover`, without waiting for the heartbeat timeout.

        Parameters:
            client: A connection of the caller's own.
        """
        place = own_place()
        if place.host is None:
            return 0
        places = f"{self.namespace}:__places__.{place.host}"
        asked = client.pipeline(transaction=False)
        asked.hset(places, self.broker_id, str(place))
        asked.pexpire(places, PLACES_KEPT_MS)
        asked.hgetall(places)
        *_, lived = asked.execute()
        dead = list(dead_ones(as_texts(lived.items())))
        if dead:
            client.ping()  # all that they had sent before they died has then been read
        for who, where in dead:
            self._script(keys=[self.namespace], args=["bury", "", self.broker_id, places, where, who], client=client)
        return len(dead)

    def fetch(
        self,
        client: redis.Redis,
        queue_name: str,
        most: int,
        *,
        held: int,
        free: int,
        begun: Sequence[str] = (),
        wait_s: float,
    ) -> list[Any]:
        """Take messages off a queue, in one round trip with the wait for them.

        Parameters:
            client: A connection of the caller's own (`client.client()`).
            held: How many fetched messages the caller knows of.
            free: How many of these messages begin at once; the others are fetched ahead.
            begun: The ids of what was fetched ahead and has begun since the last fetch.
            wait_s: How long to wait to be woken first; 0: not at all.

        Returns:
            Milliseconds to the next delayed message or -1; how many fetched messages the caller does not know of;
            how often messages were lost: a list of a place and a number in turn, for those that ever were; the fence of
            the first message, from which on the others count; then an id and a body for each message.
        """
        name, words = "fetch", (most, held, free, *begun)
        if self.pacing.concerns_queue(self, queue_name):
            name, words = "fetch_paced", (self.pacing.exit, self._pace_window_us, *words)
        command = ("EVALSHA", self._script.sha, 1, self.namespace, name, queue_name, self.broker_id, *words)
        # What follows a wait is done when that is over.
        wait = ("BLPOP", self.wake_key(queue_name), wait_s)
        # After the fetch: what was cancelled before that is known by then.
        *_, answer, serial = ask_together(client, [wait, command, self._look] if wait_s > 0 else [command, self._look])
        if isinstance(serial, bytes | str):
            self._hear(serial_of(serial))
        if isinstance(answer, redis.exceptions.NoScriptError):
            return list(self._dispatch(name)(queue_name, *words))  # loads it
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def _hear(self, serial: str) -> None:
        try:
            self.cancellations.hear(serial)
        except redis.RedisError:  # what was fetched is here, and must not get lost
            self.cancellations.forget()

    def begin(self, message: MessageProxy) -> None:
        """Say that this worker begins a message which was lost before, or of a queue whose messages say so.

        From now on it may be lost.
        """
        identifier, queue_name = message.options["redis_message_id"], message.queue_name
        if queue_name not in self.queues_that_say_begin:
            patiently(lambda: self.do_begin(queue_name, identifier), "begin a message", self.patience)
            return
        with self.riding.ride(queue_name) as ride:

            def begin() -> None:
                ride.tries += 1
                along = as_words(ride.identifiers, ride.rows) if ride.riders else ()
                ride.settled = as_settled(self._begin(queue_name, identifier, *along), ride.identifiers, ride.rows)

            patiently(begin, "begin a message", self.patience)

    def _begin(self, queue_name: str, *words: Any) -> Any:
        sha, who = self._script.sha, self.broker_id
        try:
            return self._own_connections.ask(("EVALSHA", sha, 1, self.namespace, "begin", queue_name, who, *words))
        except redis.exceptions.NoScriptError:
            return self.do_begin(queue_name, *words)  # loads it

    def defer(self, message: MessageProxy, key: str) -> None:
        """Have a message that was fetched wait in the line of a pace key; it is not acknowledged then."""
        identifier, body = message.options["redis_message_id"], message.encode()
        words = (identifier, key, self._pace_window_us, body)
        taken = patiently(
            lambda: self._dispatch("defer")(message.queue_name, *words), "put a message off", self.patience
        )
        setattr(message, SETTLED, bool(taken))

    @property
    def _pace_window_us(self) -> int:
        return round(self.pacing.hold_ms * 1000)

    def member(self, message: MessageProxy) -> str:
        """How the limiter names a message that was fetched."""
        return f"{message.queue_name} {message.options['redis_message_id']}"

    def ring_in(self, queue_name: str, ms: float) -> None:
        """Have a line looked at in so many ms, where that is soon: else consumers hear of it."""
        if 0 <= ms < NEXT_PACE_MS:
            self.alarm.set(queue_name, time.monotonic() + max(1.0, ms) / 1000)

    def _ring(self, queue_name: str) -> None:
        self.ring_in(queue_name, int(self.do_ring(queue_name)))

    def _settle(self, queue_name: str, rejected: bool, identifiers: list[str], rows: list[ClosedRow]) -> Settled:
        words = as_words(identifiers, rows, how="nack" if rejected else "ack")
        return as_settled(self.do_settle(queue_name, *words), identifiers, rows)

    def leave(self, client: redis.Redis | None = None, *, queues: Iterable[str] = ()) -> None:
        """Say that this process's worker has stopped, and give back what it still holds of these queues.

        What it holds of others is taken back by the next worker at once, not in time.
        """
        for queue_name in queues:
            self._script(keys=[self.namespace], args=["reclaim", queue_name, self.broker_id], client=client)
        self._script(keys=[self.namespace], args=["leave", "", self.broker_id], client=client)
        if (host := own_place().host) is not None:
            (client or self.client).hdel(f"{self.namespace}:__places__.{host}", self.broker_id)

    def _dispatch(self, command: str) -> Callable[..., Any]:
        def do(queue_name: str, *args: Any) -> Any:
            return self._script(keys=[self.namespace], args=[command, queue_name, self.broker_id, *args])

        return do

    def enqueue(self, message: Message[R], *, delay: int | None = None) -> Message[R]:
        """Enqueue a message, `delay` ms from now; there is no longest delay.

        Raises:
            UnfitBroker: When the broker cannot be used at all: a cluster, too old, a wrong password.
            BrokerUnavailable: When the broker did not take it in time; `sent` says whether it may have. Not after an
                attempt: the retry, the next of a pipeline and a callback wait for the broker, since what is not
                enqueued then is lost.
        """
        if getattr(message, RETRYING, False):
            return self._retry(message, delay)
        return self._send([message if delay is None else (message, delay)])[0]

    def _retry(self, message: Any, delay: int | None) -> Message[Any]:
        """Enqueue the next attempt of a message that is acknowledged with it, and say so to its proxy."""
        held = message.options["redis_message_id"]
        keys = unique_keys(self, [(message, delay)])
        following = _prepared(message, delay, self.pacing.mark(self, message))
        self.emit_before("enqueue", following, delay)
        if keys:
            following.options["redis_message_id"] = UNIQUE_ID + following.options["redis_message_id"]
        identifier, body, key = following.options["redis_message_id"], following.encode(), keys.get(0, "")
        taken = patiently(
            lambda: self._dispatch("retry")(following.queue_name, held, identifier, body, key, following.message_id),
            "enqueue what follows an attempt",
            self.patience,
        )
        setattr(message, SETTLED, bool(taken))
        if taken:
            self.emit_after("enqueue", following, delay)
        return following

    def send_many(self, messages: Iterable[ToSend]) -> list[Message[Any]]:
        return self._send(list(messages))

    def close(self) -> None:
        super().close()
        self.exchange.close()

    def _send(self, given: list[ToSend]) -> list[Message[Any]]:
        pairs = [each if isinstance(each, tuple) else (each, None) for each in given]
        keys = unique_keys(self, pairs)  # of most messages there are none, and they pay nothing for it
        prepared = [(_prepared(message, delay, self.pacing.mark(self, message)), delay) for message, delay in pairs]
        for message, delay in prepared:
            self.emit_before("enqueue", message, delay)
        messages = [message for message, _ in prepared]
        shipment = self._delivery.pack(
            [Item(each.queue_name, each.options["redis_message_id"], each.encode()) for each in messages]
            if not keys
            else self._guarded(messages, keys)
        )
        taken = set(range(len(messages)))
        try:
            self._deliver(shipment)
        except Undelivered as error:
            taken = error.taken
            _name_those_there(messages, shipment)
            raise self._unavailable(error, given, messages) from error.__cause__
        except BaseException:  # a worker that gave up, since it has to stop
            taken = set()
            raise
        finally:
            self._delivery.done(shipment)
            there = _name_those_there(messages, shipment) if keys else {}
            for place in sorted(taken - there.keys() if there else taken):
                self.emit_after("enqueue", *prepared[place])
        return messages

    def _guarded(self, messages: list[Message[Any]], keys: dict[int, str]) -> list[Item]:
        """The items of messages of which some are unique: their ids say so to the store."""
        for place in keys:
            options = messages[place].options
            options["redis_message_id"] = UNIQUE_ID + options["redis_message_id"]
        return [
            Item(
                each.queue_name,
                each.options["redis_message_id"],
                each.encode(),
                each.message_id,
                keys.get(place, ""),
                self.is_after_attempt,
            )
            for place, each in enumerate(messages)
        ]

    def _deliver(self, shipment: Shipment) -> None:
        if not self.is_after_attempt:
            self._delivery.send(shipment, self.deadline(), kept_ms=self.send_timeout_ms + KEPT_MS_AFTER)
            return

        def deliver() -> None:
            deadline = time.monotonic() + self.send_timeout_ms / 1000
            try:
                self._delivery.send(shipment, deadline, kept_ms=KEPT_MS_BY_WORKERS)
            except Undelivered as error:
                raise (error.__cause__ or error) from None

        patiently(deliver, "enqueue what follows an attempt", self.patience)

    def _unavailable(
        self, error: Undelivered, given: list[ToSend], messages: list[Message[Any]]
    ) -> BrokerUnavailable | ConfigurationError:
        if isinstance(error.__cause__, ConfigurationError) and not error.may_be_sent:
            return error.__cause__
        left = [place for place in range(len(messages)) if place not in error.taken]
        first = messages[left[0]]
        what = f"message {first.message_id} for {first.actor_name}"
        if len(messages) > 1:
            what = f"{len(left)} of {len(messages)} messages, the first of them {what}"
        outcome = "it may have been sent nevertheless" if error.may_be_sent else "it was not sent"
        if len(left) > 1:
            outcome = "some may have been sent nevertheless" if error.may_be_sent else "they were not sent"
        return BrokerUnavailable(
            f"the broker ({self.where}) did not take {what} within {self.send_timeout_ms} ms "
            f"(ASYNCWORKER_SEND_TIMEOUT_MS): {error.__cause__}; {outcome}",
            url=self.where,
            sent=None if error.may_be_sent else False,
            taken=[messages[place] for place in sorted(error.taken)],
            untaken=[given[place] for place in left],
        )


def _name_those_there(messages: list[Message[Any]], shipment: Shipment) -> dict[int, str]:
    """Give unique messages that were there already the ids that those have; returns these by place."""
    there = {place: message_id for parcel in shipment if parcel.there for place, message_id in parcel.there.items()}
    for place, message_id in there.items():
        messages[place] = messages[place].copy(message_id=message_id)
    return there


def _prepared(message: Message[Any], delay: int | None, mark: str = "") -> Message[Any]:
    """A message with its id in the store, which it keeps however often it has to be sent."""
    identifier = f"{uuid4()}{mark}"
    if delay is None:
        return message.copy(options={"redis_message_id": identifier})
    eta = current_millis() + delay
    identifier = f"{identifier}@{eta}"  # where the store reads it
    return message.copy(queue_name=dq_name(message.queue_name), options={"eta": eta, "redis_message_id": identifier})
