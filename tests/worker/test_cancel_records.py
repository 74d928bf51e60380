"""Where the ids of cancelled messages lie: in memory, and in a real Valkey; and what a process knows of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from asyncworker import cancellations, embedded
from asyncworker.cancellations import Cancellations, CancelRecords, MemoryCancelRecords, RedisCancelRecords


@pytest.fixture
def store(module_state_dir: Path) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(embedded.ensure(module_state_dir))) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.flushall()


@pytest.fixture(params=["memory", "redis", "redis that decodes"])
def records(request: pytest.FixtureRequest) -> Iterator[CancelRecords]:
    if request.param == "memory":
        yield MemoryCancelRecords()
        return
    store: redis.Redis = request.getfixturevalue("store")
    decodes = request.param != "redis"
    path = store.get_connection_kwargs()["path"]
    with redis.Redis(unix_socket_path=path, decode_responses=decodes) as client:
        yield RedisCancelRecords(client, prefix="tests:")


def test_none_is_cancelled_at_first(records: CancelRecords) -> None:
    assert (records.all(), records.has("a")) == (frozenset(), False)


def test_what_is_added_is_there_and_what_is_removed_is_not(records: CancelRecords) -> None:
    records.add(["a", "b"])
    records.add(["b", "c"])
    records.remove(["b", "never"])
    assert records.all() == {"a", "c"}
    assert [records.has(each) for each in "abc"] == [True, False, True]


def test_the_serial_number_changes_with_what_is_there(records: CancelRecords) -> None:
    serials = [records.serial()]
    records.add(["a"])
    serials.append(records.serial())
    records.remove(["a"])
    serials.append(records.serial())
    assert len(set(serials)) == 3


def test_a_process_knows_what_it_has_heard_of_and_reads_nothing_twice(records: CancelRecords) -> None:
    known = Cancellations(records)
    records.add(["a"])
    assert "a" not in known
    known.look()
    assert "a" in known
    records.all = None  # type: ignore[method-assign, assignment]  # it would fail now
    known.hear(records.serial())
    assert "a" in known


def test_removing_what_is_not_there_has_no_worker_read_anew(store: redis.Redis) -> None:
    records = RedisCancelRecords(store, prefix="tests:")
    records.add(["a"])
    serial = records.serial()
    records.remove(["never"])
    assert records.serial() == serial


def test_ids_are_forgotten_in_time_and_the_oldest_where_there_are_too_many(
    store: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = RedisCancelRecords(store, prefix="tests:")
    records.add(["old"])
    assert 0 < store.pttl(records.key) <= cancellations.KEPT_MS  # type: ignore[operator]
    store.zadd(records.key, {"old": 1})
    records.add(["new"])
    assert records.all() == {"new"}
    monkeypatch.setattr(cancellations, "MOST", 2)
    store.zadd(records.key, {"older": 10**14, "newer": 10**14 + 1})
    records.remove(["new"])
    monkeypatch.setattr(cancellations, "KEPT_MS", 10**14)
    records.add(["newest"])
    assert records.all() == {"newer", "newest"}


def test_a_full_store_takes_them(store: redis.Redis) -> None:
    records = RedisCancelRecords(store, prefix="tests:")
    store.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        store.set("any", "thing")
    records.add(["a"])
    assert records.all() == {"a"}
