"""Temporary directories end with what they were made for, and with a worker that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncworker import scratch
from tests.site import BehaviourSite
from tests.waiting import wait_until
from tests.workers import Deployment


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "t"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


def test_only_what_dead_processes_left_is_swept(temporary: Path) -> None:
    program = "from asyncworker import scratch; d = scratch.make(); (d / 'profile').mkdir(); print(d)"
    left = Path(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    )
    mine, other, strange = scratch.make(), temporary / "other", temporary / "aw-not-one-of-ours"
    other.mkdir()
    strange.mkdir()
    assert left.is_dir()
    assert scratch.sweep() == 1
    assert sorted(temporary.iterdir()) == sorted([mine, other, strange])
    scratch.remove(mine)
    assert not mine.exists()


@pytest.mark.needs_browser
def test_a_stopped_worker_leaves_no_temporary_file_and_a_killed_ones_are_removed_by_the_next(
    temporary: Path, deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        assert list(temporary.glob("aw-*-*"))
        for pid in worker.workers:
            os.kill(pid, signal.SIGKILL)
    assert list(temporary.glob("aw-*-*"))
    with deployment.worker() as worker:
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        wait_until(lambda: len(list(temporary.glob("aw-*-*"))) <= 1, "what the killed worker left is removed")
        assert worker.stop() == 0
    wait_until(lambda: not list(temporary.glob("aw-*-*")), "nothing is left")
