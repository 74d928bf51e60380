"""A worker process that was killed is known to be dead by the others of its host, long before it is missed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncworker import embedded
from asyncworker.siblings import dead_ones, own_place
from tests.site import BehaviourSite
from tests.waiting import wait_until
from tests.workers import Deployment, Running

pytestmark = pytest.mark.needs_browser

#: Who is missed only, and not known to be dead, is taken for dead after this: no test here waits for so long.
TIMEOUT_MS = 300_000


@pytest.fixture
def deployment(state_dir: Path) -> Iterator[Deployment]:
    deployment = Deployment(state_dir, heartbeat_timeout_ms=TIMEOUT_MS)
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


def places(deployment: Deployment) -> dict[bytes, bytes]:
    read: dict[bytes, bytes] = deployment.broker.client.hgetall(_key(deployment))
    return read


def _key(deployment: Deployment) -> str:
    return f"{deployment.broker.namespace}:__places__.{own_place().host}"


def kill(worker: Running) -> None:
    for pid in worker.workers:
        os.kill(pid, signal.SIGKILL)


def test_what_a_killed_worker_ran_is_lost_and_run_by_another_one_of_the_host_at_once(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker("-p", "1", "-t", "1") as first:
        message = deployment.send("probe.text", f"{site.url}/slow?ms=3000")
        wait_until(lambda: site.requests["/slow"] == 1, "it is in its page")
        with deployment.worker("-p", "1", "-t", "1") as other:
            kill(first)
            deployment.result(message)
            other.wait_for_log("worker processes of this host that were found dead: 1")
            assert other.stop() == 0
    assert [(row.attempt, row.outcome) for row in deployment.rows(message)] == [(1, "lost"), (2, "succeeded")]
    assert places(deployment) == {}


def test_who_replaces_a_killed_worker_runs_what_it_had(deployment: Deployment, site: BehaviourSite) -> None:
    with deployment.worker("-p", "1", "-t", "1") as first:
        messages = [deployment.send("probe.text", f"{site.url}/slow?ms=1000") for _ in range(2)]
        wait_until(lambda: site.requests["/slow"] == 1, "one is in its page, and the other was fetched, or waits")
        kill(first)
    with deployment.worker("-p", "1", "-t", "1") as second:
        for message in messages:
            deployment.result(message)
        assert second.stop() == 0
    assert sorted(len(deployment.rows(message)) for message in messages) == [1, 2]


def test_a_frozen_worker_is_not_dead(deployment: Deployment, site: BehaviourSite) -> None:
    with deployment.worker("-p", "1", "-t", "1") as frozen:
        message = deployment.send("probe.text", f"{site.url}/slow?ms=500")
        wait_until(lambda: site.requests["/slow"] == 1, "it is in its page")
        (pid,) = frozen.workers
        os.kill(pid, signal.SIGSTOP)
        try:
            assert [deployment.broker.bury_siblings(deployment.broker.client) for _ in range(3)] == [0, 0, 0]
            assert deployment.broker.recover("default") == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        deployment.result(message)
        assert frozen.stop() == 0
    assert len(deployment.rows(message)) == 1


def test_a_worker_that_stops_in_order_leaves_no_place(deployment: Deployment) -> None:
    with deployment.worker("-p", "1", "-t", "1") as worker:
        wait_until(lambda: len(places(deployment)) == 1, "the worker says where it lives")
        assert worker.stop() == 0
    assert places(deployment) == {}


@pytest.fixture
def with_places(deployment: Deployment) -> Callable[[dict[str, str]], int]:
    """Has the store believe that workers live at these places; returns how many of them are found dead."""
    embedded.ensure(deployment.settings.state_dir)

    def bury(given: dict[str, str]) -> int:
        deployment.broker.client.hset(_key(deployment), mapping=given)
        return deployment.broker.bury_siblings(deployment.broker.client)

    return bury


def test_only_who_is_known_to_be_dead_is_buried(
    deployment: Deployment, with_places: Callable[[dict[str, str]], int]
) -> None:
    me = own_place()
    living, dead = f"{me.pid}.{me.born}", f"{me.pid}.{me.born - 1}"
    heartbeats = f"{deployment.broker.namespace}:__heartbeats__"
    deployment.broker.client.zadd(heartbeats, {"asyncworker-a": 10**12, "asyncworker-b": 10**12})
    assert with_places({"asyncworker-a": living, "asyncworker-b": dead, "asyncworker-c": dead, "d": "nonsense"}) == 2
    assert deployment.broker.client.zrange(heartbeats, 0, -1, withscores=True) == [
        (b"asyncworker-b", 1.0),
        (b"asyncworker-a", 1e12),
    ]
    assert set(places(deployment)) == {b"asyncworker-a", b"d", deployment.broker.broker_id.encode()}


@pytest.mark.parametrize("text", ["", ".", "1", "1.", ".1", "-1.5", "²3.4", "x.y", f"1.{'9' * 30}.3"])
def test_a_place_that_says_nothing_is_no_dead_one(text: str) -> None:
    assert list(dead_ones({"name": text})) == []
