"""Does the faults of a plan to the processes of a run, and to no others, and keeps a journal of what was done."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from _chaos_plan import Deed, Fault, Target
from _chaos_watch import Seen, Watch, is_store

#: A target that is not there (yet) is waited for so long.
PATIENCE_S = 3.0


@dataclass
class Done:
    """A fault as it was done. Times are of the monotonic clock; `unix_ms` compares with the ledger's.

    Attributes:
        pid: Who it was done to; None: no such process was there.
        worker: The worker process that it belongs to; the same for a worker.
    """

    fault: Fault
    at: float
    unix_ms: int
    pid: int | None = None
    worker: int | None = None
    ended_at: float | None = None

    @property
    def until(self) -> float:
        return self.ended_at or self.at

    def facts(self) -> dict[str, Any]:
        return {**asdict(self.fault), "pid": self.pid, "worker": self.worker, "at": self.at, "ended_at": self.ended_at}


class Faults:
    """Runs a plan, in the thread that calls `run`.

    Parameters:
        watch: Knows who is there.
        state_dir: The embedded store's.
        trap: Sends the message of a bomb or a hog.
        after_browser_kill: Called right after the SIGKILL of a browser.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        state_dir: Path,
        trap: Callable[[Deed], None],
        after_browser_kill: Callable[[], None],
    ) -> None:
        self.journal: list[Done] = []
        self._watch = watch
        self._state_dir = state_dir
        self._trap = trap
        self._after_browser_kill = after_browser_kill
        self._frozen: list[tuple[float, int, psutil.Process, Done]] = []
        self._numbers = itertools.count()

    def run(self, plan: list[Fault], begun_at: float, stop: threading.Event) -> None:
        """Do the faults in time; every process that was frozen goes on at the end, also on Ctrl-C."""
        try:
            for fault in plan:
                self._wait_until(begun_at + fault.at_s, stop)
                if stop.is_set():
                    break
                self.journal.append(self._do(fault))
            while self._frozen and not stop.is_set():
                self._wait_until(self._frozen[0][0], stop)
        finally:
            while self._frozen:
                self._thaw()

    def _wait_until(self, at: float, stop: threading.Event) -> None:
        """Wait, and have frozen processes go on in time."""
        while True:
            now = time.monotonic()
            while self._frozen and self._frozen[0][0] <= now:
                self._thaw()
            next_at = min(at, self._frozen[0][0]) if self._frozen else at
            if now >= at or stop.wait(max(0.0, next_at - now)):
                return

    def _thaw(self) -> None:
        _, _, process, done = heapq.heappop(self._frozen)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
        done.ended_at = time.monotonic()

    def _do(self, fault: Fault) -> Done:
        if fault.deed in (Deed.bomb, Deed.hog):
            done = _now(fault)
            self._trap(fault.deed)
            return done
        found = self._find(fault)
        if found is None:
            return _now(fault)
        process, worker = found
        done = _now(fault, process.pid, worker)
        try:
            if fault.deed is Deed.freeze:
                process.suspend()
                heapq.heappush(self._frozen, (done.at + fault.for_s, next(self._numbers), process, done))
            else:
                if fault.target is Target.worker:
                    self._watch.died(process.pid, done.at)
                process.kill()
                if fault.target is Target.browser:
                    self._after_browser_kill()
        except psutil.NoSuchProcess:
            done.pid = None
        return done

    def _find(self, fault: Fault) -> tuple[psutil.Process, int | None] | None:
        """The target, and the worker process that it belongs to."""
        ends = time.monotonic() + PATIENCE_S
        while True:
            if fault.target is Target.store:
                if (store := self._store()) is not None:
                    return store, None
            elif targets := self._watch.targets(fault.target):
                return self._chosen(fault.target, targets[fault.index % len(targets)])
            if time.monotonic() >= ends:
                return None
            time.sleep(0.05)

    def _store(self) -> psutil.Process | None:
        """The process of the pid file, if it is this run's store: after a kill the number may be another's."""
        try:
            process = psutil.Process(int((self._state_dir / "valkey.pid").read_text()))
            is_ours = is_store(process) and Path(process.cwd()).samefile(self._state_dir)
        except (OSError, ValueError, psutil.Error):
            return None
        return process if is_ours and process.status() != psutil.STATUS_ZOMBIE else None

    def _chosen(self, target: Target, seen: Seen) -> tuple[psutil.Process, int | None]:
        if target is Target.command:
            below = {child.pid for child in seen.process.children()}
            return seen.process, next((one.pid for one in self._watch.targets(Target.worker) if one.pid in below), None)
        return seen.process, seen.token.pid if seen.token is not None else seen.pid


def _now(fault: Fault, pid: int | None = None, worker: int | None = None) -> Done:
    return Done(fault, time.monotonic(), int(time.time() * 1000), pid, worker)
