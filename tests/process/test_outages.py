"""Stores that are killed, away, read-only or loading, and connections that break, under real workers that go on."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq import Message

from asyncworker.errors import BrokerUnavailable
from tests.outage import Server, server_in
from tests.proxy import Proxy
from tests.stores import Store
from tests.waiting import BUSY_S, wait_until
from tests.workers import READY, Deployment, Running

WORKER = ("-p", "1", "-t", "4", "-Q", "noted")

#: Each outage here is longer, but where another is said; a busy machine may hold a worker up for a second.
HEARTBEAT_MS = 2_500

#: What the store's append-only file may lack after a crash.
LAST_SECOND_S = 1.0

#: How long after a message was noted the store may be told on a busy machine that it is done.
LATE_S = 2.0


@pytest.fixture
def server(state_dir: Path) -> Iterator[Server]:
    with server_in(state_dir) as server:
        server.start()
        yield server


class Noted:
    """A deployment on a server, with actors that note when they ran."""

    def __init__(self, directory: Path, url: str, **settings: Any) -> None:
        self.deployment = Deployment(
            directory, **({"broker_url": url, "heartbeat_timeout_ms": HEARTBEAT_MS, "send_timeout_ms": 500} | settings)
        )
        self._path = directory / "notes"

    def send(
        self, number: int, *, ms: int = 0, delay: int | None = None, actor: str = "note", producer: Any = None
    ) -> Message[Any]:
        message: Message[Any] = Message("noted", actor, (str(self._path), number), {"ms": ms}, {})
        return (producer or self.deployment.broker).enqueue(message, delay=delay)

    @property
    def times(self) -> dict[int, list[float]]:
        """When each number was noted."""
        found: dict[int, list[float]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                number, at = line.split()
                found.setdefault(int(number), []).append(float(at))
        return found

    def wait_for(self, *numbers: int) -> None:
        wait_until(lambda: self.times.keys() >= set(numbers), f"{numbers} were noted")

    def wait_for_nothing_left(self) -> None:
        wait_until(lambda: self.deployment.broker.do_qsize("noted") == 0, "everything is acknowledged")
        assert not list(self.deployment.broker.client.scan_iter("dramatiq:__acks__.*")), "nothing is held"

    def once_each(self, count: int) -> None:
        """Nothing is left, and each of so many numbers was noted once."""
        self.wait_for_nothing_left()
        assert {number: len(at) for number, at in self.times.items()} == dict.fromkeys(range(count), 1)


@contextlib.contextmanager
def working(noted: Noted, *options: str) -> Iterator[Running]:
    """A worker that is ready, and that is still the same at the end, where it stops in order."""
    with noted.deployment.worker(*(options or WORKER)) as worker:
        worker.ready()
        yield worker
        assert worker.log.count(READY) == worker.count, "it was started again"
        assert worker.stop() == 0


# --- killed


class Sender(threading.Thread):
    """Sends numbers, every third with a delay, until it is told to stop.

    `sent_at` has those that were taken: between which two moments.
    """

    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self._noted = noted
        self.sent_at: dict[int, tuple[float, float]] = {}
        self.over = threading.Event()

    def run(self) -> None:
        number = 0
        while not self.over.wait(0.002):
            began = time.time()
            with contextlib.suppress(BrokerUnavailable):
                self._noted.send(number, delay=1_500 if number % 3 == 0 else None)
                self.sent_at[number] = began, time.time()
            number += 1


def test_of_a_store_that_is_killed_again_and_again_nothing_older_than_a_second_is_lost_or_run_twice(
    server: Server, state_dir: Path
) -> None:
    noted = Noted(state_dir, server.url, send_timeout_ms=10_000)
    with working(noted):
        sender = Sender(noted)
        sender.start()
        killed_at = []
        for _ in range(3):
            before = len(sender.sent_at)
            wait_until(lambda before=before: len(sender.sent_at) > before + 400, "some were sent")  # type: ignore[misc]
            told = time.time()
            server.stop(signal.SIGKILL)
            killed_at.append((told, time.time()))
            server.start()
        before = len(sender.sent_at)
        wait_until(lambda: len(sender.sent_at) > before + 100, "it sends on")
        sender.over.set()
        sender.join()
        safe = {number for number, at in sender.sent_at.items() if not _in_last_second(*at, killed_at)}
        noted.wait_for(*safe)
        noted.wait_for_nothing_left()
    first = killed_at[0][0]
    assert any(number % 3 == 0 and at < first < at + 1.5 for number, (_, at) in sender.sent_at.items()), "delayed"
    twice = {number: at for number, at in noted.times.items() if len(at) > 1}
    assert all(_in_last_second(at[0], at[0] + LATE_S, killed_at) for at in twice.values()), twice


def _in_last_second(began: float, ended: float, killed_at: list[tuple[float, float]]) -> bool:
    """Whether what happened between two moments may have been in the last second before the store died."""
    return any(began <= died and ended >= told - LAST_SECOND_S for told, died in killed_at)


# --- away


@pytest.mark.parametrize(
    ("how", "away_s", "heartbeat_ms"),
    [
        ("is gone", 4, HEARTBEAT_MS),
        pytest.param("is gone", 18, 15_000, marks=pytest.mark.long),
        ("hangs", 12, HEARTBEAT_MS),
    ],
)
def test_a_store_that_is_away_costs_no_message_doubles_none_and_restarts_no_one(
    server: Server, state_dir: Path, how: str, away_s: float, heartbeat_ms: int
) -> None:
    noted = Noted(state_dir, server.url, heartbeat_timeout_ms=heartbeat_ms)
    with working(noted, "-p", "2", "-t", "2", "-Q", "noted") as worker:
        noted.send(0)
        noted.wait_for(0)
        noted.wait_for_nothing_left()
        for number in range(1, 5):
            noted.send(number, ms=2_000)
        wait_until(lambda: _held(noted) == 4, "four run, two in each process")
        for number in range(5, 8):
            noted.send(number)
        noted.send(8, delay=1_000)
        server.hang() if how == "hangs" else server.stop()
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable) as caught:
            noted.send(100)
        assert time.monotonic() - began < 1 + BUSY_S, "a producer is told within its bound"
        assert caught.value.sent is (None if how == "hangs" else False), "and whether it was sent"
        noted.wait_for(1, 2, 3, 4)
        worker.wait_for_log("trying again in" if how == "is gone" else "the broker (")
        time.sleep(max(0.0, began + away_s - time.monotonic()))  # the fact tested: away for so long
        server.go_on() if how == "hangs" else server.start()
        noted.wait_for(*range(9))
        noted.send(9)
        noted.wait_for(9)
        noted.wait_for_nothing_left()
        assert "messages of dead workers" not in worker.log
        ran = {number: len(at) for number, at in noted.times.items()}
        assert ran.pop(100, 0) <= (1 if how == "hangs" else 0), "what may have been sent"
        assert ran == dict.fromkeys(range(10), 1)


def _held(noted: Noted) -> int:
    """How many messages are with workers."""
    client: Any = noted.deployment.broker.client
    return sum(client.scard(key) for key in client.scan_iter("dramatiq:__acks__.*"))


@contextlib.contextmanager
def read_only(server: Server) -> Iterator[None]:
    """The store is a replica of an address where no one is."""
    with server.client() as client, socket.socket() as nowhere:
        nowhere.bind(("127.0.0.1", 0))  # and not listened on
        client.replicaof("127.0.0.1", nowhere.getsockname()[1])
        yield
        client.replicaof("NO", "ONE")


def test_a_store_that_takes_no_writes_is_waited_for_and_its_producers_are_told(server: Server, state_dir: Path) -> None:
    noted = Noted(state_dir, server.url)
    with working(noted) as worker:
        for number in range(2):
            noted.send(number, ms=1_000)
        wait_until(lambda: _held(noted) == 2, "two run")
        noted.send(2, delay=1_500)
        with read_only(server):
            began = time.monotonic()
            with pytest.raises(BrokerUnavailable, match=r"read only replica.*it was not sent") as caught:
                noted.send(100)
            assert time.monotonic() - began < 1 + BUSY_S
            assert caught.value.sent is False
            noted.wait_for(0, 1)
            worker.wait_for_log("could not settle what is done")
            wait_until(lambda: time.monotonic() - began > 1.2 * HEARTBEAT_MS / 1000, "longer than the timeout")
        noted.send(3)
        noted.once_each(4)


def test_a_store_that_is_loading_is_waited_for_and_its_producers_are_told(server: Server, state_dir: Path) -> None:
    noted = Noted(state_dir, server.url, send_timeout_ms=2_000)
    with working(noted) as worker:
        with server.client() as client, client.pipeline(transaction=False) as pipe:
            for number in range(16_000):
                pipe.set(f"much:{number}", number)
            pipe.execute()
        noted.send(0, ms=1_000)
        noted.send(1, delay=1_000)
        wait_until(lambda: _held(noted) == 1, "one runs")
        server.stop()
        server.start("--key-load-delay", "200")  # µs for each command in its file; it answers every 1,024
        with server.client() as client, pytest.raises(redis.BusyLoadingError):
            client.ping()
        with pytest.raises(BrokerUnavailable, match="it was not sent") as caught:
            noted.send(100)
        assert caught.value.sent is False
        noted.wait_for(0)
        worker.wait_for_log("loading")
        noted.wait_for(1)
        noted.send(2)
        noted.once_each(3)


# --- broken connections


@pytest.fixture
def proxy(store: Store) -> Iterator[Proxy]:
    proxy = Proxy(store.path)
    yield proxy
    proxy.close()


def test_connections_that_break_in_the_middle_of_a_fetch_cost_no_message_and_double_none(
    store: Store, state_dir: Path, proxy: Proxy
) -> None:
    noted, producer = Noted(state_dir, f"redis://127.0.0.1:{proxy.port}/0"), store.ours()
    with working(noted) as worker:
        noted.send(0, producer=producer)
        noted.wait_for(0)
        proxy.lose_times(1, "before", b"\r\nfetch\r\n")
        wait_until(lambda: proxy.losses == 1, "a fetch did not arrive")
        for number in range(1, 8):
            noted.send(number, producer=producer)
        proxy.lose_times(1, "after", b"\r\nfetch\r\n")
        wait_until(lambda: proxy.losses == 2, "the answer with messages did not")
        noted.wait_for(*range(8))
        noted.once_each(8)
        assert "had got lost on the way here" in worker.log


def test_connections_that_break_in_the_middle_of_an_acknowledgement_have_it_repeated_until_it_is_taken(
    store: Store, state_dir: Path, proxy: Proxy
) -> None:
    noted, producer = Noted(state_dir, f"redis://127.0.0.1:{proxy.port}/0"), store.ours()
    with working(noted) as worker:
        for round_, how in enumerate(("before", "after")):
            proxy.lose_times(3, how, b"\r\nsettle\r\n")
            noted.send(round_, producer=producer)
            wait_until(lambda round_=round_: proxy.losses == 3 * (round_ + 1), "three were lost")  # type: ignore[misc]
        noted.wait_for(0, 1)
        noted.once_each(2)
        assert worker.log.count("could not settle what is done") == 6
        assert "no longer this worker's" not in worker.log


# --- stopped meanwhile


@pytest.mark.parametrize("actor", [pytest.param("note", marks=pytest.mark.long), "note_and_answer"])
def test_a_worker_that_is_stopped_while_the_store_is_away_ends_in_time_and_says_what_is_run_again(
    server: Server, state_dir: Path, actor: str
) -> None:
    stop_ms = 3_000
    noted = Noted(state_dir, server.url, stop_timeout_ms=stop_ms)
    with noted.deployment.worker(*WORKER) as worker:
        worker.ready()
        sent = noted.send(0, ms=1_000, actor=actor)
        wait_until(lambda: _held(noted) == 1, "it runs")
        server.stop()
        noted.wait_for(0)
        worker.wait_for_log("trying again in")
        began = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - began < stop_ms / 1000 + 4 + BUSY_S
        lines = [line for line in worker.log.split("Shutting down")[-1].splitlines() if "run again" in line]
        assert len(lines) == 1
        assert sent.message_id in lines[0]
    server.start()
    with working(noted):
        wait_until(lambda: len(noted.times[0]) == 2, "it is run again")
        noted.wait_for_nothing_left()
        if actor == "note_and_answer":
            assert noted.deployment.result(sent) == 0
