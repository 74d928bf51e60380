"""Where is the browser? Looked up anew each time, so that one installed meanwhile is seen.

Nothing is launched, imported from Playwright (0.4 s) or remembered here. A browser that the settings name is
used or reported, never replaced by another one: someone who counts on it must not go out with something else.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncworker.engines.importing import import_quietly
from asyncworker.errors import EngineMissing
from asyncworker.settings import EngineName, Settings, foreign

#: On the same pages a headless shell took 255 ms of CPU per message, a full Chromium 725 ms.
HEADLESS_SHELLS = ("chromium-headless-shell", "chrome-headless-shell", "headless_shell")
CHROMIUMS = (
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
FIREFOXES = ("firefox", "firefox-esr")

#: Where vendors install on Linux: Playwright looks for a channel there and nowhere else.
CHANNELS = {
    "chrome": "/opt/google/chrome/chrome",
    "chrome-beta": "/opt/google/chrome-beta/chrome",
    "chrome-dev": "/opt/google/chrome-unstable/chrome",
    "msedge": "/opt/microsoft/msedge/msedge",
    "msedge-beta": "/opt/microsoft/msedge-beta/msedge",
    "msedge-dev": "/opt/microsoft/msedge-dev/msedge",
}

#: From here on Playwright sends every context a command that no Firefox release of the machine knows.
FIRST_PLAYWRIGHT_WITHOUT_STOCK_FIREFOX = (1, 65)


@dataclass(frozen=True)
class Found:
    """A browser that can be launched, or connected to.

    Parameters:
        executable: Its file; None when Playwright, invisible_playwright or the endpoint knows it best.
        origin: `settings`, `channel`, `playwright`, `machine`, `invisible_playwright` or `endpoint`.
        headless_shell: True for a Chromium that has no windows at all.
        channel: What to give Playwright as `channel`.
    """

    engine: str
    executable: Path | None
    origin: str
    headless_shell: bool = False
    channel: str | None = None

    def describe(self) -> str:
        """A phrase for a log line, such as "chromium at /usr/bin/chromium (on this machine)"."""
        where = f" at {self.executable}" if self.executable else ""
        channel = f", channel {self.channel}" if self.channel else ""
        return f"{self.engine}{where} ({_ORIGINS[self.origin]}{channel})"


_ORIGINS = {
    "settings": "as set",
    "channel": "where its vendor installs it",
    "playwright": "Playwright's own download",
    "machine": "on this machine",
    "invisible_playwright": "invisible_playwright's own download",
    "endpoint": "at the endpoint",
}


def find(settings: Settings) -> Found | None:
    """Find the browser of the settings' engine.

    Stock engines, in this order: ASYNCWORKER_EXECUTABLE_PATH, ASYNCWORKER_CHANNEL, Playwright's own download,
    and for chromium a browser on PATH, where a headless chromium prefers a headless shell from anywhere to a
    full Chromium from anywhere. A Firefox on PATH counts only with a Playwright older than 1.65, over BiDi
    (channel moz-firefox): it lacks the patches by which Playwright drives its own Firefox, and newer
    Playwrights send it a command that it refuses. A WebKit on PATH never counts.

    Raises:
        EngineMissing: When the settings name an executable that cannot be used. Not raised when there is
            simply none: that is None.
    """
    match settings.engine:
        case EngineName.remote:
            return Found(settings.engine.value, None, "endpoint")
        case EngineName.invisible:
            return _invisible(settings)
    return next(_stock(settings), None)


def which(*names: str) -> Path | None:
    """The first of these programs on PATH."""
    for name in names:
        path = shutil.which(name, path=foreign("PATH") or os.defpath)
        if path is not None and not _is_stub_of_a_snap(Path(path)):
            return Path(path)
    return None


def needs_xvfb(settings: Settings) -> bool:
    """True when the browser draws on a virtual screen of its own, so that it looks like one with a window."""
    return (
        settings.engine is EngineName.invisible
        and settings.headless
        and sys.platform == "linux"
        and foreign("INVPW_TRUE_HEADLESS") != "1"
    )


def playwright_version() -> tuple[int, ...]:
    """The installed Playwright's version; () when there is none."""
    try:
        text = importlib.metadata.version("playwright")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text))


def browsers_path() -> Path | None:
    """The directory of Playwright's downloads, by Playwright's own rules; None without Playwright."""
    package = _playwright_package()
    chosen = foreign("PLAYWRIGHT_BROWSERS_PATH")
    if package is None:
        return None
    if chosen == "0":
        return package / ".local-browsers"
    if chosen:
        return Path(chosen).absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ms-playwright"
    return Path(foreign("XDG_CACHE_HOME") or Path.home() / ".cache") / "ms-playwright"


def is_downloaded(name: str) -> bool:
    """True when Playwright's own download of a browser is complete.

    Parameters:
        name: As in Playwright's list, such as chromium-headless-shell.
    """
    root, package = browsers_path(), _playwright_package()
    if root is None or package is None:
        return False
    return any((root / folder / "INSTALLATION_COMPLETE").is_file() for folder in _folders(package, name))


