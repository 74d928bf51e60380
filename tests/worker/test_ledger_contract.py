"""What every ledger does: the one in memory, and the one in a real Valkey."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from asyncworker import embedded, ledger
from asyncworker.identity import MAX_SEED
from asyncworker.ledger import KEPT, Beat, Kept, Ledger, MemoryLedger, Outcome, RedisLedger, Row
from tests.waiting import wait_until

OPENED = Row(message_id="m1", attempt=1, actor="pages.title", seed=42, worker="host:7", opened_ms=1_000)


@pytest.fixture
def store(module_state_dir: Path) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(embedded.ensure(module_state_dir))) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.flushall()


@pytest.fixture(params=["memory", "redis", "redis that decodes"])
def book(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    if request.param == "memory":
        yield MemoryLedger()
        return
    store: redis.Redis = request.getfixturevalue("store")
    if request.param == "redis":
        yield RedisLedger(store)
        return
    path = store.get_connection_kwargs()["path"]
    with redis.Redis(unix_socket_path=path, decode_responses=True) as decoding:
        yield RedisLedger(decoding)


def another(opened_ms: int, **changed: Any) -> Row:
    """Another attempt of the same message."""
    return replace(OPENED, **({"opened_ms": opened_ms} | changed))


# rows


def test_a_message_that_no_one_knows_has_no_rows(book: Ledger) -> None:
    assert book.rows("never") == []


def test_an_open_row_says_that_its_attempt_runs(book: Ledger) -> None:
    assert book.open(OPENED) == OPENED
    assert book.rows("m1") == [OPENED]
    assert OPENED.outcome is Outcome.running
    assert OPENED.took_ms is None


def test_a_closed_row_stands_in_place_of_the_open_one(book: Ledger) -> None:
    opened = book.open(OPENED)
    closed = replace(opened, closed_ms=1_250, outcome=Outcome.failed, generation=3, error="ValueError: 'ü'\n\0")
    book.close(closed)
    (row,) = book.rows("m1")
    assert row == closed
    assert row.outcome is Outcome.failed
    assert row.took_ms == 250


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_kept(book: Ledger, outcome: Outcome) -> None:
    book.close(replace(book.open(OPENED), outcome=outcome))
    assert book.rows("m1")[0].outcome is outcome


@pytest.mark.parametrize("seed", [None, 0, MAX_SEED])
def test_every_seed_is_kept_to_the_last_digit(book: Ledger, seed: int | None) -> None:
    assert book.open(replace(OPENED, seed=seed)).seed == seed
    assert book.rows("m1")[0].seed == seed


def test_attempts_are_numbered_by_the_ledger_whatever_the_worker_believes(book: Ledger) -> None:
    """A worker counts retries; an attempt that its worker's death cut short is none to it, but has its row here."""
    numbers = [book.open(another(at_ms, attempt=believed)).attempt for at_ms, believed in enumerate((1, 1, 7))]
    assert numbers == [1, 2, 3]
    assert [row.attempt for row in book.rows("m1")] == [1, 2, 3]


def test_an_attempt_that_is_opened_again_since_the_answer_was_lost_has_one_row(book: Ledger) -> None:
    numbers = [book.open(another(at_ms)).attempt for at_ms in (5, 50, 5)]
    assert numbers == [1, 2, 1]
    book.close(replace(another(5), attempt=1, closed_ms=9, outcome=Outcome.succeeded))
    assert book.open(another(5)).attempt == 1, "a command that comes late, too"
    assert [row.outcome for row in book.rows("m1")] == ["succeeded", "running"]
    for at_ms in range(100, 120):
        book.open(another(at_ms))
    assert book.open(another(119)).attempt == 22


def test_attempts_of_other_messages_do_not_count(book: Ledger) -> None:
    book.open(OPENED)
    assert book.open(replace(OPENED, message_id="m2")).attempt == 1
    assert len(book.rows("m1")) == len(book.rows("m2")) == 1


