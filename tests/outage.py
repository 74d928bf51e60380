"""A store of a test's own, which goes away in one way or another and comes back."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from asyncworker import embedded
from asyncworker.settings import child_environment
from tests.waiting import wait_until


class Server:
    """A Valkey of the test's own on a TCP port, which it can stop, start, kill and fill.

    Its append-only file is written out every second.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Held, not listened on: no one else gets the port while the server is away, and the server shares it.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Start it, and return as soon as it can be connected to: it may be loading then."""
        options = ["--port", str(self.port), "--dir", str(self.directory), "--appendonly", "yes", "--save", ""]
        self._process = subprocess.Popen(
            [str(embedded.binary()), "--bind", "127.0.0.1", *options, "--appendfsync", "everysec", *more],
            env=child_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers, "the server answers")

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(10)
            self._process = None

    def hang(self) -> None:
        """Whoever connects succeeds, and is never answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.stop(signal.SIGKILL)
        self._held.close()

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        with redis.Redis("127.0.0.1", self.port, socket_timeout=10, retry=Retry(NoBackoff(), 0)) as client:
            yield client

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def server_in(directory: Path) -> Iterator[Server]:
    server = Server(directory)
    try:
        yield server
    finally:
        server.close()
