"""A proxy before a store, which loses connections at a chosen moment."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import Any


class Proxy:
    """Listens on a port of this machine, and passes bytes on to a unix socket.

    Parameters:
        path: The store's socket.

    Attributes:
        turns: How often a client spoke after the store had: its round trips.
        asked: How often a client spoke.
        lose: Which of what a client sends makes its connection end: `(chunk) -> "before" | "after" | None`, before it
            is passed on, or as soon as the store has answered, in the place of the answer.
        on_loss: Called between the store's answer and the end of the connection.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.turns = 0
        self.asked = 0
        self.losses = 0
        self.lose: Callable[[bytes], str | None] = lambda _: None
        self.on_loss: Callable[[], object] = lambda: None
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)

    def lose_times(self, count: int, how: str, word: bytes = b"\r\nsend\r\n") -> None:
        """Lose the next connections over which `word` is sent."""
        left = [how] * count

        def lose(chunk: bytes) -> str | None:
            return left.pop() if left and word in chunk else None

        self.lose = lose

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(self._path)
            self._open |= {client, server}
            self._pass_on(client, server)
        self._open -= {client, server}

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        clients_turn = False
        while True:
            ready: list[Any] = select.select([client, server], [], [])[0]
            for source in ready:
                chunk = source.recv(1 << 20)
                if not chunk:
                    return
                if source is server:
                    clients_turn = False
                    client.sendall(chunk)
                    continue
                self.asked += 1
                if not clients_turn:
                    clients_turn = True
                    self.turns += 1
                loss = self.lose(chunk)
                if loss != "before":
                    server.sendall(chunk)
                if loss is not None:
                    if loss == "after":
                        server.recv(1 << 20)
                    self.losses += 1
                    self.on_loss()
                    return
