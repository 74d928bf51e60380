"""What a producer can do beside `.send()`: send many messages at once, and all of it from an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import dramatiq
from dramatiq import Broker, Message
from dramatiq.results import Results
from dramatiq.results.backend import DEFAULT_TIMEOUT, ResultBackend
from dramatiq.results.errors import ResultMissing, ResultTimeout

from asyncworker.cancellations import Cancellations
from asyncworker.errors import BrokerUnavailable
from asyncworker.results import PatientResults

R = TypeVar("R")
T = TypeVar("T")

#: A message, or one with its delay in ms.
ToSend = Message[Any] | tuple[Message[Any], int]

#: So many sends from loops are under way at once; each is a round trip to the store.
THREADS = 4

#: How long a producer tries, where the broker is none of ours.
SEND_TIMEOUT_MS = 10_000

#: A result that no one is woken for is looked for this often.
LOOK_S = 0.05


class SentMessage(Message[R]):
    """A message that was sent from an event loop: its result can be awaited there."""

    async def aresult(self, *, timeout_ms: int = DEFAULT_TIMEOUT, broker: Broker | None = None) -> R:
        """Wait for the result; see `aresult`."""
        return await aresult(self, timeout_ms=timeout_ms, broker=broker)


async def aresult(message: Message[R], *, timeout_ms: int = DEFAULT_TIMEOUT, broker: Broker | None = None) -> R:
    """Wait for the result of a message, from any event loop and without blocking it; woken by the result.

    Parameters:
        message: Sent by whatever means; its actor stores results.
        timeout_ms: How long to wait; limits below a second are kept.
        broker: Whose results; None: the global one's, as Dramatiq's `get_result` does it.

    Raises:
        ResultTimeout: When there is none in time, also where the store was away; its cause is then why.
        ResultFailure: When the message was given up.
        RuntimeError: When the broker keeps no results.
    """
    broker = broker or dramatiq.get_broker()
    backend = broker.get_results_backend()
    if isinstance(backend, PatientResults):
        return await backend.aget_result(message, timeout_ms=timeout_ms)
    return await _looked_for(broker, backend, message, timeout_ms)


async def _looked_for(broker: Broker, backend: ResultBackend, message: Message[R], timeout_ms: int) -> R:
    deadline = time.monotonic() + timeout_ms / 1000
    while True:
        with contextlib.suppress(ResultMissing):
            return cast(R, await aside(broker, lambda: backend.get_result(message)))
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ResultTimeout(message)  # type: ignore[no-untyped-call]
        await asyncio.sleep(min(LOOK_S, left_s))


class ProducerBroker(Broker):
    """What asyncworker's brokers have beside Dramatiq's own methods.

    What is written here is for any broker; one that can do better does.
    """

    send_timeout_ms: int = SEND_TIMEOUT_MS
    #: True when it has what `unique` and `delivery="at_most_once"` of an actor need: a store of its own.
    can_guard: bool = False
    #: Which messages were cancelled; None: no one can say, since there is no store.
    cancellations: Cancellations | None = None
    _threads: tuple[int, ThreadPoolExecutor] | None = None

    def send_many(self, messages: Iterable[ToSend]) -> list[Message[Any]]:
        """Enqueue messages together, in their order; one in a tuple `(message, delay_ms)` is delayed.

        On Redis that is one round trip.

        Returns:
            The messages as they were sent.

        Raises:
            BrokerUnavailable: When the broker did not take all of them in time. `taken` are those that it has, and
                `untaken` the others, as they were given; `sent` is None when it may have some of these, too.
        """
        given, taken = list(messages), list[Message[Any]]()
        with self.one_send():
            for each in given:
                message, delay = each if isinstance(each, tuple) else (each, None)
                try:
                    taken.append(self.enqueue(message, delay=delay))
                except BrokerUnavailable as error:
                    error.taken, error.untaken = taken, given[len(taken) :]
                    raise
        return taken

    async def aenqueue(self, message: Message[R], *, delay: int | None = None) -> SentMessage[R]:
        """Enqueue a message, `delay` ms from now, from any event loop and without blocking it.

        When this is cancelled, the message may be sent nevertheless.

        Raises:
            BrokerUnavailable: As `enqueue`.
        """
        return awaitable(await self.aside(lambda: self.enqueue(message, delay=delay)))

    async def asend_many(self, messages: Iterable[ToSend]) -> list[SentMessage[Any]]:
        """`send_many` from any event loop, without blocking it."""
        given = list(messages)
        return [awaitable(each) for each in await self.aside(lambda: self.send_many(given))]

    async def aside(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread of producers; its time is counted from now, not from when a thread is free."""
        context = contextvars.copy_context()
        context.run(_deadline.set, time.monotonic() + self.send_timeout_ms / 1000)
        return await asyncio.get_running_loop().run_in_executor(self._executor(), context.run, work)

    def deadline(self) -> float:
        """Until when what is being sent is tried, by the monotonic clock in seconds."""
        deadline = _deadline.get()
        return time.monotonic() + self.send_timeout_ms / 1000 if deadline is None else deadline

    @contextlib.contextmanager
    def one_send(self) -> Iterator[None]:
        """All that is asked and sent within has one time limit together."""
        token = _deadline.set(self.deadline())
        try:
            yield
        finally:
            _deadline.reset(token)

    def close(self) -> None:
        super().close()
        for middleware in self.middleware:
            if isinstance(middleware, Results) and isinstance(middleware.backend, PatientResults):
                middleware.backend.watch.close()
        threads, self._threads = self._threads, None
        if threads is not None and threads[0] == os.getpid():
            threads[1].shutdown(wait=False)

    def _executor(self) -> Executor:
        threads = self._threads
        if threads is None or threads[0] != os.getpid():  # threads do not survive a fork
            pool = ThreadPoolExecutor(THREADS, thread_name_prefix="asyncworker-producer")
            threads = self._threads = (os.getpid(), pool)
        return threads[1]


def awaitable(message: Message[R]) -> SentMessage[R]:
    """The same message, as one whose result can be awaited."""
    return SentMessage(**message.asdict())


async def aside(broker: Broker, work: Callable[[], T]) -> T:
    """Run `work` beside the loop, on a thread of the broker's producers where it has some."""
    if isinstance(broker, ProducerBroker):
        return await broker.aside(work)
    return await asyncio.to_thread(work)


def one_send(broker: Broker) -> contextlib.AbstractContextManager[None]:
    """All that is asked of a broker and sent to it within has one time limit together."""
    return broker.one_send() if isinstance(broker, ProducerBroker) else contextlib.nullcontext()


@contextlib.contextmanager
def sending_for(broker: Broker, limit_ms: int) -> Iterator[None]:
    """What is sent to a broker within is tried for so long at the most."""
    if not isinstance(broker, ProducerBroker):
        yield
        return
    token = _deadline.set(min(broker.deadline(), time.monotonic() + limit_ms / 1000))
    try:
        yield
    finally:
        _deadline.reset(token)


#: Until when what is being sent is tried; None: that is not settled yet.
_deadline: ContextVar[float | None] = ContextVar("asyncworker_send_deadline", default=None)
