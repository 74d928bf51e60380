"""The bridge: what real Celery producers have sent to Redis or RabbitMQ is here once, whatever kills the bridge."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from dramatiq import Message
from dramatiq.common import current_millis
from kombu import Queue

from asyncworker import embedded
from asyncworker.celery.bridge import Bridge, open_source
from asyncworker.celery.envelope import opened
from asyncworker.celery.names import to_dramatiq
from asyncworker.celery.stores import store_of
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.urls import SecretUrl
from tests import operating
from tests.celery.sides import HOME, our_side, records_in
from tests.conftest import missing
from tests.rabbitmq import RabbitServer, rabbit_server, why_missing
from tests.waiting import wait_until
from tests.workers import Deployment

TASKS = 200
LEASE = ("--lease-ms", "1000")


@pytest.fixture(scope="module")
def source(deployment: Deployment) -> str:
    """Celery's broker: another database of the deployment's server."""
    return f"redis+socket://{embedded.ensure(deployment.settings.state_dir)}?virtual_host=5"


@pytest.fixture(scope="module")
def old(source: str) -> Iterator[Celery]:
    """A producer that sends to Celery's broker as it always did."""
    app = Celery("old", broker=source, set_as_current=False)
    yield app
    app.close()


@pytest.fixture(autouse=True)
def lists(deployment: Deployment) -> Iterator[Any]:
    """The source's store. Nothing is in it or in the deployment's, but kombu's bindings, which producers make once."""
    path = str(embedded.ensure(deployment.settings.state_dir))
    deployment.broker.client.flushdb()
    with redis.Redis(unix_socket_path=path, db=5, socket_timeout=10) as client:
        for key in client.keys("*"):
            if not key.startswith(b"_kombu"):
                client.delete(key)
        yield client


def here(deployment: Deployment, queue: str) -> list[Message[Any]]:
    """What lies in a queue of the deployment, due or not."""
    client: Any = deployment.broker.client
    bodies = [*client.hvals(f"dramatiq:{queue}.msgs"), *client.hvals(f"dramatiq:{queue}.DQ.msgs")]
    return [Message.decode(body) for body in bodies]


def everything(deployment: Deployment, queue: str = "celery") -> list[Message[Any]]:
    return [each for step in (0, 3, 6, 9) for each in here(deployment, to_dramatiq(queue, step))]


def bridged(deployment: Deployment, source: str, *options: str, code: int = 0) -> dict[str, Any]:
    return operating.facts(deployment, "celery", "bridge", "--from", source, "--once", *LEASE, *options, code=code)


