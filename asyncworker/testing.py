"""For tests of actors, the users' and our own: an engine without a browser, a clock without time, a worker
without a broker.

    def test_title(stub_worker, fake_engine):
        fake_engine.documents["https://shop.example/"] = Document(title="Shop")
        assert stub_worker.run(title.message("https://shop.example/", seed=7)) == "Shop"

`FakeEngine` passes the same contract tests as the real engines; its pages answer from `documents` and record
what was called on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import dramatiq
import dramatiq.broker
from dramatiq import Message, MessageProxy, Worker
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import q_name
from dramatiq.results.backends import StubBackend

from asyncworker.broker import middleware_in_order
from asyncworker.cancellations import Cancellations, MemoryCancelRecords
from asyncworker.engines import Engine
from asyncworker.errors import InvalidArguments
from asyncworker.fakes import Document, FakeBrowserError, FakeClock, FakeEngine, FakePage, FakeTimeoutError
from asyncworker.generation import Clock
from asyncworker.ledger import Ledger, MemoryLedger, Row
from asyncworker.memory_limiter import MemoryLimiter
from asyncworker.middleware import BrowserMiddleware, browsers_of, emit_receive
from asyncworker.paced import Pacing
from asyncworker.producing import ProducerBroker
from asyncworker.settings import Settings, load
from asyncworker.settling import SETTLED
from asyncworker.unique import unique_key
from asyncworker.watchdog import Watchdog

__all__ = [
    "Document",
    "FakeBrowserError",
    "FakeClock",
    "FakeEngine",
    "FakePage",
    "FakeTimeoutError",
    "StubWorker",
    "WorkerStubBroker",
    "stub_worker",
]

R = TypeVar("R")

#: When a stub worker's clock of the paces begins, in microseconds: a noon, so that no test of a budget ends its day.
FIRST_US = 1_767_268_800_000_000


class WorkerStubBroker(ProducerBroker, StubBroker):
    """Dramatiq's stub broker with the middleware of a real deployment, and its receive hook."""

    can_guard = True
    can_pace = True

    def __init__(self, *, clock: Clock | None = None, pacing: Pacing | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.pacing = pacing or Pacing()
        monotonic = clock.monotonic if clock is not None else time.monotonic
        self.limiter = MemoryLimiter(lambda: FIRST_US + round(monotonic() * 1_000_000))
        self.pace_sleep = clock.sleep if clock is not None else asyncio.sleep
        #: By member: the messages that wait for their pace, and in order those that may go now, by queue.
        self._in_line: dict[str, MessageProxy] = {}
        self._let_go: defaultdict[str, deque[MessageProxy]] = defaultdict(deque)
        #: Unique keys: the message that holds each, and how often it is enqueued and not settled: twice with its retry.
        self._holders: dict[str, tuple[str, int]] = {}
        self._guarding = threading.Lock()
        self.cancellations = Cancellations(MemoryCancelRecords())

    def enqueue(self, message: Message[R], *, delay: int | None = None) -> Message[R]:
        if not (key := unique_key(self, message)):
            return super().enqueue(message, delay=delay)
        with self._guarding:
            holder, count = self._holders.get(key, (message.message_id, 0))
            if holder != message.message_id:
                return message.copy(message_id=holder)
            self._holders[key] = holder, count + 1
        return super().enqueue(message, delay=delay)

    def member(self, message: MessageProxy) -> str:
        """How the limiter names a message that was received."""
        return f"{message.queue_name} {message.message_id}"

    def ring_in(self, queue_name: str, ms: float) -> None:
        """Consumers look by themselves here."""

    def defer(self, message: MessageProxy, key: str) -> None:
        """Have a message that was received wait in the line of a pace key."""
        member = self.member(message)
        self._in_line[member] = MessageProxy(message._message)
        self.limiter.back(key, member, hold_ms=self.pacing.hold_ms)
        setattr(message, SETTLED, True)

    def next_let_go(self, queue_name: str) -> MessageProxy | None:
        """The next message of a queue that has waited for its pace, and may go."""
        for member in self.limiter.admit():
            message = self._in_line.pop(member)
            self._let_go[message.queue_name].append(message)
        try:
            return self._let_go[queue_name].popleft()
        except IndexError:
            return None

    def may_go(self, message: MessageProxy) -> bool:
        """Whether a message that was received may begin; else it waits in line."""
        try:
            subject = self.pacing.subject_of(self, message)
        except InvalidArguments:  # it fails, with its own words
            return True
        if subject is None:
            return True
        member = self.member(message)
        self._in_line[member] = message
        (goes,) = self.limiter.arrive([(self.pacing.key(subject), member)], hold_ms=self.pacing.hold_ms)
        if goes:
            self._in_line.pop(member, None)
        return goes

    def settled(self, message: MessageProxy) -> None:
        """Free the unique key and the slot of a message that is done, unless its retry waits."""
        self.limiter.done(self.member(message))
        if not (key := unique_key(self, message)):  # type: ignore[arg-type]  # a proxy of one
            return
        with self._guarding:
            holder, count = self._holders.get(key, ("", 0))
            if holder == message.message_id and count > 1:
                self._holders[key] = holder, count - 1
            elif holder == message.message_id:
                del self._holders[key]

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 100) -> Any:
        return _Receiving(self, super().consume(queue_name, prefetch, timeout), queue_name)


