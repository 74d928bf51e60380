"""Producers against a real store: exact about what was sent, once each, in time, and from any event loop."""

from __future__ import annotations

import asyncio
import contextvars
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq import Message
from dramatiq.middleware import Middleware

from asyncworker import delivery, embedded, producing
from asyncworker.broker import make_redis_broker
from asyncworker.consumer import WorkerConsumer
from asyncworker.errors import BrokerUnavailable
from asyncworker.redis_broker import WorkerBroker
from asyncworker.settings import child_environment, load
from tests.proxy import Proxy
from tests.waiting import BUSY_S, eventually, loop_watched, wait_until

QUEUE = "default"


class Store:
    """The embedded server of a directory, a proxy before it, and brokers of producers behind that."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.path = str(embedded.ensure(state_dir))
        self.client: Any = redis.Redis(unix_socket_path=self.path, socket_timeout=10)
        self.proxy = Proxy(self.path)
        self._brokers: list[WorkerBroker] = []

    @property
    def pid(self) -> int:
        return int((self.state_dir / "valkey.pid").read_text())

    def broker(self, **options: Any) -> WorkerBroker:
        """A producer's; its connections go through the proxy."""
        client = redis.Redis(host="127.0.0.1", port=self.proxy.port, socket_timeout=10)
        return self._keep(WorkerBroker(client=client, where="the test's store", **options))

    def direct(self, **options: Any) -> WorkerBroker:
        """One as a deployment without a broker URL has it."""
        return self._keep(make_redis_broker(load({}, state_dir=self.state_dir, **options)))

    def close(self) -> None:
        for broker in self._brokers:
            broker.alarm.stop()
            broker.settling.stop()
            broker.close()
            broker.client.close()
        self.client.close()
        self.proxy.close()

    def _keep(self, broker: WorkerBroker) -> WorkerBroker:
        broker.declare_queue(QUEUE)
        self._brokers.append(broker)
        return broker

    def bodies(self, queue: str = QUEUE) -> list[str]:
        """The message ids of everything that is not acknowledged."""
        keys = (f"dramatiq:{queue}.msgs", f"dramatiq:{queue}.DQ.msgs")
        return [Message.decode(body).message_id for key in keys for body in self.client.hvals(key)]

    def ids(self, queue: str = QUEUE) -> list[bytes]:
        return [each for key in (queue, f"{queue}.DQ") for each in self.client.lrange(f"dramatiq:{key}", 0, -1)]

    def connections(self) -> int:
        return len(self.client.client_list())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The server hangs: whoever connects succeeds, and is never answered."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def store(state_dir: Path) -> Iterator[Store]:
    store = Store(state_dir)
    yield store
    store.close()


def message(*args: Any, **options: Any) -> Message[Any]:
    return Message(QUEUE, "do", args, {}, options)


def run_and_acknowledge(store: Store) -> Callable[[], None]:
    """What a worker does that is quick."""
    worker = store.direct()

    def run() -> None:
        (number,) = worker.do_fetch(QUEUE, 1, 0, 1)[4::2]
        assert worker.do_ack(QUEUE, number) == 1

    return run


# --- once each, and exact about what is known


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_connection_that_is_lost_in_the_middle_of_an_enqueue_costs_no_message_and_doubles_none(
    store: Store, how: str, times: int
) -> None:
    broker = store.broker()
    broker.enqueue(message("first"))
    store.proxy.lose_times(times, how)
    sent = broker.enqueue(message("second"))
    assert store.proxy.losses == times
    assert len(store.bodies()) == len(store.ids()) == 2
    assert store.bodies().count(sent.message_id) == 1


def test_an_enqueue_is_not_repeated_when_the_message_was_run_and_forgotten_before_its_answer_got_lost(
    store: Store,
) -> None:
    broker, run = store.broker(), run_and_acknowledge(store)
    broker.enqueue(message("loads the script"))
    run()
    store.proxy.lose_times(1, "after")
    store.proxy.on_loss = run
    broker.enqueue(message("once"))
    assert (store.proxy.losses, store.bodies(), store.ids()) == (1, [], [])


def test_messages_sent_together_are_not_repeated_when_they_were_run_before_the_answer_got_lost(store: Store) -> None:
    broker, run = store.broker(), run_and_acknowledge(store)
    broker.enqueue(message("loads the script"))
    run()
    store.proxy.lose_times(1, "after")
    store.proxy.on_loss = lambda: [run() for _ in range(3)]
    broker.send_many([message(number) for number in range(3)])
    assert (store.proxy.losses, store.bodies(), store.ids()) == (1, [], [])


