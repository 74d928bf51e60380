"""What the tiers share: places that clean up after themselves, and the proof that nothing is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing.resource_tracker
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings

from asyncworker import embedded, processes
from asyncworker.engines.finding import find
from asyncworker.errors import AsyncworkerError
from asyncworker.settings import load

#: Tiers whose tests start processes.
TIERS_WITH_PROCESSES = ("browser", "celery", "process", "worker")

#: How long what is ending may take to have ended.
LEFTOVERS_TIMEOUT_S = 5.0

#: Inherited by everything that these tests start, at any depth: a process that carries it is theirs, also when it
#: has left the tree of this one. Tests may run in several processes at once, each with a mark of its own: what one
#: of them has started is no leftover of another's.
MARK = "_ASYNCWORKER_TESTS"

#: Carried by what a fixture of a wider scope ends, although it may have been started anew during a test.
SHARED = "_ASYNCWORKER_TESTS_SHARED"


# No test here is about how long an example takes, and beside other tests any may take long. The phase that explains a
# failure traces each line of every example, also where all pass.
settings.register_profile(
    "patient",
    settings(),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell without job control starts what ends with & like this, and all that is started here would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so does `nohup`
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ[MARK] = f"{os.getpid()}.{secrets.token_hex(8)}"  # noqa: TID251 -- tests are no part of the package


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_browser") is not None and (reason := _no_browser()) is not None:
        missing(reason)


def missing(what: str) -> NoReturn:
    """Skip for want of `what`, but not where it must be there: in CI."""
    if os.environ.get("CI", "").lower() == "true":  # noqa: TID251 -- tests are no part of the package
        pytest.fail(f"{what}; in CI that is a failure", pytrace=False)
    pytest.skip(what)


@cache
def _no_browser() -> str | None:
    try:
        found = find(load({"ASYNCWORKER_ENGINE": "chromium"}))
    except AsyncworkerError as error:
        return str(error)
    return None if found else "no Chromium on this machine: `asyncworker doctor --install --engine chromium` gets one"


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A directory whose path is short enough for a socket; an embedded server in it is stopped afterwards."""
    yield from _temporary_state_dir()


@pytest.fixture(scope="module")
def module_state_dir() -> Iterator[Path]:
    """The same, for all tests of a module."""
    yield from _temporary_state_dir()


def _temporary_state_dir() -> Iterator[Path]:
    if embedded.binary() is None:
        missing("no Valkey or Redis server on this machine")
    directory = Path(tempfile.mkdtemp(prefix="aw-")).resolve()
    try:
        yield directory
        embedded.stop(directory)
        _end_servers_below(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _end_servers_below(directory: Path) -> None:
    """A server overwrites its environment, so it is found by where it works: in a directory of the test's own."""
    deadline = time.monotonic() + LEFTOVERS_TIMEOUT_S
    while left := [process for process in psutil.process_iter() if _works_below(process, directory)]:
        if time.monotonic() >= deadline:
            named = [_described(process) for process in left]
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            pytest.fail("processes in the state directory were left over:\n" + "\n".join(named), pytrace=False)
        time.sleep(0.05)


def _works_below(process: psutil.Process, directory: Path) -> bool:
    try:
        return process.pid != os.getpid() and Path(process.cwd()).is_relative_to(directory)
    except (psutil.Error, OSError):
        return False


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of these tiers ends every process that it started: it fails when one is still there 5 s later."""
    if request.path.parent.name not in TIERS_WITH_PROCESSES:
        yield
        return
    multiprocessing.resource_tracker.ensure_running()  # its process stays until this one ends, and is no test's
    before, directories_before = _ours(), _scratch()
    yield
    deadline = time.monotonic() + LEFTOVERS_TIMEOUT_S
    while left := {one: what for one, what in _ours().items() if one not in before}:
        if time.monotonic() >= deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            pytest.fail(f"{len(left)} processes were left over:\n" + "\n".join(left.values()), pytrace=False)
        time.sleep(0.05)
    while directories := _scratch() - directories_before:
        if time.monotonic() >= deadline:
            pytest.fail(f"temporary directories were left over: {directories}", pytrace=False)
        time.sleep(0.05)


def _scratch() -> set[Path]:
    """The temporary directories of this process's drivers."""
    return set(Path(tempfile.gettempdir()).glob(f"aw-*-{os.getpid()}-*"))


def _ours() -> dict[psutil.Process, str]:
    """Everything below this process, zombies too, and everything anywhere that these tests have started."""
    mine = processes.new_token()
    carriers = processes.carriers(lambda token: (token.pid, token.born) == (mine.pid, mine.born))
    found = {*psutil.Process().children(recursive=True), *carriers, *_marked()}
    return {process: _described(process) for process in found if process.pid != os.getpid() and not _is_shared(process)}


def _is_shared(process: psutil.Process) -> bool:
    try:
        return SHARED in process.environ()
    except (psutil.Error, OSError):
        return False


def _marked() -> Iterator[psutil.Process]:
    mark = os.environ[MARK]  # noqa: TID251 -- tests are no part of the package
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                yield process
        except (psutil.Error, OSError):
            continue


def _described(process: psutil.Process) -> str:
    try:
        return f"  {process.pid} ({process.status()}, {process.name()}) {' '.join(process.cmdline())[:200]}"
    except psutil.Error as error:
        return f"  {process.pid} ({type(error).__name__})"
