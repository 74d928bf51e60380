"""`asyncworker reap`: what dead workers left is shown, killed and removed, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from asyncworker import processes, scratch
from asyncworker.cli import app
from asyncworker.processes import Token, lives, new_token
from asyncworker.settings import as_environment, child_environment
from tests import namespaces
from tests.hung import suspend
from tests.site import BehaviourSite
from tests.waiting import BUSY_S, wait_until
from tests.workers import HOME, Deployment

Start = Callable[[Token | None], subprocess.Popen[bytes]]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A namespace and a directory of the test's own, which no other worker on this machine sweeps."""
    name = f"test{os.getpid()}"
    monkeypatch.setattr(processes, "_namespace", lambda: name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return name


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that carries a token, with a helper that has overwritten its environment."""
    started: list[subprocess.Popen[bytes]] = []

    def start(token: Token | None) -> subprocess.Popen[bytes]:
        environment = child_environment() | ({processes.VARIABLE: str(token)} if token else {})
        process = subprocess.Popen(
            ["sh", "-c", "env -i sleep 60 & echo up; wait"],
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def of_a_dead_owner(role: str = "browser") -> Token:
    mine = new_token(role)
    return replace(mine, born=mine.born - 1)


def reap(*words: str, code: int = 0) -> dict[str, Any]:
    ended = CliRunner().invoke(app, ["reap", "--json", *words], catch_exceptions=False)
    assert ended.exit_code == code, ended.output
    read: dict[str, Any] = json.loads(ended.stdout)
    return read


@pytest.mark.usefixtures("alone")
def test_a_dry_run_shows_what_dead_workers_left_and_touches_nothing(start: Start) -> None:
    driver, browser = start(of_a_dead_owner("driver")), start(of_a_dead_owner())
    found = reap("--dry-run")
    shown = found["processes"]
    assert {each["pid"] for each in shown} >= {driver.pid, browser.pid}
    assert len(shown) == 4, "the helpers too, whose token cannot be read"
    assert sorted(each["role"] for each in shown) == ["browser", "browser", "driver", "driver"]
    assert {each["owner"] for each in shown} == {os.getpid()}
    assert all(each["memory_bytes"] > 0 and 0 <= each["age_ms"] < 60_000 for each in shown)
    assert (found["killed"], found["removed"], found["dry_run"]) == (0, 0, True)
    assert all(lives(each["pid"]) for each in shown)
    table = CliRunner().invoke(app, ["reap", "--dry-run"]).stdout
    assert table.split()[:5] == ["pid", "role", "owner", "age", "memory"]
    assert "4 processes would be killed, 0 directories removed" in table


@pytest.mark.usefixtures("alone")
def test_only_what_dead_workers_left_is_killed(start: Start) -> None:
    condemned = start(of_a_dead_owner())
    spared = {
        "a living owner's": start(new_token()),
        "another namespace's": start(replace(of_a_dead_owner(), namespace="4026530000")),
        "an installation's": start(of_a_dead_owner("install")),
        "no one's": start(None),
    }
    assert reap()["killed"] == 2
    assert condemned.wait() == -signal.SIGKILL
    assert {whose for whose, process in spared.items() if process.poll() is not None} == set()
    assert reap() == {
        "dry_run": False, "processes": [], "directories": [], "killed": 0, "removed": 0, "left": [], "kept": []
    }  # fmt: skip
    assert "no worker left anything" in CliRunner().invoke(app, ["reap"]).stdout


def test_directories_of_dead_workers_are_removed_and_no_others(alone: str, tmp_path: Path) -> None:
    mine = scratch.make()
    left = tmp_path / f"aw-{alone}-{os.getpid()}-1-abcdefgh"
    other = tmp_path / f"aw-elsewhere-{os.getpid()}-1-abcdefgh"
    for directory in (left, other):
        (directory / "profile").mkdir(parents=True)
    assert reap("--dry-run")["directories"] == [{"path": str(left), "owner": os.getpid()}]
    assert left.is_dir()
    assert reap()["removed"] == 1
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])
    scratch.remove(mine)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_killed_is_named_and_the_exit_code_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(of_a_dead_owner())

    def refuse(condemned: psutil.Process) -> None:
        raise psutil.AccessDenied(condemned.pid)

    monkeypatch.setattr(psutil.Process, "kill", refuse)
    assert process.pid in reap(code=1)["left"]
    ended = CliRunner().invoke(app, ["reap"])
    assert ended.exit_code == 1
    assert f"process {process.pid}" in ended.stdout.splitlines()[-1]


@pytest.mark.needs_browser
def test_after_messages_that_never_answer_a_killed_workers_tree_is_reaped_whole(
    deployment: Deployment, site: BehaviourSite
) -> None:
    """In a namespace of its own, where no other worker sweeps."""
    namespaces.needed()
    messages = [deployment.send("probe.stuck", f"{site.url}/never") for _ in range(20)]
    with namespaces.namespace() as init:
        entering = namespaces.entering(init, HOME)
        with deployment.worker(within=entering) as worker:
            assert all("TimeLimitExceeded" in deployment.failure(message) for message in messages)
            (command,) = psutil.Process(worker.command.pid).children()
            (process,) = command.children()
            tree = _stopped_below(process)  # else the driver sees that its worker is gone, and closes its browser
            killed_at = time.monotonic()
            process.kill()
            wait_until(lambda: not command.is_running(), "dramatiq has ended")
            left = [member for member in tree if lives(member.pid)]
            assert len(left) > 2  # some of the tree were ending when they were stopped
            found = _reap_within(deployment, entering, "--dry-run")
            assert len(found["processes"]) == len(left)
            assert {each["role"] for each in found["processes"]} == {"driver", "browser"}
            done = _reap_within(deployment, entering)
            assert (done["killed"], done["left"]) == (len(left), [])
            assert done["removed"] >= 1
            assert not [member for member in left if lives(member.pid)]
            assert time.monotonic() - killed_at < 5 + 2 * BUSY_S, "5 s, and two starts of Python on a busy machine"


def _stopped_below(process: psutil.Process) -> list[psutil.Process]:
    """All that is below a process, stopped; what was being started meanwhile, too."""
    stopped: list[psutil.Process] = []
    while new := [each for each in process.children(recursive=True) if each not in stopped]:
        stopped += suspend(new)
    return stopped


def _reap_within(deployment: Deployment, entering: list[str], *words: str) -> dict[str, Any]:
    ended = subprocess.run(
        [*entering, sys.executable, "-m", "asyncworker", "reap", "--json", *words],
        cwd=HOME,
        env=child_environment(**as_environment(deployment.settings)),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    read: dict[str, Any] = json.loads(ended.stdout)
    return read