def test_what_follows_an_attempt_is_sent_under_one_id_however_often_its_answer_gets_lost(store: Store) -> None:
    broker, run = store.broker(), run_and_acknowledge(store)
    broker.enqueue(message("loads the script"))
    run()
    broker.send_timeout_ms = 100  # which is none of what follows an attempt

    class Retrying(Middleware):
        def after_process_message(self, broker: Any, message: Any, **_: Any) -> None:
            broker.enqueue(message)

    broker.add_middleware(Retrying())
    store.proxy.lose_times(3, "after")
    ran: list[None] = []
    store.proxy.on_loss = lambda: ran or ran.append(run())
    broker.emit_after("process_message", message("again"), result=None, exception=None)
    assert store.proxy.losses == 3
    assert (ran, store.bodies()) == ([None], [])


def test_the_producer_is_told_whether_a_lost_message_may_have_been_sent(store: Store) -> None:
    broker = store.broker()
    broker.enqueue(message("loads the script"))
    broker.send_timeout_ms = 1_000
    store.proxy.lose_times(100, "after")
    with pytest.raises(BrokerUnavailable, match="it may have been sent nevertheless") as caught:
        broker.enqueue(message("unclear"))
    assert caught.value.sent is None
    store.proxy.close()
    with pytest.raises(BrokerUnavailable, match="it was not sent") as caught:
        broker.enqueue(message("refused"))
    assert caught.value.sent is False


def test_a_message_that_may_have_been_sent_never_lends_its_place_in_the_stores_memory(store: Store) -> None:
    broker = store.broker()
    broker.enqueue(message("loads the script"))
    store.proxy.lose_times(100, "after")
    with hurried(broker, 1_000), pytest.raises(BrokerUnavailable):
        broker.enqueue(message("unclear"))
    store.proxy.lose = lambda _: None
    for number in range(5):
        broker.enqueue(message(number))
    assert len(store.client.keys("dramatiq:__sent__.*")) == 2, "of the unclear one, and of all others"
    assert all(0 < store.client.pttl(key) < 120_000 for key in store.client.keys("dramatiq:__sent__.*"))


def test_a_full_store_takes_nothing_by_halves(store: Store) -> None:
    broker = store.broker()
    broker.enqueue(message("first"))
    broker.send_timeout_ms = 1_000
    before = {key: store.client.dump(key) for key in store.client.keys("*")}
    store.client.config_set("maxmemory", "1")
    given = [message("a"), (message("b"), 60_000)]
    with pytest.raises(BrokerUnavailable, match="they were not sent") as caught:
        broker.send_many(given)
    with pytest.raises(BrokerUnavailable, match="it was not sent"):
        broker.enqueue(message("c"))
    store.client.config_set("maxmemory", "0")
    assert {key: store.client.dump(key) for key in store.client.keys("*")} == before
    assert (caught.value.sent, caught.value.taken, caught.value.untaken) == (False, [], given)
    broker.send_many(caught.value.untaken)
    assert len(store.bodies()) == 3


def test_of_messages_sent_together_the_error_names_those_that_were_taken(store: Store) -> None:
    store.client.set("dramatiq:broken.msgs", "no hash")
    broker, told = store.broker(), []

    class Watching(Middleware):
        def after_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            told.append(message.args)

    broker.add_middleware(Watching())
    good, bad = message("good"), Message("broken", "do", (), {}, {})
    with pytest.raises(
        BrokerUnavailable, match=f"1 of 2 messages, the first of them message {bad.message_id}"
    ) as caught:
        broker.send_many([good, bad])
    assert [each.message_id for each in caught.value.taken or []] == [good.message_id] == store.bodies()
    assert (caught.value.untaken, caught.value.sent, told) == ([bad], False, [("good",)])


async def test_many_producers_on_a_bad_line_have_each_message_run_once(store: Store) -> None:
    broker, worker, chance = store.broker(), store.direct(), random.Random(7)
    store.proxy.lose = lambda chunk: (
        chance.choice(["before", "after"]) if b"\r\nsend\r\n" in chunk and chance.random() < 0.15 else None
    )
    ran: list[int] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            fetched = worker.do_fetch(QUEUE, 8, 0, 8)[4:]
            for number, body in zip(fetched[::2], fetched[1::2], strict=True):
                ran.append(Message.decode(body).args[0])
                worker.do_ack(QUEUE, number)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        await asyncio.gather(*(broker.aenqueue(message(number)) for number in range(200)))
        await broker.asend_many([message(number) for number in range(200, 300)])
        await eventually(lambda: store.bodies() == [], "all were run")
    finally:
        over.set()
        thread.join()
    assert store.proxy.losses > 10
    assert sorted(ran) == list(range(300))


# --- in time


@contextmanager
def hurried(broker: WorkerBroker, send_timeout_ms: int) -> Iterator[None]:
    """The broker tries for so long in the block, and as long as before it afterwards."""
    former, broker.send_timeout_ms = broker.send_timeout_ms, send_timeout_ms
    try:
        yield
    finally:
        broker.send_timeout_ms = former


