"""The turns of handlers, without a browser."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Iterator

import pytest

from asyncworker.lane import Lane
from tests.waiting import wait_until

LONG_S = 30


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane(contextvars.copy_context())
    yield lane
    lane.close()
    wait_until(lambda: not threads(), "the threads of handlers have ended")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "asyncworker-handler"]


def test_handlers_run_one_after_the_other_in_their_order_and_in_one_thread(lane: Lane) -> None:
    seen: list[tuple[int, int]] = []
    done = threading.Event()
    for number in range(50):
        lane.run(lambda number=number: seen.append((number, threading.get_ident())))
    lane.run(done.set)
    assert done.wait(LONG_S)
    assert [number for number, _ in seen] == list(range(50))
    assert len({ident for _, ident in seen} - {threading.get_ident()}) <= 2


def test_a_handler_that_waits_lets_the_next_one_run_and_goes_on_in_its_turn(lane: Lane) -> None:
    seen: list[str] = []
    answered, second_runs, done = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        seen.append("first")
        with lane.left():
            assert answered.wait(LONG_S)
        seen.append("first again")
        done.set()

    def second() -> None:
        seen.append("second")
        answered.set()
        second_runs.wait(0.2)  # the first one could go on now, if it did not wait for its turn
        seen.append("second ends")

    lane.run(first)
    lane.run(second)
    assert done.wait(LONG_S)
    assert seen == ["first", "second", "second ends", "first again"]


def test_who_is_no_handler_waits_for_those_that_were_there_before_the_answer(lane: Lane) -> None:
    seen: list[str] = []
    with lane.left():
        lane.run(lambda: (threading.Event().wait(0.2), seen.append("handler")))
    seen.append("code")
    assert seen == ["handler", "code"]


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_a_call_that_raises_gives_the_turn_back(lane: Lane, error: type[BaseException]) -> None:
    done = threading.Event()

    def fails() -> None:
        with pytest.raises(error), lane.left():
            raise error

    lane.run(fails)
    lane.run(done.set)
    assert done.wait(LONG_S)


def test_an_interrupt_waits_for_no_handler(lane: Lane) -> None:
    goes_on = threading.Event()
    with pytest.raises(KeyboardInterrupt), lane.left():
        lane.run(lambda: goes_on.wait(LONG_S))
        raise KeyboardInterrupt
    goes_on.set()


def test_a_closed_lane_runs_nothing_more_and_keeps_no_one_waiting(lane: Lane) -> None:
    seen: list[str] = []
    goes_on, began = threading.Event(), threading.Event()

    def stuck() -> None:
        began.set()
        goes_on.wait(LONG_S)

    with lane.left():
        lane.run(stuck)
        lane.run(lambda: seen.append("never"))
        assert began.wait(LONG_S)
        threading.Timer(0.1, lane.close).start()
    assert lane.run(lambda: seen.append("never")) is False
    goes_on.set()
    wait_until(lambda: not threads(), "the threads of handlers have ended")
    assert seen == []


def test_without_celery_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "celery" or "asyncworker.celery." in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "celery", None)
    from asyncworker import celery as adapter

    for name in ("browser", "session", "install"):
        with pytest.raises(ModuleNotFoundError, match=r"pip install asyncworker\[celery\]"):
            getattr(adapter, name)
