"""benchmarks/broker.py, with real workers and servers: what it prints was measured, and nothing is left of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncworker.settings import child_environment
from tests.scripts import interrupt, status

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "broker.py"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The script, whose temporary files lie in `folder`."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--quick", "--json", "--threads", "2", *words],
        env=child_environment(TMPDIR=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@pytest.mark.long
def test_the_broker_benchmark_measures_what_is_installed_and_names_what_is_not(tmp_path: Path) -> None:
    running = start(
        tmp_path,
        *("--systems", "plain,arq,ours", "--only", "pickup,drain,enqueue,memory", "--messages", "200"),
        *("--delayed", "50"),
    )
    out, err = running.communicate(timeout=100)
    assert running.returncode == 0, out + err
    found = json.loads(out)
    assert found["ok"] is True
    assert found["not_measured"] == {"arq": "not installed"}
    assert set(found["systems"]) == {"plain", "ours"}
    for name, figures in found["systems"].items():
        assert figures["pickup_ms"]["p50"] > 0, name
        assert figures["drain_per_s"]["median"] > 0, name
        assert figures["enqueue_per_s"]["median"] > 0, name
        assert figures["rss_mb"]["delayed_messages"] == 50, name
    assert found["systems"]["ours"]["pickup_ms"]["p50"] < found["systems"]["plain"]["pickup_ms"]["p50"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [("--only", "drain", "--messages", "1000000"), ("--only", "memory", "--delayed", "1000000")],
    ids=["while a worker is stopped", "while a producer sends"],
)
def test_the_broker_benchmark_ends_what_it_started_on_ctrl_c(words: tuple[str, ...], tmp_path: Path) -> None:
    running = start(tmp_path, "--systems", "ours", *words)

    def is_in_the_middle(seen: set[psutil.Process]) -> bool:
        if words[1] == "drain":
            return any(status(process) == psutil.STATUS_STOPPED for process in seen)
        return any("_producer.py" in " ".join(command(process)) for process in seen)

    seen = interrupt(running, is_in_the_middle, "the benchmark is in the middle", timeout_ms=60_000, end_s=30)
    assert len(seen) >= 3
    assert list(tmp_path.iterdir()) == []
