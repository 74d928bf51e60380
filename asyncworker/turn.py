"""Turn: one recycle at a time on a machine, whoever its worker processes belong to.

While a browser is replaced two are up. A lock in the directory for temporary files keeps that to one process at a
time; the system drops it when its holder dies. A holder that is frozen keeps it, so it writes down until when it may
need it: after that the others put another file in its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("asyncworker.browser")

#: How often a file that others remove or replace at the same moment is opened anew.
MOST_TRIES = 5


def default_path() -> Path:
    """One for each user: no one else's file is trusted, nor can it be opened."""
    return Path(tempfile.gettempdir()) / f"asyncworker-{os.geteuid()}-recycle.lock"


class Turn:
    """The right to recycle; held by one process of this user on this machine at a time.

    Parameters:
        path: The lock's file; it is there only while someone recycles. None: where all look for it.
        clock: Seconds of a clock that all processes of the machine share.
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._held: int | None = None
        self._complained = False

    def take(self, longest_ms: float) -> bool:
        """True when it is this process's turn now; never waits.

        Parameters:
            longest_ms: After this it is given back, unless this process hangs.
        """
        for _ in range(MOST_TRIES):
            descriptor = self._open()
            if descriptor is None:
                return True  # better at the same time as others than never
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if not self._is_overdue(descriptor):
                    os.close(descriptor)
                    return False
                self._remove(descriptor)
                continue
            if self._is_current(descriptor):
                self._held = descriptor
                self.extend(longest_ms)
                return True
            os.close(descriptor)  # whoever had it removed it before it was locked here
        return False

    def extend(self, longest_ms: float) -> None:
        """Say that the turn may take so long from now on."""
        if self._held is not None:
            os.pwrite(self._held, f"{self._clock() + longest_ms / 1000:020.3f}\n".encode(), 0)

    def give_back(self) -> None:
        """Let the next one have it."""
        if self._held is not None:
            descriptor, self._held = self._held, None
            self._remove(descriptor)

    def _where(self) -> Path:
        if self._path is None:
            self._path = default_path()
        return self._path

    def _open(self) -> int | None:
        try:
            descriptor = os.open(self._where(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._complain(error.strerror)
            return None
        if os.fstat(descriptor).st_uid != os.geteuid():
            os.close(descriptor)
            self._complain("it belongs to another user")
            return None
        return descriptor

    def _complain(self, reason: str | None) -> None:
        if not self._complained:
            self._complained = True
            logger.warning(
                "the lock %s cannot be used (%s): other worker processes may replace their browsers at the same time; "
                "remove it, or set TMPDIR to a directory that can be written",
                self._where(),
                reason,
            )

    def _is_overdue(self, descriptor: int) -> bool:
        """The holder had promised to be done, long enough ago."""
        try:
            return float(os.pread(descriptor, 64, 0)) < self._clock()
        except ValueError:
            return False  # it has not written yet

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._where().stat())
        except FileNotFoundError:
            return False

    def _remove(self, descriptor: int) -> None:
        """Remove the file and close it; not one that has taken its place."""
        if self._is_current(descriptor):
            with contextlib.suppress(OSError):
                self._where().unlink()
        os.close(descriptor)
