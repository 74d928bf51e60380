"""Workers that are there at once: a process that has imported everything forks them, and kills them.

Run as `python -m tests.forked STATE_DIR HEARTBEAT_MS THREADS`, it reads commands, a line each, and answers each with a
line: `fork` with the pid of a new worker, `kill PID` and `stop PID` with how it ended. It has one thread, so that it
may fork, and it alone waits for its workers: a pid is one of them until it has said that it ended. With the end of its
input it kills those that are left.

Its workers have one actor, `record`: it works for some ms, and counts in the store how often each number was run.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dramatiq
from dramatiq import Worker

from asyncworker import engines, middleware
from asyncworker.broker import make_broker
from asyncworker.settings import Settings, child_environment, load

QUEUE = "recorded"

#: A hash in the store: how often each number was run.
COUNTS = "test:runs"

#: How long the actor works at the most.
LONGEST_MS = 20

_PR_SET_PDEATHSIG = 1


class Zygote:
    """The process that forks workers, from the outside."""

    def __init__(self, state_dir: Path, *, heartbeat_ms: int, threads: int) -> None:
        with (state_dir / "workers.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(state_dir), str(heartbeat_ms), str(threads)],
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )

    def fork(self) -> int:
        """Start a worker; returns its pid at once."""
        return int(self._ask("fork"))

    def kill(self, pid: int) -> None:
        """Kill a worker with SIGKILL; it has ended then."""
        assert self._ask(f"kill {pid}") == str(-signal.SIGKILL), "it had ended by itself"

    def stop(self, pid: int) -> int:
        """Stop a worker with SIGTERM, and wait for its end; returns its exit code."""
        return int(self._ask(f"stop {pid}"))

    def close(self) -> None:
        if self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdin.close()
            self._process.wait(20)
            self._process.stdout.close()

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        answer = self._process.stdout.readline().strip()
        assert answer, f"the process that forks has ended at {command!r}"
        return answer


@contextlib.contextmanager
def forking(state_dir: Path, *, heartbeat_ms: int, threads: int) -> Iterator[Zygote]:
    zygote = Zygote(state_dir, heartbeat_ms=heartbeat_ms, threads=threads)
    try:
        yield zygote
    finally:
        zygote.close()


def serve(state_dir: Path, heartbeat_ms: int, threads: int) -> None:
    """Do what is asked on the standard input, until that ends."""
    settings = load({}, engine="chromium", state_dir=state_dir, output_dir=state_dir / "out", max_losses=1_000)
    _import_everything(settings)
    libc = ctypes.CDLL(None)
    middleware.processes.sweep = lambda: 0  # no worker here has a browser, and to look at all processes takes longest
    gc.freeze()  # a collection in a worker would copy what it shares with this process
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a worker waits for it, from its first moment
    alive: set[int] = set()
    while line := sys.stdin.readline():
        match line.split():
            case ["fork"]:
                pid = os.fork()
                if pid == 0:
                    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    _work_and_exit(settings, heartbeat_ms, threads)
                alive.add(pid)
                answer = pid
            case [command, pid_text] if int(pid_text) in alive:
                answer = _end(int(pid_text), signal.SIGKILL if command == "kill" else signal.SIGTERM)
                alive.discard(int(pid_text))
            case _:
                raise ValueError(f"no command: {line!r}")
        print(answer, flush=True)
    for pid in alive:
        _end(pid, signal.SIGKILL)


def _import_everything(settings: Settings) -> None:
    """Import also what is imported on use, and have the server started."""
    engines.create(settings)
    broker = make_broker(settings)
    broker.recover(QUEUE)
    broker.leave()
    broker.client.close()


def _end(pid: int, number: int) -> int:
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _work_and_exit(settings: Settings, heartbeat_ms: int, threads: int) -> None:
    """Be a worker until SIGTERM; never returns into the parent's code."""
    code = 1
    try:
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 0)
        os.dup2(devnull, 1)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        worker = _worker(settings, heartbeat_ms, threads)
        worker.start()
        signal.sigwait({signal.SIGTERM})
        worker.stop(timeout=20_000)
        code = 0
    except BaseException:
        logging.exception("worker %d failed", os.getpid())
    finally:
        os._exit(code)


def _worker(settings: Settings, heartbeat_ms: int, threads: int) -> Worker:
    broker = make_broker(settings)
    broker.heartbeat_timeout = heartbeat_ms  # shorter than the settings allow

    @dramatiq.actor(broker=broker, actor_name="record", queue_name=QUEUE, max_retries=0)
    def record(number: int) -> None:
        time.sleep(number % LONGEST_MS / 1000)
        broker.client.hincrby(COUNTS, str(number), 1)

    return Worker(broker, worker_timeout=100, worker_threads=threads)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s")
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
