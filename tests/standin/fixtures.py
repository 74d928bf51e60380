"""Fixtures for tests that launch the stand-in from their own process: import `standin` into a conftest or a test."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncworker.settings import leave_invisible_core_alone
from tests.standin.tree import Standin, build_tree
from tests.waiting import wait_until

#: What would send the client elsewhere, when it is set.
_FOREIGN = ("INVISIBLE_SEAL_FILE", "NO_PROXY", "no_proxy", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY")

#: How long an engine may take to end, and its temporary files to be gone, after the test.
_LEFTOVERS_TIMEOUT_MS = 5_000


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    """A stand-in engine that this process launches.

    The test fails when it leaves one running, or a temporary file. What closes its browsers must itself ask for this
    fixture, so that it is done before.
    """
    yield from _built(tmp_path, monkeypatch, bridged=False)


@pytest.fixture
def bridged_standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    """The same with a headless Chromium behind it; a test that asks for it is marked needs_browser."""
    yield from _built(tmp_path, monkeypatch, bridged=True)


def _built(directory: Path, monkeypatch: pytest.MonkeyPatch, *, bridged: bool) -> Iterator[Standin]:
    leave_invisible_core_alone()
    built = build_tree(directory, bridged=bridged)
    for name in _FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in built.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(built.temporary_directory))
    engines = _recorded(monkeypatch)
    yield built
    _ended(engines)
    left = built.temporary_directory
    wait_until(lambda: not list(left.iterdir()), f"no file is left in {left}", timeout_ms=_LEFTOVERS_TIMEOUT_MS)


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The engines that the client starts from now on.

    It leaves the pipe of an engine's output to the garbage collector, and with it a ResourceWarning to some other
    test.
    """
    from invisible_core.juggler import connection

    engines: list[subprocess.Popen[bytes]] = []
    spawn = connection._spawn_posix

    def recording(*arguments: Any) -> Any:
        spawned = spawn(*arguments)
        engines.append(spawned[2])
        return spawned

    monkeypatch.setattr(connection, "_spawn_posix", recording)
    return engines


def _ended(engines: list[subprocess.Popen[bytes]]) -> None:
    try:
        wait_until(
            lambda: all(engine.poll() is not None for engine in engines),
            "every engine that the test launched has ended",
            timeout_ms=_LEFTOVERS_TIMEOUT_MS,
        )
    finally:
        for engine in engines:
            engine.kill()  # does nothing to one that has ended
            engine.wait()
            assert engine.stdout is not None
            engine.stdout.close()
