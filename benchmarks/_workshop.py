"""The processes and files of a run; none of them is left when it ends, also by Ctrl-C."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import psutil

from asyncworker import embedded
from asyncworker.settings import child_environment

#: Carried by every process of a run, so that what outlives its parent is still found, and nothing else is.
RUN_VARIABLE = "_BENCHMARK_RUN"

#: The line by which Dramatiq says that a worker process has booted.
READY = "Worker process is ready for action."

BOOT_TIMEOUT_MS = 60_000
STOP_TIMEOUT_MS = 30_000


def within(timeout_ms: float, fact: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Wait until `fact()` is true.

    Raises:
        TimeoutError: When it is not within `timeout_ms`; with what `otherwise()` says.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    while not fact():
        if time.monotonic() >= deadline:
            raise TimeoutError(otherwise())
        time.sleep(0.01)


class Child:
    """A process of a run, in a session of its own: a Ctrl-C at the terminal reaches the script alone."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> None:
        """Write one line to its stdin."""
        stdin = self._pipe(self.process.stdin)
        stdin.write(f"{line}\n".encode())
        stdin.flush()

    def answer(self) -> str:
        """Read one line of its stdout.

        Raises:
            RuntimeError: When it ended instead; with the end of its log.
        """
        line = self._pipe(self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {self.log_end()}")
        return line.decode().rstrip("\n")

    def await_ready(self) -> None:
        """Wait until a Dramatiq worker has booted.

        Raises:
            RuntimeError: When it ended instead.
            TimeoutError: When it did neither.
        """
        within(
            BOOT_TIMEOUT_MS,
            lambda: READY in self.log.read_text() or self.process.poll() is not None,
            lambda: f"{self.name} did not boot within {BOOT_TIMEOUT_MS} ms: {self.log_end()}",
        )
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended: {self.log_end()}")

    def tree(self) -> list[psutil.Process]:
        """Its processes, parents before their children; empty when it has ended."""
        try:
            me = psutil.Process(self.pid)
            return [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_s(self) -> float:
        """The CPU time of its whole tree so far, with what has ended and was reaped."""
        return sum(_cpu_s(process) for process in self.tree())

    def rss_mb(self) -> float:
        """The memory of its whole tree, in MB; what processes share counts for each."""
        rss = 0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                rss += process.memory_info().rss
        return rss / 1_000_000

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its whole tree."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def stop(self) -> None:
        """Let it end by itself (its stdin ends, SIGTERM), or kill it."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        else:
            self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_MS / 1000)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-2_000:]

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise ValueError(f"{self.name} was started without pipes")
        return pipe


class Workshop:
    """A temporary directory, an embedded Valkey in it, and the processes of one run; made by `workshop()`.

    Attributes:
        folder: The processes' working directory.
        state_dir: The embedded Valkey's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.socket = embedded.socket_path(self.state_dir)
        self._run = secrets.token_hex(8)
        self._children: list[Child] = []

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """This process's environment without its ASYNCWORKER_ settings, with the run's own and `variables`."""
        own = {RUN_VARIABLE: self._run, "ASYNCWORKER_STATE_DIR": str(self.state_dir)}
        return child_environment(**(own | dict(variables)))

    def start(
        self,
        name: str,
        *command: str,
        variables: Mapping[str, str] = {},
        pipes: bool = False,
        folder: Path | None = None,
    ) -> Child:
        """Start a process, in the workshop's folder or another; with `pipes`, to be talked to line by line."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=folder or self.folder,
                env=self.environment(variables),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else stderr,
                stderr=stderr,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def cpu_s(self) -> float:
        """The CPU time so far of everything in this run: its processes, the server, and this one."""
        server = psutil.Process(int((self.state_dir / "valkey.pid").read_text()))
        children = sum(child.cpu_s() for child in self._children)
        return children + _cpu_s(server) + _cpu_s(psutil.Process())

    def stop(self, child: Child) -> None:
        """Stop one process before the others."""
        child.stop()
        self._children.remove(child)

    def close(self) -> None:
        """Stop everything: the processes, the server, and what they may have left behind."""
        for child in reversed(self._children):
            child.stop()
        embedded.stop(self.state_dir)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(RUN_VARIABLE) == self._run:
                    process.kill()


def machine_cpu_s() -> float:
    """The CPU time so far of all processes of this machine, however short they lived."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


@contextlib.contextmanager
def workshop() -> Iterator[Workshop]:
    """A place to measure in, of which nothing is left: no process, no file."""
    folder = Path(tempfile.mkdtemp(prefix="asyncworker-benchmark-"))
    place = Workshop(folder)
    try:
        yield place
    finally:
        try:
            place.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def script(name: str) -> str:
    """The path of a program that is installed beside this interpreter, such as `dramatiq`."""
    return str(Path(sys.executable).with_name(name))