def _stock(settings: Settings) -> Iterator[Found]:
    """Every browser that would do, best first."""
    engine, channel = settings.engine.value, settings.channel
    if settings.executable_path is not None:
        path = _named(settings.executable_path, engine)
        yield Found(engine, path, "settings", path.name in HEADLESS_SHELLS, channel)
    elif channel is not None:
        if _has_channel(channel):
            yield Found(engine, None, "channel", channel=channel)
    elif settings.engine is EngineName.chromium:
        yield from _chromiums(headless=settings.headless)
    else:
        if is_downloaded(engine):
            yield Found(engine, None, "playwright")
        stock = _stock_firefox() if settings.engine is EngineName.firefox else None
        if stock is not None:
            yield Found(engine, stock, "machine", channel="moz-firefox")


def _stock_firefox() -> Path | None:
    usable = () < playwright_version() < FIRST_PLAYWRIGHT_WITHOUT_STOCK_FIREFOX
    return which(*FIREFOXES) if usable else None


def _chromiums(*, headless: bool) -> Iterator[Found]:
    if headless:
        if is_downloaded("chromium-headless-shell"):
            yield Found("chromium", None, "playwright", headless_shell=True)
        if (path := which(*HEADLESS_SHELLS)) is not None:
            yield Found("chromium", path, "machine", headless_shell=True)
    if is_downloaded("chromium"):
        # Without the channel a headless launch asks for the headless shell, and only for that.
        yield Found("chromium", None, "playwright", channel="chromium" if headless else None)
    if (path := which(*CHROMIUMS)) is not None:
        yield Found("chromium", path, "machine")


def _invisible(settings: Settings) -> Found | None:
    try:
        import_quietly("invisible_core")
        from invisible_core import active_seal, verify_engine
        from invisible_core.download import cache_dir_for_seal, engine_status
    except ImportError as error:
        raise EngineMissing(
            f"invisible_playwright does not import ({error}); `pip install invisible-playwright` installs it",
            engine="invisible",
        ) from error
    if settings.executable_path is not None:
        path = _named(settings.executable_path, "invisible")
        try:
            verify_engine(path, active_seal(), source="ASYNCWORKER_EXECUTABLE_PATH")
        except (RuntimeError, OSError, ValueError) as error:
            reason = getattr(error, "summary", None) or str(error)
            raise EngineMissing(
                f"{path} (ASYNCWORKER_EXECUTABLE_PATH) is not the patched Firefox that the installed "
                f"invisible_playwright drives: {reason}; correct or unset it",
                engine="invisible",
            ) from error
        return Found("invisible", path, "settings")
    present, detail = engine_status()
    if present:
        seal = active_seal()
        entry = cache_dir_for_seal(seal) / seal.asset_for(sys.platform, platform.machine()).entry_rel
        return Found("invisible", entry, "invisible_playwright")
    if detail == "not downloaded":
        return None
    raise EngineMissing(
        f"the patched Firefox cannot be used: {detail}; `asyncworker doctor --install` fetches it anew",
        engine="invisible",
    )


def _named(path: Path, engine: str) -> Path:
    """The executable that the settings name.

    Raises:
        EngineMissing: When it is none; no other browser is taken in its place.
    """
    if path.is_file() and os.access(path, os.X_OK):
        return path
    problem = "is not executable" if path.is_file() else "is no file"
    raise EngineMissing(
        f"{path} (ASYNCWORKER_EXECUTABLE_PATH) {problem}; correct it, or unset it to let {engine} be found",
        engine=engine,
    )


def _has_channel(channel: str) -> bool:
    """False when it is known not to be there; a channel not known here is Playwright's to judge."""
    if channel == "chromium":
        return is_downloaded("chromium")
    path = CHANNELS.get(channel)
    return path is None or sys.platform != "linux" or Path(path).is_file()


def _playwright_package() -> Path | None:
    package = importlib.util.find_spec("playwright")  # finds a top-level package without importing it
    folders = package.submodule_search_locations if package else None
    return Path(next(iter(folders))) / "driver" / "package" if folders else None


def _folders(package: Path, name: str) -> Iterator[str]:
    """The names that a browser's directory may have; older systems get older revisions under longer names."""
    try:
        browsers: list[dict[str, Any]] = json.loads((package / "browsers.json").read_text())["browsers"]
    except (OSError, ValueError, KeyError):
        return
    for browser in browsers:
        if browser.get("name") == name:
            stem = name.replace("-", "_")
            yield f"{stem}-{browser['revision']}"
            for system, revision in browser.get("revisionOverrides", {}).items():
                yield f"{stem}_{system.replace('-', '_')}_special-{revision}"


def _is_stub_of_a_snap(path: Path) -> bool:
    """Ubuntu's chromium-browser and firefox are scripts that only ask for a snap when it is not installed."""
    try:
        with path.open("rb") as file:
            head = file.read(8_192)
    except OSError:
        return False
    if not head.startswith(b"#!"):
        return False
    snaps = re.findall(rb"/snap/bin/[\w.-]+", head)
    return bool(snaps) and not any(Path(os.fsdecode(snap)).exists() for snap in snaps)