def test_closing_one_attempt_leaves_the_others_as_they_are(book: Ledger) -> None:
    first, second, third = (book.open(another(at_ms)) for at_ms in range(3))
    book.close(replace(second, outcome=Outcome.crashed))
    assert book.rows("m1") == [first, replace(second, outcome=Outcome.crashed), third]


def test_a_row_may_be_closed_twice_and_the_last_word_stands(book: Ledger) -> None:
    opened = book.open(OPENED)
    book.close(replace(opened, outcome=Outcome.failed))
    book.close(replace(opened, outcome=Outcome.rejected))
    assert [row.outcome for row in book.rows("m1")] == [Outcome.rejected]


def test_a_lost_attempt_stays_lost_whatever_its_worker_says_when_it_goes_on(book: Ledger) -> None:
    opened = book.open(OPENED)
    book.close(opened.closed(Outcome.lost, 2_000))
    book.close(opened.closed(Outcome.succeeded, 3_000))
    book.note(opened, at_any_cost=True)
    assert [row.outcome for row in book.rows("m1")] == [Outcome.lost]


@pytest.mark.parametrize("attempt", [-1, 2])
def test_closing_an_attempt_that_was_never_opened_changes_nothing(book: Ledger, attempt: int) -> None:
    book.open(OPENED)
    book.close(replace(OPENED, attempt=attempt, outcome=Outcome.failed))
    assert book.rows("m1") == [OPENED]


def test_an_attempt_that_is_closed_without_a_number_is_the_messages_next(book: Ledger) -> None:
    book.open(OPENED)
    book.close(replace(OPENED, attempt=0, outcome=Outcome.succeeded))
    assert book.rows("m1") == [OPENED, replace(OPENED, attempt=2, outcome=Outcome.succeeded)]


def test_closing_a_row_of_a_message_that_is_known_no_more_changes_nothing(book: Ledger) -> None:
    """An attempt may take longer than its row is kept, and a store may be flushed."""
    book.close(replace(OPENED, outcome=Outcome.succeeded))
    assert book.rows("m1") == []
    assert book.open(OPENED).attempt == 1


@pytest.mark.parametrize("changed", [True, False])
def test_the_identity_is_kept_from_the_session_on_and_with_the_outcome(book: Ledger, changed: bool) -> None:
    opened = book.open(OPENED)
    assert (opened.identity, opened.drawn_by, opened.identity_changed) == (None, None, False)
    met = replace(opened, identity="8472c6ff5bfe", drawn_by="invisible_core 53.48.0", identity_changed=changed)
    book.close(met)
    assert book.rows("m1") == [met]
    assert met.outcome is Outcome.running
    book.close(replace(met, outcome=Outcome.succeeded, closed_ms=2_000))
    (row,) = book.rows("m1")
    assert (row.identity, row.drawn_by) == ("8472c6ff5bfe", "invisible_core 53.48.0")
    assert (row.identity_changed, row.outcome, row.took_ms) == (changed, "succeeded", 1_000)


def test_the_phases_are_kept_with_their_times_and_that_of_the_close_may_come_later(book: Ledger) -> None:
    opened = book.open(OPENED)
    assert (opened.phase, opened.phases, opened.phases_ms) == (None, (), {})
    closed = replace(opened, outcome=Outcome.succeeded, closed_ms=1_250, phase="code", phases=(1, 0, 30, 219))
    book.close(closed)
    assert book.rows("m1") == [closed]
    book.note(replace(closed, phases=(*closed.phases, 8_000)), at_any_cost=True)
    (row,) = book.rows("m1")
    assert row.phases_ms == {"wait": 1, "launch": 0, "context": 30, "code": 219, "close": 8_000}
    assert (row.outcome, row.took_ms) == ("succeeded", 250), "the close is no part of what was waited for"


