"""A RabbitMQ server of the tests' own, from Debian's package, and a deployment whose broker it is."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import psutil

from asyncworker import embedded
from asyncworker.broker import make_broker
from asyncworker.rabbitmq import WorkerRabbitmqBroker, quieten
from asyncworker.settings import child_environment
from tests.conftest import SHARED
from tests.waiting import wait_until
from tests.workers import Deployment

#: Not /usr/sbin/rabbitmq-server: as root that becomes another user, who may not write here.
SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

USER, PASSWORD = "worker", "s3cret-of-the-test"

CONFIGURATION = f"""
default_user = {USER}
default_pass = {PASSWORD}
log.file = false
log.console = true
log.console.level = warning
vm_memory_high_watermark.absolute = 2GB
disk_free_limit.absolute = 1MB
"""


def why_missing() -> tuple[str | None, bool]:
    """Why there is no server here, if so; and whether it can be had, so that a test without it must fail in CI."""
    if SERVER.exists() and shutil.which("epmd") is not None:
        return None, False
    if shutil.which("apt-get") is None:
        return "no RabbitMQ server on this machine, and no apt-get to get one with", False
    return "no RabbitMQ server on this machine: `make rabbitmq`, as root, gets one", True


class RabbitServer:
    """A node with ports, files and a name server (epmd) of its own, on the loopback interface."""

    def __init__(self, directory: Path) -> None:
        quieten()
        self.directory = directory
        self._held = [_held_port() for _ in range(3)]
        self.port, self._distribution_port, self._epmd_port = (each.getsockname()[1] for each in self._held)
        self._epmd: subprocess.Popen[bytes] | None = None
        self._script: subprocess.Popen[bytes] | None = None
        (directory / "plugins").write_text("[].")
        (directory / "rabbitmq.conf").write_text(CONFIGURATION)

    @property
    def url(self) -> str:
        return f"amqp://{USER}:{PASSWORD}@127.0.0.1:{self.port}"

    def start(self) -> None:
        log = (self.directory / "server.log").open("ab")
        if self._epmd is None:
            options = ["-port", str(self._epmd_port), "-address", "127.0.0.1"]
            self._epmd = subprocess.Popen(["epmd", *options], stdout=log, stderr=log, env=self._environment())
        self._script = subprocess.Popen([str(SERVER)], stdout=log, stderr=log, env=self._environment())
        log.close()
        try:
            wait_until(self._answers, "RabbitMQ answers", timeout_ms=60_000)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{(self.directory / 'server.log').read_text()[-4_000:]}") from None

    def _environment(self) -> dict[str, str]:
        home = str(self.directory)
        return child_environment(
            **{SHARED: "1"},
            HOME=home,
            ERL_EPMD_PORT=str(self._epmd_port),
            ERL_EPMD_ADDRESS="127.0.0.1",
            RABBITMQ_NODENAME=f"asyncworker-{self.port}@localhost",
            RABBITMQ_NODE_IP_ADDRESS="127.0.0.1",
            RABBITMQ_NODE_PORT=str(self.port),
            RABBITMQ_DIST_PORT=str(self._distribution_port),
            RABBITMQ_MNESIA_BASE=f"{home}/mnesia",
            RABBITMQ_LOG_BASE=f"{home}/log",
            RABBITMQ_CONF_ENV_FILE=f"{home}/none",
            RABBITMQ_CONFIG_FILE=f"{home}/rabbitmq.conf",
            RABBITMQ_ENABLED_PLUGINS_FILE=f"{home}/plugins",
            RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="+S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}",
        )

    def _answers(self) -> bool:
        try:
            socket.create_connection(
                ("127.0.0.1", self.port), timeout=5
            ).close()  # costs less than pika, while it starts
            pika.BlockingConnection(pika.URLParameters(self.url)).close()
        except (pika.exceptions.AMQPError, OSError):
            return False
        return True

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It answers nothing within the block, and closes nothing."""
        assert self._script is not None
        (beam,) = (each for each in psutil.Process(self._script.pid).children() if each.name().startswith("beam"))
        beam.suspend()
        wait_until(lambda: beam.status() == psutil.STATUS_STOPPED, "its threads are stopped")
        try:
            yield
        finally:
            beam.resume()

    def kill(self) -> None:
        """End it as a crash does; its files stay."""
        script, self._script = self._script, None
        if script is None:
            return
        below = psutil.Process(script.pid).children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        script.kill()
        script.wait(30)
        _, left = psutil.wait_procs(below, timeout=10)
        assert not left, f"processes of the server were left over: {left}"

    def close(self) -> None:
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(30)
        for held in self._held:
            held.close()


def _held_port() -> socket.socket:
    """Held, not listened on: no one else gets the port while the server is away, and the server shares it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


@contextlib.contextmanager
def rabbit_server() -> Iterator[RabbitServer]:
    directory = Path(tempfile.mkdtemp(prefix="aw-rabbit-"))
    server = RabbitServer(directory)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(directory, ignore_errors=True)


class RabbitDeployment(Deployment):
    """A deployment whose broker is RabbitMQ, and whose store is a Valkey in its directory."""

    broker: WorkerRabbitmqBroker  # type: ignore[assignment]

    def __init__(self, directory: Path, url: str, **settings: Any) -> None:
        store = f"unix://{embedded.ensure(directory)}"
        self.url = url
        super().__init__(directory, **({"broker_url": url, "store_url": store} | settings))

    def make_broker(self) -> Any:
        return make_broker(self.settings)

    @contextlib.contextmanager
    def channel(self) -> Iterator[Any]:
        """A channel of the test's own."""
        assert self.settings.broker_url is not None
        with pika.BlockingConnection(pika.URLParameters(self.settings.broker_url.parts[0])) as connection:
            yield connection.channel()

    def waiting(self, queue: str) -> int:
        """How many messages of a queue wait, by its name at the server; -1: there is no such queue."""
        try:
            with self.channel() as channel:
                return int(channel.queue_declare(queue, passive=True).method.message_count)
        except pika.exceptions.ChannelClosedByBroker:
            return -1

    def take(self, queue: str) -> bytes | None:
        """The body of the message at the front of a queue, which is gone then."""
        with self.channel() as channel:
            _, _, body = channel.basic_get(queue, auto_ack=True)
            return body  # type: ignore[no-any-return]

    def put(self, queue: str, body: bytes) -> None:
        with self.channel() as channel:
            channel.basic_publish("", queue, body)
