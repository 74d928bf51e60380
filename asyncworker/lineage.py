"""Lineage: who adopts orphans, and who ends with its parent. Linux decides it; elsewhere nothing changes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from functools import cache

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent dies; whoever calls this has to reap them.

    Returns:
        False where the system does not know that.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Have this process sent SIGTERM when its parent dies, whatever kills that one.

    Safe between fork and exec, and kept over an exec. It is the thread of the parent that forked whose end counts, and
    with several threads the signal may come more than once: for a parent that has one.

    Parameters:
        parent: Its pid; when that is not this process's parent any more, SIGTERM is sent at once.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def prepare() -> None:
    """Load what `end_with` calls: not to be done between fork and exec."""
    _libc()


def _prctl(option: int, value: int) -> bool:
    libc = _libc()
    return libc is not None and libc.prctl(option, value, 0, 0, 0) == 0


@cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
