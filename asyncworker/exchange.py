"""Exchanges with the store that end in time, and say what is known of a command that got no answer."""

from __future__ import annotations

import contextlib
import os
import select
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ResponseError
from redis.retry import Retry

#: So many connections are kept for the next exchanges, and for so long: what lies between may forget them silently.
MOST_IDLE = 8
MOST_IDLE_S = 30.0

#: A command in words, and what the store says to it; its refusal is an answer, too.
Command = tuple[Any, ...]
Answer = Any


class NotSent(Exception):
    """No command can have reached the store; the cause is why."""


class Unanswered(Exception):
    """The connection was lost, or the time over, before all answers came; the cause is why.

    Attributes:
        answers: Those that did come, in order; what became of the other commands is not known.
    """

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__(f"{len(answers)} answers came")
        self.answers = answers


def connection_of(pool: Any, **options: Any) -> Any:
    """A connection as the pool makes them, but not the pool's, and not connected yet."""
    kept = {name: value for name, value in pool.connection_kwargs.items() if not name.startswith(("maint_", "orig_"))}
    return pool.connection_class(**(kept | {"retry": Retry(NoBackoff(), 0)} | options))


def ask_together(client: redis.Redis, commands: Sequence[Command]) -> list[Answer]:
    """What the store says to commands that are sent together; a refusal is returned, not raised.

    A pipeline of redis-py does much around that, which a worker that was woken has no time for.

    Parameters:
        client: Of a single connection, which no one else uses now. Where it is lost the commands are sent again, as
            often as the connection's own `retry` says.
    """
    connection: Any = client.connection

    def ask() -> list[Answer]:
        connection.send_packed_command(connection.pack_commands(commands))
        return [_read(connection) for _ in commands]

    answers: list[Answer] = connection.retry.call_with_retry(ask, lambda _: connection.disconnect())
    return answers


class OwnConnections:
    """A connection for each thread that asks: taking one from the pool costs as much as a command.

    Parameters:
        client: Has them made, and has them back when their thread has ended.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._of_thread = threading.local()

    def ask(self, command: Command) -> Answer:
        """What the store says to a command; its refusal is raised."""
        own = getattr(self._of_thread, "client", None)
        if own is None:
            own = self._of_thread.client = self._client.client()  # type: ignore[no-untyped-call]
        try:
            (answer,) = ask_together(own, [command])
        except BaseException:  # whoever was interrupted has left an answer behind, which is no one else's
            own.connection.disconnect()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer


def _read(connection: Any) -> Answer:
    """The next answer; a refusal is one, too."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def socket_of(connection: Any) -> Any:
    """The socket of a connection, whose own time limit is for all of its commands alike."""
    return connection._sock


class Exchange:
    """Connections over which commands are exchanged within a time limit each.

    The client of redis-py has one limit for all: for connecting, for each command, and for each of its repeats. Here
    nothing is repeated, and connecting, which may look up a name or start a server, is done by a thread, so that it
    can be left when the time is over.

    Parameters:
        pool: Says how to connect.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()  # another thread may have held the parent's
        self._pid = os.getpid()
        #: Each with when it was used last; the latest is at the right.
        self._idle: deque[tuple[Any, float]] = deque()
        self._failures: deque[BaseException] = deque()
        self._waiting = 0
        self._connecting = 0

    def ask(self, commands: Sequence[Command], deadline: float) -> list[Answer]:
        """Send commands together, and return what the store says to each; a refusal is returned, not raised.

        Parameters:
            deadline: By the monotonic clock, in seconds.

        Raises:
            NotSent: When none of them can have reached the store.
            Unanswered: When it is not known what became of some.
        """
        connection = self._take(deadline)
        try:
            self._send(connection, commands, deadline)
            answers = self._receive(connection, len(commands), deadline)
        except BaseException:
            connection.disconnect()
            self.close()  # they lead where this one led
            raise
        self._keep(connection)
        return answers

    def close(self) -> None:
        """Close the connections that are idle; the next exchange makes a new one."""
        with self._changed:
            idle, self._idle = self._idle, deque()
        for connection, _ in idle:
            connection.disconnect()

    def _send(self, connection: Any, commands: Sequence[Command], deadline: float) -> None:
        packed = b"".join(connection.pack_commands(commands))
        try:
            _limit(connection, deadline)
            connection.send_packed_command([packed], check_health=False)
        except redis.RedisError as error:
            # Its last bytes did not go out, so the last command is incomplete; those before it need not be.
            raise (NotSent() if len(commands) == 1 else Unanswered([])) from error

    def _receive(self, connection: Any, count: int, deadline: float) -> list[Answer]:
        answers: list[Answer] = []
        while len(answers) < count:
            try:
                _limit(connection, deadline)
                answers.append(_read(connection))
            except BusyLoadingError as error:  # to redis-py the end of the connection; the store says it to all
                answers.extend([error] * (count - len(answers)))
            except redis.RedisError as error:
                raise Unanswered(answers) from error
        return answers

    def _keep(self, connection: Any) -> None:
        with self._changed:
            if socket_of(connection) is not None and len(self._idle) < MOST_IDLE:
                self._idle.append((connection, time.monotonic()))
                self._changed.notify()
                return
        connection.disconnect()

    def _take(self, deadline: float) -> Any:
        """A connection that was alive just now.

        Raises:
            NotSent: When there is none in time.
        """
        if self._pid != os.getpid():
            self._reset()  # the sockets are the parent's
        while True:
            connection, since = self._idle_or_new(deadline)
            if time.monotonic() - since < MOST_IDLE_S and _is_quiet(connection):
                return connection
            connection.disconnect()

    def _idle_or_new(self, deadline: float) -> tuple[Any, float]:
        with self._changed:
            self._waiting += 1
            try:
                while not self._idle and not self._failures:
                    if self._connecting < self._waiting:
                        self._begin_to_connect()
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise NotSent() from redis.TimeoutError("there was no connection in time")
                    self._changed.wait(left_s)
                if self._idle:
                    return self._idle.pop()
                raise NotSent() from self._failures.popleft()
            finally:
                self._waiting -= 1
                if self._waiting == 0:
                    self._failures.clear()  # they are of now, not of the next exchange

    def _begin_to_connect(self) -> None:
        self._connecting += 1
        try:
            threading.Thread(target=self._connect, name="asyncworker-connecting", daemon=True).start()
        except RuntimeError:  # at the end of the interpreter there are no new threads
            self._connect()

    def _connect(self) -> None:
        connection, failure = None, None
        try:
            connection = connection_of(self._pool)
            connection.connect()
        except Exception as error:  # noqa: BLE001 -- whatever it is, whoever waits for the connection is told
            failure = error
        with self._changed:
            self._connecting -= 1
            if failure is None:
                self._idle.append((connection, time.monotonic()))
            elif self._waiting > len(self._failures):
                self._failures.append(failure)
            self._changed.notify()


def _is_quiet(connection: Any) -> bool:
    """True when nothing can be read from an idle connection: that would be its end, since the store has left."""
    socket = socket_of(connection)
    if socket is None:
        return False
    if isinstance(socket, ssl.SSLSocket):  # what came may be part of TLS, which only reading tells
        with contextlib.suppress(redis.RedisError):
            return not connection.can_read(0)
        return False
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return not poll.poll(0)


def _limit(connection: Any, deadline: float) -> None:
    """Bound what is next done with the socket."""
    socket = socket_of(connection)
    if socket is not None:
        socket.settimeout(max(0.001, deadline - time.monotonic()))