def test_what_an_attempt_is_at_is_noted_in_its_open_row(book: Ledger) -> None:
    opened = book.open(replace(OPENED, phase="wait"))
    book.note(replace(opened, phase="context", generation=2), at_any_cost=True)
    (row,) = book.rows("m1")
    assert (row.outcome, row.phase, row.generation) == ("running", "context", 2)


@pytest.mark.parametrize("was_opened", [False, True])
def test_mending_writes_a_row_once_whether_it_was_opened_or_not(book: Ledger, was_opened: bool) -> None:
    """A store that goes away may have taken the row, and not have said so."""
    if was_opened:
        book.open(OPENED)
    ended = replace(OPENED, attempt=0, outcome=Outcome.failed, closed_ms=1_250)
    assert [book.mend(ended).attempt for _ in range(2)] == [1, 1]
    assert book.rows("m1") == [replace(ended, attempt=1)]
    other = book.mend(replace(ended, worker="host:8"))
    assert other.attempt == 2, "an attempt of another worker is another attempt"


def test_what_is_read_is_a_copy(book: Ledger) -> None:
    book.open(OPENED)
    book.rows("m1").clear()
    assert book.rows("m1") == [OPENED]


def test_attempts_opened_at_the_same_moment_have_numbers_of_their_own(book: Ledger) -> None:
    gate = threading.Barrier(8)

    def open_some(worker: int) -> list[int]:
        gate.wait()
        return [book.open(another(at_ms, worker=f"host:{worker}")).attempt for at_ms in range(25)]

    with ThreadPoolExecutor(8) as pool:
        numbers = [number for some in pool.map(open_some, range(8)) for number in some]
    assert sorted(numbers) == list(range(1, 201))
    assert [row.attempt for row in book.rows("m1")] == list(range(1, 201))


# counts


def test_no_one_has_counted_at_first(book: Ledger) -> None:
    assert book.counts() == {}


def test_the_last_counts_of_every_worker_are_known(book: Ledger) -> None:
    book.count("host:7", {"contexts_opened": 1, "browsers_launched": 1})
    book.count("höst:8", {"contexts_opened": 5})
    book.count("host:7", {"contexts_opened": 2})
    assert book.counts() == {"host:7": {"contexts_opened": 2}, "höst:8": {"contexts_opened": 5}}


def test_counting_again_in_the_same_mapping_does_not_change_what_was_stored(book: Ledger) -> None:
    counts = {"contexts_opened": 1}
    book.count("host:7", counts)
    counts["contexts_opened"] = 9
    book.counts()["host:7"]["contexts_opened"] = 8
    assert book.counts() == {"host:7": {"contexts_opened": 1}}


# who lives


