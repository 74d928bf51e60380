"""`async def` tasks of Celery: their coroutine on the loop, and the thread that waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import celery
import pytest
from celery import Celery, current_task
from celery.exceptions import SoftTimeLimitExceeded
from dramatiq.asyncio import set_event_loop_thread
from dramatiq.threading import raise_thread_exception
from pydantic import BaseModel

from asyncworker.celery.async_tasks import is_async, make_runnable, run_on
from asyncworker.loop import LoopThread


class Number(BaseModel):
    value: int


@pytest.fixture
def app() -> Iterator[Celery]:
    with Celery("tasks", broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        yield app


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread(cleanup_timeout_ms=5_000)
    thread.start()
    set_event_loop_thread(thread)  # type: ignore[arg-type]
    yield thread
    set_event_loop_thread(None)
    thread.stop()


def of(result: Any) -> Any:
    return result.get(disable_sync_subtasks=False)


def test_a_coroutine_runs_on_the_loop_and_sees_its_task(app: Celery, loop_thread: LoopThread) -> None:
    @app.task(bind=True, shared=False)
    async def where(self: Any) -> list[object]:
        await asyncio.sleep(0)
        return [threading.get_ident(), current_task.name, self.request.id == current_task.request.id]

    assert is_async(where)
    assert make_runnable(where)
    assert not make_runnable(where)
    assert of(where.apply()) == [loop_thread.thread_id, where.name, True]


@pytest.mark.skipif(celery.VERSION < (5, 5), reason="pydantic=True came with Celery 5.5")
@pytest.mark.parametrize("retries", [{}, {"autoretry_for": (KeyError,)}])
@pytest.mark.parametrize("bind", [True, False])
def test_arguments_of_an_async_task_are_validated_by_pydantic_and_its_model_is_dumped(
    app: Celery, bind: bool, retries: dict[str, Any]
) -> None:
    async def double(number: Number) -> Number:
        await asyncio.sleep(0)
        return Number(value=2 * number.value)

    async def bound(self: Any, number: Number) -> Number:
        assert self.name == "double"
        return await double(number)

    for name in ("number", "return"):  # pytest's modules have no names that pydantic could look up
        double.__annotations__[name] = bound.__annotations__[name] = Number
    task = app.task(shared=False, pydantic=True, bind=bind, name="double", **retries)(bound if bind else double)
    assert make_runnable(task)
    assert is_async(task)
    assert of(task.apply([{"value": 2}])) == {"value": 4}
    assert "validation error" in str(task.apply([{"value": "many"}]).result)


def in_a_thread(loop_thread: LoopThread, coroutine: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def wait() -> None:
        try:
            found.append(run_on(loop_thread, coroutine))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, found


@pytest.mark.parametrize("catches", [True, False])
def test_what_is_raised_in_the_thread_is_raised_at_the_await(loop_thread: LoopThread, catches: bool) -> None:
    waits, cleaned = threading.Event(), []

    async def body() -> str:
        try:
            async with asyncio.timeout(30):
                waits.set()
                await asyncio.sleep(30)
        except SoftTimeLimitExceeded:
            await asyncio.sleep(0)
            cleaned.append(True)
            if not catches:
                raise
        return "caught"

    thread, found = in_a_thread(loop_thread, body())
    assert waits.wait(30)
    raise_thread_exception(thread.ident, SoftTimeLimitExceeded)
    thread.join(30)
    assert cleaned == [True]
    assert found == ["caught"] if catches else isinstance(found[0], SoftTimeLimitExceeded)


def test_who_ends_the_thread_ends_the_coroutine(loop_thread: LoopThread) -> None:
    waits, ended = threading.Event(), []

    async def body() -> None:
        try:
            waits.set()
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    thread, found = in_a_thread(loop_thread, body())
    assert waits.wait(30)
    raise_thread_exception(thread.ident, SystemExit)
    thread.join(30)
    assert ended == [True]
    assert isinstance(found[0], SystemExit)


def test_a_coroutine_that_is_cancelled_by_its_own_code_fails_in_words(loop_thread: LoopThread) -> None:
    async def body() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="by its own code"):
        run_on(loop_thread, body())


def test_without_a_running_loop_thread_the_coroutine_is_not_left_open() -> None:
    async def body() -> None:
        raise AssertionError

    with pytest.raises(RuntimeError, match="is not running"):
        run_on(LoopThread(cleanup_timeout_ms=1), body())
