"""What is said about RabbitMQ where there is none to speak to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncworker import cli
from asyncworker.broker import make_broker
from asyncworker.errors import ConfigurationError
from asyncworker.settings import child_environment, load
from tests.getting_rabbitmq import no_service_starts

DEPLOYMENT = {
    "ASYNCWORKER_BROKER_URL": "amqp://worker:s3cret@127.0.0.1:1",
    "ASYNCWORKER_STORE_URL": "redis://127.0.0.1:1",
}


@pytest.fixture
def no_pika(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extra is not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pika" or name == "asyncworker.rabbitmq"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pika", None)


def test_without_the_extra_a_worker_is_told_what_to_install(no_pika: None) -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'asyncworker\[rabbitmq\]'") as caught:
        make_broker(load(DEPLOYMENT))
    assert "s3cret" not in str(caught.value)


def test_a_broker_of_rabbitmq_is_made_without_a_connection_and_with_the_same_middleware() -> None:
    redis_like = make_broker(load({"ASYNCWORKER_BROKER_URL": "redis://127.0.0.1:1"}))
    rabbit = make_broker(load(DEPLOYMENT))
    names = [[type(each).__name__ for each in broker.middleware] for broker in (redis_like, rabbit)]
    of_redis = ("Fitness", "Heartbeat")
    assert [name for name in names[0] if name not in of_redis] == [name for name in names[1] if name != "Stopping"]
    rabbit.close()
    redis_like.close()


@pytest.mark.parametrize(
    "query", ["amqp://worker:s3cret@127.0.0.1:1?heartbeat=often", "amqp://a:s3cret@one;amqp://a:s3cret@two:port"]
)
def test_a_url_that_pika_does_not_take_is_refused_without_its_password(query: str) -> None:
    with pytest.raises((ConfigurationError, ValueError)) as caught:
        make_broker(load(DEPLOYMENT | {"ASYNCWORKER_BROKER_URL": query}))
    assert "ASYNCWORKER_BROKER_URL" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["queues"],
        ["pause", "default"],
        ["resume", "default"],
        ["purge", "default", "--yes"],
        ["dead", "list"],
        ["dead", "retry", "default", "--yes"],
    ],
)
def test_commands_about_queues_are_refused_with_what_does_it_there(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.environ", child_environment(**DEPLOYMENT))
    monkeypatch.setattr(sys, "argv", ["asyncworker", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert "rabbitmqctl" in said.err
    assert "s3cret" not in said.err


def test_installing_the_tests_server_starts_no_service_and_leaves_a_policy_of_the_machine_alone(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with no_service_starts(policy):
        assert subprocess.run([policy], check=False).returncode == 101, "how Debian is told not to start one"
    assert not policy.exists()
    policy.write_text("the machine's own")
    with no_service_starts(policy):
        pass
    assert policy.read_text() == "the machine's own"
