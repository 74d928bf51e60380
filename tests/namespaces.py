"""A process namespace of its own, as a container has: its process 1, seen from outside."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.conftest import missing
from tests.waiting import wait_until

#: What makes the command after it process 1 of a namespace; all of that ends with it.
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

#: An init that reaps, and does nothing else.
_INIT = """
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.02)
"""


def needed() -> None:
    """Skip the test where no process namespace can be made."""
    if (reason := _forbidden()) is not None:
        missing(reason)


@functools.cache
def _forbidden() -> str | None:
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "no unshare and nsenter (util-linux) on this machine"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no process namespace can be made here: {tried.stderr.strip()}"


def init_below(unshare: int) -> psutil.Process:
    """Process 1 of the namespace that this `unshare` has made."""
    (init,) = wait_until(psutil.Process(unshare).children, "unshare has started its command")
    return init


def zombies(init: psutil.Process) -> list[psutil.Process]:
    return [one for one in init.children(recursive=True) if _status(one) == psutil.STATUS_ZOMBIE]


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone"


@contextlib.contextmanager
def namespace() -> Iterator[psutil.Process]:
    """An empty namespace with an init that reaps; ends with all that is in it."""
    unshare = subprocess.Popen([*UNSHARE, sys.executable, "-c", _INIT])
    try:
        yield init_below(unshare.pid)
    finally:
        unshare.kill()
        unshare.wait()


def entering(init: psutil.Process, directory: Path) -> list[str]:
    """What makes the command after it run within a namespace, in a directory."""
    return ["nsenter", "--target", str(init.pid), "--pid", "--mount", f"--wd={directory}"]
