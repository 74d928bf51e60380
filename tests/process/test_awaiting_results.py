"""Results awaited on an event loop: woken by them, beside any number of others, on one connection."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq import Message
from dramatiq.results import ResultFailure, ResultTimeout
from dramatiq.results.backends import RedisBackend

from asyncworker import aresult, embedded, result_watch
from asyncworker.broker import make_redis_broker
from asyncworker.errors import BrokerUnavailable
from asyncworker.redis_broker import WorkerBroker
from asyncworker.settings import load
from tests.proxy import Proxy
from tests.waiting import BUSY_S, eventually, loop_watched, wait_until

TTL_MS = 60_000


class Store:
    """A server, a producer's broker on it, and what stores results as a worker does."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.broker: WorkerBroker = make_redis_broker(load({}, state_dir=state_dir))
        self.path = str(embedded.ensure(state_dir))
        self.client: Any = redis.Redis(unix_socket_path=self.path, socket_timeout=10)
        self.worker: Any = make_redis_broker(load({}, state_dir=state_dir)).get_results_backend()
        #: Plain Dramatiq's.
        self.plain = RedisBackend(client=self.client)

    @property
    def pid(self) -> int:
        return int((self.state_dir / "valkey.pid").read_text())

    def connections(self) -> int:
        return len(self.client.client_list())

    def close(self) -> None:
        self.broker.close()
        for client in (self.broker.client, self.worker.client, self.client):
            client.close()

    async def awaited(self, message: Message[Any], *, timeout_ms: int = 30_000) -> Any:
        return await aresult(message, timeout_ms=timeout_ms, broker=self.broker)


@pytest.fixture
def store(state_dir: Path) -> Iterator[Store]:
    store = Store(state_dir)
    yield store
    store.close()


def message() -> Message[Any]:
    return Message("default", "do", (), {}, {})


def watching() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "asyncworker-results"]


async def is_watched(store: Store, count: int = 1) -> None:
    """The store has been asked for so many results."""
    await eventually(lambda: int(store.client.info("stats")["tracking_total_keys"]) >= count, "it is waited for")


