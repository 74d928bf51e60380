"""Which browser is found, in which order, and that nothing is found in another one's place."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncworker.engines import finding
from asyncworker.engines.finding import Found, find
from asyncworker.errors import EngineMissing
from asyncworker.settings import load


@dataclass
class Machine:
    """A machine of its own: its PATH, its home and Playwright's downloads are folders of the test."""

    folder: Path

    def program(self, name: str, text: str = "#!/bin/sh\n") -> Path:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def download(self, name: str, *, complete: bool = True) -> None:
        folder = self.folder / "browsers" / f"{name.replace('-', '_')}-{revision(name)}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "INSTALLATION_COMPLETE").touch()


def revision(name: str) -> str:
    package = finding._playwright_package()
    assert package is not None
    browsers = json.loads((package / "browsers.json").read_text())["browsers"]
    return next(browser["revision"] for browser in browsers if browser["name"] == name)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "browsers"))
    monkeypatch.setenv("INVISIBLE_PLAYWRIGHT_CACHE_DIR", str(tmp_path / "invisible"))
    monkeypatch.delenv("INVISIBLE_PLAYWRIGHT_ENGINE_DIR", raising=False)
    return Machine(tmp_path)


def found(**settings: Any) -> Found | None:
    return find(load({}, **settings))


@pytest.mark.parametrize("engine", ["invisible", "chromium", "firefox", "webkit"])
def test_nothing_is_found_on_an_empty_machine(machine: Machine, engine: str) -> None:
    assert found(engine=engine) is None


def test_a_headless_chromium_prefers_a_headless_shell_of_the_machine(machine: Machine) -> None:
    machine.program("chromium")
    shell = machine.program("chromium-headless-shell")
    assert found(engine="chromium") == Found("chromium", shell, "machine", headless_shell=True)


def test_a_chromium_with_windows_is_never_a_headless_shell(machine: Machine) -> None:
    machine.program("chromium-headless-shell")
    machine.download("chromium-headless-shell")
    assert found(engine="chromium", headless=False) is None
    chrome = machine.program("google-chrome")
    assert found(engine="chromium", headless=False) == Found("chromium", chrome, "machine")


def test_playwrights_own_download_comes_before_the_machines_browser(machine: Machine) -> None:
    machine.program("chromium-headless-shell")
    machine.download("chromium-headless-shell")
    assert found(engine="chromium") == Found("chromium", None, "playwright", headless_shell=True)


def test_a_headless_shell_of_the_machine_comes_before_a_full_chromium_that_was_downloaded(machine: Machine) -> None:
    machine.download("chromium")
    assert found(engine="chromium") == Found("chromium", None, "playwright", channel="chromium")
    shell = machine.program("headless_shell")
    assert found(engine="chromium") == Found("chromium", shell, "machine", headless_shell=True)


def test_an_incomplete_download_does_not_count(machine: Machine) -> None:
    machine.download("chromium-headless-shell", complete=False)
    assert found(engine="chromium") is None


def test_a_download_of_another_revision_does_not_count(machine: Machine) -> None:
    folder = machine.folder / "browsers" / "firefox-1"
    folder.mkdir(parents=True)
    (folder / "INSTALLATION_COMPLETE").touch()
    assert found(engine="firefox") is None


@pytest.mark.parametrize("engine", ["firefox", "webkit"])
def test_firefox_and_webkit_are_found_in_playwrights_downloads(machine: Machine, engine: str) -> None:
    machine.download(engine)
    assert found(engine=engine) == Found(engine, None, "playwright")


def test_downloads_are_looked_for_where_playwright_puts_them(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAYWRIGHT_BROWSERS_PATH")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    program = (
        "import sys; from playwright.sync_api import sync_playwright as p\n"
        "with p() as playwright: print(playwright.firefox.executable_path)"
    )
    theirs = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    ours = finding.browsers_path()
    assert ours is not None
    assert Path(theirs.stdout.strip()).is_relative_to(ours / f"firefox-{revision('firefox')}")


def test_a_browser_installed_later_is_seen(machine: Machine) -> None:
    assert found(engine="chromium") is None
    machine.program("chromium")
    assert found(engine="chromium") is not None


def test_the_executable_of_the_settings_comes_before_all_others(machine: Machine) -> None:
    machine.download("chromium-headless-shell")
    mine = machine.program("my-own-chromium")
    assert found(engine="chromium", executable_path=mine) == Found("chromium", mine, "settings")


def test_a_missing_executable_is_an_error_and_no_other_browser_is_taken(machine: Machine) -> None:
    machine.program("chromium")
    with pytest.raises(EngineMissing, match=r"no-such .*ASYNCWORKER_EXECUTABLE_PATH.* is no file") as caught:
        found(engine="chromium", executable_path=machine.folder / "no-such")
    assert caught.value.engine == "chromium"


def test_an_executable_that_is_not_executable_says_so(machine: Machine) -> None:
    path = machine.folder / "data"
    path.touch(mode=0o644)
    with pytest.raises(EngineMissing, match=r"ASYNCWORKER_EXECUTABLE_PATH.* is not executable"):
        found(engine="firefox", executable_path=path)


