"""What launches or connects a browser, behind one protocol.

An engine says which identities may share a browser, what its browsers can do, and what "closed" means: stock
Playwright announces the death of a browser, invisible_playwright does not. The rest of the package asks the
engine and never looks at a browser library itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from asyncworker.engines.capabilities import Capability
from asyncworker.identity import Identity
from asyncworker.settings import EngineName, Settings

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext


class Fault(StrEnum):
    """What an error of a browser library says about the browser, not about the page."""

    gone = "gone"  # the browser, its context or its page is closed, by a crash or by the code itself
    page_crashed = "page_crashed"
    exit_drifted = "exit_drifted"  # the proxy's exit is another one than at launch, or cannot be verified
    unsupported = "unsupported"  # the engine cannot do what it was asked for
    unclear = "unclear"  # what a crash says too, a moment before it is announced


class Launched(Protocol):
    """One launched browser, as its engine keeps it."""

    browser: Browser
    pid: int | None

    @property
    def abandoned(self) -> int:
        """How many calls were cancelled and still hold the browser's client up; 0 where none can."""

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once, on the loop, when the browser is gone without `close`."""

    async def new_context(self, identity: Identity, options: Mapping[str, Any]) -> BrowserContext:
        """A fresh context of the identity, with more of Playwright's options. Unbounded: the caller bounds it.

        Raises:
            Unsupported: When the engine cannot honour one of the options.
        """

    async def memory_mb(self, enough_mb: float) -> float:
        """The memory of its processes, its pages' and its driver's too; roughly, and too much, below `enough_mb`."""

    async def close(self, timeout_ms: int) -> None:
        """Close the browser, or kill it after `timeout_ms`; leaves no process. Never raises."""

    async def kill(self) -> None:
        """End the browser's processes now. Never raises."""


class Engine(Protocol):
    """What launches or connects browsers of one kind."""

    name: str
    max_contexts: int | None
    capabilities: frozenset[Capability]

    def launch_key(self, identity: Identity) -> Hashable:
        """Two identities of equal keys may share a browser."""

    async def identify(self, identity: Identity) -> Identity:
        """The identity with its digest, as this engine draws it; unchanged where it draws none.

        Raises:
            ConfigurationError: When it cannot be drawn as the settings want it.
            EngineMissing: When what draws it is not installed.
        """

    async def check(self) -> str:
        """What would be launched, as a phrase for a log line.

        Raises:
            EngineMissing: When there is nothing to launch; it names the command that installs it.
        """

    async def launch(self, identity: Identity) -> Launched:
        """Start a browser, within the settings' `launch_timeout_ms`; leaves nothing behind when it fails.

        Raises:
            LaunchFailed: When it did not start.
        """

    def renew(self, launched: Launched) -> None:
        """Let the next launch share nothing with this browser; what it has from the engine ends with the last user."""

    def classify(self, error: BaseException) -> Fault | None:
        """What `error` says about the browser; None: nothing, it is the page's or the code's."""

    async def close(self) -> None:
        """Release what all browsers of the engine share, such as Playwright's driver."""


def create(settings: Settings) -> Engine:
    """The engine that the settings name. Browser libraries are imported here, on use: they cost 0.4 s."""
    match settings.engine:
        case EngineName.invisible:
            from asyncworker.engines.invisible import InvisibleEngine

            return InvisibleEngine(settings)
        case EngineName.remote:
            from asyncworker.engines.remote import RemoteEngine

            return RemoteEngine(settings)
        case _:
            from asyncworker.engines.playwright import PlaywrightEngine

            return PlaywrightEngine(settings)


def classify_by_name(error: BaseException) -> Fault | None:
    """Classify by class name and text: Playwright and invisible_playwright have classes of equal names.

    A crash mostly raises TargetClosedError, but a call that meets the dying pipe raises a plain Error.
    """
    faults = [_classify_one(each) for each in _related(error)]
    return next((fault for fault in faults if fault is not None), None)


def _related(error: BaseException, depth: int = 0) -> Iterator[BaseException]:
    """The error, what it was raised from, and the members of groups."""
    yield error
    if depth >= 8:
        return
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (*members, error.__cause__, error.__context__):
        if other is not None:
            yield from _related(other, depth + 1)


def _classify_one(error: BaseException) -> Fault | None:
    names = {cls.__name__ for cls in type(error).__mro__ if cls.__module__.partition(".")[0] in _LIBRARIES}
    if not names:
        return None
    # What the browser's state is stands in the first line; below it are the call's own words, such as a selector.
    said = str(error).partition("\n")[0]
    if names & _EXIT_DRIFTED:
        return Fault.exit_drifted
    if any(phrase in str(error) for phrase in _UNSUPPORTED):
        return Fault.unsupported
    if _PAGE_CRASHED.match(said):
        return Fault.page_crashed
    if "TargetClosedError" in names or any(phrase in said for phrase in _GONE):
        return Fault.gone
    return Fault.unclear if any(phrase in said for phrase in _UNCLEAR) else None


def context_options(identity: Identity) -> dict[str, Any]:
    """The options of `new_context` that stock Playwright takes from an identity."""
    options = {"locale": identity.locale, "timezone_id": identity.timezone}
    return {name: value for name, value in options.items() if value is not None}


_EXIT_DRIFTED = {"ProxyEgressDrifted", "ProxyEgressNonVerificabile"}
_UNSUPPORTED = (
    "invisible_playwright does not implement",
    "outside what invisible_playwright implements",
    "() is not implemented yet",
    "() is not wired yet",
    "has no engine command in this Juggler",
    "localStorage is not implemented",
    "clear_cookies() with a filter is not supported",
    "so this is a gap, not a decision",
)
_LIBRARIES = ("playwright", "invisible_playwright")
_PAGE_CRASHED = re.compile(r"(?:[\w.]+: )?(?:Target|Page) crashed")
_UNCLEAR = ("ERR_ABORTED", "frame was detached", "Execution context was destroyed")
_GONE = (
    "Target closed",
    "has been closed",
    "Broken pipe",
    "the pipe is closed",
    "Connection closed",
    "Browser closed",
)