def test_a_send_to_a_store_that_hangs_ends_in_time_and_may_have_been_sent(store: Store) -> None:
    broker = store.broker()
    broker.enqueue(message("first"))
    with hurried(broker, 1_000), store.stopped():
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable) as caught:
            broker.enqueue(message("second"))
        took_s = time.monotonic() - began
    assert 0.9 < took_s < 1 + BUSY_S
    assert caught.value.sent is None
    wait_until(lambda: len(store.bodies()) == 2, "what was on its way arrives")
    assert len(store.ids()) == 2


@pytest.mark.parametrize("embedded_server", [True, False])
def test_connecting_to_a_store_that_hangs_ends_in_time_and_nothing_was_sent(
    store: Store, embedded_server: bool
) -> None:
    broker = store.direct() if embedded_server else store.broker()
    with hurried(broker, 400), store.stopped():
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match="it was not sent") as caught:
            broker.enqueue(message("a"))
        took_s = time.monotonic() - began
    assert took_s < 0.4 + BUSY_S
    assert caught.value.sent is False
    broker.enqueue(message("b"))
    assert len(store.bodies()) == 1


def test_a_large_batch_to_a_store_that_hangs_ends_in_time(store: Store) -> None:
    broker = store.broker()
    broker.enqueue(message("first"))
    with hurried(broker, 600), store.stopped():
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match="they were not sent") as caught:
            broker.send_many([message("x" * 1_000_000) for _ in range(12)])  # more than a socket holds
        assert time.monotonic() - began < 0.6 + BUSY_S
    assert caught.value.sent is False, "its end never left"
    broker.enqueue(message("last"))
    assert len(store.bodies()) == 2


def test_a_store_that_is_killed_and_comes_back_while_a_producer_sends_has_each_message_once(store: Store) -> None:
    broker = store.direct(send_timeout_ms=10_000)
    sent = [broker.enqueue(message(number)).message_id for number in range(20)]
    store.client.config_set("appendfsync", "always")
    failed: list[BaseException] = []

    def send() -> None:
        try:
            for number in range(400):
                sent.append(broker.enqueue(message(number)).message_id)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: len(sent) > 100, "it sends")
    os.kill(store.pid, signal.SIGKILL)
    thread.join(30)
    assert failed == []
    assert sorted(store.bodies()) == sorted(sent)
    assert len(store.ids()) == len(sent)


def test_a_producer_is_not_stopped_by_a_store_that_has_left_and_come_back_since_its_last_message(store: Store) -> None:
    broker = store.direct()
    broker.enqueue(message("before"))
    os.kill(store.pid, signal.SIGTERM)
    wait_until(lambda: not embedded.answers(Path(store.path)), "it is down")
    began = time.monotonic()
    broker.enqueue(message("after"))
    assert time.monotonic() - began < 2 + BUSY_S
    assert len(store.bodies()) == 2


def test_a_connection_that_was_closed_meanwhile_is_noticed_before_anything_is_written_to_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "PAUSE_S", 60)  # so that nothing is tried again
    broker = store.broker()
    broker.enqueue(message("before"))
    for each in store.client.client_list():
        if int(each["id"]) != store.client.client_id():
            store.client.client_kill_filter(_id=each["id"])
    wait_until(lambda: store.connections() == 1, "all others are closed")
    assert broker.enqueue(message("after")).message_id in store.bodies()


# --- together


def test_many_messages_of_several_queues_and_delays_are_sent_in_one_round_trip(store: Store) -> None:
    broker = store.broker()
    broker.enqueue(message("loads the script"))
    given: list[Any] = [message(number) for number in range(300)]
    given += [(message(number), 60_000 + number) for number in range(50)]
    given += [Message("other", "do", (), {}, {})]
    turns = store.proxy.turns
    sent = broker.send_many(given)
    assert store.proxy.turns - turns == 1
    assert len(store.bodies()) == 351
    assert len(store.bodies("other")) == 1
    waiting = [Message.decode(store.client.hget(f"dramatiq:{QUEUE}.msgs", each)) for each in store.ids()[1:301]]
    assert [each.args for each in waiting] == [(number,) for number in range(300)], "in their order"
    etas = [each.options["eta"] for each in sent[300:350]]
    assert etas[-1] - etas[0] >= 49
    assert broker.send_many([]) == []


