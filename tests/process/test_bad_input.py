"""What comes from a queue or a shell is not trusted: a clear error, nothing lost, and a worker that goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
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


def push(deployment: Deployment, body: bytes, queue: str = "default", identifier: bytes | None = None) -> bytes:
    """Put raw bytes into a queue as another program might; returns the id under which they lie there."""
    identifier = identifier or str(uuid4()).encode()
    client: Any = deployment.broker.client
    client.hset(f"dramatiq:{queue}.msgs", identifier, body)
    client.rpush(f"dramatiq:{queue}", identifier)
    return identifier


def other_kinds(**fields: Any) -> bytes:
    """A body with all fields of a message, of which some are of another kind."""
    good = {"queue_name": "default", "actor_name": "probe.text", "args": [], "kwargs": {}, "options": {}}
    return json.dumps(good | {"message_id": "x", "message_timestamp": 1} | fields).encode()


NO_MESSAGES = {
    "bytes": b"\xff\xfe not json",
    "a list": b"[]",
    "a text": b'"text"',
    "fields missing": b'{"queue_name": "default"}',
    "args are a number": other_kinds(args=5),
    "actor is a list": other_kinds(actor_name=["probe.text"]),
    "kwargs are a list": other_kinds(kwargs=[]),
    "options are a text": other_kinds(options="x"),
}


def test_bodies_that_are_no_messages_lie_in_the_dead_letters_as_they_came_and_the_others_are_served(
    deployment: Deployment, site: BehaviourSite
) -> None:
    good, bad = [], {}
    for body in NO_MESSAGES.values():
        bad[push(deployment, body)] = body
        good.append(deployment.send("probe.text", f"{site.url}/cookie/get"))
    bad[push(deployment, b"{}", identifier=b"\xff no text")] = b"{}"
    with deployment.worker() as worker:
        assert [deployment.result(message) for message in good] == [""] * len(good)
        wait_until(lambda: deployment.dead_letters() == bad, "the bodies are dead letters")
        assert worker.stop() == 0
    assert worker.log.count("no Dramatiq message") == len(bad)
    assert "Restarting consumer" not in worker.log
    assert deployment.broker.do_qsize("default") == 0


NEVER_SUCCEED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((), {}, "missing a required argument: 'url'"),
    (("a", "b"), {}, "too many positional arguments"),
    (("a",), {"colour": 1}, "unexpected keyword argument 'colour'"),
    (("a",), {"seed": -1}, "0 to 2**63-1"),
    (("a",), {"seed": 2**63}, "0 to 2**63-1"),
    (("a",), {"seed": "7"}, "0 to 2**63-1"),
    (("a",), {"seed": 7.0}, "0 to 2**63-1"),
    (("a",), {"seed": True}, "0 to 2**63-1"),
]


def test_messages_that_can_never_succeed_are_given_up_at_once_with_their_reason_and_the_worker_goes_on(
    deployment: Deployment, site: BehaviourSite
) -> None:
    sent = [
        (deployment.send("probe.text", *args, options={"max_retries": 5}, **kwargs), said)
        for args, kwargs, said in NEVER_SUCCEED
    ]
    unknown = deployment.send("probe.nobody", 1)
    no_url = deployment.send("probe.text", "not a url")
    good = deployment.send("probe.text", f"{site.url}/cookie/get")
    with deployment.worker() as worker:
        for message, said in sent:
            assert said in deployment.failure(message)
            wait_until(partial(is_rejected, deployment, message), "its only row is closed")
        assert "invalid URL" in deployment.failure(no_url), "Playwright's own error passes"
        assert deployment.result(good) == ""
        assert worker.stop() == 0
    assert f"undefined actor {unknown.actor_name!r}" in worker.log
    assert len(deployment.dead_letters()) == len(sent) + 2
    assert deployment.counts()["browsers_launched"] == 1


def is_rejected(deployment: Deployment, message: Message[Any]) -> bool:
    return [row.outcome for row in deployment.rows(message)] == ["rejected"]


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


def test_a_function_that_cannot_be_an_actor_stops_the_worker_where_it_is_declared(
    deployment: Deployment, tmp_path: Path
) -> None:
    (tmp_path / "actors.py").write_text("from asyncworker import actor\n\n@actor\ndef title(session, url): ...\n")
    code, output = start_and_fail(as_environment(deployment.settings), tmp_path)
    assert code == 2
    assert "title is not async" in output
    assert "use @dramatiq.actor" in output


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


def test_a_folder_of_actors_that_another_package_hides_is_refused_with_the_remedy(
    deployment: Deployment, tmp_path: Path
) -> None:
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "mine.py").touch()
    other = tmp_path / "other" / "actors"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    settings = as_environment(deployment.settings) | {"PYTHONPATH": str(other.parent)}
    code, said = start_and_fail(settings, tmp_path)
    assert code == 2
    assert f"add an empty __init__.py to {tmp_path / 'actors'}" in said


def test_a_wrong_setting_stops_the_worker_and_is_named_without_its_secrets(deployment: Deployment) -> None:
    settings = as_environment(deployment.settings) | {"ASYNCWORKER_PROXY": "http://user:hunter2@nowhere"}
    code, output = start_and_fail(settings, HOME)
    assert code == 2
    assert "ASYNCWORKER_PROXY: a proxy URL names a host and a port" in output
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
    message = deployment.send("probe.text", site.url, options={"max_retries": 0})
    plain = deployment.send("add", 2, 3, queue="plain")
    other = Deployment(deployment.directory, engine="invisible")
    with other.worker(environment={"INVISIBLE_PLAYWRIGHT_CACHE_DIR": str(deployment.directory / "x")}) as worker:
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
