"""Whatever producers, workers and deaths do in whatever order: each message is in exactly one place."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import redis
from dramatiq import Message
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from asyncworker import embedded
from asyncworker.consumer import WorkerConsumer
from asyncworker.redis_broker import WorkerBroker

QUEUE = "default"


class Queue(RuleBasedStateMachine):
    """Two producers' calls, two workers that may die, and one store."""

    delayed = Bundle("delayed")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="aw-")).resolve()
        embedded.ensure(self.directory)
        self.clients: list[redis.Redis] = []
        self.client: Any = self.connect()
        self.producer = self.broker()
        self.workers: list[WorkerBroker] = [self.broker(), self.broker()]
        self.consumers: dict[int, WorkerConsumer] = {}
        self.running: dict[int, list[Any]] = {0: [], 1: []}
        self.sent: set[str] = set()
        self.done: set[str] = set()
        self.dead: set[str] = set()

    def connect(self) -> redis.Redis:
        client = redis.Redis(unix_socket_path=str(embedded.socket_path(self.directory)))
        self.clients.append(client)
        return client

    def broker(self) -> WorkerBroker:
        broker = WorkerBroker(client=self.connect(), where="the model's store")
        broker.declare_queue(QUEUE)
        return broker

    def teardown(self) -> None:
        import shutil

        for client in self.clients:
            client.close()
        embedded.stop(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)

    def consumer(self, worker: int) -> WorkerConsumer:
        if worker not in self.consumers:
            consumer = self.workers[worker].consume(QUEUE, prefetch=3)
            assert isinstance(consumer, WorkerConsumer)
            consumer.poll_s = 0.0  # the model waits for nothing
            self.consumers[worker] = consumer
        return self.consumers[worker]

    @initialize()
    def heard_of(self) -> None:
        for worker in self.workers:
            worker.recover(QUEUE)

    @rule()
    def enqueue(self) -> None:
        self.sent.add(self.producer.enqueue(Message(QUEUE, "do", (), {}, {})).options["redis_message_id"])

    @rule(target=delayed, minutes=st.integers(1, 60))
    def delay(self, minutes: int) -> str:
        message = self.producer.enqueue(Message(QUEUE, "do", (), {}, {}), delay=minutes * 60_000)
        identifier: str = message.options["redis_message_id"]
        self.sent.add(identifier)
        return identifier

    @rule(identifier=consumes(delayed))
    def time_passes(self, identifier: str) -> None:
        """The delayed message is due now, if a worker has moved it yet."""
        self.client.zadd(f"dramatiq:{QUEUE}.DQ.due", {identifier: 0}, xx=True)

    @rule(worker=st.integers(0, 1))
    def fetch(self, worker: int) -> None:
        message = next(self.consumer(worker))
        if message is not None:
            self.running[worker].append(message)

    @rule(worker=st.integers(0, 1), lost=st.integers(1, 3))
    def lose_an_answer(self, worker: int, lost: int) -> None:
        """The store has given messages to a worker that has not heard of it."""
        self.workers[worker].do_fetch(QUEUE, lost, 99)

    @precondition(lambda self: any(self.running.values()))
    @rule(worker=st.integers(0, 1), fails=st.booleans())
    def finish(self, worker: int, fails: bool) -> None:
        if not self.running[worker]:
            return
        message = self.running[worker].pop(0)
        identifier = message.options["redis_message_id"]
        was_its_own = self.client.sismember(self.acks(worker), identifier)
        (self.consumer(worker).nack if fails else self.consumer(worker).ack)(message)
        assert self.workers[worker].settling.stop(), "the store has taken it"
        if was_its_own:
            (self.dead if fails else self.done).add(identifier)

    @rule(worker=st.integers(0, 1))
    def end_consumer(self, worker: int) -> None:
        """A failure of the store ends the consumer, not what runs."""
        if worker in self.consumers:
            self.consumers.pop(worker).close()

    @rule(worker=st.integers(0, 1))
    def stop(self, worker: int) -> None:
        """A clean stop gives back what has not begun."""
        self.consumer(worker).requeue(self.running[worker])
        self.running[worker] = []
        self.end_consumer(worker)

    @rule(worker=st.integers(0, 1))
    def die(self, worker: int) -> None:
        """SIGKILL, and the other one notices; a new worker takes the place."""
        self.client.zadd("dramatiq:__heartbeats__", {self.workers[worker].broker_id: 1})
        self.workers[1 - worker].recover(QUEUE)
        assert not self.client.exists(self.acks(worker))
        self.running[worker] = []
        self.consumers.pop(worker, None)
        self.workers[worker] = self.broker()
        self.workers[worker].recover(QUEUE)

    @rule(worker=st.integers(0, 1))
    def wake_from_the_dead(self, worker: int) -> None:
        """SIGSTOP for long: its messages are taken, and it goes on with them."""
        self.client.zadd("dramatiq:__heartbeats__", {self.workers[worker].broker_id: 1})
        self.workers[1 - worker].recover(QUEUE)
        self.workers[worker].recover(QUEUE)

    def acks(self, worker: int) -> str:
        return f"dramatiq:__acks__.{self.workers[worker].broker_id}.{QUEUE}"

    def places(self) -> list[str]:
        """The id of every message in every place where one can be."""
        found = [*self.client.lrange(f"dramatiq:{QUEUE}", 0, -1), *self.client.lrange(f"dramatiq:{QUEUE}.DQ", 0, -1)]
        found += self.client.zrange(f"dramatiq:{QUEUE}.DQ.due", 0, -1)
        found += self.client.zrange(f"dramatiq:{QUEUE}.XQ", 0, -1)
        for key in self.client.keys("dramatiq:__acks__.*"):
            found += self.client.smembers(key)
        return [each.decode() for each in found]

    @invariant()
    def each_message_is_in_exactly_one_place(self) -> None:
        places = self.places()
        assert len(places) == len(set(places)), "one is in two places"
        assert set(places) == self.sent - self.done, "one got lost, or came back"
        assert {each.decode() for each in self.client.zrange(f"dramatiq:{QUEUE}.XQ", 0, -1)} == self.dead

    @invariant()
    def each_has_its_body(self) -> None:
        bodies = []
        for key in (".msgs", ".DQ.msgs", ".XQ.msgs"):
            bodies += [each.decode() for each in self.client.hkeys(f"dramatiq:{QUEUE}{key}")]
        assert sorted(bodies) == sorted(self.sent - self.done)


Queue.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestQueue = Queue.TestCase
