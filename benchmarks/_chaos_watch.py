"""What is seen of the processes of a chaos run: who is there, what outlives its owner, and how much memory all take."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from _browsers import is_main
from _chaos_plan import Target

from asyncworker import processes
from asyncworker.processes import Token

#: How often the processes are looked at, and their memory is measured.
LOOK_S = 0.2
MEASURE_S = 2.0

#: A process that was just forked has its parent's environment: it is read again until it is so old.
SETTLED_S = 2.0

WORKER_WORDS = "asyncworker.actors"


@dataclass(frozen=True)
class Seen:
    """A process of the run."""

    process: psutil.Process
    session: int
    token: Token | None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def leads(self) -> bool:
        return self.pid == self.session

    def word(self, text: str) -> bool:
        """True when its command line has it."""
        with contextlib.suppress(psutil.Error):
            return any(text in word for word in self.process.cmdline())
        return False

    def is_main_of_browser(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return is_main(self.process)
        return False


@dataclass
class Outlived:
    """What was left of an owner that died."""

    owner: int
    died_at: float
    last_seen_at: float
    names: set[str] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        return self.last_seen_at - self.died_at


class Watch:
    """Looks at everything below `asyncworker up`, in a thread of its own.

    Parameters:
        root: The pid of `up`: what its workers leave is adopted by it.
    """

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._tokens: dict[psutil.Process, Token] = {}
        self._died_at: dict[tuple[int, int], float] = {}
        self.outlived: dict[tuple[int, int], Outlived] = {}
        self.memory: list[tuple[float, float]] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="chaos-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    # --- who is there

    def there(self) -> list[Seen]:
        """The living processes of the run, oldest first; the store and `up` itself are not among them."""
        with self._lock:
            found = [Seen(each, _session(each.pid), self._token(each)) for each in self._below()]
        by_session = {one.session: one.token for one in found if one.token is not None and one.leads}
        # A helper that has overwritten its environment belongs to who leads its session.
        return [Seen(one.process, one.session, one.token or by_session.get(one.session)) for one in found]

    def targets(self, target: Target) -> list[Seen]:
        """The processes that a fault may be done to."""
        there = self.there()
        match target:
            case Target.worker | Target.command:
                leads = target is Target.command
                return [s for s in there if s.token is None and s.leads is leads and s.word(WORKER_WORDS)]
            case Target.driver:
                return [s for s in there if s.token is not None and s.token.role == "driver" and s.leads]
            case Target.browser:
                return [
                    s for s in there if s.token is not None and s.token.role == "browser" and s.is_main_of_browser()
                ]
            case Target.page:
                return [s for s in there if s.token is not None and s.word("--type=renderer")]
            case Target.store:
                raise ValueError("the store is known by its pid file")

    def _below(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            below = self._root.children(recursive=True)
            return sorted((one for one in below if _lives(one) and not is_store(one)), key=lambda one: one.pid)
        return []

    def _token(self, process: psutil.Process) -> Token | None:
        known = self._tokens.get(process)
        if known is None or time.time() - process.create_time() < SETTLED_S:
            with contextlib.suppress(psutil.Error, OSError):
                read = Token.parse(process.environ().get(processes.VARIABLE, ""))
                if read is not None:
                    known = self._tokens[process] = read  # kept for `left`, also when it has ended
        return known

    # --- what is noted

    def died(self, pid: int, at: float) -> None:
        """A worker process was killed at that time, by the monotonic clock."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            self._died_at[(pid, _born(pid))] = at

    def _run(self) -> None:
        measure_at = 0.0
        while not self._stop.wait(LOOK_S):
            try:
                there = self.there()
                self._note_outlived(there)
                if time.monotonic() >= measure_at:
                    self.memory.append((time.monotonic(), _memory_mb(there)))
                    measure_at = time.monotonic() + MEASURE_S
            except Exception as error:  # noqa: BLE001 -- one look that fails is told with the result
                self.errors.append(f"{type(error).__name__}: {error}")

    def _note_outlived(self, there: list[Seen]) -> None:
        for one in there:
            if one.token is None or not one.token.owner_is_gone():
                continue
            owner, now = (one.token.pid, one.token.born), time.monotonic()
            died_at = self._died_at.get(owner, now)
            left = self.outlived.setdefault(owner, Outlived(one.token.pid, died_at, now))
            left.last_seen_at = now
            left.names.add(f"{one.token.role} {one.pid}")

    def left(self, timeout_s: float) -> list[str]:
        """What carries a token still after so long; nothing, when all has ended."""
        ends = time.monotonic() + timeout_s
        while (left := [one for one in self._tokens if one.is_running() and _lives(one)]) and time.monotonic() < ends:
            time.sleep(0.1)
        return [f"{self._tokens[one].role} {one.pid}" for one in left]

    def memory_quarters(self) -> Iterator[float]:
        """The median memory of each quarter of the time, in MB."""
        size = max(1, len(self.memory) // 4)
        for start in range(0, 4 * size, size):
            if part := [mb for _, mb in self.memory[start : start + size]]:
                yield statistics.median(part)


def _memory_mb(there: list[Seen]) -> float:
    return sum(_proportional(one.process) for one in there) / 1e6


def _proportional(process: psutil.Process) -> int:
    """Its own memory and its part of what it shares, in bytes."""
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _born(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def is_store(process: psutil.Process) -> bool:
    try:
        return "valkey-server" in process.name() or "redis-server" in process.name()
    except psutil.Error:
        return False
