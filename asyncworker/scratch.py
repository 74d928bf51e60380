"""Scratch directories: where a driver and its browsers write for the moment, a directory for each launch.

Playwright removes a browser's profile when it sees the browser end. A driver that is stopped, or a worker that is
killed, before that would leave it for ever: so it lies in a directory whose name says which process it belongs to.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from pathlib import Path

from asyncworker import processes

# Short: a Chromium puts a socket below it, whose whole path may have 107 bytes.
_FORM = re.compile(r"aw-(\w+)-(\d{1,18})-(\d{1,18})-\w+", re.ASCII)

#: What a browser that is dying still writes makes a removal fail, for a moment.
REMOVAL_TIMEOUT_S = 2.0


def make() -> Path:
    """A new directory of this process's own, below the system's directory for temporary files."""
    me = processes.new_token()
    return Path(tempfile.mkdtemp(prefix=f"aw-{me.namespace}-{me.pid}-{me.born}-"))


def remove(directory: Path) -> None:
    """Remove it with all that is in it. Blocks for a moment; never raises."""
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)
        if time.monotonic() >= deadline:
            return
        time.sleep(0.01)


def remove_own() -> None:
    """Remove all directories of this process, which is about to end. Blocks for a moment; never raises."""
    me = processes.new_token()
    with contextlib.suppress(OSError):
        for directory in Path(tempfile.gettempdir()).glob(f"aw-{me.namespace}-{me.pid}-{me.born}-*"):
            remove(directory)


def sweep() -> int:
    """Remove the directories of processes that are dead; returns how many. Blocks: call it in a thread."""
    removed = 0
    for directory in left_over():
        remove(directory)
        removed += not directory.exists()
    return removed


def left_over() -> list[Path]:
    """The directories of processes that are dead: what a sweep would remove."""
    with contextlib.suppress(OSError):  # no such directory, or not ours to read
        return [path for path in sorted(Path(tempfile.gettempdir()).glob("aw-*")) if _owner_is_gone(path.name)]
    return []


def owner(directory: Path) -> int | None:
    """The pid of the process that made it; None when it is none of ours."""
    parts = _FORM.fullmatch(directory.name)
    return None if parts is None else int(parts[2])


def _owner_is_gone(name: str) -> bool:
    parts = _FORM.fullmatch(name)
    if parts is None:
        return False
    namespace, pid, born = parts.groups()
    return processes.Token(namespace, int(pid), int(born), launch="").owner_is_gone()
