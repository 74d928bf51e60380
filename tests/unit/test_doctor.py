"""What the doctor looks at, what it says, and that it changes nothing."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from rich.console import Console

from asyncworker import broker_checks as checks
from asyncworker import doctor, embedded
from asyncworker.broker_checks import Check, State, broker_checks, clock
from asyncworker.doctor import examine, would_run
from asyncworker.settings import Settings, load
from asyncworker.urls import SecretUrl

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "browsers"))
    monkeypatch.setenv("INVISIBLE_PLAYWRIGHT_CACHE_DIR", str(tmp_path / "invisible"))
    for variable in ("DISPLAY", "WAYLAND_DISPLAY", "INVPW_TRUE_HEADLESS", "INVISIBLE_PLAYWRIGHT_ENGINE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    return folder


def program(folder: Path, name: str, text: str = "exit 0") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    if embedded.binary() is None:
        if os.environ.get("CI"):  # noqa: TID251
            pytest.fail("no Valkey or Redis server on this machine")
        pytest.skip("no Valkey or Redis server on this machine")
    folder = tmp_path_factory.mktemp("valkey")
    client = redis.Redis(unix_socket_path=str(embedded.ensure(folder)))
    try:
        yield client
    finally:
        client.close()
        embedded.stop(folder)


@pytest.fixture
def server(running_server: redis.Redis) -> Iterator[redis.Redis]:
    yield running_server
    running_server.config_set("requirepass", "")
    running_server.config_set("maxmemory-policy", "noeviction")


def url_of(client: redis.Redis, password: str = "") -> SecretUrl:
    path = client.connection_pool.connection_kwargs["path"]
    return SecretUrl(f"unix://:{password}@{path}" if password else f"unix://{path}")


def settings(**values: Any) -> Settings:
    return load({}, **values)


def one(checks: Iterator[Check], name: str) -> Check:
    [check] = [check for check in checks if check.name == name]
    return check


def test_a_machine_that_has_everything_runs_a_worker_and_nothing_is_changed_on_it(
    tmp_path: Path, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bin_folder, "chromium-headless-shell")
    (tmp_path / "actors.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    checks = examine(settings(engine="chromium", broker_url=None))
    assert [check for check in checks if check.state is State.failed] == []
    assert would_run(checks)
    assert {"python", "packages", "engine", "descriptors", "broker", "actors", "init"} <= {c.name for c in checks}
    assert sorted(tmp_path.rglob("*")) == before


def test_a_warning_does_not_keep_a_worker_from_running_and_a_failure_does() -> None:
    assert would_run([Check("a", State.ok, ""), Check("b", State.warning, "", "do")])
    assert not would_run([Check("a", State.ok, ""), Check("b", State.failed, "", "do")])


def test_a_check_is_told_as_json() -> None:
    facts = json.loads(json.dumps(Check("screen", State.failed, "none", "get one").facts()))
    assert facts == {"name": "screen", "state": "failed", "detail": "none", "remedy": "get one"}


def test_each_check_that_is_not_ok_is_printed_with_its_remedy() -> None:
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    checks = [
        Check("fine", State.ok, "all [is] well", "not needed"),
        Check("odd", State.warning, "hm", "look"),
        Check("bad", State.failed, "no", "`mend it`"),
    ]
    doctor.render(checks, console)
    text = console.export_text()
    console.file.close()
    assert "all [is] well" in text
    assert "not needed" not in text
    assert "→ look" in text
    assert "→ `mend it`" in text


@pytest.mark.parametrize("engine", ["invisible", "chromium", "firefox", "webkit"])
def test_a_missing_engine_is_reported_with_the_command_that_installs_it(bin_folder: Path, engine: str) -> None:
    check = doctor._engine(settings(engine=engine))
    assert (check.state, check.detail) == (State.failed, f"no {engine} on this machine")
    assert check.remedy == f"`ASYNCWORKER_ENGINE={engine} asyncworker doctor --install`"


def test_another_browser_does_not_make_a_missing_engine_good(bin_folder: Path) -> None:
    program(bin_folder, "chromium")
    assert doctor._engine(settings()).state is State.failed


def test_an_executable_that_is_not_there_is_reported_with_its_setting(bin_folder: Path) -> None:
    check = doctor._engine(settings(engine="chromium", executable_path=bin_folder / "none"))
    assert check.state is State.failed
    assert "ASYNCWORKER_EXECUTABLE_PATH" in check.detail


def test_a_headless_shell_that_shall_show_windows_is_a_warning(bin_folder: Path) -> None:
    shell = program(bin_folder, "chromium-headless-shell")
    check = doctor._engine(settings(engine="chromium", executable_path=shell, headless=False))
    assert check.state is State.warning


def test_a_remote_browser_is_asked_whether_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        url = f"ws://127.0.0.1:{port}/?token=hunter2"
        assert doctor._engine(settings(engine="remote", endpoint=url)).state is State.ok
    check = doctor._engine(settings(engine="remote", endpoint=url))
    assert check.state is State.failed
    assert str(port) in check.detail
    assert "hunter2" not in check.detail


@linux_only
def test_the_patched_firefox_needs_xvfb_unless_it_is_truly_headless(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = one(doctor._screen(settings()), "screen")
    assert check.state is State.failed
    assert "apt-get install xvfb" in (check.remedy or "")
    monkeypatch.setenv("INVPW_TRUE_HEADLESS", "1")
    assert list(doctor._screen(settings())) == []
    monkeypatch.delenv("INVPW_TRUE_HEADLESS")
    program(bin_folder, "Xvfb")
    assert one(doctor._screen(settings()), "screen").state is State.ok


@linux_only
def test_a_browser_with_windows_needs_a_screen(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_windows = settings(engine="chromium", headless=False)
    check = one(doctor._screen(with_windows), "screen")
    assert check.state is State.failed
    assert "DISPLAY" in check.detail
    assert "xvfb-run" in (check.remedy or "")
    monkeypatch.setenv("DISPLAY", ":7")
    assert one(doctor._screen(with_windows), "screen").state is State.ok
    assert list(doctor._screen(settings(engine="chromium"))) == []


@linux_only
def test_chromium_as_root_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check = one(doctor._sandbox(settings(engine="chromium")), "sandbox")
    assert check.state is State.warning
    assert "--no-sandbox" in check.detail
    assert list(doctor._sandbox(settings(engine="firefox"))) == []


@linux_only
@pytest.mark.parametrize(("answer", "state"), [("exit 0", State.ok), ("exit 1", State.warning)])
def test_a_sandbox_that_cannot_work_is_a_warning(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, state: State
) -> None:
    program(bin_folder, "unshare", answer)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert one(doctor._sandbox(settings(engine="chromium")), "sandbox").state is state


@linux_only
def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_SHARED_MEMORY", 2**62)
    check = one(doctor._shared_memory(settings()), "shared memory")
    assert check.state is State.warning
    assert "--shm-size" in (check.remedy or "")
    monkeypatch.setattr(doctor, "ENOUGH_SHARED_MEMORY", 1)
    assert one(doctor._shared_memory(settings()), "shared memory").state is State.ok


def test_few_descriptors_are_a_warning() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        check = doctor._descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check.state is State.warning
    assert "512" in check.detail
    assert check.remedy is not None
    assert "ulimit -n" in check.remedy


@linux_only
def test_whoever_does_not_reap_orphans_is_named() -> None:
    """A process that adopts orphans (as process 1 does) and reaps none looks at itself."""
    program = (
        "import ctypes, psutil; from asyncworker import doctor\n"
        "assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER\n"
        "doctor.REAPING_TIMEOUT_MS = 500\n"
        "print(doctor._reaping(doctor._orphan()).state.value, psutil.Process().children(), psutil.Process().pid)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("warning [] ")  # and it left no zombie of its own behind


def test_an_orphan_that_is_reaped_is_fine() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert doctor._reaping(gone.pid).state is State.ok


def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_playwright(package: str) -> str:
        if package == "playwright":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr("importlib.metadata.version", without_playwright)
    check = doctor._packages(settings())
    assert check.state is State.failed
    assert "not installed: playwright" in check.detail
    assert "pip install playwright" in (check.remedy or "")


def test_the_packages_are_told_with_their_versions() -> None:
    check = doctor._packages(settings())
    assert check.state is State.ok
    assert f"dramatiq {version('dramatiq')}" in check.detail


def test_a_core_that_invisible_playwright_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda package: ["greenlet>=3", "invisible-core==1.2.3"])
    check = doctor._packages(settings())
    assert check.state is State.failed
    assert "invisible-core==1.2.3" in (check.remedy or "")
    assert doctor._packages(settings(engine="chromium")).state is State.ok


def test_without_a_broker_url_the_embedded_server_is_checked_and_not_started(tmp_path: Path) -> None:
    if embedded.binary() is None:
        pytest.skip("no Valkey or Redis server on this machine")
    folder = tmp_path / "state"
    check = one(broker_checks(settings(state_dir=folder)), "broker")
    assert check.state is State.ok
    assert "started with the first message" in check.detail
    assert not folder.exists()


def test_a_state_directory_that_cannot_be_one_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "binary", lambda: Path("/usr/bin/valkey-server"))
    (tmp_path / "file").touch()
    check = one(broker_checks(settings(state_dir=tmp_path / "file" / "state")), "broker")
    assert check.state is State.failed
    assert "ASYNCWORKER_STATE_DIR" in (check.remedy or "")


def test_no_broker_url_and_no_server_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "binary", lambda: None)
    check = one(broker_checks(settings()), "broker")
    assert check.state is State.failed
    assert "ASYNCWORKER_BROKER_URL" in (check.remedy or "")


def test_a_broker_that_answers_is_fine_and_so_is_its_clock(server: redis.Redis) -> None:
    server.config_set("appendonly", "yes")
    checks = list(broker_checks(settings(broker_url=url_of(server))))
    assert [(check.name, check.state) for check in checks] == [
        ("broker", State.ok),
        ("persistence", State.ok),
        ("clock", State.ok),
    ]
    assert "Valkey" in checks[0].detail or "Redis" in checks[0].detail


def test_a_broker_that_evicts_keys_is_a_warning(server: redis.Redis) -> None:
    server.config_set("maxmemory-policy", "allkeys-lru")
    assert one(broker_checks(settings(broker_url=url_of(server))), "broker").state is State.ok, "nothing is evicted yet"
    server.config_set("maxmemory", "100mb")
    check = one(broker_checks(settings(broker_url=url_of(server))), "broker")
    assert check.state is State.warning
    assert "allkeys-lru" in check.detail
    assert "noeviction" in (check.remedy or "")


def test_a_broker_that_refuses_the_password_is_a_failure_that_does_not_show_it(server: redis.Redis) -> None:
    server.config_set("requirepass", "right")
    check = one(broker_checks(settings(broker_url=url_of(server, "hunter2"))), "broker")
    assert check.state is State.failed
    assert "hunter2" not in f"{check.detail} {check.remedy}"


def test_a_broker_that_is_away_is_a_failure_that_masks_its_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    check = one(broker_checks(settings(broker_url=f"redis://u:hunter2@127.0.0.1:{port}/0")), "broker")
    assert check.state is State.failed
    assert f"redis://u:***@127.0.0.1:{port}/0" in check.detail
    assert "hunter2" not in check.detail


def test_a_broker_that_accepts_and_never_answers_is_a_failure_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncworker.broker_checks.BROKER_TIMEOUT_MS", 200)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        check = one(broker_checks(settings(broker_url=url)), "broker")
    assert check.state is State.failed
    assert "imeout" in check.detail


class Clock(redis.Redis):
    """A broker whose clock is off; it answers at once."""

    NOW = 1_700_000_000

    def __init__(self, off_by_s: float) -> None:
        self._off_by_s = off_by_s

    def time(self) -> Any:
        return int(self.NOW + self._off_by_s), 0


@pytest.mark.parametrize(
    ("off_by_s", "state", "word"),
    [(0.0, State.ok, "agrees"), (5.0, State.warning, "5.0 s behind"), (-5.0, State.warning, "5.0 s ahead")],
)
def test_a_clock_that_differs_from_the_brokers_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, off_by_s: float, state: State, word: str
) -> None:
    monkeypatch.setattr(checks, "time", SimpleNamespace(time=lambda: float(Clock.NOW)))
    check = clock(Clock(off_by_s))
    assert check.state is state
    assert word in check.detail


def test_actors_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shop_actors"
    (package / "inner").mkdir(parents=True)
    for file in (package / "__init__.py", package / "inner" / "__init__.py", package / "inner" / "pages.py"):
        file.write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    for name in ("shop_actors", "shop_actors.inner", "shop_actors.inner.pages"):
        check = doctor._actors(name)
        assert check.state is State.ok
        assert str(package) in check.detail
    for name in ("shop_actor", "shop_actors.outer", "shop_actors.inner.pages.more"):
        check = doctor._actors(name)
        assert check.state is State.failed
        assert name in check.detail
        assert "ASYNCWORKER_ACTORS" in (check.remedy or "")
    assert not [name for name in sys.modules if name.startswith("shop_actors")]