def test_a_worker_is_known_to_live_for_as_long_as_it_says_so(book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    assert book.last_beat("host:7") is None
    monkeypatch.setattr(ledger, "BEAT_MS", 60_000)
    book.beat("host:7", Beat(10, 20))
    book.beat("host:7", Beat(10, 1_020))
    assert book.last_beat("host:7") == Beat(10, 1_020)
    assert book.last_beat("host:8") is None
    monkeypatch.setattr(ledger, "BEAT_MS", 150)
    book.beat("host:7", Beat(10, 1_120))
    wait_until(lambda: book.last_beat("host:7") is None, "it was not heard of")


# what only a store does


def test_rows_and_counts_are_found_by_whoever_has_the_store(store: redis.Redis) -> None:
    RedisLedger(store).open(OPENED)
    RedisLedger(store).count("host:7", {"contexts_opened": 1})
    assert RedisLedger(store).rows("m1") == [OPENED]
    assert RedisLedger(store).counts() == {"host:7": {"contexts_opened": 1}}
    assert RedisLedger(store, namespace="other").rows("m1") == []
    assert RedisLedger(store, namespace="other").counts() == {}


def test_rows_of_older_and_newer_versions_are_read(store: redis.Redis) -> None:
    older = {
        name: value
        for name, value in asdict(OPENED).items()
        if name not in ("identity", "drawn_by", "identity_changed")
    }
    newer = asdict(replace(OPENED, identity="8472c6ff5bfe")) | {"exit": "192.0.2.7"}
    store.rpush("asyncworker:attempts:m1", json.dumps(older), json.dumps(newer))
    first, second = RedisLedger(store).rows("m1")
    assert first == OPENED
    assert second == replace(OPENED, attempt=2, identity="8472c6ff5bfe")
    RedisLedger(store).close(replace(first, outcome=Outcome.failed))
    assert [row.outcome for row in RedisLedger(store).rows("m1")] == ["failed", "running"]


def test_nothing_is_kept_for_ever(store: redis.Redis) -> None:
    book = RedisLedger(store)
    book.close(replace(book.open(OPENED), outcome=Outcome.succeeded))
    book.count("host:7", {"contexts_opened": 1})
    lives: dict[Any, int] = {key: store.pttl(key) for key in store.scan_iter()}
    assert len(lives) == 4
    assert all(0 < life <= KEPT.ms for life in lives.values()), lives


def test_a_row_is_kept_after_its_last_change_not_after_its_first(store: redis.Redis) -> None:
    opened = RedisLedger(store, kept=Kept(ms=60_000)).open(OPENED)
    RedisLedger(store).close(replace(opened, outcome=Outcome.succeeded))
    assert store.pttl("asyncworker:attempts:m1") > 60_000


def test_a_living_worker_does_not_keep_the_counts_of_a_dead_one(store: redis.Redis) -> None:
    book = RedisLedger(store)
    RedisLedger(store, kept=Kept(ms=20)).count("dead", {"contexts_opened": 1})
    book.count("living", {"contexts_opened": 1})
    wait_until(lambda: "dead" not in book.counts(), "the dead one is forgotten")
    assert book.counts() == {"living": {"contexts_opened": 1}}
    assert store.smembers("asyncworker:workers") == {b"living"}


@pytest.fixture(params=["memory", "redis"])
def short_book(request: pytest.FixtureRequest) -> Ledger:
    """A ledger that keeps four rows."""
    kept = Kept(rows=4)
    return (
        MemoryLedger(kept=kept)
        if request.param == "memory"
        else RedisLedger(request.getfixturevalue("store"), kept=kept)
    )


def test_of_more_rows_than_may_be_the_oldest_are_forgotten_and_the_others_keep_their_numbers(
    short_book: Ledger,
) -> None:
    def numbers() -> list[list[int]]:
        return [[row.attempt for row in short_book.rows(name)] for name in "abc"]

    first = short_book.open(replace(OPENED, message_id="a"))
    for at_ms, name in enumerate("baa"):
        short_book.open(another(at_ms, message_id=name))
    assert numbers() == [[1, 2, 3], [1], []]
    short_book.open(replace(OPENED, message_id="c"))
    assert numbers() == [[2, 3], [1], [1]], "of one message the oldest"
    assert short_book.open(another(8, message_id="a")).attempt == 4
    assert numbers() == [[2, 3, 4], [], [1]], "and a message with it, where it has no other"
    for at_ms in range(4):
        short_book.open(another(at_ms, message_id="c"))
    assert numbers() == [[], [], [2, 3, 4, 5]]
    short_book.close(first)
    assert numbers() == [[], [], [2, 3, 4, 5]], "what is forgotten stays so"


def test_a_store_that_refuses_a_row_is_an_error(store: redis.Redis) -> None:
    """Unlike a row that is known no more: it would be lost silently."""
    book = RedisLedger(store)
    first = book.open(OPENED)
    store.config_set("maxmemory", 1)
    for write in (lambda: book.open(another(2)), lambda: book.close(first), lambda: book.count("host:7", {"n": 1})):
        with pytest.raises(redis.RedisError, match=r"OOM|maxmemory"):
            write()
    store.config_set("maxmemory", 0)
    store.set("asyncworker:attempts:m2", "no list")
    with pytest.raises(redis.RedisError, match="WRONGTYPE"):
        book.close(replace(first, message_id="m2"))
