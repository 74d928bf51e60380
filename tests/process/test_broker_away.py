"""The broker is down at boot, away for a while, killed, or full: workers wait and go on, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncworker.errors import BrokerUnavailable
from tests.outage import server_in
from tests.site import BehaviourSite
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment

pytestmark = pytest.mark.needs_browser


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


def test_a_worker_waits_for_a_broker_that_is_down_at_boot(state_dir: Path, site: BehaviourSite) -> None:
    with server_in(state_dir) as server:
        deployment = Deployment(state_dir, broker_url=server.url)
        with deployment.worker() as worker:
            worker.wait_for_log("Restarting consumer in")
            server.start()
            message = deployment.send("probe.text", f"{site.url}/cookie/get")
            assert deployment.result(message) == ""
            assert worker.stop() == 0


@pytest.mark.long
def test_a_broker_away_while_pages_end_costs_no_message_and_doubles_none(state_dir: Path, site: BehaviourSite) -> None:
    with server_in(state_dir) as server:
        server.start()
        deployment = Deployment(state_dir, broker_url=server.url)
        running = [deployment.send("probe.visit", f"{site.url}/slow?ms=3000", seed=number) for number in range(2)]
        failing = [deployment.send("probe.visit", f"{site.url}/slow?ms=3000", seed=9, fail=1) for _ in range(2)]
        waiting = [deployment.send("probe.visit", site.product_url(1), seed=number) for number in range(8)]
        with deployment.worker() as worker:
            wait_until(lambda: sum(site.requests.values()) >= 4, "four pages are loading")
            server.stop()
            worker.wait_for_log("trying again in")
            time.sleep(4)  # the fact tested: away until the pages have ended, with results, acks and retries to store
            server.start()
            for message in running + failing + waiting:
                deployment.result(message)
            assert worker.stop(timeout_s=60) == 0
        for message in running + waiting:
            assert [row.outcome for row in deployment.rows(message) if row.outcome != "running"] == ["succeeded"]
        assert site.requests["/slow"] == 6, "each of four, and the retry of two"
        assert deployment.broker.do_qsize("default") == 0


def test_a_broker_that_is_full_refuses_the_producer_and_loses_nothing_of_the_workers(
    state_dir: Path, site: BehaviourSite
) -> None:
    with server_in(state_dir) as server:
        server.start()
        deployment = Deployment(state_dir, broker_url=server.url)
        running = [deployment.send("probe.visit", f"{site.url}/slow?ms=2000", seed=number) for number in range(2)]
        with deployment.worker() as worker:
            wait_until(lambda: sum(site.requests.values()) >= 2, "two pages are loading")
            deployment.broker.client.config_set("maxmemory", "1")
            with pytest.raises(BrokerUnavailable, match="it was not sent"):
                deployment.send("probe.visit", site.product_url(1))
            worker.wait_for_log("trying again in")
            deployment.broker.client.config_set("maxmemory", "0")
            assert [deployment.result(message)["seed"] for message in running] == [0, 1]
            assert deployment.result(deployment.send("probe.visit", site.product_url(1)))
            assert worker.stop() == 0
        assert site.requests["/slow"] == 2, "a message was run twice"


def test_a_producer_without_a_broker_gets_a_sentence_within_seconds(state_dir: Path) -> None:
    with server_in(state_dir) as server:
        deployment = Deployment(state_dir, broker_url=server.url.replace("redis://", "redis://user:hunter2@"))
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable) as caught:
            deployment.send("probe.text", "x")
        assert time.monotonic() - began < 10 + BUSY_S
        assert f"user:***@127.0.0.1:{server.port}" in str(caught.value)
        assert "hunter2" not in str(caught.value)


def test_an_embedded_server_that_was_killed_is_started_again_with_its_messages(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        first = deployment.send("probe.text", f"{site.url}/cookie/get")
        assert deployment.result(first) == ""
        later = deployment.send("probe.text", f"{site.url}/cookie/get", delay=4_000)
        pid = int((deployment.directory / "valkey.pid").read_text())
        os.kill(pid, signal.SIGKILL)
        assert deployment.result(later) == ""
        assert worker.stop() == 0
    assert not psutil.pid_exists(pid)