def killed(deployment: Deployment, source: str, step: str, count: int, *options: str) -> None:
    """Run a bridge that is killed at this step."""
    command = [sys.executable, "killed_bridge.py", step, str(count), "--from", source, *LEASE, *options]
    ended = subprocess.run(
        command,
        cwd=HOME,
        env=operating.environment(deployment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_every_task_comes_over_once_though_the_bridge_is_killed_on_its_way(
    deployment: Deployment, source: str, old: Celery, lists: Any
) -> None:
    sent = {old.send_task("facts.ok", (number,), priority=number % 10).id: number for number in range(TASKS)}
    killed(deployment, source, "taken", 3)  # 40 are here and acknowledged, 20 are taken
    assert len(everything(deployment)) == 40
    killed(deployment, source, "enqueued", 2)  # 40 more are here, 20 of them not acknowledged
    assert len(everything(deployment)) == 80
    report = bridged(deployment, source)
    assert report == {"moved": TASKS - 80, "known": 20, "left": [], "with_workers": 0}
    assert Counter(each.message_id for each in everything(deployment)) == Counter(list(sent))
    for step in (0, 3, 6, 9):
        numbers = {sent[each.message_id] % 10 for each in here(deployment, to_dramatiq("celery", step))}
        assert numbers == {number for number in range(10) if step <= number < step + 3}
    assert [key for key in lists.keys("*") if not key.startswith(b"_kombu")] == [], "nothing of it is left there"


def test_a_task_keeps_its_eta_its_queue_and_all_that_its_worker_sees_of_it(
    deployment: Deployment, source: str, old: Celery, lists: Any
) -> None:
    later = old.send_task("facts.ok", (1,), countdown=600, queue="mail:high")
    twice = [old.send_task("facts.ok", (1,), task_id="the same", queue="facts") for _ in range(2)]
    packed = old.send_task(
        "facts.dump_request", (1,), {"x": "ä" * 500}, queue="facts", compression="zlib", headers={"trace": "t"}
    )
    raw = next(each for each in map(json.loads, lists.lrange("facts", 0, -1)) if each["headers"]["id"] == packed.id)
    report = bridged(deployment, source, "--queue", "facts", "--queue", "mail:high")
    assert (report["moved"], report["left"]) == (4, [])
    (delayed,) = here(deployment, to_dramatiq("mail:high"))
    assert delayed.message_id == later.id
    assert 590_000 < delayed.options["eta"] - current_millis() <= 600_000
    assert Counter(each.message_id for each in here(deployment, "facts")) == {twice[0].id: 2, packed.id: 1}
    assert opened(next(each for each in here(deployment, "facts") if each.message_id == packed.id).options) == raw
    with our_side(deployment) as side:
        wait_until(lambda: len(bodies(side.record)) == 3, "all that are due run")
    request = next(
        each for each in records_in(side.record) if each["what"] == "task_prerun" and each["id"] == packed.id
    )
    assert request["id"] == packed.id


def bodies(record: Path) -> list[str]:
    return [each["id"] for each in records_in(record) if each["what"] == "task_success"]


def test_what_cannot_be_read_is_left_where_it_was_and_named_and_the_others_come_over(
    deployment: Deployment, source: str, old: Celery, lists: Any
) -> None:
    with old.producer_pool.acquire() as producer:
        producer.publish({"hello": "world"}, routing_key="celery", serializer="json")
    unreadable = [b"no JSON", b'{"a": 1}', lists.lindex("celery", 0)]
    lists.lpush("celery", *unreadable[:2])
    sent = old.send_task("facts.ok", (1,))
    report = bridged(deployment, source, code=1)
    assert report["moved"] == 1
    assert len(report["left"]) == 3, report
    assert "'no JSON'" in report["left"][1], report
    assert set(lists.lrange("celery", 0, -1)) == set(unreadable)
    assert [each.message_id for each in everything(deployment)] == [sent.id]


def test_what_a_worker_of_celerys_held_when_it_was_killed_is_counted_and_brought_back_when_told(
    deployment: Deployment, source: str, old: Celery
) -> None:
    sent = old.send_task("facts.ok", (1,))
    with old.connection_for_read() as connection:
        channel = connection.channel()
        channel.do_restore = False  # as one that is killed
        assert channel.basic_get("celery") is not None
    report = bridged(deployment, source)
    assert (report["moved"], report["with_workers"]) == (0, 1)
    report = bridged(deployment, source, "--option", "visibility_timeout=0")
    assert (report["moved"], report["with_workers"]) == (1, 0)
    assert [each.message_id for each in everything(deployment)] == [sent.id]


def test_a_bridge_takes_what_comes_until_it_is_told_to_stop(
    deployment: Deployment, source: str, old: Celery, lists: Any
) -> None:
    command = [*operating.COMMAND, "celery", "bridge", "--from", source, "--json"]
    with subprocess.Popen(
        command, cwd=deployment.directory, env=operating.environment(deployment), stdout=subprocess.PIPE, text=True
    ) as bridge:
        wait_until(lambda: lists.keys("asyncworker.bridge.*"), "the bridge is up")
        sent = [old.send_task("facts.ok", (number,)).id for number in range(3)]
        wait_until(lambda: len(everything(deployment)) == 3, "they came over")
        bridge.send_signal(signal.SIGTERM)
        said, _ = bridge.communicate(timeout=20)
    assert bridge.returncode == 0
    assert json.loads(said)["moved"] == 3
    assert sorted(each.message_id for each in everything(deployment)) == sorted(sent)
    assert lists.keys("asyncworker.bridge*") == []


def test_what_the_broker_here_does_not_take_is_sent_again_and_what_it_took_is_not(
    deployment: Deployment, source: str, old: Celery, lists: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [old.send_task("facts.ok", (number,)).id for number in range(4)]
    real, news = deployment.broker.send_many, list[str]()

    def takes_half(messages: Any) -> Any:
        given = list(messages)
        monkeypatch.setattr(deployment.broker, "send_many", real)
        taken = real(given[:2])
        raise BrokerUnavailable("it went away", sent=False, taken=taken, untaken=given[2:])

    monkeypatch.setattr(deployment.broker, "send_many", takes_half)
    with contextlib.closing(store_of(f"asyncworker+unix://{embedded.ensure(deployment.settings.state_dir)}")) as marks:
        taken_from = open_source(SecretUrl(source), ["celery"], lease_ms=1_000)
        bridge = Bridge(taken_from, deployment.broker, marks, on_news=news.append)
        thread = threading.Thread(target=bridge.run)
        thread.start()
        try:
            wait_until(lambda: bridge.report.moved == 4 and not lists.keys("asyncworker.bridge.*:*"), "all came over")
        finally:
            bridge.stop()
            thread.join()
    assert news == ["it went away; trying again"]
    assert sorted(each.message_id for each in everything(deployment)) == sorted(sent)


def test_a_source_that_cannot_be_used_is_named_without_its_password(deployment: Deployment) -> None:
    with pytest.raises(ConfigurationError, match=r"sqs://x:\*\*\*@host: messages are taken from"):
        open_source(SecretUrl("sqs://x:secret@host"), ["celery"], lease_ms=1_000)
    ended = operating.run(deployment, "celery", "bridge", "--from", "redis://u:secret@127.0.0.1:1/0")
    assert ended.returncode == 2
    assert "the source (redis://u:***@127.0.0.1:1/0) does not answer" in ended.stderr
    assert "secret" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture(scope="module")
def rabbit() -> Iterator[RabbitServer]:
    reason, is_failure = why_missing()
    if reason is not None:
        missing(reason) if is_failure else pytest.skip(reason)
    with rabbit_server() as server:
        server.start()
        yield server


def test_tasks_of_rabbitmq_come_over_once_and_the_greatest_priority_is_the_most_urgent(
    deployment: Deployment, rabbit: RabbitServer
) -> None:
    old = Celery("old", broker=rabbit.url, set_as_current=False)
    old.conf.task_queues = [Queue("celery", queue_arguments={"x-max-priority": 10})]
    sent = {old.send_task("facts.ok", (number,), priority=number % 11).id: number for number in range(TASKS)}
    with old.producer_pool.acquire() as producer:
        producer.publish({"hello": "world"}, routing_key="celery", serializer="json")
    priorities = ("--max-priority", "10")
    killed(deployment, rabbit.url, "taken", 2, *priorities)
    killed(deployment, rabbit.url, "enqueued", 2, *priorities)
    packed = old.send_task("facts.ok", (1, "ä" * 500), compression="zlib", priority=10)
    sent[packed.id] = 10
    report = bridged(deployment, rabbit.url, *priorities, code=1)
    assert (report["known"], len(report["left"])) == (20, 1)
    assert Counter(each.message_id for each in everything(deployment)) == Counter(list(sent))
    steps = [
        {sent[each.message_id] % 11 for each in here(deployment, to_dramatiq("celery", step))} for step in (0, 3, 6, 9)
    ]
    assert set.union(*steps) == set(range(11))
    assert all(min(urgent) > max(less) for urgent, less in itertools.pairwise(steps)), steps
    payload = opened(next(each for each in everything(deployment) if each.message_id == packed.id).options)
    assert payload["headers"]["compression"] == "application/x-gzip"
    assert payload["properties"]["correlation_id"] == packed.id
    ended = operating.run(deployment, "celery", "bridge", "--from", rabbit.url, "--queue", "celrey")
    assert (ended.returncode, "no queue 'celrey'" in ended.stderr) == (2, True)
    old.close()
