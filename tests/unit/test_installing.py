"""Getting a browser: what is taken, what is tried in which order, and what is said when nothing works.

Python, apt-get and the browsers are stand-ins here, scripts on a PATH of the test's own; a real download
and real browsers are in tests/browser.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncworker.engines.finding import Found
from asyncworker.errors import EngineMissing
from asyncworker.installing import install, install_any
from asyncworker.settings import EngineName, Settings, load

Said = list[str]


class Machine:
    """An empty machine whose commands write down how they were called, and fail unless told otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        (folder / "bin").mkdir()
        self.command("python", "exit 1")
        self.said: Said = []

    def command(self, name: str, then: str) -> Path:
        return self.program(name, f'echo "{name} $*" >> {self.log}\n{then}')

    def program(self, name: str, text: str = "exit 0") -> Path:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def making(self, name: str) -> str:
        """Shell text that puts a program on this machine."""
        path = self.folder / "bin" / name
        return f'printf "#!/bin/sh\\n" > {path}; /bin/chmod +x {path}'

    def downloading(self, name: str) -> str:
        """Shell text that completes one of Playwright's downloads."""
        from asyncworker.engines import finding

        package = finding._playwright_package()
        assert package is not None
        folder = self.folder / "browsers" / next(finding._folders(package, name))
        return f"/bin/mkdir -p {folder}; : > {folder}/INSTALLATION_COMPLETE"

    @property
    def calls(self) -> list[str]:
        """What was called, apt-get without its options."""
        lines = self.log.read_text().splitlines()
        return [" ".join(w for w in line.split() if "::" not in w and w not in ("-q", "-y", "-o")) for line in lines]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "browsers"))
    monkeypatch.setenv("INVISIBLE_PLAYWRIGHT_CACHE_DIR", str(tmp_path / "invisible"))
    monkeypatch.delenv("INVISIBLE_PLAYWRIGHT_ENGINE_DIR", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    return machine


@pytest.fixture
def root(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    machine.command("apt-get", 'echo "E: no network"; exit 100')
    return machine


@pytest.fixture
def nobody(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    machine.command("apt-get", "exit 0")
    return machine


def settings(**values: Any) -> Settings:
    return load({}, **values)


def starts(settings: Settings) -> str | None:
    return None


def starts_when(condition: Callable[[], bool]) -> Callable[[Settings], str | None]:
    return lambda settings: None if condition() else "libnss3.so: cannot open shared object file"


def test_a_browser_that_is_there_and_starts_is_taken_and_nothing_else_is_tried(root: Machine) -> None:
    shell = root.program("chromium-headless-shell")
    found = install(settings(engine="chromium"), root.said.append, trial=starts)
    assert found == Found("chromium", shell, "machine", headless_shell=True)
    assert root.said == [f"chromium at {shell} (on this machine): starts"]
    assert root.calls == []


def test_every_way_is_tried_in_order_and_all_of_them_are_told_when_none_works(root: Machine) -> None:
    with pytest.raises(EngineMissing) as caught:
        install(settings(engine="chromium"), root.said.append, trial=starts)
    assert root.calls == [
        "python -m playwright install chromium-headless-shell",
        "apt-get update",
        "apt-get install --no-install-recommends chromium-headless-shell --download-only",
        "apt-get update",
        "apt-get install --no-install-recommends chromium --download-only",
    ]
    assert len(root.said) == 4  # one line for each look and each way
    assert all(line in str(caught.value) for line in root.said)
    assert "apt-get install chromium: failed after" in str(caught.value)
    assert "E: no network" in str(caught.value)
    assert caught.value.engine == "chromium"


def test_without_root_apt_is_not_tried(nobody: Machine) -> None:
    with pytest.raises(EngineMissing):
        install(settings(engine="chromium"), nobody.said.append, trial=starts)
    assert nobody.calls == ["python -m playwright install chromium-headless-shell"]


def test_a_chromium_with_windows_is_never_sought_as_a_headless_shell(root: Machine) -> None:
    with pytest.raises(EngineMissing):
        install(settings(engine="chromium", headless=False), root.said.append, trial=starts)
    assert root.calls[0] == "python -m playwright install chromium"
    assert not [call for call in root.calls if "shell" in call]


def test_playwrights_download_is_taken_when_it_works(root: Machine) -> None:
    root.command("python", root.downloading("chromium-headless-shell"))
    found = install(settings(engine="chromium"), root.said.append, trial=starts)
    assert found.origin == "playwright"
    assert root.calls == ["python -m playwright install chromium-headless-shell"]


def test_apt_installs_where_the_download_fails(root: Machine) -> None:
    install_it = f'case "$*" in *--download-only*|*update*) ;; *) {root.making("chromium-headless-shell")};; esac'
    root.command("apt-get", install_it)
    found = install(settings(engine="chromium"), root.said.append, trial=starts)
    assert (found.origin, found.headless_shell) == ("machine", True)
    assert root.calls[-1] == "apt-get install --no-install-recommends chromium-headless-shell"


def test_where_there_is_no_package_of_a_headless_shell_the_full_chromium_is_installed(root: Machine) -> None:
    answers = (
        f'case "$*" in *headless-shell*) exit 100;; *download-only*|*update*) ;; *) {root.making("chromium")};; esac'
    )
    root.command("apt-get", answers)
    found = install(settings(engine="chromium"), root.said.append, trial=starts)
    assert found.executable == root.folder / "bin" / "chromium"


def test_a_failing_update_of_the_lists_does_not_keep_a_package_from_being_installed(root: Machine) -> None:
    answers = f'case "$*" in *update*) exit 100;; *) {root.making("chromium-headless-shell")};; esac'
    root.command("apt-get", answers)
    assert install(settings(engine="chromium"), root.said.append, trial=starts).origin == "machine"


def test_a_download_that_does_not_start_gets_the_systems_libraries(root: Machine) -> None:
    libraries = root.folder / "libraries"
    download = root.downloading("chromium-headless-shell")
    root.command("python", f'case "$*" in *install-deps*) : > {libraries};; *) {download};; esac')
    found = install(settings(engine="chromium"), root.said.append, trial=starts_when(libraries.exists))
    assert found.origin == "playwright"
    assert root.calls == [
        "python -m playwright install chromium-headless-shell",
        "python -m playwright install-deps chromium-headless-shell",
    ]
    assert any("does not start: libnss3.so" in line for line in root.said)


def test_a_browser_of_the_machine_that_does_not_start_is_not_the_end(nobody: Machine) -> None:
    nobody.program("chromium-headless-shell")
    nobody.command("python", nobody.downloading("chromium-headless-shell"))
    marker = nobody.folder / "browsers"
    found = install(settings(engine="chromium"), nobody.said.append, trial=starts_when(marker.exists))
    assert found.origin == "playwright"


def test_the_patched_firefox_is_fetched_and_nothing_else_is_taken_in_its_place(nobody: Machine) -> None:
    nobody.program("chromium-headless-shell")
    nobody.program("firefox")
    with pytest.raises(EngineMissing, match="no invisible could be found or installed"):
        install(settings(), nobody.said.append, trial=starts)
    assert nobody.calls == ["python -m invisible_playwright fetch"]


def test_nothing_is_installed_beside_a_patched_firefox_that_did_not_come(root: Machine) -> None:
    root.command("python", "exit 0")
    with pytest.raises(EngineMissing):
        install(settings(), root.said.append, trial=starts)
    assert root.calls == ["python -m invisible_playwright fetch"]


@pytest.mark.skipif(sys.platform != "linux", reason="Xvfb is Linux's")
def test_a_patched_firefox_that_came_gets_the_virtual_screen_that_it_needs(
    root: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INVPW_TRUE_HEADLESS", raising=False)
    came = root.folder / "came"
    monkeypatch.setattr(
        "asyncworker.installing.find",
        lambda settings: Found("invisible", None, "invisible_playwright") if came.exists() else None,
    )
    root.command("python", f": > {came}")
    root.command("apt-get", root.making("Xvfb"))
    screen = root.folder / "bin" / "Xvfb"
    install(settings(), root.said.append, trial=starts_when(screen.exists))
    assert root.calls[0] == "python -m invisible_playwright fetch"
    assert root.calls[-1] == "apt-get install --no-install-recommends xvfb"


@pytest.mark.parametrize("chosen", [{"executable_path": "/no/such/browser"}, {"channel": "msedge-dev"}])
def test_a_browser_that_someone_chose_is_theirs_to_install(root: Machine, chosen: dict[str, str]) -> None:
    with pytest.raises(EngineMissing):
        install(settings(engine="chromium", **chosen), root.said.append, trial=starts)
    assert root.calls == []


def test_auto_takes_what_is_present_before_it_downloads_anything(root: Machine) -> None:
    shell = root.program("chromium-headless-shell")
    engine, found = install_any(settings(), root.said.append, trial=starts)
    assert (engine, found.executable) == (EngineName.chromium, shell)
    assert root.said[-1] == f"taking chromium at {shell} (on this machine)"
    assert root.calls == []


def test_auto_passes_over_what_does_not_start(root: Machine) -> None:
    root.program("chromium-headless-shell")
    root.command("python", f'case "$*" in *"install firefox"*) {root.downloading("firefox")};; *) exit 1;; esac')
    engine, _ = install_any(
        settings(), root.said.append, trial=lambda s: None if s.engine is EngineName.firefox else "no"
    )
    assert engine is EngineName.firefox


def test_auto_downloads_in_its_order_and_tells_all_that_was_tried(nobody: Machine) -> None:
    with pytest.raises(EngineMissing) as caught:
        install_any(settings(), nobody.said.append, trial=starts)
    assert nobody.calls == [
        "python -m invisible_playwright fetch",
        "python -m playwright install chromium-headless-shell",
        "python -m playwright install firefox",
    ]
    assert all(line in str(caught.value) for line in nobody.said)
