"""Sentinels: a master that dies, and producers and workers that go on with the next one without a restart."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncworker.broker_checks import State, broker_checks
from asyncworker.connecting import connect
from asyncworker.errors import BrokerUnavailable, UnfitBroker
from asyncworker.settings import load
from tests.conftest import missing
from tests.servers import Shop, binary_of
from tests.waiting import wait_until
from tests.workers import Deployment

PLAIN = ("-p", "1", "-t", "2", "-Q", "plain")


@pytest.fixture
def shop(state_dir: Path) -> Iterator[Shop]:
    if binary_of("Valkey 9") is None:
        missing("no Valkey here that can be a sentinel")
    with ExitStack() as stack:
        yield Shop(state_dir, stack)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_worker_and_a_producer_go_on_with_the_new_master(state_dir: Path, shop: Shop, end: signal.Signals) -> None:
    deployment = Deployment(state_dir, broker_url=f"{shop.url}?socket_timeout=5")
    with deployment.worker(*PLAIN) as worker:
        assert deployment.result(deployment.send("add", 1, 2, queue="plain")) == 3
        with shop.master.client() as master:
            delayed = deployment.send("add", 3, 4, queue="plain", delay=2_000)
            assert master.wait(1, 5_000) == 1, "the replica has it"
        shop.master.signal(end)
        sent = deployment.send("add", 5, 6, queue="plain")
        assert shop.replica.is_master()
        assert (deployment.result(sent), deployment.result(delayed)) == (11, 7)
        assert len(worker.workers) == 1
        assert worker.stop() == 0
    assert deployment.broker.do_qsize("plain") == 0
    deployment.broker.close()
    deployment.broker.client.close()


def test_a_master_that_returns_as_a_replica_is_left_alone(state_dir: Path, shop: Shop) -> None:
    deployment = Deployment(state_dir, broker_url=shop.url)
    with deployment.worker(*PLAIN) as worker:
        assert deployment.result(deployment.send("add", 1, 2, queue="plain")) == 3
        with shop.sentinels[0].client() as sentinel:
            sentinel.sentinel_failover("shop")
        wait_until(lambda: shop.replica.is_master() and not shop.master.is_master(), "the two have changed places")
        assert deployment.result(deployment.send("add", 3, 4, queue="plain")) == 7
        assert worker.stop() == 0
    deployment.broker.close()
    deployment.broker.client.close()


def test_the_doctor_sees_the_service_its_sentinels_and_its_replica(shop: Shop) -> None:
    checks = {check.name: check for check in broker_checks(load({}, broker_url=shop.url))}
    assert checks["broker"].state is State.ok
    assert "shop behind 3 sentinels" in checks["broker"].detail
    assert checks["sentinels"].state is State.ok
    shop.sentinels[2].stop()
    shop.replica.stop()
    wait_until(lambda: not shop.master.info()["connected_slaves"], "the replica is gone")
    checks = {check.name: check for check in broker_checks(load({}, broker_url=shop.url))}
    assert checks["sentinels"].state is State.warning
    assert f"127.0.0.1:{shop.sentinels[2].port}" in checks["sentinels"].detail
    assert "no replica" in checks["sentinels"].detail


def test_a_service_that_no_sentinel_knows_is_refused_with_those_it_knows(shop: Shop) -> None:
    misspelt = load({}, broker_url=shop.url.replace("/shop/", "/store/"))
    told = "knows no service 'store', but 'shop'; correct the service in the URL"
    with connect(misspelt) as client, pytest.raises(UnfitBroker, match=told):
        client.ping()


def test_sentinels_that_ask_for_a_password_are_given_it_and_say_that_it_is_wanted(shop: Shop) -> None:
    for sentinel in shop.sentinels:
        with sentinel.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "resetpass", ">watch")
    for url in (shop.url, f"{shop.url}?sentinel_password=wrong"):
        with connect(load({}, broker_url=url)) as client, pytest.raises(UnfitBroker, match=r"\?sentinel_username=…"):
            client.ping()
    with connect(load({}, broker_url=f"{shop.url}?sentinel_password=watch")) as client:
        assert client.ping()


def test_sentinels_that_are_away_are_named_in_time(shop: Shop) -> None:
    for sentinel in shop.sentinels:
        sentinel.stop(signal.SIGKILL)
    deployment = Deployment(shop.directory, broker_url=shop.url, send_timeout_ms=1_000)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"no sentinel answers: 127\.0\.0\.1:.*it was not sent"):
        deployment.send("add", 1, 2, queue="plain")
    assert time.monotonic() - began < 10
    deployment.broker.close()
    deployment.broker.client.close()


def test_a_url_of_a_sentinel_as_if_it_were_the_broker_is_refused(shop: Shop) -> None:
    told = r"is a sentinel, not a broker; write redis\+sentinel://"
    with connect(load({}, broker_url=shop.sentinels[0].url)) as client, pytest.raises(UnfitBroker, match=told):
        client.ping()
