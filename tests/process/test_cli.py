"""The command `asyncworker`, as a shell runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncworker import embedded
from asyncworker.settings import Settings, as_environment, child_environment
from tests.site import BehaviourSite
from tests.waiting import wait_until
from tests.workers import HOME, READY, Deployment


def run(deployment: Deployment, *words: str, cwd: Path = HOME, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in the deployment's directory."""
    return subprocess.run(
        [sys.executable, "-m", "asyncworker", *words],
        cwd=cwd,
        env=child_environment(**(as_environment(deployment.settings) | {"COLUMNS": "250"} | environment)),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def facts(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ended.stdout, ended.stderr
    read: dict[str, Any] = json.loads(ended.stdout)
    return read


@pytest.mark.needs_browser
def test_a_message_is_sent_waited_for_and_its_result_printed(deployment: Deployment, site: BehaviourSite) -> None:
    with deployment.worker() as worker:
        ended = run(
            deployment, "send", "probe.visit", site.product_url(1), "--seed", "42", "-a", "fail=1", "--wait", "--json"
        )
        sent = facts(ended)
        assert ended.returncode == 0
        assert (sent["ok"], sent["error"], sent["seed"], sent["actor"]) == (True, None, 42, "probe.visit")
        assert (sent["result"]["seed"], sent["result"]["attempt"]) == (42, 2)
        failed = run(deployment, "send", "probe.text", "nonsense", "--wait")
        assert failed.returncode == 1
        assert "failed: actor raised Error: Page.goto" in failed.stdout
        assert worker.stop() == 0


def test_a_message_is_sent_with_a_delay_to_a_queue_and_waits_for_a_worker(deployment: Deployment) -> None:
    sent = facts(run(deployment, "send", "probe.text", "x", "--delay", "60000", "--queue", "night", "--json"))
    assert sent["queue"] == "night"
    assert deployment.broker.do_qsize("night") == 1
    alone = run(deployment, "send", "add", "2", "3", "--wait", "--timeout", "300")
    assert alone.returncode == 1
    assert "no worker began it in 300 ms; is one running?" in alone.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["probe.txt", "x"], "this deployment has no actor 'probe.txt'; did you mean probe.text?"),
        (["probe.text"], "missing a required argument: 'url'"),
        (["probe.text", "x", "--seed", "-1"], "-1 is no seed: a seed is an integer from 0 to 2**63-1"),
        (["probe.text", "x", "-a", "colour"], "--arg colour is no name=value"),
    ],
)
def test_what_cannot_be_sent_is_one_sentence(deployment: Deployment, words: list[str], said: str) -> None:
    ended = run(deployment, "send", *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_misspelt_setting_is_one_sentence_with_the_nearest_name(deployment: Deployment) -> None:
    ended = run(deployment, "settings", ASYNCWORKER_HEADLES="false")
    assert ended.returncode == 2
    assert "ASYNCWORKER_HEADLES is no setting; the nearest is ASYNCWORKER_HEADLESS" in ended.stderr


def test_all_settings_are_printed_with_their_source_and_without_secrets(deployment: Deployment) -> None:
    ended = run(deployment, "settings", ASYNCWORKER_PROXY="http://user:hunter2@proxy:8080")
    assert ended.returncode == 0
    assert "hunter2" not in ended.stdout
    shown = facts(run(deployment, "settings", "--json", ASYNCWORKER_PROXY="http://user:hunter2@proxy:8080"))
    assert shown["ASYNCWORKER_PROXY"] == {
        "value": "http://user:***@proxy:8080",
        "source": "environment",
        "default": "",
    }
    assert set(shown) == {f"ASYNCWORKER_{name.upper()}" for name in Settings.model_fields}
    for variable in shown:
        assert variable in ended.stdout


@pytest.mark.needs_browser
def test_up_runs_the_server_and_workers_and_stops_both(
    deployment: Deployment, site: BehaviourSite, tmp_path: Path
) -> None:
    deployment.settings.state_dir.rmdir()
    log = tmp_path / "up.log"
    with log.open("wb") as output:
        up = subprocess.Popen(
            [sys.executable, "-m", "asyncworker", "up", "-p", "1", "-t", "1"],
            cwd=HOME,
            env=child_environment(**as_environment(deployment.settings)),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(lambda: READY in log.read_text(), "the worker is ready", timeout_ms=40_000)
        assert deployment.result(deployment.send("probe.text", f"{site.url}/cookie/get")) == ""
        up.send_signal(signal.SIGTERM)
        assert up.wait(40) == 0, log.read_text()
        assert not embedded.answers(embedded.socket_path(deployment.settings.state_dir))
    finally:
        for process in [*psutil.Process(up.pid).children(recursive=True), up] if up.poll() is None else []:
            process.kill()
        up.wait()


def test_down_stops_the_server_and_says_when_there_was_none(deployment: Deployment) -> None:
    deployment.send("add", 1, 2, queue="plain")
    assert "is stopped" in run(deployment, "down").stdout
    again = run(deployment, "down")
    assert (again.returncode, "was not running" in again.stdout) == (0, True)
    refused = run(deployment, "down", ASYNCWORKER_BROKER_URL="redis://user:hunter2@elsewhere/0")
    assert refused.returncode == 2
    assert "redis://user:***@elsewhere/0, which asyncworker did not start" in refused.stderr


@pytest.mark.needs_browser
def test_doctor_says_with_its_exit_code_whether_a_worker_would_run(deployment: Deployment) -> None:
    well = run(deployment, "doctor", "--json")
    assert well.returncode == 0, well.stdout
    assert facts(well)["would_run"] is True
    ill = run(deployment, "doctor", ASYNCWORKER_EXECUTABLE_PATH="/nowhere/chromium")
    assert ill.returncode == 1
    assert "ASYNCWORKER_EXECUTABLE_PATH" in ill.stdout
    installed = run(deployment, "doctor", "--install")
    assert installed.returncode == 0
    assert "chromium at" in installed.stderr


def test_the_command_starts_without_a_browser_library() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "asyncworker", "--help"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "demo" in ended.stdout
    assert not {"playwright", "invisible_playwright"} & {
        line.rpartition("|")[2].strip().partition(".")[0] for line in ended.stderr.splitlines()
    }
