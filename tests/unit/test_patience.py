"""What a store says: who waits for it, who gives up, and who is told what to do."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import pytest
import redis
from dramatiq import ConnectionClosed
from redis._parsers.base import BaseParser

from asyncworker import patience as module
from asyncworker.errors import BrokerUnavailable
from asyncworker.patience import Patience, locked_out, passes, patiently, remedy

#: What servers say, as redis-py raises it when it is the answer to a command.
WILL_PASS = [
    "OOM command not allowed when used memory > 'maxmemory'.",
    "LOADING Valkey is loading the dataset in memory",
    "READONLY You can't write against a read only replica.",
    "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "NOREPLICAS Not enough good replicas to write.",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "ERR max number of clients reached",
    "ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -OOM command not allowed when used "
    "memory > 'maxmemory'.",
    "READONLY You can't write against a read only replica. script: 0, on @user_script:9.",
]

LOCKED_OUT = [
    "NOAUTH Authentication required.",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "NOPERM User worker has no permissions to run the 'evalsha' command",
    "ERR invalid password",
    "ERR Error running script (call to f_0): @user_script:1: @user_script: 1: -NOPERM The user executing the script "
    "can't run this command or subcommand",
    "ERR ACL failure in script: User worker has no permissions to run the 'del' command script: 0, on @user_script:9.",
]

WILL_NOT_PASS = [
    "WRONGTYPE Operation against a key holding the wrong kind of value",
    "ERR unknown command 'EVALSHA'",
]


def said(answer: str) -> redis.RedisError:
    error = BaseParser.parse_error(answer)
    assert isinstance(error, redis.RedisError)
    return error


def wrapped(error: redis.RedisError) -> list[BaseException]:
    """The same error as the parts of a worker see it."""
    closed, unavailable = ConnectionClosed(str(error)), BrokerUnavailable(str(error), url="the store")
    closed.__cause__ = unavailable.__cause__ = error
    return [error, closed, unavailable]


@pytest.mark.parametrize("answer", WILL_PASS)
def test_a_store_that_takes_nothing_for_the_moment_is_waited_for(answer: str) -> None:
    for error in wrapped(said(answer)):
        assert (passes(error), locked_out(error), remedy(error)) == (True, False, "")


@pytest.mark.parametrize("answer", LOCKED_OUT)
def test_a_producer_that_the_store_locks_out_is_told_at_once_and_what_to_do(answer: str) -> None:
    for error in wrapped(said(answer)):
        assert (passes(error), locked_out(error)) == (False, True)
        assert "ASYNCWORKER_BROKER_URL" in remedy(error)


@pytest.mark.parametrize("answer", WILL_NOT_PASS)
def test_what_no_waiting_changes_is_raised(answer: str) -> None:
    for error in wrapped(said(answer)):
        assert (passes(error), locked_out(error), remedy(error)) == (False, False, "")


@pytest.mark.parametrize("error", [redis.ConnectionError("reset"), redis.TimeoutError("no answer")], ids=str)
def test_a_connection_that_is_lost_is_made_again(error: redis.RedisError) -> None:
    assert passes(error)


@pytest.mark.parametrize(("answer", "level"), [(WILL_PASS[0], logging.WARNING), (LOCKED_OUT[1], logging.ERROR)])
def test_a_worker_waits_for_a_store_that_is_full_and_for_one_that_locks_it_out_and_says_the_second_loudly(
    answer: str, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PAUSES_MS", (1, 2))
    answers = [said(answer)] * 3

    def work() -> str:
        if answers:
            raise answers.pop()
        return "taken"

    assert patiently(work, "store a result") == "taken"
    assert [record.levelno for record in caplog.records] == [level] * 3
    assert ("ASYNCWORKER_BROKER_URL" in caplog.text) == (level == logging.ERROR)


def test_a_worker_that_has_to_stop_gives_up_in_time_and_its_thread_knows(caplog: pytest.LogCaptureFixture) -> None:
    patience, tries = Patience(), []

    def work() -> None:
        tries.append(1)
        if len(tries) == 2:
            patience.end_in(0)
        raise redis.ConnectionError("away")

    with pytest.raises(redis.ConnectionError, match="away"):
        patiently(work, "store a result", patience)
    assert (len(tries), caplog.text.count("this worker has to stop")) == (2, 1)
    assert patience.gave_up()
    assert not patience.gave_up(), "it is asked once"
    patience.renew()
    assert patience.left_s == float("inf")


def test_who_waits_for_a_store_is_woken_when_the_worker_has_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES_MS", (60_000, 60_000))
    patience, waits = Patience(), threading.Event()

    def work() -> None:
        waits.set()
        raise redis.ConnectionError("away")

    ended = []
    thread = threading.Thread(target=lambda: ended.append(_gives_up(patience, work)), daemon=True)
    thread.start()
    assert waits.wait(30)
    patience.end_in(0)
    thread.join(30)
    assert ended == [True]
    assert not patience.gave_up(), "another thread has"


def _gives_up(patience: Patience, work: Callable[[], None]) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        patiently(work, "store a result", patience)
    return patience.gave_up()
