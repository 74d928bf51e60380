"""What comes from a queue or a shell is not trusted: a clear error, nothing lost, and a worker that goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from dramatiq import Message

from asyncworker.settings import as_environment, child_environment
from tests.site import BehaviourSite
from tests.waiting import wait_until
from tests.workers import HOME, READY, Deployment

pytestmark = pytest.mark.needs_browser


def push(deployment: Deployment, body: bytes, queue: str = "default") -> str:
    """Put raw bytes into a queue as another program might; returns the id under which they lie there."""
    identifier = str(uuid4())
    client: Any = deployment.broker.client
    client.hset(f"dramatiq:{queue}.msgs", identifier, body)
    client.rpush(f"dramatiq:{queue}", identifier)
    return identifier


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe not json",
        b"[]",
        b'"text"',
        b'{"queue_name": "default"}',
        json.dumps({"queue_name": "default", "actor_name": "probe.text", "args": 5, "kwargs": {}, "options": {}}).encode(),
        json.dumps(
            {
                "queue_name": "default",
                "actor_name": ["probe.text"],
                "args": [],
                "kwargs": [],
                "options": {},
                "message_id": "x",
                "message_timestamp": 1,
            }
        ).encode(),
    ],
    ids=["bytes", "list", "text", "fields missing", "args no list", "fields of other kinds"],
)
def test_a_body_that_is_no_message_lies_in_the_dead_letters_as_it_came_and_the_next_is_served(
    deployment: Deployment, site: BehaviourSite, body: bytes
) -> None:
    good_before = deployment.send("probe.text", f"{site.url}/cookie/get")
    identifier = push(deployment, body)
    good_after = deployment.send("probe.text", f"{site.url}/cookie/get")
    with deployment.worker() as worker:
        assert deployment.result(good_before) == deployment.result(good_after) == ""
        wait_until(lambda: deployment.dead_letters().get(identifier.encode()) == body, "the body is a dead letter")
        assert worker.stop() == 0
    assert "no Dramatiq message" in worker.log
    assert deployment.broker.do_qsize("default") == 0


def test_a_message_without_the_id_of_its_queue_is_refused_not_run_for_ever(
    deployment: Deployment, site: BehaviourSite
) -> None:
    body = Message("default", "probe.text", (site.url,), {}, {}).encode()
    identifier = push(deployment, body)
    with deployment.worker() as worker:
        wait_until(lambda: deployment.dead_letters().get(identifier.encode()) == body, "the body is a dead letter")
        assert worker.stop() == 0


@pytest.mark.parametrize(
    ("actor", "args", "kwargs", "said"),
    [
        ("probe.text", (), {}, "missing a required argument: 'url'"),
        ("probe.text", ("a", "b"), {}, "too many positional arguments"),
        ("probe.text", ("a",), {"colour": 1}, "unexpected keyword argument 'colour'"),
        ("probe.text", ("a",), {"seed": -1}, "0 to 2**63-1"),
        ("probe.text", ("a",), {"seed": 2**63}, "0 to 2**63-1"),
        ("probe.text", ("a",), {"seed": "7"}, "0 to 2**63-1"),
        ("probe.text", ("a",), {"seed": True}, "0 to 2**63-1"),
    ],
)
def test_a_message_that_can_never_succeed_is_given_up_at_once_with_its_reason(
    deployment: Deployment, actor: str, args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    message = deployment.send(actor, *args, options={"max_retries": 5}, **kwargs)
    with deployment.worker() as worker:
        failure = deployment.failure(message)
        assert worker.stop() == 0
    assert said in failure
    assert [row.outcome for row in deployment.rows(message)] == ["rejected"]
    assert len(deployment.dead_letters()) == 1


def test_a_message_for_an_unknown_actor_is_a_dead_letter_and_the_next_is_served(
    deployment: Deployment, site: BehaviourSite
) -> None:
    deployment.send("probe.nobody", 1)
    good = deployment.send("probe.text", f"{site.url}/cookie/get")
    with deployment.worker() as worker:
        assert deployment.result(good) == ""
        wait_until(lambda: len(deployment.dead_letters()) == 1, "the message is a dead letter")
        assert worker.stop() == 0
    assert "undefined actor 'probe.nobody'" in worker.log


def test_an_invalid_url_is_playwrights_own_error_and_the_worker_goes_on(
    deployment: Deployment, site: BehaviourSite
) -> None:
    bad = deployment.send("probe.text", "not a url")
    with deployment.worker() as worker:
        assert "invalid URL" in deployment.failure(bad)
        assert deployment.result(deployment.send("probe.text", f"{site.url}/cookie/get")) == ""
        assert worker.stop() == 0
    assert deployment.counts()["browsers_launched"] == 1


def start_and_fail(settings: dict[str, str], cwd: Path) -> tuple[int, str]:
    """Start the worker command where it cannot start; its exit code and all that it said."""
    ended = subprocess.run(
        [sys.executable, "-m", "dramatiq", "asyncworker.actors", "-p", "1"],
        cwd=cwd,
        env=child_environment(**settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_an_actors_module_that_does_not_import_stops_the_worker_with_the_whole_error(
    deployment: Deployment, tmp_path: Path
) -> None:
    package = tmp_path / "actors"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "broken.py").write_text("def helper():\n    return 1 / 0\n\nhelper()\n")
    code, said = start_and_fail(as_environment(deployment.settings), tmp_path)
    assert code == 2
    assert "the actors in actors.broken do not import" in said
    assert "ZeroDivisionError" in said
    assert "return 1 / 0" in said
    assert READY not in said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def title(session, url): ...", "is not async"),
        ("async def title(url: str): ...", "receives the session there"),
        ("async def title(): ...", "must take the session first"),
    ],
)
def test_a_function_that_cannot_be_an_actor_stops_the_worker_where_it_is_declared(
    deployment: Deployment, tmp_path: Path, source: str, said: str
) -> None:
    (tmp_path / "actors.py").write_text(f"from asyncworker import actor\n\n@actor\n{source}\n")
    code, output = start_and_fail(as_environment(deployment.settings), tmp_path)
    assert code == 2
    assert said in output


def test_two_actors_of_one_name_stop_the_worker_and_both_are_named(deployment: Deployment, tmp_path: Path) -> None:
    source = "from asyncworker import actor\n\n@actor(actor_name='title')\nasync def {name}(session): ...\n"
    package = tmp_path / "actors"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text(source.format(name="first"))
    (package / "two.py").write_text(source.format(name="second"))
    code, said = start_and_fail(as_environment(deployment.settings), tmp_path)
    assert code == 2
    assert "two actors are named 'title': actors.one.first and actors.two.second" in said


def test_no_actors_here_is_said_with_what_to_do(deployment: Deployment, tmp_path: Path) -> None:
    settings = as_environment(deployment.settings) | {"ASYNCWORKER_ACTORS": "nowhere"}
    code, said = start_and_fail(settings, tmp_path)
    assert code == 2
    assert "there is no module 'nowhere' with actors here" in said
    assert "ASYNCWORKER_ACTORS" in said


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ASYNCWORKER_ENGIN", "chromium", "the nearest is ASYNCWORKER_ENGINE"),
        ("ASYNCWORKER_PROXY", "http://user:hunter2@nowhere", "a proxy URL names a host and a port"),
        ("ASYNCWORKER_SEED", "-1", "ASYNCWORKER_SEED"),
        ("ASYNCWORKER_BROKER_URL", "kafka://x", "a broker URL starts with"),
    ],
)
def test_a_wrong_setting_stops_the_worker_and_is_named_without_its_secrets(
    deployment: Deployment, variable: str, value: str, said: str
) -> None:
    code, output = start_and_fail(as_environment(deployment.settings) | {variable: value}, HOME)
    assert code == 2
    assert said in output
    assert "hunter2" not in output


def test_a_state_directory_that_cannot_be_written_stops_the_worker(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = as_environment(deployment.settings) | {"ASYNCWORKER_STATE_DIR": str(tmp_path / "file" / "state")}
    code, said = start_and_fail(settings, HOME)
    assert code == 2
    assert "cannot be written" in said
    assert "ASYNCWORKER_STATE_DIR" in said


def test_a_worker_without_its_engine_says_so_at_boot_takes_no_other_and_backs_off(
    deployment: Deployment, site: BehaviourSite
) -> None:
    environment = {"ASYNCWORKER_ENGINE": "invisible", "INVISIBLE_PLAYWRIGHT_CACHE_DIR": str(deployment.directory / "x")}
    message = deployment.send("probe.text", site.url, options={"max_retries": 0})
    plain = deployment.send("add", 2, 3, queue="plain")
    settings = deployment.settings.model_dump(include=deployment.settings.model_fields_set - {"engine"})
    other = Deployment(deployment.directory, **(settings | {"engine": "invisible"}))
    with other.worker(environment={"INVISIBLE_PLAYWRIGHT_CACHE_DIR": environment["INVISIBLE_PLAYWRIGHT_CACHE_DIR"]}) as worker:
        worker.wait_for_log("this worker has no browser")
        assert "EngineMissing" in deployment.failure(message)
        assert deployment.result(plain) == 5
        assert worker.ready().stop() == 0
    assert "asyncworker doctor --install" in worker.log
    assert site.requests == {}


def test_a_worker_of_plain_queues_never_launches_a_browser_and_keeps_its_threads(deployment: Deployment) -> None:
    with deployment.worker("-p", "1", "-t", "8", "-Q", "plain") as worker:
        messages = [deployment.send("add", number, 1, queue="plain") for number in range(20)]
        assert [deployment.result(message) for message in messages] == list(range(1, 21))
        assert worker.ready().tokens("browser") == worker.tokens("driver") == set()
        assert worker.stop() == 0
    assert "trimmed" not in worker.log
    assert deployment.counts() == {}
