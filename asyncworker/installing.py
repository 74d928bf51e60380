"""Getting a browser onto this machine: `asyncworker doctor --install`.

What is there already is taken first, then each way to get one is tried in turn. A browser counts when it
starts, not when its file is there: on a fresh machine a download often lacks the system's libraries. A
download that cannot work ends in seconds: a command that writes nothing for a while is killed, with
everything that it started.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from asyncworker.commands import DOWNLOAD, UNPACK, Say, Step, run, shortened
from asyncworker.engines import create
from asyncworker.engines.finding import Found, find, needs_xvfb, which
from asyncworker.engines.playwright import own_reason
from asyncworker.errors import EngineMissing
from asyncworker.identity import Identity
from asyncworker.settings import EngineName, Settings

#: What the demo's engine `auto` may take, best first.
AUTO = (EngineName.invisible, EngineName.chromium, EngineName.firefox)

#: How long a launch may take when it is only tried out.
TRIAL_TIMEOUT_MS = 30_000

Trial = Callable[[Settings], str | None]


@dataclass(frozen=True)
class Way:
    """One way to get a browser; `name` is what a person would type."""

    name: str
    steps: tuple[Step, ...]


class Search:
    """One search: what was tried so far, each told as it ends."""

    def __init__(self, say: Say, trial: Trial) -> None:
        self.tried: list[str] = []
        self._say = say
        self._trial = trial

    def present(self, settings: Settings) -> Found | None:
        """The browser of this engine, when there is one and it starts."""
        engine = settings.engine.value
        try:
            found = find(settings)
        except EngineMissing as error:
            self._failed(f"{engine}: {error}")
            return None
        if found is None:
            self._failed(f"{engine}: not on this machine")
            return None
        reason = self._trial(settings)
        if reason is not None:
            self._failed(f"{found.describe()}: does not start: {reason}")
            return None
        self._say(f"{found.describe()}: starts")
        return found

    def get(self, settings: Settings) -> Found | None:
        """Try each way to get this engine until its browser starts."""
        for way in _ways(settings):
            if self._goes(way):
                found = self.present(settings)
                if found is not None:
                    return found
        return None

    def _goes(self, way: Way) -> bool:
        started = time.monotonic()
        for step in way.steps:
            reason = run(step, on_news=lambda text: self._say(f"{way.name}: {text}"))
            if reason is not None and not step.optional:
                self._failed(f"{way.name}: failed after {time.monotonic() - started:.1f} s: {reason}")
                return False
        self._say(f"{way.name}: done in {time.monotonic() - started:.1f} s")
        return True

    def _failed(self, line: str) -> None:
        self.tried.append(line)
        self._say(line)


def install(settings: Settings, say: Say, *, trial: Trial | None = None) -> Found:
    """Make the browser of the settings' engine present; does nothing when it is.

    Parameters:
        say: Called with a line of text for each thing that was looked at or tried.
        trial: Gives the reason why the browser does not start; None launches it once.

    Raises:
        EngineMissing: When no way worked; it lists all that was tried.
    """
    search = Search(say, trial or why_it_does_not_start)
    found = search.present(settings) or search.get(settings)
    if found is None:
        raise EngineMissing(_nothing(settings.engine.value, search.tried), engine=settings.engine.value)
    return found


def install_any(settings: Settings, say: Say, *, trial: Trial | None = None) -> tuple[EngineName, Found]:
    """For the demo's engine `auto`: the first engine that works, whatever the settings name.

    Whatever is present comes first, in the order of AUTO, then whatever can be got, in the same order.

    Raises:
        EngineMissing: When no way worked; it lists all that was tried.
    """
    search = Search(say, trial or why_it_does_not_start)
    candidates = [settings.model_copy(update={"engine": engine}) for engine in AUTO]
    for attempt in (search.present, search.get):
        for candidate in candidates:
            found = attempt(candidate)
            if found is not None:
                say(f"taking {found.describe()}")
                return candidate.engine, found
    raise EngineMissing(_nothing("browser", search.tried), engine="auto")


def why_it_does_not_start(settings: Settings) -> str | None:
    """Launch the browser once, open a page in it and close it; None: it works."""
    timeout = min(settings.launch_timeout_ms, TRIAL_TIMEOUT_MS)
    try:
        asyncio.run(_launch_once(settings.model_copy(update={"launch_timeout_ms": timeout})))
    except Exception as error:  # noqa: BLE001 -- whatever a browser library raises is the answer
        return shortened(own_reason(error.__cause__ or error) or str(error) or type(error).__name__)
    return None


async def _launch_once(settings: Settings) -> None:
    proxy = settings.proxy.value if settings.proxy else None
    identity = Identity(0, settings.locale, settings.timezone, proxy, settings.pins)
    engine = create(settings)
    try:
        launched = await engine.launch(identity)
        try:
            async with asyncio.timeout(settings.context_timeout_ms / 1000):
                context = await launched.new_context(identity, {})
                await context.new_page()
        finally:
            await launched.close(settings.close_timeout_ms)
    finally:
        await engine.close()


def _nothing(what: str, tried: list[str]) -> str:
    lines = "\n".join(f"  - {line}" for line in tried)
    return f"no {what} could be found or installed; tried, in this order:\n{lines}"


def _ways(settings: Settings) -> Iterator[Way]:
    """The ways to get this engine, decided one by one: a later one may mend what an earlier one brought."""
    if settings.executable_path is not None or settings.channel not in (None, "chromium"):
        return  # a browser that someone chose is theirs to install
    match settings.engine:
        case EngineName.invisible:
            command = (sys.executable, "-m", "invisible_playwright", "fetch")
            yield Way("python -m invisible_playwright fetch", (Step(command, own_temporary_directory=True),))
            if _is_there(settings) and needs_xvfb(settings) and which("Xvfb") is None and _has_apt():
                yield _apt("xvfb")  # only for an engine that came: nobody needs a screen without it
        case EngineName.chromium | EngineName.firefox | EngineName.webkit:
            yield from _ways_to_a_stock_browser(settings)


def _ways_to_a_stock_browser(settings: Settings) -> Iterator[Way]:
    shell = settings.engine is EngineName.chromium and settings.headless and settings.channel is None
    name = "chromium-headless-shell" if shell else settings.engine.value
    playwright = (sys.executable, "-m", "playwright")
    environment = {"PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT": "5000"}
    download = Step((*playwright, "install", name), DOWNLOAD, environment, own_temporary_directory=True)
    yield Way(f"python -m playwright install {name}", (download,))
    if not _has_apt():
        return
    if _is_there(settings):  # and does not start: most often libraries are missing
        libraries = Step((*playwright, "install-deps", name), UNPACK)
        yield Way(f"python -m playwright install-deps {name}", (libraries,))
    if settings.engine is EngineName.chromium and settings.channel is None:
        if shell:
            yield _apt("chromium-headless-shell")
        yield _apt("chromium")


def _is_there(settings: Settings) -> bool:
    try:
        return find(settings) is not None
    except EngineMissing:
        return False


def _has_apt() -> bool:
    return os.geteuid() == 0 and which("apt-get") is not None


def _apt(package: str) -> Way:
    """Lists and packages are fetched first, impatiently; then unpacking needs no network."""
    options = (
        "Acquire::Retries=0",
        "Acquire::http::Timeout=5",
        "Acquire::https::Timeout=5",
        "DPkg::Lock::Timeout=60",
    )
    apt = ("apt-get", "-q", "-y", *(word for option in options for word in ("-o", option)))
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    install = (*apt, "install", "--no-install-recommends", package)
    return Way(
        f"apt-get install {package}",
        (
            Step((*apt, "update"), DOWNLOAD, environment, optional=True),  # one dead mirror of many is no obstacle
            Step((*install, "--download-only"), DOWNLOAD, environment),
            Step(install, UNPACK, environment),
        ),
    )
