"""benchmarks/chaos.py, one minute of it with a fixed seed: every promise is kept, and nothing is left of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncworker.settings import child_environment
from tests.scripts import interrupt, status

pytestmark = pytest.mark.needs_browser

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "chaos.py"

SEED = 5
MINUTES = 0.8


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The script, whose temporary files lie in `folder`; it is slow there, so times are not asserted."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--json", "--busy", "--rate", "3", "--seed", str(SEED), *words],
        env=child_environment(TMPDIR=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory whose path is short: a Chromium puts a socket below it."""
    with tempfile.TemporaryDirectory(prefix="c-") as folder:
        yield Path(folder)


@pytest.mark.timeout(420)
def test_a_minute_of_chaos_loses_no_message_doubles_no_effect_and_leaves_no_process(
    temporary: Path, tmp_path: Path
) -> None:
    running = start(temporary, "--minutes", str(MINUTES), "--logs", str(tmp_path / "logs"))
    try:
        out, err = running.communicate(timeout=400)
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGINT)
            running.wait(70)
    assert running.returncode == 0, out + err
    found = json.loads(out)
    assert found["ok"] is True
    assert found["broken"] == []
    assert found["sent"] > 50
    done = set(found["faults"])
    assert {"kill worker", "kill browser", "kill driver", "kill page", "kill store", "freeze worker"} <= done
    assert list(temporary.iterdir()) == []


@pytest.mark.timeout(180)
@pytest.mark.long
def test_chaos_that_is_interrupted_ends_all_that_it_started_also_what_is_frozen(temporary: Path) -> None:
    running = start(temporary, "--minutes", "5")
    interrupt(
        running,
        lambda seen: any(status(one) == psutil.STATUS_STOPPED for one in seen),
        "something is frozen",
        timeout_ms=100_000,
        end_s=70,
    )
    assert list(temporary.iterdir()) == []
