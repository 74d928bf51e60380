"""The servers of a worker process that say how it is: at its unix socket, at the deployment's port, and a local page.

They run in threads of their own, so that they answer while the event loop is blocked. The port is one for all worker
processes of the deployment on this host: whoever comes first listens, asks the others at their sockets, and answers for
all; the others try again, so that another takes over when it ends.
"""

from __future__ import annotations

import errno
import http.client
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from asyncworker.errors import ConfigurationError
from asyncworker.health_sockets import ask_all, deployment_id, members, together
from asyncworker.probing import TITLE, State
from asyncworker.settings import Settings

logger = logging.getLogger("asyncworker.health")

#: Who has not sent its request for so long is hung up on.
REQUEST_TIMEOUT_S = 5.0

#: How often a worker process looks whether the port is free.
TAKE_OVER_S = 1.0

#: A server that is told to stop notices it this soon.
POLL_S = 0.1

#: A probe's page is asked for by one browser at a time; health by whoever watches.
BACKLOG = 128

#: An answer: status, content type, body.
Answer = tuple[HTTPStatus, str, bytes]

NOT_FOUND: Answer = (HTTPStatus.NOT_FOUND, "text/plain", b"there are /live and /ready\n")


class _Handler(BaseHTTPRequestHandler):
    """Gives what the server's `answer` says for the path."""

    server: _TcpServer
    timeout = REQUEST_TIMEOUT_S
    server_version = "asyncworker"
    sys_version = ""

    def do_GET(self) -> None:
        status, content_type, body = self.server.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """A line for each probe would be all that a log has."""


class _Quiet:
    """What the servers have in common."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request for the health of this worker was not answered", exc_info=True)


class _Telling(socketserver.BaseRequestHandler):
    """Says how this process is to whoever connects."""

    server: _UnixServer

    def handle(self) -> None:
        self.request.settimeout(REQUEST_TIMEOUT_S)
        self.request.sendall(json.dumps(self.server.facts()).encode())


class _UnixServer(_Quiet, socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    facts: Callable[[], dict[str, Any]]


class _TcpServer(_Quiet, ThreadingHTTPServer):
    answer: Callable[[str], Answer]

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer asks the name service for a name that no one needs


class _Tcp6Server(_TcpServer):
    address_family = socket.AF_INET6


class Servers:
    """The threads that serve, by name; each is told to stop, and no one waits for requests in flight."""

    def __init__(self) -> None:
        self._serving: list[socketserver.BaseServer] = []

    def serve(self, server: socketserver.BaseServer, name: str) -> None:
        self._serving.append(server)
        threading.Thread(target=server.serve_forever, args=(POLL_S,), name=name, daemon=True).start()

    def stop(self) -> None:
        serving, self._serving = self._serving, []
        for server in serving:
            server.shutdown()
            server.server_close()


def own_socket(path: Path, facts: Callable[[], dict[str, Any]]) -> socketserver.BaseServer:
    """The socket at which this process says how it is; who finds the file can ask at once."""
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    server = _UnixServer(str(unfinished), _Telling)
    server.facts = facts
    unfinished.rename(path)
    return server


def local_page() -> tuple[socketserver.BaseServer, str] | None:
    """A page of this process's own for its browser to load, and where it is; None where there is no loopback."""
    try:
        server = _TcpServer(("127.0.0.1", 0), _Handler)
    except OSError as error:
        logger.warning("there is no local page to probe the browser with: %s", error)
        return None
    page = f"<!doctype html><title>{TITLE}</title><link rel=icon href=data:,>".encode()
    server.answer = lambda path: (HTTPStatus.OK, "text/html", page) if path == "/" else NOT_FOUND
    return server, f"http://127.0.0.1:{server.server_address[1]}/"


class SharedPort:
    """The deployment's port on this host, which one of its worker processes listens at.

    Parameters:
        settings: `health_host` and `health_port`; whose workers are asked.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._deployment = deployment_id(settings)
        self._server: _TcpServer | None = None
        self._serving = threading.Lock()
        self._stopping = threading.Event()
        self._said: str | None = None

    def begin(self) -> None:
        """Listen, now or when who does has ended.

        Raises:
            ConfigurationError: When it can never be: the address is none of this host's, or the port is not for this
                user.
        """
        bound = self._bind()
        threading.Thread(target=self._run, args=(bound,), name="asyncworker-health-port", daemon=True).start()

    def end(self) -> None:
        self._stopping.set()
        with self._serving:
            server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _run(self, server: _TcpServer | None) -> None:
        while server is None:
            self._say_who_has_it()
            if self._stopping.wait(TAKE_OVER_S):
                return
            try:
                server = self._bind()
            except ConfigurationError as error:  # the address was there at the boot
                logger.error("%s", error)
        with self._serving:
            if self._stopping.is_set():
                server.server_close()
                return
            self._server = server
        logger.info("the health of this deployment is answered at %s by this process", self._where)
        server.serve_forever(POLL_S)  # at once to its end, when it was told to stop meanwhile

    @property
    def _where(self) -> str:
        host = self._settings.health_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._settings.health_port}"

    def _bind(self) -> _TcpServer | None:
        """The server; None while someone else has the port."""
        host, port = self._settings.health_host, self._settings.health_port
        try:
            server = (_Tcp6Server if ":" in host else _TcpServer)((host, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise ConfigurationError(
                f"{self._where} cannot be listened at ({error.strerror or error}); set ASYNCWORKER_HEALTH_HOST to an "
                "address of this host, and ASYNCWORKER_HEALTH_PORT to a port that this user may have, or to 0 for none",
                name="ASYNCWORKER_HEALTH_PORT",
            ) from error
        server.answer = self.answer
        return server

    def answer(self, path: str) -> Answer:
        """What is answered for a path."""
        if path not in ("/live", "/ready"):
            return NOT_FOUND
        answers = ask_all(members(self._settings))
        state = together(answers)
        live = bool(answers) and all(answer["live"] for answer in answers)
        good = live if path == "/live" else state is State.ready
        facts = {"deployment": self._deployment, "state": state, "live": live, "workers": answers}
        status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", json.dumps(facts).encode() + b"\n"

    def _say_who_has_it(self) -> None:
        """Once for each of them: a worker of this deployment, which is as it should be, or someone else."""
        who = "another worker process of this deployment" if self._is_ours() else "another program"
        if who == self._said:
            return
        self._said = who
        if who == "another program":
            logger.error(
                "%s is in use by %s, or by one that does not answer: no one answers there for this worker until it "
                "ends; set ASYNCWORKER_HEALTH_PORT to a port of this deployment's own",
                self._where,
                who,
            )

    def _is_ours(self) -> bool:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.health_host, self._settings.health_host)  # noqa: S104 -- compared only
        connection = http.client.HTTPConnection(host, self._settings.health_port, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("GET", "/live")
            facts = json.loads(connection.getresponse().read(100_000))
            return isinstance(facts, dict) and facts.get("deployment") == self._deployment
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()
