"""Each version of Celery that the extra allows, in an environment of its own, beside what else is installed here."""

from __future__ import annotations

import logging
import subprocess
import sys
import sysconfig
from pathlib import Path

import celery
import pytest

from asyncworker.celery import serving
from asyncworker.settings import child_environment
from tests.readme import ROOT

#: What each version has to pass: signals, hooks, states and results beside its own worker's; lost workers; a chord.
TESTS = ("tests/celery/test_differential.py", "tests/celery/test_lost.py", "tests/celery/test_worker.py")

#: Older versions call what the present redis deprecates; that is theirs.
IGNORED = ("-W", "ignore::DeprecationWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning")


def test_a_newer_celery_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def warnings(version: str) -> list[str]:
        caplog.clear()
        monkeypatch.setattr(celery, "__version__", version)
        with caplog.at_level(logging.WARNING, serving.logger.name):
            serving._warn([])
        return caplog.messages

    assert warnings("5.8.0rc1") == ["Celery 5.8.0rc1 is newer than what asyncworker was tested with: 5.4 to 5.7"]
    assert warnings("6.0.0") != []
    assert warnings("5.7.3") == warnings("5.4.0") == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["5.4", "5.5", "5.6", "5.7"])
def test_each_version_is_served(tmp_path: Path, version: str) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=120)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, f"celery=={version}.*"], check=True, timeout=300)
    # What is missing there is found here.
    place = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")})
    Path(place, "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ran = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *IGNORED, *TESTS],
        cwd=ROOT,
        env=child_environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8_000:]