@pytest.mark.parametrize("kind", ["worker", "plain"])
async def test_a_result_wakes_who_awaits_it_whoever_stores_it(
    store: Store, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POLL_S", "LOOK_S", "SILENT_S"):  # no one looks for it
        monkeypatch.setattr(result_watch, name, 60)
    for number in range(20):
        sent = message()
        waiting = asyncio.create_task(store.awaited(sent, timeout_ms=30_000))
        await is_watched(store)
        storing = asyncio.create_task(asyncio.to_thread(getattr(store, kind).store_result, sent, number, TTL_MS))
        assert await waiting == number
        await storing


async def test_a_result_that_is_there_already_is_given_at_once_and_stays(store: Store) -> None:
    sent = message()
    store.worker.store_result(sent, {"a": 1}, TTL_MS)
    assert await store.awaited(sent) == {"a": 1}
    assert await store.awaited(sent) == {"a": 1}
    assert sent.get_result(backend=store.plain) == {"a": 1}
    assert 0 < store.client.pttl(store.plain.build_message_key(sent)) <= TTL_MS


async def test_a_sent_message_has_its_result_awaited_and_got_as_dramatiq_does(store: Store) -> None:
    sent = await store.broker.aenqueue(message(), delay=5)
    waiting = asyncio.create_task(sent.aresult(timeout_ms=30_000, broker=store.broker))
    await is_watched(store)
    store.worker.store_result(sent, 7, TTL_MS)
    assert await waiting == 7
    assert sent.get_result(backend=store.plain) == 7


async def test_a_message_that_was_given_up_fails_who_awaits_it(store: Store) -> None:
    sent = message()
    store.worker.store_exception(sent, ValueError("no such shop"), TTL_MS)
    with pytest.raises(ResultFailure, match="no such shop"):
        await store.awaited(sent)


@pytest.mark.parametrize("timeout_ms", [50, 400])
async def test_limits_below_a_second_are_kept(store: Store, timeout_ms: int) -> None:
    await store.broker.aenqueue(message())
    took_ms = []
    for _ in range(5):  # of which a busy machine does not delay each
        began = time.monotonic()
        with pytest.raises(ResultTimeout) as caught:
            await store.awaited(message(), timeout_ms=timeout_ms)
        took_ms.append((time.monotonic() - began) * 1000)
        assert caught.value.__cause__ is None
    assert timeout_ms - 10 <= min(took_ms) < timeout_ms + 250


async def test_a_hundred_wait_on_one_connection_and_a_cancelled_wait_leaves_none(store: Store) -> None:
    before = store.connections()
    sent = [message() for _ in range(100)]
    waiting = [asyncio.create_task(store.awaited(each)) for each in sent]
    await is_watched(store, 100)
    assert store.connections() == before + 1
    for number, each in enumerate(sent[:50]):
        store.worker.store_result(each, number, TTL_MS)
    assert await asyncio.gather(*waiting[:50]) == list(range(50))
    for each in waiting[50:]:
        each.cancel()
    await asyncio.gather(*waiting[50:], return_exceptions=True)
    assert store.broker.get_results_backend().watch._waits == {}
    await eventually(lambda: not watching(), "the thread has ended")
    extra = store.connections() - before
    assert extra <= 1, "but for the one that stored the results"
    assert store.client.info("clients")["tracking_clients"] == 0


async def test_what_comes_after_its_wait_was_cancelled_disturbs_no_one(store: Store) -> None:
    given_up, wanted = message(), message()
    cancelled = asyncio.create_task(store.awaited(given_up))
    waiting = asyncio.create_task(store.awaited(wanted))
    await is_watched(store, 2)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    store.worker.store_result(given_up, "late", TTL_MS)
    store.worker.store_result(wanted, "right", TTL_MS)
    assert await waiting == "right"


def test_results_are_awaited_from_loops_that_come_and_go_and_several_at_once(store: Store) -> None:
    sent = [message() for _ in range(8)]
    got: list[Any] = []

    def wait(mine: Message[Any]) -> None:
        got.append(asyncio.run(store.awaited(mine)))

    async def too_short() -> None:
        with pytest.raises(ResultTimeout):
            await store.awaited(message(), timeout_ms=30)

    asyncio.run(too_short())
    threads = [threading.Thread(target=wait, args=(each,)) for each in sent]
    for thread in threads:
        thread.start()
    for number, each in enumerate(sent):
        store.worker.store_result(each, number, TTL_MS)
    for thread in threads:
        thread.join(30)
    assert sorted(got) == list(range(8))
    assert len(watching()) == 1


async def test_a_store_that_is_away_meanwhile_is_waited_out(store: Store) -> None:
    sent = message()
    await store.broker.aenqueue(message())
    waiting = asyncio.create_task(store.awaited(sent, timeout_ms=20_000))
    await is_watched(store)
    async with loop_watched() as watch:
        os.kill(store.pid, signal.SIGKILL)
        await asyncio.sleep(0.3)  # the fact tested: away, and found away
        await asyncio.to_thread(store.worker.store_result, sent, "there", TTL_MS)
        assert await waiting == "there"
    assert watch.longest_s < 0.3


async def test_who_awaits_a_result_of_a_store_that_stays_away_is_told_why_when_the_time_is_over(store: Store) -> None:
    proxy = Proxy(store.path)
    broker = make_redis_broker(load({}, broker_url=f"redis://127.0.0.1:{proxy.port}"))
    try:
        waiting = asyncio.create_task(aresult(message(), timeout_ms=800, broker=broker))
        await is_watched(store)
        proxy.close()
        began = time.monotonic()
        with pytest.raises(ResultTimeout) as caught:
            await waiting
        assert time.monotonic() - began < 0.8 + BUSY_S
        assert isinstance(caught.value.__cause__, redis.RedisError)
    finally:
        broker.get_results_backend().watch.close()
        broker.client.close()


async def test_a_store_that_hangs_does_not_hold_up_the_loop_nor_the_limit(store: Store) -> None:
    waiting = asyncio.create_task(store.awaited(message(), timeout_ms=600))
    await is_watched(store)
    pid = store.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        async with loop_watched() as watch:
            with pytest.raises(ResultTimeout):
                await waiting
            with pytest.raises(ResultTimeout):
                await store.awaited(message(), timeout_ms=100)
        assert watch.longest_s < 0.3
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_where_the_store_may_not_speak_up_results_are_looked_for(store: Store) -> None:
    store.client.execute_command("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "+@all", "-client|tracking")
    proxy = Proxy(store.path)
    broker = make_redis_broker(load({}, broker_url=f"redis://narrow:secret@127.0.0.1:{proxy.port}"))
    try:
        sent = message()
        waiting = asyncio.create_task(aresult(sent, timeout_ms=30_000, broker=broker))
        await eventually(lambda: watching(), "it is waited for")
        await asyncio.sleep(0.2)  # the fact tested: it has been looked for in vain
        store.worker.store_result(sent, 1, TTL_MS)
        assert await waiting == 1
    finally:
        broker.get_results_backend().watch.close()
        broker.client.close()
        proxy.close()


async def test_a_key_that_holds_no_result_fails_the_wait_for_it_alone(store: Store) -> None:
    broken, good = message(), message()
    store.client.set(store.plain.build_message_key(broken), "no list")
    waiting = asyncio.create_task(store.awaited(good))
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        await store.awaited(broken)
    store.worker.store_result(good, 1, TTL_MS)
    assert await waiting == 1


async def test_who_awaits_a_result_when_the_broker_is_closed_is_told(store: Store) -> None:
    waiting = asyncio.create_task(store.awaited(message()))
    await is_watched(store)
    await asyncio.to_thread(store.broker.close)
    with pytest.raises(BrokerUnavailable, match="was closed"):
        await waiting
    assert watching() == []


def test_a_wait_after_a_long_pause_begins_anew(store: Store) -> None:
    for number in range(2):
        sent = message()
        store.worker.store_result(sent, number, TTL_MS)
        assert asyncio.run(store.awaited(sent)) == number
        wait_until(lambda: not watching(), "the thread has ended")
