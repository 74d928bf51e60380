"""`asyncworker demo`: everything adds up, and nothing is left, also on Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncworker.settings import child_environment
from tests.site import BehaviourSite
from tests.standin import Standin
from tests.standin.fixtures import bridged_standin
from tests.waiting import wait_until

__all__ = ["bridged_standin"]

pytestmark = pytest.mark.needs_browser

KEYS = {
    "messages",
    "succeeded",
    "failed",
    "browsers_launched",
    "contexts_opened",
    "contexts_closed",
    "seeds",
    "median_ms",
    "results",
}


@contextlib.contextmanager
def demo(directory: Path, *options: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo in a process group of its own; its temporary files are below `directory`."""
    with subprocess.Popen(
        [sys.executable, "-m", "asyncworker", "demo", *options],
        env=child_environment(TMPDIR=str(directory), COLUMNS="200") | variables,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            yield running
        finally:
            if running.poll() is None:  # the test failed: let it clean up, as on Ctrl-C
                running.send_signal(signal.SIGINT)


def said_by(directory: Path, *options: str, **variables: str) -> tuple[int, str, str]:
    """Run the demo to its end: exit code, stdout, stderr."""
    with demo(directory, *options, **variables) as running:
        out, err = running.communicate(timeout=110)
        return running.returncode, out, err


def test_the_demo_accounts_for_every_message_and_context(state_dir: Path) -> None:
    code, out, err = said_by(state_dir, "--engine", "chromium", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert set(facts) == KEYS
    assert (facts["messages"], facts["succeeded"], facts["failed"]) == (40, 40, 0)
    assert facts["browsers_launched"] == 2, "one was killed on purpose"
    assert facts["contexts_opened"] == facts["contexts_closed"] >= 40
    assert len(facts["seeds"]) == 1
    assert facts["median_ms"] > 0
    assert {row["title"] for row in facts["results"]}.isdisjoint({None, ""})
    assert "killed the browser on purpose" in err
    assert list(state_dir.iterdir()) == []


def test_the_demo_goes_to_the_users_own_addresses(state_dir: Path) -> None:
    with BehaviourSite() as site:
        options = ["--url", site.product_url(1), "--url", site.product_url(2)]
        code, out, err = said_by(state_dir, "--engine", "chromium", *options)
        assert code == 0, out + err
        assert site.requests["/products/1"] == 1
        assert site.product(2).title in out
    assert "2 messages, 2 succeeded" in out


def test_an_address_that_does_not_answer_fails_the_demo_and_says_which(state_dir: Path) -> None:
    with BehaviourSite() as site:
        gone = site.url
    code, out, err = said_by(state_dir, "--engine", "chromium", "--url", "ftp://nowhere/", "--url", f"{gone}/x")
    assert code == 1, out + err
    assert "not as it should be: ftp://nowhere/" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_and_no_file(state_dir: Path, number: signal.Signals) -> None:
    with demo(state_dir, "--engine", "chromium") as running:
        wait_until(lambda: list(state_dir.glob("*/worker.log")), "the worker was started", timeout_ms=60_000)
        log = next(state_dir.glob("*/worker.log"))
        wait_until(lambda: "is up after" in log.read_text(), "the browser is up", timeout_ms=60_000)
        os.killpg(running.pid, number)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert list(state_dir.iterdir()) == []


def test_an_engine_that_is_missing_is_a_sentence(state_dir: Path) -> None:
    code, out, err = said_by(state_dir, "--engine", "netscape")
    assert code == 2
    assert "there is no engine 'netscape'; there are auto, invisible, chromium" in err
    assert "Traceback" not in out + err


@pytest.mark.long
def test_the_demo_adds_up_on_the_engine_invisible_too(bridged_standin: Standin, tmp_path: Path) -> None:
    place = {"ASYNCWORKER_LOCALE": "de-DE", "ASYNCWORKER_TIMEZONE": "Europe/Berlin"}
    (directory := tmp_path / "demo").mkdir()
    code, out, err = said_by(directory, "--engine", "invisible", "--json", **place)
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["messages"], facts["succeeded"], facts["failed"]) == (40, 40, 0)
    assert facts["browsers_launched"] == 2
    assert facts["contexts_opened"] == facts["contexts_closed"]
    assert len(bridged_standin.launches()) == 3, "the demo tries its engine once before it begins"
    assert list(directory.iterdir()) == []
