"""The watchdog in a worker on the stub broker: what blocks the loop or a thread is named, and ends in a replacement."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from typing import Any

import dramatiq
import pytest

from asyncworker import Session, actor
from asyncworker.settings import load
from asyncworker.testing import FakeEngine, stub_worker
from asyncworker.threads import in_thread
from asyncworker.watchdog import Watchdog
from tests.waiting import BUSY_S, wait_until


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if text in record.getMessage()]


async def hold_up(let_go: threading.Event) -> None:
    let_go.wait(60)


def test_a_blocked_loop_is_named_within_two_seconds_with_its_stack_actor_and_message(
    fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    let_go, began = threading.Event(), []

    async def body(session: Session) -> None:
        began.append(time.time())
        await asyncio.gather(hold_up(let_go))  # in another task than the actor's

    with stub_worker(engine=fake_engine) as worker:
        message = actor(actor_name="blocker", max_retries=0)(body).message()
        worker.broker.enqueue(message)
        try:
            wait_until(lambda: said(caplog, "the loop is blocked"), "it is noticed")
        finally:
            let_go.set()
        wait_until(lambda: said(caplog, "the loop goes on"), "it goes on")
        worker.join()
    (record,) = said(caplog, "the loop is blocked")
    assert record.created - began[0] < 2 + BUSY_S
    assert f"message {message.message_id} (blocker)" in record.getMessage()
    assert "in hold_up" in record.getMessage()
    assert said(caplog, "would be replaced") == []


def test_a_loop_that_is_blocked_for_longer_than_it_may_be_ends_in_a_replacement(
    fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()

    async def body(session: Session) -> None:
        await hold_up(let_go)

    with stub_worker(engine=fake_engine, settings=load({}, loop_block_limit_ms=2_000)) as worker:
        worker.broker.enqueue(actor(actor_name="blocker", max_retries=0)(body).message())
        try:
            wait_until(lambda: said(caplog, "would be replaced"), "it is given up")
        finally:
            let_go.set()
        worker.join()
    (record,) = said(caplog, "would be replaced")
    blocked_ms = int(re.search(r"blocked for (\d+) ms", record.getMessage())[1])  # type: ignore[index]
    assert 2_000 <= blocked_ms < 3_500 + BUSY_S * 1000


def test_a_loop_that_is_busy_and_served_is_not_blocked(
    fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(session: Session) -> float:
        ends = time.monotonic() + 2.5
        longest = 0.0
        while (began := time.monotonic()) < ends:
            time.sleep(0.3)
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - began)
        return longest

    with stub_worker(engine=fake_engine) as worker:
        busy = actor(actor_name="busy", max_retries=0)(body)
        for _ in range(10):
            caplog.clear()
            if worker.run(busy.message()) < 1:  # else this machine has held it up
                break
    assert said(caplog, "the loop is blocked") == []


def test_a_process_that_was_frozen_was_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncworker import watchdog

    now, looked = [0.0], []
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog = Watchdog(load({}), replace=None)

    def wait(_: float) -> bool:
        now[0] += 600  # it did not run for ten minutes
        return len(looked) == 3

    monkeypatch.setattr(dog._stop, "wait", wait)
    dog._run([looked.append])
    assert looked == [watchdog.MOST_COUNTED_S] * 3


def test_a_thread_that_sees_no_interrupt_is_named_the_others_finish_and_the_process_is_replaced(
    fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    let_go, calm = threading.Event(), threading.Event()

    class Deaf:
        """A lock's own wait is a call to C; in slices it would see the interrupt."""

        def wait(self) -> None:
            lock = threading.Lock()
            lock.acquire()
            threading.Thread(target=lambda: (let_go.wait(90), lock.release()), daemon=True).start()
            lock.acquire()

    settings = load({}, cleanup_timeout_ms=200, close_timeout_ms=200)
    with stub_worker(engine=fake_engine, settings=settings, threads=2) as worker:

        @dramatiq.actor(broker=worker.broker, max_retries=0, time_limit=300)
        def deaf() -> None:
            Deaf().wait()

        @dramatiq.actor(broker=worker.broker, max_retries=0)
        def healthy() -> None:
            calm.wait(90)

        message: Any = deaf.send()
        healthy.send()
        try:
            wait_until(lambda: said(caplog, "does not end"), "the deaf one is noticed")
            assert said(caplog, "would be replaced") == [], "the other one is still at its message"
            calm.set()
            wait_until(lambda: said(caplog, "would be replaced"), "the process is given up")
        finally:
            let_go.set()
            calm.set()
        wait_until(lambda: not worker.broker.queues["default"].unfinished_tasks, "all have ended")
    (record,) = said(caplog, "does not end")
    assert f"message {message.message_id} (deaf)" in record.getMessage()
    assert "in wait" in record.getMessage()
    assert f"1 of its 2 threads are in calls that no time limit interrupts, at messages {message.message_id}" in (
        said(caplog, "would be replaced")[0].getMessage()
    )


async def test_the_runtimes_own_threads_are_not_those_that_actors_may_keep_busy() -> None:
    let_go = threading.Event()
    busy = [asyncio.ensure_future(asyncio.to_thread(let_go.wait, 60)) for _ in range(64)]
    try:
        assert await asyncio.wait_for(in_thread(lambda: "done"), 30) == "done"
    finally:
        let_go.set()
        await asyncio.gather(*busy)