def test_many_messages_wake_idle_consumers_until_nothing_is_left(store: Store) -> None:
    workers, came = [store.direct() for _ in range(3)], []

    def idle(broker: WorkerBroker) -> None:
        consumer = broker.consume(QUEUE, prefetch=1, timeout=1_000)
        assert isinstance(consumer, WorkerConsumer)
        consumer.poll_s = 60.0
        assert next(consumer) is None
        found = next(consumer)
        came.append(found)
        if found is not None:
            consumer.ack(found)
        consumer.close()

    threads = [threading.Thread(target=idle, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    wait_until(lambda: store.client.info("clients")["blocked_clients"] == 3, "all three are blocked")
    store.broker().send_many([message(number) for number in range(3)])
    wait_until(lambda: len(came) == 3, "all three were woken")
    assert sorted(each.args[0] for each in came if each) == [0, 1, 2]
    for thread in threads:
        thread.join(30)


# --- from event loops


def test_messages_are_sent_from_several_loops_that_come_and_go(store: Store) -> None:
    earlier = _threads()
    broker = store.broker()
    broker.enqueue(message("first"))
    before = store.connections()

    async def send(loop: int) -> None:
        await asyncio.gather(*(broker.aenqueue(message(loop, number)) for number in range(10)))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(send(n))) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(5, 10):
        asyncio.run(send(number))
    assert len(store.bodies()) == len(store.ids()) == 101
    assert store.connections() - before <= 4
    broker.close()
    wait_until(lambda: _threads() <= earlier, "its threads have ended")
    wait_until(lambda: store.connections() < before, "its connections, too")


async def test_a_loop_goes_on_while_the_store_hangs(store: Store) -> None:
    broker = store.broker()
    await broker.aenqueue(message("first"))
    with hurried(broker, 600), store.stopped():
        async with loop_watched() as watch:
            began = time.monotonic()
            results = await asyncio.gather(
                *(broker.aenqueue(message(number)) for number in range(60)), return_exceptions=True
            )
            took_s = time.monotonic() - began
    assert all(isinstance(each, BrokerUnavailable) for each in results)
    assert {each.sent for each in results if isinstance(each, BrokerUnavailable)} == {None, False}
    assert took_s < 0.6 + BUSY_S, "those that waited for a thread have waited as long"
    assert watch.longest_s < 0.3


async def test_a_loop_goes_on_while_the_embedded_server_starts(state_dir: Path) -> None:
    broker = make_redis_broker(load({}, state_dir=state_dir))
    async with loop_watched() as watch:
        sent = await broker.aenqueue(message("a"))
    assert broker.do_qsize(QUEUE) == 1
    assert sent.message_id
    assert watch.longest_s < 0.3
    broker.close()
    broker.client.close()


async def test_a_send_that_is_cancelled_before_its_turn_is_not_sent(store: Store) -> None:
    broker = store.broker(send_timeout_ms=5_000)
    await broker.aenqueue(message("first"))
    asked = store.proxy.asked
    with store.stopped():
        sending = [asyncio.create_task(broker.aenqueue(message(number))) for number in range(producing.THREADS + 2)]
        await eventually(lambda: store.proxy.asked - asked == producing.THREADS, "each thread has one, and waits")
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    await eventually(lambda: len(store.bodies()) == 1 + producing.THREADS, "what was on its way has arrived")
    await broker.aenqueue(message("last"))
    assert len(store.bodies()) == 2 + producing.THREADS


FORKING = """
import asyncio, os, sys
from dramatiq import Message
from asyncworker import aresult, get_broker
from asyncworker.broker import make_redis_broker

broker = get_broker()

async def send_and_await():
    sent = await broker.aenqueue(Message("default", "do", (os.getpid(),), {}, {}))
    await asyncio.to_thread(broker.get_results_backend().store_result, sent, os.getpid(), 60_000)
    assert await sent.aresult(timeout_ms=5_000) == os.getpid()

asyncio.run(send_and_await())
child = os.fork()
asyncio.run(send_and_await())
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
asyncio.run(send_and_await())
"""


def test_a_forked_process_sends_and_awaits_on_connections_of_its_own(store: Store) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        env=child_environment(ASYNCWORKER_STATE_DIR=str(store.state_dir)),
        cwd=store.state_dir,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(store.bodies()) == 4


async def test_hooks_are_called_as_for_send_and_see_the_callers_context(store: Store) -> None:
    seen: list[tuple[str, Any, Any, str]] = []
    request = contextvars.ContextVar("request", default="none")

    class Watching(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            seen.append(("before", message.args[0], delay, request.get()))

        def after_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            seen.append(("after", message.args[0], delay, request.get()))

    broker = store.broker()
    broker.add_middleware(Watching())
    request.set("r1")
    await broker.aenqueue(message("a"), delay=1_000)
    await broker.asend_many([message("b"), (message("c"), 2_000)])
    assert seen == [
        ("before", "a", 1_000, "r1"),
        ("after", "a", 1_000, "r1"),
        ("before", "b", None, "r1"),
        ("before", "c", 2_000, "r1"),
        ("after", "b", None, "r1"),
        ("after", "c", 2_000, "r1"),
    ]


def _threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("asyncworker-producer")}
