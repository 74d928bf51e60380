"""The loop thread, under the interrupts that Dramatiq raises in its worker threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from dramatiq.asyncio import async_to_sync, set_event_loop_thread
from dramatiq.middleware import Interrupt, Shutdown, TimeLimitExceeded
from dramatiq.threading import raise_thread_exception

from asyncworker.loop import LoopThread
from tests.waiting import BUSY_S, wait_until


class Attempt:
    """A coroutine run as a worker thread runs it: its result or what it raised, and when."""

    def __init__(self, loop: LoopThread, coro: Coroutine[Any, Any, Any]) -> None:
        self.result: Any = None
        self.raised: BaseException | None = None
        self.ended_at = 0.0
        self._thread = threading.Thread(target=self._run, args=(loop, coro), daemon=True)
        self._thread.start()

    def _run(self, loop: LoopThread, coro: Coroutine[Any, Any, Any]) -> None:
        try:
            self.result = loop.run_coroutine(coro)
        except BaseException as error:
            self.raised = error
        self.ended_at = time.monotonic()

    def interrupt(self, kind: type[Interrupt] = TimeLimitExceeded) -> Attempt:
        raise_thread_exception(self._thread.ident, kind)  # type: ignore[no-untyped-call]
        return self

    def waits(self) -> bool:
        """True when its thread waits for the loop."""
        return self._is_in("run_coroutine") and self._is_in("wait")

    def waits_for_cleanup(self) -> bool:
        """True when its thread has seen the interrupt."""
        return self._is_in("_await_cleanup") and self._is_in("wait")

    def _is_in(self, function: str) -> bool:
        assert self._thread.ident is not None
        frame = sys._current_frames().get(self._thread.ident)
        names = [each.f_code.co_name for each, _ in traceback.walk_stack(frame)] if frame else []
        return function in names

    def end(self, timeout: float = 10) -> Attempt:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"the worker thread still waits after {timeout} s"
        return self


class Code:
    """An actor's code that reports what happens to it."""

    def __init__(self, *, cleanup: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        self.began = threading.Event()
        self.cleaning = threading.Event()
        self.cleaned = threading.Event()
        self.release = asyncio.Event()
        self.cancellations = 0
        self._cleanup = cleanup

    async def __call__(self) -> str:
        self.began.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancellations += 1
            await self._clean()
            raise
        return "done"

    async def _clean(self) -> None:
        self.cleaning.set()
        try:
            if self._cleanup is not None:
                await self._cleanup()
        except asyncio.CancelledError:
            self.cancellations += 1
            raise
        self.cleaned.set()


class Stubborn:
    """Code that takes no cancellation at all, until the test lets it go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.let_go = threading.Event()
        self.cancellations = 0

    async def __call__(self) -> str:
        self.began.set()
        while not self.let_go.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.cancellations += 1
        return "at last"


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread(cleanup_timeout_ms=10_000)
    loop.start()
    yield loop
    loop.stop()
    wait_until(lambda: not loop_threads(), "the loop thread has ended")


@pytest.fixture
def impatient(loop: LoopThread) -> LoopThread:
    """A loop thread whose budget for cleanup is 200 ms."""
    loop._cleanup_timeout_ms = 200
    return loop


@pytest.fixture
def stubborn() -> Iterator[Stubborn]:
    code = Stubborn()
    yield code
    code.let_go.set()


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("asyncworker-loop")]


def begun(loop: LoopThread, code: Code | Stubborn) -> Attempt:
    attempt = Attempt(loop, code())
    assert code.began.wait(30)
    wait_until(attempt.waits, "the worker thread waits")
    return attempt


async def value() -> str:
    return "value"


# results and errors


def test_a_coroutine_gives_its_result_to_the_thread_that_waits(loop: LoopThread) -> None:
    assert loop.run_coroutine(value()) == "value"


def test_it_stands_where_dramatiqs_own_loop_thread_would(loop: LoopThread) -> None:
    set_event_loop_thread(loop)  # type: ignore[arg-type]
    try:
        assert async_to_sync(value)() == "value"
    finally:
        set_event_loop_thread(None)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the code's"),
        TimeoutError("the code's"),
        asyncio.CancelledError("the code's"),
        TimeLimitExceeded("the code's"),
        Shutdown("the code's"),
        SystemExit(3),
        KeyboardInterrupt("the code's"),
        BaseExceptionGroup("the code's", [ValueError(), KeyboardInterrupt()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_code_raises_passes_as_it_is(loop: LoopThread, error: BaseException) -> None:
    async def code() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(type(error)) as raised:
        loop.run_coroutine(code())
    assert raised.value is error
    assert loop.run_coroutine(value()) == "value", "the loop lives on"


def test_awaiting_something_cancelled_is_the_codes_own_error(loop: LoopThread) -> None:
    async def code() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(asyncio.CancelledError):
        loop.run_coroutine(code())


def test_an_error_keeps_nothing_alive_once_it_is_handled(loop: LoopThread) -> None:
    class Page:
        pass

    kept: list[weakref.ref[Page]] = []

    async def code() -> None:
        page = Page()
        kept.append(weakref.ref(page))
        raise ValueError(page)

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            loop.run_coroutine(code())
        wait_until(lambda: kept[0]() is None, "the page is gone, without the garbage collector")
    finally:
        gc.enable()


def test_the_code_sees_the_context_variables_of_its_worker_thread(loop: LoopThread) -> None:
    attempt: ContextVar[str] = ContextVar("attempt", default="none")

    async def code() -> str:
        return attempt.get()

    def run() -> None:
        attempt.set("7")
        seen.append(loop.run_coroutine(code()))

    seen: list[str] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == ["7"]
    assert loop.run_coroutine(code()) == "none"


def test_work_of_many_threads_runs_at_once(loop: LoopThread) -> None:
    codes = [Code() for _ in range(8)]
    attempts = [begun(loop, code) for code in codes]
    for code in codes:
        loop.loop.call_soon_threadsafe(code.release.set)
    assert [attempt.end().result for attempt in attempts] == ["done"] * 8


# interrupts


def test_what_many_threads_bring_while_the_loop_is_busy_runs_each_in_its_context(loop: LoopThread) -> None:
    number: ContextVar[int] = ContextVar("number")
    is_busy, go_on = threading.Event(), threading.Event()
    seen: dict[int, int] = {}

    def be_busy() -> None:
        is_busy.set()
        go_on.wait(30)

    async def own_number() -> int:
        return number.get()

    def run(own: int) -> None:
        number.set(own)
        seen[own] = loop.run_coroutine(own_number())

    loop.loop.call_soon_threadsafe(be_busy)
    assert is_busy.wait(30)
    threads = [threading.Thread(target=run, args=(own,)) for own in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(loop._entrance) == 8, "all have come")
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert seen == {own: own for own in range(8)}


def test_a_call_that_an_interrupt_kept_a_thread_from_making_is_made_by_another(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = loop.loop.call_soon_threadsafe
    cut_off = [TimeLimitExceeded()]

    def interrupted(*args: Any) -> Any:
        if cut_off:
            raise cut_off.pop()
        return call(*args)

    async def code() -> str:
        return "done"

    monkeypatch.setattr(loop.loop, "call_soon_threadsafe", interrupted)
    assert isinstance(Attempt(loop, code()).end().raised, TimeLimitExceeded)
    assert Attempt(loop, code()).end().result == "done"


def test_a_cleanup_longer_than_a_second_ends_before_the_time_limit_is_raised(loop: LoopThread) -> None:
    cleaned_at: list[float] = []

    async def cleanup() -> None:
        await asyncio.sleep(1.2)
        cleaned_at.append(time.monotonic())

    code = Code(cleanup=cleanup)
    attempt = begun(loop, code).interrupt().end()
    assert type(attempt.raised) is TimeLimitExceeded
    assert attempt.ended_at >= cleaned_at[0]
    assert code.cancellations == 1


def test_a_second_interrupt_during_cleanup_changes_nothing(loop: LoopThread) -> None:
    let_go = threading.Event()

    async def cleanup() -> None:
        while not let_go.is_set():
            await asyncio.sleep(0.01)

    code = Code(cleanup=cleanup)
    attempt = begun(loop, code).interrupt(TimeLimitExceeded)
    assert code.cleaning.wait(30)
    for _ in range(50):
        attempt.interrupt(Shutdown)
        time.sleep(0.002)  # the interrupts come at any moment of the wait, not all at one
    assert attempt.raised is None
    let_go.set()
    assert type(attempt.end().raised) is TimeLimitExceeded
    assert code.cleaned.is_set()
    assert code.cancellations == 1


def test_a_shutdown_is_raised_as_a_shutdown(loop: LoopThread) -> None:
    assert type(begun(loop, Code()).interrupt(Shutdown).end().raised) is Shutdown


def test_code_that_makes_an_error_of_its_cancellation_is_still_interrupted(loop: LoopThread) -> None:
    async def cleanup() -> None:
        raise ValueError("of the cleanup")

    assert type(begun(loop, Code(cleanup=cleanup)).interrupt().end().raised) is TimeLimitExceeded


def test_code_that_swallows_its_cancellation_and_returns_is_still_interrupted(loop: LoopThread) -> None:
    began = threading.Event()

    async def code() -> str:
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "all is well"
        return "never"

    attempt = Attempt(loop, code())
    assert began.wait(30)
    assert type(attempt.interrupt().end().raised) is TimeLimitExceeded


def test_a_cleanup_that_hangs_is_cancelled_too_and_the_slot_comes_back(
    impatient: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    code = Code(cleanup=lambda: asyncio.sleep(3_600))
    attempt = begun(impatient, code)
    began = time.monotonic()
    assert type(attempt.interrupt().end().raised) is TimeLimitExceeded
    assert 0.2 <= attempt.ended_at - began < 0.2 + BUSY_S
    assert code.cancellations == 2
    assert "ASYNCWORKER_CLEANUP_TIMEOUT_MS" in caplog.text


def test_code_that_ignores_every_cancellation_gives_its_slot_back(
    impatient: LoopThread, stubborn: Stubborn, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = begun(impatient, stubborn)
    began = time.monotonic()
    assert type(attempt.interrupt().end().raised) is TimeLimitExceeded
    assert 0.4 <= attempt.ended_at - began < 0.4 + BUSY_S
    assert stubborn.cancellations == 2
    assert "ignored two cancellations" in caplog.text
    assert impatient.run_coroutine(value()) == "value", "the loop serves others"


def test_an_interrupt_before_the_coroutine_began_keeps_it_from_beginning(loop: LoopThread) -> None:
    code, gate = Code(), threading.Event()
    loop.loop.call_soon_threadsafe(gate.wait)
    attempt = Attempt(loop, code())
    wait_until(attempt.waits, "the worker thread waits")
    attempt.interrupt()
    wait_until(attempt.waits_for_cleanup, "the worker thread has seen the interrupt")
    gate.set()
    assert type(attempt.end().raised) is TimeLimitExceeded
    assert loop.run_coroutine(value()) == "value"
    assert not code.began.is_set()


def test_interrupts_at_any_moment_leave_the_loop_and_its_threads_whole(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two bytecodes: also while the thread holds a lock that the loop needs."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # one may come before or after the call itself
    moments = random.Random(7)

    async def code() -> None:
        try:
            await asyncio.sleep(0.001)
        finally:
            await asyncio.sleep(0.001)

    attempts = []
    for _ in range(150):
        attempt = Attempt(loop, code())
        time.sleep(moments.uniform(0, 0.004))
        attempts.append(attempt.interrupt(TimeLimitExceeded).interrupt(Shutdown))
    for attempt in attempts:
        attempt.end()
        assert attempt.raised is None or isinstance(attempt.raised, Interrupt), repr(attempt.raised)
    assert loop.drain(timeout_ms=10_000) == 0
    assert loop.run_coroutine(value()) == "value"


# the end of the worker


def test_draining_nothing_takes_no_time(loop: LoopThread) -> None:
    assert loop.drain(timeout_ms=60_000) == 0


def test_draining_lets_running_code_end_by_itself(loop: LoopThread) -> None:
    code = Code()
    attempt = begun(loop, code)
    draining = threading.Thread(target=lambda: left.append(loop.drain(timeout_ms=10_000)))
    left: list[int] = []
    draining.start()
    loop.loop.call_soon_threadsafe(code.release.set)
    draining.join(30)
    assert left == [0]
    assert attempt.end().result == "done"
    assert code.cancellations == 0


def test_code_that_does_not_end_is_cancelled_by_the_drain_and_interrupted(loop: LoopThread) -> None:
    code = Code(cleanup=lambda: asyncio.sleep(0.1))
    attempt = begun(loop, code)
    assert loop.drain(timeout_ms=50) == 0
    assert code.cleaned.is_set()
    assert type(attempt.end().raised) is Shutdown


def test_a_drain_says_how_many_ignored_it(impatient: LoopThread, stubborn: Stubborn) -> None:
    attempt = begun(impatient, stubborn)
    assert impatient.drain(timeout_ms=50) == 1
    stubborn.let_go.set()
    assert attempt.end().result == "at last"


def test_a_drain_cancels_again_what_two_cancellations_did_not_end(impatient: LoopThread, stubborn: Stubborn) -> None:
    begun(impatient, stubborn).interrupt().end()
    assert impatient.drain(timeout_ms=10) == 1
    assert stubborn.cancellations == 3


def test_stopping_lets_the_cleanup_of_running_code_end(loop: LoopThread) -> None:
    code = Code(cleanup=lambda: asyncio.sleep(0.1))
    attempt = begun(loop, code)
    loop.stop()
    assert code.cleaned.is_set()
    assert type(attempt.end().raised) is Shutdown


def test_stopping_does_not_wait_for_ever_for_code_that_ignores_it(
    impatient: LoopThread, stubborn: Stubborn, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = begun(impatient, stubborn)
    began = time.monotonic()
    impatient.stop()
    assert time.monotonic() - began < 1 + BUSY_S
    assert "ignores its cancellation" in caplog.text
    stubborn.let_go.set()
    attempt.end()


def test_stopping_twice_is_stopping_once(loop: LoopThread) -> None:
    loop.stop()
    loop.stop()
    loop.join()


def test_a_stopped_loop_thread_starts_again(loop: LoopThread) -> None:
    loop.stop()
    loop.start(timeout=1)
    assert loop.run_coroutine(value()) == "value"


def test_a_loop_that_cannot_be_made_is_the_starters_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", no_descriptors)
    monkeypatch.setattr(asyncio.events, "new_event_loop", no_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        LoopThread(cleanup_timeout_ms=1_000).start()
    wait_until(lambda: not loop_threads(), "the thread has ended")


def test_starting_twice_is_refused(loop: LoopThread) -> None:
    with pytest.raises(RuntimeError, match="running already"):
        loop.start()
    assert len(loop_threads()) == 1


def test_nothing_runs_on_a_loop_that_is_not_there() -> None:
    loop = LoopThread(cleanup_timeout_ms=1_000)
    for run in (loop.run_coroutine, lambda coro: loop.call(coro, timeout_ms=1_000)):
        with pytest.raises(RuntimeError, match="not running"):
            run(value())  # and no warning that it was never awaited: warnings are errors here
    loop.stop()


def test_a_loop_ended_by_a_task_of_the_code_leaves_no_thread_waiting(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio ends the loop when any task raises SystemExit; that of the attempt itself is caught, not its own ones."""

    async def code() -> None:
        await asyncio.gather(leave(), asyncio.sleep(60))

    async def leave() -> None:
        sys.exit(1)

    with caplog.at_level(logging.CRITICAL, "asyncio"):
        bystander = begun(loop, Code())
        culprit = Attempt(loop, code())
        assert isinstance(bystander.end().raised, Shutdown | asyncio.CancelledError)
        culprit.end()
        wait_until(lambda: not loop_threads(), "the loop has ended")
        with pytest.raises(RuntimeError, match="not running"):
            loop.run_coroutine(value())
        gc.collect()  # asyncio logs the errors of tasks that no one asked when they are collected
    wait_until(lambda: "restart it" in caplog.text, "the end of the loop is logged")


# calls of the runtime's own


def test_a_call_gives_its_result(loop: LoopThread) -> None:
    assert loop.call(value(), timeout_ms=1_000) == "value"


def test_a_call_that_takes_too_long_is_cancelled(loop: LoopThread) -> None:
    code = Code()
    with pytest.raises(TimeoutError):
        loop.call(code(), timeout_ms=50)
    assert code.cleaned.wait(30)


def test_code_on_the_loop_cannot_wait_for_the_loop(loop: LoopThread) -> None:
    """An async actor called like a function by another one would block every attempt for ever."""

    async def code() -> str:
        return loop.run_coroutine(value())

    async def calls() -> str:
        return loop.call(value(), timeout_ms=1_000)

    for wrong in (code(), calls()):
        with pytest.raises(RuntimeError, match=r"send\(\)"):
            loop.call(wrong, timeout_ms=5_000)


# forks

FORK = """
import os, sys, warnings
from asyncworker.errors import ForkedBrowser
from asyncworker.loop import LoopThread

async def value():
    return "value"

warnings.simplefilter("error")
loop = LoopThread(cleanup_timeout_ms=60_000)
loop.start()
if os.fork() == 0:
    sys.exit(0)
print("idle child:", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
if os.fork() == 0:
    for run in (loop.run_coroutine, lambda coro: loop.call(coro, timeout_ms=1_000)):
        try:
            run(value())
        except ForkedBrowser as error:
            print(str(error), flush=True)
    loop.stop()
    loop.start()
    print("own:", loop.run_coroutine(value()), flush=True)
    loop.stop()
    sys.exit(0)
_, status = os.wait()
print("parent:", os.waitstatus_to_exitcode(status), loop.run_coroutine(value()), flush=True)
loop.stop()
"""


def test_a_fork_is_refused_the_loop_of_its_parent_and_ends_as_it_likes() -> None:
    forking = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=20, check=False)
    lines = forking.stdout.splitlines()
    assert len([line for line in lines if "does not exist in its fork" in line and "spawn" in line]) == 2, forking
    assert lines[0] == "idle child: 0"
    assert lines[3:] == ["own: value", "parent: 0 value"]
    assert forking.stderr == ""