class _Receiving:
    """A consumer that says what it received, as the Redis one does."""

    def __init__(self, broker: WorkerStubBroker, consumer: Any, queue_name: str) -> None:
        self._broker = broker
        self._consumer = consumer
        self._queue_name = queue_name

    def __iter__(self) -> _Receiving:
        return self

    def __next__(self) -> MessageProxy | None:
        message = self._broker.next_let_go(self._queue_name)
        if message is None:
            message = next(self._consumer)
            is_delayed = self._queue_name != q_name(self._queue_name)
            if message is not None and not is_delayed and not self._broker.may_go(message):
                return None
        if message is not None:
            emit_receive(self._broker, message)
        return message

    def ack(self, message: MessageProxy) -> None:
        if getattr(message, SETTLED, False):  # it waits in line
            return
        self._consumer.ack(message)
        self._broker.settled(message)

    def nack(self, message: MessageProxy) -> None:
        self._consumer.nack(message)
        self._broker.settled(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


#: How often it is looked whether the contexts are closed.
_LOOK_S = 0.001


class StubWorker:
    """A real Dramatiq worker on a stub broker: the whole way of a message but the store.

    Attributes:
        broker: Its broker; `dead_letters` are the messages that were given up.
        engine: What launches its browsers.
        ledger: The account of its attempts.
    """

    def __init__(self, broker: WorkerStubBroker, worker: Worker, engine: Engine, ledger: Ledger) -> None:
        self.broker = broker
        self.worker = worker
        self.engine = engine
        self.ledger = ledger

    def run(self, message: Message[R], *, timeout_ms: int = 30_000) -> R:
        """Send a message, wait until it is done, retries included, and return its result.

        Raises:
            Exception: The one with which its last attempt failed.
            TimeoutError: When it is not done in time.
        """
        self.broker.enqueue(message.copy(options={"store_results": True}))
        self.join(message.queue_name, timeout_ms=timeout_ms)
        for dead in self.broker.dead_letters:
            if dead.message_id == message.message_id:
                raise dead._exception or RuntimeError(f"{dead} was given up")
        return message.get_result(backend=self.broker.get_results_backend())

    def join(self, queue_name: str = "default", *, timeout_ms: int = 30_000) -> None:
        """Wait until a queue is empty, nothing of it runs, and the contexts of its messages are closed.

        Raises:
            TimeoutError: When that is not so in time.
        """
        ends_at = time.monotonic() + timeout_ms / 1000
        try:
            self.broker.join(queue_name, timeout=timeout_ms, fail_fast=False)
        except dramatiq.errors.QueueJoinTimeout:
            raise TimeoutError(f"the messages of {queue_name} were not done in {timeout_ms} ms") from None
        self.worker.join()
        while self._slots_in_use() and time.monotonic() < ends_at:
            time.sleep(_LOOK_S)  # a message is done before its context is closed
        if self._slots_in_use():
            raise TimeoutError(f"a context of {queue_name}'s messages was not closed in {timeout_ms} ms")

    def _slots_in_use(self) -> int:
        return browsers_of(self.broker).runtime.slots.in_use

    def rows(self, message: Message[Any]) -> list[Row]:
        """The attempts of a message, first to last."""
        return self.ledger.rows(message.message_id)


@contextlib.contextmanager
def stub_worker(
    *,
    engine: Engine | None = None,
    settings: Settings | None = None,
    actors: Iterable[dramatiq.Actor[..., Any]] | None = None,
    threads: int = 4,
    seed: int = 1,
    clock: Clock | None = None,
) -> Iterator[StubWorker]:
    """Run a worker on a stub broker for the time of a `with`.

    Parameters:
        engine: None: a `FakeEngine`.
        settings: None: the defaults, without the environment.
        actors: The actors it serves, moved to its broker meanwhile; None: all that are declared.
        threads: Dramatiq's worker threads.
        seed: The deployment's seed.
        clock: Of the paces: with a `FakeClock` their time passes when a test advances it; None: the real time.
    """
    settings = settings or load({})
    engine = engine or FakeEngine()
    ledger = MemoryLedger()
    broker = WorkerStubBroker(clock=clock, pacing=Pacing.of(settings), middleware=[])
    for middleware in middleware_in_order(settings, ledger=ledger, results=StubBackend(), draw_seed=lambda: seed):
        if isinstance(middleware, BrowserMiddleware):
            middleware = BrowserMiddleware(settings, ledger=ledger, draw_seed=lambda: seed, engine=engine)
        if isinstance(middleware, Watchdog):
            middleware = Watchdog(settings, replace=None)  # this process is the tests'
        broker.add_middleware(middleware)
    with _global_broker(broker, actors):
        broker.emit_after("process_boot")
        worker = Worker(broker, worker_timeout=50, worker_threads=threads)
        worker.start()
        try:
            yield StubWorker(broker, worker, engine, ledger)
        finally:
            worker.stop()
            broker.close()


@contextlib.contextmanager
def _global_broker(broker: StubBroker, actors: Iterable[dramatiq.Actor[..., Any]] | None) -> Iterator[None]:
    """Make `broker` the global one and move actors to it; afterwards everything is as before."""
    before = dramatiq.broker.global_broker
    moved = list(actors) if actors is not None else list(before.actors.values() if before else ())
    homes = [actor.broker for actor in moved]
    dramatiq.set_broker(broker)
    for actor in moved:
        actor.broker = broker
        broker.declare_actor(actor)
    try:
        yield
    finally:
        for actor, home in zip(moved, homes, strict=True):
            actor.broker = home
        dramatiq.broker.global_broker = before