def test_a_channel_of_the_settings_hides_every_other_browser(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.program("chromium")
    vendor = machine.program("vendor")
    monkeypatch.setitem(finding.CHANNELS, "chrome", str(vendor))
    assert found(engine="chromium", channel="chrome") == Found("chromium", None, "channel", channel="chrome")
    monkeypatch.setitem(finding.CHANNELS, "chrome", str(vendor) + "-missing")
    assert found(engine="chromium", channel="chrome") is None


@pytest.mark.parametrize(("version", "channel"), [("1.64.1", "moz-firefox"), ("1.65.0", None), ("2.0", None)])
def test_a_firefox_of_the_machine_counts_only_with_a_playwright_that_can_drive_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, version: str, channel: str | None
) -> None:
    machine.program("firefox-esr")
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)
    firefox = found(engine="firefox")
    assert (firefox.channel if firefox else None) == channel


def test_a_webkit_of_the_machine_never_counts(machine: Machine) -> None:
    machine.program("webkit")
    machine.program("MiniBrowser")
    assert found(engine="webkit") is None


def test_the_stub_of_a_snap_that_is_not_installed_is_no_browser(machine: Machine) -> None:
    machine.program("chromium-browser", '#!/bin/sh\nexec /snap/bin/no-such-chromium "$@"\n')
    assert found(engine="chromium") is None
    chrome = machine.program("google-chrome")
    assert found(engine="chromium") == Found("chromium", chrome, "machine")


def test_a_remote_browser_is_at_its_endpoint() -> None:
    remote = found(engine="remote", endpoint="ws://user:hidden@browsers:3000")
    assert remote == Found("remote", None, "endpoint")
    assert "hidden" not in remote.describe()


def test_the_patched_firefox_is_found_in_its_own_store(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = tree_of_the_patched_firefox(machine.folder / "invisible")
    assert found(engine="invisible") == Found("invisible", executable, "invisible_playwright")


def test_a_damaged_patched_firefox_is_reported_with_the_command_that_mends_it(machine: Machine) -> None:
    executable = tree_of_the_patched_firefox(machine.folder / "invisible")
    (executable.parent / "application.ini").write_text("[App]\nVersion=1.0\n")
    with pytest.raises(EngineMissing, match=r"Version '1\.0'.*`asyncworker doctor --install`"):
        found(engine="invisible")


def test_a_stock_browser_is_never_taken_for_the_patched_firefox(machine: Machine) -> None:
    machine.program("firefox")
    machine.download("firefox")
    machine.program("chromium")
    assert found(engine="invisible") is None
    with pytest.raises(EngineMissing, match="is not the patched Firefox"):
        found(engine="invisible", executable_path=machine.folder / "bin" / "firefox")


def test_finding_a_stock_browser_imports_no_browser_library() -> None:
    program = (
        "import sys; from asyncworker.settings import load; from asyncworker.engines.finding import find\n"
        "find(load({}, engine='chromium')); find(load({}, engine='firefox'))\n"
        "print({m.partition('.')[0] for m in sys.modules} & {'playwright', 'invisible_playwright', 'invisible_core'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_invisible_core_is_told_not_to_repair_itself_before_it_is_imported() -> None:
    program = (
        "import os; from asyncworker.settings import load; from asyncworker.engines.finding import find\n"
        "find(load({})); from invisible_core.pin import autofix_enabled; print(autofix_enabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


DESCRIPTIONS: list[tuple[Found, str]] = [
    (Found("chromium", Path("/usr/bin/chromium"), "machine"), "chromium at /usr/bin/chromium (on this machine)"),
    (Found("firefox", None, "playwright"), "firefox (Playwright's own download)"),
    (Found("chromium", None, "channel", channel="chrome"), "chromium (where its vendor installs it, channel chrome)"),
    (Found("remote", None, "endpoint"), "remote (at the endpoint)"),
]


@pytest.mark.parametrize(("browser", "phrase"), DESCRIPTIONS)
def test_what_was_found_is_a_phrase_for_the_log(browser: Found, phrase: str) -> None:
    assert browser.describe() == phrase


def tree_of_the_patched_firefox(store: Path) -> Path:
    """Files that say of themselves what the installed seal asks for; nothing of them runs."""
    from invisible_core import active_seal
    from invisible_core.download import cache_dir_for_seal

    seal = active_seal()
    root = cache_dir_for_seal(seal)
    assert root.is_relative_to(store)
    write: Callable[[str, str], object] = lambda name, text: (root / name).write_text(text)  # noqa: E731
    (root / "modules" / "juggler" / "protocol").mkdir(parents=True)
    (root / "modules" / "juggler" / "content").mkdir()
    write("application.ini", f"[App]\nVersion={seal.upstream_version}\nBuildID={seal.build_id}\n")
    write("platform.ini", f"[Build]\nMilestone={seal.upstream_version}\nBuildID={seal.build_id}\n")
    for name in ("protocol/PageHandler.js", "TargetRegistry.js", "content/main.js", "content/Runtime.js"):
        write(f"modules/juggler/{name}", "zoom.stealth stealthfox")
    write("firefox", "#!/bin/sh\n")
    (root / "firefox").chmod(0o755)
    return root / "firefox"
