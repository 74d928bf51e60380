"""One worker process that is kept: a `dramatiq asyncworker.actors -p 1` in a session of its own, and what it writes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from asyncworker import lineage, processes
from asyncworker.settings import worker_environment
from asyncworker.supervised import READY_VARIABLE

#: A line that is longer than this comes through in pieces.
LONGEST_LINE = 64 * 1024


class KeptWorker:
    """A worker's process, or what is left of it.

    Its owner alone waits for children, and says here how this one ended: a wait of its own would take the status.

    Parameters:
        number: Which of the supervisor's workers it is, from 1.
        command: Its command line.
        ready_file: Where it writes that it is ready.
    """

    def __init__(self, number: int, command: Sequence[str], ready_file: Path) -> None:
        ready_file.unlink(missing_ok=True)
        self.number = number
        self.exit_code: int | None = None
        self._ready_file = ready_file
        self._label = f"worker {number} | ".encode()
        self._begun = b""
        self._rest: list[psutil.Process] = []
        self.output, writing = os.pipe()
        os.set_blocking(self.output, False)
        supervisor = os.getpid()
        try:
            # Not in the supervisor's group: a Ctrl-C in its terminal is the supervisor's to obey.
            process = subprocess.Popen(
                command,
                env=worker_environment(**{READY_VARIABLE: str(ready_file)}),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                preexec_fn=lambda: lineage.end_with(supervisor),  # the supervisor has one thread
            )
        except BaseException:
            os.close(self.output)
            raise
        finally:
            os.close(writing)
        self.pid = process.pid
        process.returncode = 0  # else Python itself would wait for it once the Popen is dropped, as it is now

    def is_ready(self) -> bool:
        return self._ready_file.exists()

    def lines(self) -> bytes | None:
        """What it has written since the last call, each line with the worker's label; the rest of a line waits.

        Returns:
            None when nothing more can come.
        """
        try:
            read = os.read(self.output, LONGEST_LINE)
        except BlockingIOError:
            return b""
        if not read:
            return None
        self._begun += read
        whole, newline, begun = self._begun.rpartition(b"\n")
        if len(begun) >= LONGEST_LINE:
            whole, newline, begun = self._begun, b"\n", b""
        self._begun = begun
        return self._labelled(whole) if newline else b""

    def last_lines(self) -> bytes:
        """What is still to be read, to the end; it writes no more."""
        with contextlib.suppress(BlockingIOError):  # something else of its still holds the other end
            while read := os.read(self.output, LONGEST_LINE):
                self._begun += read
        begun, self._begun = self._begun.removesuffix(b"\n"), b""
        return self._labelled(begun) if begun else b""

    def send(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            os.kill(self.pid, number)

    def ended(self, exit_code: int) -> None:
        """Called when its command was reaped; negative: the signal that killed it.

        The command may have been killed over a worker that lets its messages finish. What else is left is ended now.
        """
        self.exit_code = exit_code
        self._rest = processes.session_members(self.pid)
        if not self._works():
            self.kill()

    def is_gone(self) -> bool:
        """True when nothing of it runs any more."""
        if self.exit_code is None:
            return False
        self._rest = [one for one in self._rest if one.is_running() and processes.lives(one.pid)]
        if self._rest and not self._works():
            self.kill()
        return not self._rest

    def _works(self) -> bool:
        """True while the process that has said that it is ready is there."""
        try:
            pid = int(self._ready_file.read_text())
        except (OSError, ValueError):
            return False
        return any(one.pid == pid for one in self._rest)

    def kill(self) -> None:
        """SIGKILL all of it but its browsers, which are known by their token."""
        for process in processes.session_members(self.pid) if self.exit_code is None else self._rest:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        os.close(self.output)
        self._ready_file.unlink(missing_ok=True)

    def _labelled(self, text: bytes) -> bytes:
        return b"".join(self._label + line + b"\n" for line in text.split(b"\n"))
