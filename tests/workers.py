"""The real `dramatiq asyncworker.actors` on a real embedded server, for tests of whole processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from dramatiq import Message
from dramatiq.results.errors import ResultFailure

from asyncworker import processes
from asyncworker.broker import make_redis_broker
from asyncworker.deployment import worker_command
from asyncworker.ledger import Row
from asyncworker.middleware import ledger_of
from asyncworker.redis_broker import WorkerBroker
from asyncworker.settings import Settings, as_environment, child_environment, load
from tests.waiting import wait_until

#: Where the worker runs: its package `actors` is the one with tests/deployment/actors/probe.py.
HOME = Path(__file__).parent / "deployment"

READY = "Worker process is ready for action"


class Running:
    """A running worker command: its log so far, its processes."""

    def __init__(self, command: subprocess.Popen[bytes], log: Path, count: int) -> None:
        self.command = command
        self.count = count
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def workers(self) -> list[int]:
        """The pids of its worker processes, from what they logged."""
        pids = re.findall(rf"\[PID (\d+)\].*{READY}", self.log)
        return [int(pid) for pid in pids]

    def wait_for_log(self, text: str, *, times: int = 1, timeout_ms: int = 30_000) -> None:
        wait_until(lambda: self.log.count(text) >= times, f"{times} x {text!r} in the log", timeout_ms=timeout_ms)

    def ready(self) -> Running:
        self.wait_for_log(READY, times=self.count)
        return self

    def tokens(self, role: str) -> set[processes.Token]:
        """What the browsers, or the drivers, of its worker processes carry."""
        pids = set(self.ready().workers)
        return processes.tokens(lambda token: token.role == role and token.pid in pids)

    def kill_browser(self) -> None:
        for token in self.tokens("browser"):
            processes.kill_launch(token)

    def kill_driver(self) -> None:
        for token in self.tokens("driver"):
            processes.kill_launch(token)

    def stop(self, number: int = signal.SIGTERM, *, timeout_s: float = 40) -> int:
        """Send a signal to the command and wait for its end; returns the exit code."""
        if self.command.poll() is None:
            self.command.send_signal(number)
        return self.command.wait(timeout_s)


class Deployment:
    """Settings, a broker to send with, and workers to start."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.settings: Settings = load(
            {}, **({"engine": "chromium", "state_dir": directory, "output_dir": directory / "out"} | settings)
        )
        self.broker: WorkerBroker = self.make_broker()
        self._logs = 0

    def make_broker(self) -> WorkerBroker:
        return make_redis_broker(self.settings)

    @contextlib.contextmanager
    def worker(
        self,
        *options: str,
        cwd: Path = HOME,
        environment: dict[str, str] | None = None,
        group: bool = True,
        within: Sequence[str] = (),
    ) -> Iterator[Running]:
        """Run `dramatiq asyncworker.actors` with these options; killed with all below it if the test leaves it."""
        options = options or ("-p", "1", "-t", "4")
        command = [*within, *worker_command(*options)]
        with self._running(command, options, cwd=cwd, environment=environment, group=group) as running:
            yield running

    @contextlib.contextmanager
    def up(
        self,
        *options: str,
        within: Sequence[str] = (),
        cwd: Path = HOME,
        environment: dict[str, str] | None = None,
    ) -> Iterator[Running]:
        """Run `asyncworker up` with these options, below another command when one is given."""
        command = [*within, sys.executable, "-m", "asyncworker", "up", *options]
        with self._running(command, options, cwd=cwd, environment=environment, group=True) as running:
            yield running

    @contextlib.contextmanager
    def _running(
        self,
        command: Sequence[str],
        options: Sequence[str],
        *,
        cwd: Path,
        environment: dict[str, str] | None,
        group: bool,
    ) -> Iterator[Running]:
        self._logs += 1
        log = self.directory / f"worker-{self._logs}.log"
        with log.open("wb") as output:
            started = subprocess.Popen(
                command,
                cwd=cwd,
                env=child_environment(**as_environment(self.settings), **(environment or {})),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=group,
            )
        count = int(options[options.index("-p") + 1]) if "-p" in options else os.cpu_count() or 1
        running = Running(started, log, count)
        try:
            yield running
        except BaseException:
            sys.stderr.write(f"--- the worker's log\n{running.log[-12_000:]}\n")
            raise
        finally:
            _end(started)

    def send(
        self, actor: str, *args: Any, queue: str = "default", delay: int | None = None, **kwargs: Any
    ) -> Message[Any]:
        """Send to an actor of the deployment as a producer would that does not import it."""
        options = kwargs.pop("options", {})
        message: Message[Any] = Message(queue, actor, args, kwargs, options)
        return self.broker.enqueue(message, delay=delay)

    def result(self, message: Message[Any], *, timeout_s: float = 40) -> Any:
        """The result, or ResultFailure with what the last attempt raised."""
        return self.broker.get_results_backend().get_result(message, block=True, timeout=int(timeout_s * 1000))

    def failure(self, message: Message[Any], *, timeout_s: float = 40) -> str:
        """What the message failed with, as text."""
        try:
            result = self.result(message, timeout_s=timeout_s)
        except ResultFailure as error:
            return str(error)
        raise AssertionError(f"{message} did not fail: {result!r}")

    def rows(self, message: Message[Any]) -> list[Row]:
        return ledger_of(self.broker).rows(message.message_id)

    def counts(self) -> dict[str, int]:
        """The counts of all worker processes together."""
        return {name: number for name, number in self._counted().items() if not name.startswith("slots")}

    def slots(self) -> dict[str, int]:
        """How many slots all worker processes have together, and how many of them were in use when last counted."""
        return {name: number for name, number in self._counted().items() if name.startswith("slots")}

    def _counted(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for counts in ledger_of(self.broker).counts().values():
            for name, number in counts.items():
                total[name] = total.get(name, 0) + number
        return total

    def dead_letters(self, queue: str = "default") -> dict[bytes, bytes]:
        client: Any = self.broker.client
        letters: dict[bytes, bytes] = client.hgetall(f"dramatiq:{queue}.XQ.msgs")
        return letters


def _end(command: subprocess.Popen[bytes]) -> None:
    """Kill the command and what is below it, by pid, unless it has ended."""
    if command.poll() is not None:
        return
    below = psutil.Process(command.pid).children(recursive=True)
    pids = {process.pid for process in below}
    started = processes.tokens(lambda token: token.pid in pids)
    command.kill()
    command.wait()
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for token in started:
        processes.kill_launch(token)
    deadline = time.monotonic() + 5
    psutil.wait_procs(below, timeout=max(0.0, deadline - time.monotonic()))
