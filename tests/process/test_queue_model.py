"""Whatever producers, workers, deaths and a full store do in whatever order: each message is in exactly one place."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq import ConnectionClosed, Message
from dramatiq.brokers.redis import RedisBroker
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncworker import embedded
from asyncworker.consumer import WorkerConsumer
from asyncworker.errors import BrokerUnavailable
from asyncworker.redis_broker import WorkerBroker
from asyncworker.settling import RETRYING

QUEUE = "default"
WAITING, DELAYED = f"dramatiq:{QUEUE}", f"dramatiq:{QUEUE}.DQ"
DUE, WAKE, DEAD = f"{DELAYED}.due", f"{WAITING}.wake", f"{WAITING}.XQ"
HEARTBEATS = "dramatiq:__heartbeats__"

#: How many examples, of how many steps: half a minute of them, or some minutes where the machine is busy.
EXAMPLES, STEPS = 60, 50


@pytest.mark.timeout(400)
def test_each_message_is_in_exactly_one_place_whatever_happens(state_dir: Path) -> None:
    embedded.ensure(state_dir)
    hold(Fleet, embedded.socket_path(state_dir), examples=EXAMPLES)


def hold(model: type[Fleet], path: Path, *, examples: int) -> None:
    """Run examples of the model on a store of their own, at this socket."""
    on_this_store = type(model.__name__, (model,), {"path": path})
    run_state_machine_as_test(
        on_this_store, settings=settings(max_examples=examples, stateful_step_count=STEPS, deadline=None)
    )


class Fleet(RuleBasedStateMachine):
    """Producers, two workers of ours and a plain one that may die, someone who operates them, and one store."""

    path: Path
    bodies = Bundle("bodies")

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[redis.Redis] = []
        self.client: Any = self.connect()
        self.client.config_set("maxmemory", 0)
        self.client.flushall()
        self.patient, self.hasty = self.broker(), self.broker(send_timeout_ms=100)
        self.workers = [self.broker(), self.broker()]
        self.plain = self.plain_broker()
        self.consumers: dict[int, WorkerConsumer] = {}
        self.running: dict[int, list[Any]] = {0: [], 1: []}
        self.running_plainly: list[str] = []
        self.expected: set[str] = set()  # what was sent, and is neither done nor dropped
        self.dead: set[str] = set()
        self.finished_plainly: set[str] = set()
        self.unannounced: set[str] = set()  # what was put into the queue by plain Dramatiq, which wakes no one
        self.is_full = False
        self.numbers = itertools.count()

    # The parts.

    def connect(self) -> redis.Redis:
        client = redis.Redis(unix_socket_path=str(self.path))
        self.clients.append(client)
        return client

    def broker(self, send_timeout_ms: int = 10_000) -> WorkerBroker:
        broker = WorkerBroker(client=self.connect(), where="the model's store", send_timeout_ms=send_timeout_ms)
        broker.declare_queue(QUEUE)
        return broker

    def plain_broker(self) -> RedisBroker:
        broker = RedisBroker(client=self.connect(), middleware=[], maintenance_chance=0)
        broker.declare_queue(QUEUE)
        return broker

    @property
    def producer(self) -> WorkerBroker:
        """On a full store one that soon gives up."""
        return self.hasty if self.is_full else self.patient

    def consumer(self, worker: int) -> WorkerConsumer:
        if worker not in self.consumers:
            consumer = self.workers[worker].consume(QUEUE, prefetch=3)
            assert isinstance(consumer, WorkerConsumer)
            consumer.poll_s = 0.0  # the model waits for nothing
            self.consumers[worker] = consumer
        return self.consumers[worker]

    def teardown(self) -> None:
        self.client.config_set("maxmemory", 0)
        for consumer in self.consumers.values():
            consumer.close()
        for client in self.clients:
            client.close()

    @contextlib.contextmanager
    def refusable(self) -> Iterator[None]:
        """A full store may refuse this; otherwise it has to be done."""
        try:
            yield
        except (redis.ResponseError, ConnectionClosed, BrokerUnavailable):
            if not self.is_full:
                raise

    def score(self, key: str, member: str, at_ms: int) -> None:
        """What the model itself writes is written into a full store, too."""
        self.client.config_set("maxmemory", 0)
        self.client.zadd(key, {member: at_ms}, xx=True)
        self.client.config_set("maxmemory", int(self.is_full))

    @initialize()
    def heard_of(self) -> None:
        for worker in self.workers:
            worker.recover(QUEUE)

    # The store.

    @rule()
    def fill_the_store(self) -> None:
        self.client.config_set("maxmemory", 1)
        self.is_full = True

    @rule()
    def make_room_in_the_store(self) -> None:
        self.client.config_set("maxmemory", 0)
        self.is_full = False

    # Producers.

    @rule()
    def enqueue(self) -> None:
        with self.refusable():
            self.expected.add(self.producer.enqueue(a_message()).options["redis_message_id"])

    @rule(minutes=st.integers(1, 60))
    def delay(self, minutes: int) -> None:
        with self.refusable():
            message = self.producer.enqueue(a_message(), delay=minutes * 60_000)
            self.expected.add(message.options["redis_message_id"])

    @rule(minutes=st.none() | st.integers(1, 60))
    def enqueue_plainly(self, minutes: int | None) -> None:
        """A store that is full refuses the first command of Dramatiq's script, which has done nothing then."""
        with self.refusable():
            message = self.plain.enqueue(a_message(), delay=minutes and minutes * 60_000)
            identifier = message.options["redis_message_id"]
            self.expected.add(identifier)
            self.unannounced.add(identifier)

    @rule(body=st.sampled_from([b"", b"{", b"[1]", b'{"actor_name": 3}', b"\xff\xfe"]))
    def enqueue_what_is_no_message(self, body: bytes) -> None:
        with self.refusable():
            self.plain.do_enqueue(QUEUE, identifier := f"bad-{next(self.numbers)}", body)
            self.expected.add(identifier)
            self.unannounced.add(identifier)

    # Time.

    @rule(count=st.integers(1, 3))
    def time_passes(self, count: int) -> None:
        """The next delayed messages are due now, as far as a worker knows of them yet."""
        for identifier in self.client.zrange(DUE, 0, count - 1):
            self.score(DUE, identifier, 0)

    @rule(worker=st.integers(0, 1))
    def ring(self, worker: int) -> None:
        with self.refusable():
            self.workers[worker].do_ring(QUEUE)

    # Workers of ours.

    @rule(worker=st.integers(0, 1))
    def fetch(self, worker: int) -> None:
        waiting, is_paused = self.client.llen(WAITING), self.client.exists(f"{WAITING}.paused")
        with self.refusable():
            message = next(self.consumer(worker))
            if message is not None:
                self.running[worker].append(message)
        self.dead |= {each for each in self.ids(DEAD) if each.startswith("bad-")}
        if is_paused:
            assert self.client.llen(WAITING) >= waiting, "no one takes from a paused queue"

    @rule(worker=st.integers(0, 1), lost=st.integers(1, 3))
    def lose_an_answer(self, worker: int, lost: int) -> None:
        """The store has given messages to a worker that has not heard of it."""
        with self.refusable():
            self.workers[worker].do_fetch(QUEUE, lost, 99, lost)

    @precondition(lambda self: any(self.running.values()))
    @rule(worker=st.integers(0, 1), fails=st.booleans())
    def finish(self, worker: int, fails: bool) -> None:
        if not self.running[worker]:
            return
        message = self.running[worker].pop(0)
        identifier = message.options["redis_message_id"]
        was_its_own = self.client.sismember(self.acks(worker), identifier)
        (self.consumer(worker).nack if fails else self.consumer(worker).ack)(message)
        assert self.workers[worker].settling.stop(), "the store has taken it, full as it may be"
        if was_its_own and fails:
            self.dead.add(identifier)
        elif was_its_own:
            self.expected.remove(identifier)

    @precondition(lambda self: any(self.running.values()))
    @rule(worker=st.integers(0, 1), delay=st.sampled_from([None, 60_000]))
    def retry(self, worker: int, delay: int | None) -> None:
        """The next attempt takes the place of this one, also in a store that is full."""
        if not self.running[worker]:
            return
        message = self.running[worker].pop(0)
        identifier = message.options["redis_message_id"]
        was_its_own = self.client.sismember(self.acks(worker), identifier)
        setattr(message, RETRYING, True)
        following = self.workers[worker].enqueue(message, delay=delay)
        self.consumer(worker).ack(message)
        if was_its_own:
            self.expected.remove(identifier)
            self.expected.add(following.options["redis_message_id"])

    @precondition(lambda self: any(self.running.values()))
    @rule(worker=st.integers(0, 1))
    def rewrite(self, worker: int) -> None:
        if self.running[worker]:
            identifier = self.running[worker][0].options["redis_message_id"]
            with self.refusable():
                self.workers[worker].do_rewrite(QUEUE, identifier, a_message().encode())

    @rule(worker=st.integers(0, 1))
    def end_consumer(self, worker: int) -> None:
        """A failure of the store ends the consumer, not what runs."""
        if worker in self.consumers:
            self.consumers.pop(worker).close()

    @rule(worker=st.integers(0, 1))
    def stop(self, worker: int) -> None:
        """A clean stop gives back what has not begun."""
        with self.refusable():
            self.consumer(worker).requeue(self.running[worker])
            self.running[worker] = []
        self.end_consumer(worker)

    @precondition(lambda self: not self.is_full)
    @rule(worker=st.integers(0, 1))
    def die(self, worker: int) -> None:
        """SIGKILL, and the other one notices; a new worker takes the place."""
        self.score(HEARTBEATS, self.workers[worker].broker_id, 1)
        self.workers[1 - worker].recover(QUEUE)
        assert not self.client.exists(self.acks(worker))
        self.running[worker] = []
        self.consumers.pop(worker, None)
        self.workers[worker] = self.broker()
        self.workers[worker].recover(QUEUE)

    @rule(worker=st.integers(0, 1))
    def wake_from_the_dead(self, worker: int) -> None:
        """SIGSTOP for long: its messages are taken, and it goes on with them."""
        self.score(HEARTBEATS, self.workers[worker].broker_id, 1)
        with self.refusable():
            self.workers[1 - worker].recover(QUEUE)
            self.workers[worker].recover(QUEUE)

    # A worker that is plain Dramatiq; it knows ids, and so does whoever it takes for dead.

    @precondition(lambda self: not self.is_full)
    @rule(most=st.integers(1, 3))
    def fetch_plainly(self, most: int) -> None:
        self.plain.do_fetch(QUEUE, most)
        self.running_plainly = self.ids(self.plain_acks())

    @precondition(lambda self: self.running_plainly and not self.is_full)
    @rule(how=st.sampled_from(["ack", "nack", "requeue"]))
    def finish_plainly(self, how: str) -> None:
        identifier = self.running_plainly.pop()
        was_its_own = self.client.sismember(self.plain_acks(), identifier)
        getattr(self.plain, f"do_{how}")(QUEUE, identifier)
        if was_its_own and how != "requeue":
            self.finished_plainly.add(identifier)
        if was_its_own and how == "ack":
            self.expected.remove(identifier)
        elif was_its_own and how == "nack":
            self.dead.add(identifier)
        elif was_its_own:
            self.unannounced.add(identifier)

    @precondition(lambda self: not self.is_full)
    @rule(serves=st.booleans())
    def serve_what_is_delayed_plainly(self, serves: bool) -> None:
        """A plain worker holds delayed messages until they are due, and sends them anew then."""
        self.plain.do_fetch(f"{QUEUE}.DQ", 2)
        held = self.ids(self.plain_acks(".DQ"))
        for identifier in held if serves else []:
            again = self.plain.enqueue(a_message()).options["redis_message_id"]
            self.plain.do_ack(f"{QUEUE}.DQ", identifier)
            self.expected.remove(identifier)
            self.expected.add(again)
            self.unannounced.add(again)

    @precondition(lambda self: not self.is_full)
    @rule()
    def die_plainly(self) -> None:
        self.score(HEARTBEATS, self.plain.broker_id, 1)
        self.workers[0].recover(QUEUE)
        assert not self.client.exists(self.plain_acks(), self.plain_acks(".DQ"))
        self.running_plainly = []
        self.plain = self.plain_broker()

    @precondition(lambda self: not self.is_full)
    @rule(worker=st.integers(0, 1))
    def take_for_dead_plainly(self, worker: int) -> None:
        """A plain worker, too, gives back what one of ours holds that it has not heard of."""
        self.unannounced |= set(self.ids(self.acks(worker)))
        self.score(HEARTBEATS, self.workers[worker].broker_id, 1)
        other = RedisBroker(client=self.client, middleware=[], maintenance_chance=1_000_000)
        other.do_fetch(QUEUE, 0)
        self.client.zrem(HEARTBEATS, other.broker_id)

    # Who operates them.

    @rule(paused=st.booleans())
    def pause_or_resume(self, paused: bool) -> None:
        with self.refusable():
            (self.producer.do_pause if paused else self.producer.do_resume)(QUEUE)

    @precondition(lambda self: self.dead)
    @rule(again=st.booleans())
    def deal_with_a_dead_letter(self, again: bool) -> None:
        (raw, died) = self.client.zrange(DEAD, 0, 0, withscores=True)[0]
        identifier = raw.decode()
        # What died meanwhile once more is another's business.
        assert self.revive_or_discard(again, identifier, int(died) - 1) in ([0], None)
        if self.revive_or_discard(again, identifier, int(died)) == [1]:
            self.dead.remove(identifier)
            if not again:
                self.expected.remove(identifier)

    def revive_or_discard(self, again: bool, identifier: str, died: int) -> Any:
        with self.refusable():
            if again:
                return self.producer.do_revive(QUEUE, identifier, died, a_message().encode())
            return self.producer.do_discard(QUEUE, identifier, died)
        return None

    @rule(what=st.sampled_from(["waiting", "delayed", "dead"]))
    def drop(self, what: str) -> None:
        before = set(self.places())
        count = getattr(self.producer, f"do_drop_{what}")(QUEUE, 2)
        gone = before - set(self.places())
        assert len(gone) == count
        self.expected -= gone
        self.dead -= gone

    # What is to hold.

    def acks(self, worker: int) -> str:
        return f"dramatiq:__acks__.{self.workers[worker].broker_id}.{QUEUE}"

    def plain_acks(self, suffix: str = "") -> str:
        return f"dramatiq:__acks__.{self.plain.broker_id}.{QUEUE}{suffix}"

    def ids(self, *keys: str) -> list[str]:
        read = {b"list": lambda key: self.client.lrange(key, 0, -1), b"set": self.client.smembers}
        read[b"zset"] = lambda key: self.client.zrange(key, 0, -1)
        read[b"none"] = lambda key: []
        return [each.decode() for key in keys for each in read[self.client.type(key)](key)]

    def places(self) -> list[str]:
        """The id of every message in every place where one can be."""
        return self.ids(WAITING, DELAYED, DUE, DEAD, *self.client.keys("dramatiq:__acks__.*"))

    @invariant()
    def each_message_is_in_exactly_one_place(self) -> None:
        places = self.places()
        assert len(places) == len(set(places)), "one is in two places"
        assert set(places) == self.expected, "one got lost, or came back"
        assert set(self.ids(DEAD)) == self.dead

    @invariant()
    def each_has_its_body(self) -> None:
        bodies = []
        for key in (WAITING, DELAYED, DEAD):
            bodies += [each.decode() for each in self.client.hkeys(f"{key}.msgs")]
        assert sorted(bodies) == sorted(self.expected)

    @invariant()
    def what_waits_has_woken_someone(self) -> None:
        announced = set(self.ids(WAITING)) - self.unannounced
        if announced and not self.client.exists(f"{WAITING}.paused"):
            assert self.client.llen(WAKE) > 0

    @invariant()
    def nothing_is_counted_of_what_is_done(self) -> None:
        counted = {each.decode() for each in self.client.hkeys(f"{WAITING}.losses")}
        assert counted <= self.expected - self.dead | self.finished_plainly  # these are forgotten with later losses
        for worker in (0, 1):
            ahead = {each.decode() for each in self.client.smembers(self.acks(worker).replace("__acks__", "__ahead__"))}
            taken_plainly = self.unannounced  # whoever took these back leaves what is ours until the next fetch
            assert ahead & self.expected - taken_plainly <= set(self.ids(self.acks(worker)))

    @invariant()
    def each_worker_knows_of_what_it_runs_and_holds(self) -> None:
        for worker in (0, 1):
            running = {message.options["redis_message_id"] for message in self.running[worker]}
            assert running & set(self.ids(self.acks(worker))) <= self.workers[worker].held(QUEUE)


def a_message() -> Message[Any]:
    return Message(QUEUE, "do", (), {}, {})
