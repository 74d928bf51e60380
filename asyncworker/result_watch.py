"""ResultWatch: any number of waits for results, on one connection that the store speaks up on.

The connection asks the store to say when a key changes that it has looked for (client-side caching, which Redis has
since 6.0). So whoever stores a result wakes its waiters, plain Dramatiq too, and the result's format stays as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import redis
from redis.exceptions import ResponseError

from asyncworker.errors import AsyncworkerError, BrokerUnavailable
from asyncworker.exchange import connection_of, socket_of
from asyncworker.patience import PAUSE_S, passes

logger = logging.getLogger("asyncworker.broker")

#: Everything is looked for again after so long: a connection may be dead without a word.
LOOK_S = 10.0

#: The same where the store cannot speak up.
POLL_S = 0.1

#: A store that does not answer for so long is away.
SILENT_S = 10.0

#: So long after the last wait the connection is kept for the next.
LINGER_S = 2.0

#: A thread that is about to connect is not waited for any longer.
CLOSE_S = 2.0

_CHANGED = object()


class ResultWatch:
    """A thread that waits for keys in the store; it begins with the first wait, and ends some time after the last.

    Parameters:
        pool: Says how to connect.
    """

    def __init__(self, pool: Any, *, linger_s: float = LINGER_S) -> None:
        self._pool = pool
        self._linger_s = linger_s
        #: Why the store could not be asked last time; None: it can.
        self.trouble: BaseException | None = None
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()  # another thread may have held the parent's
        self._pid = os.getpid()
        self._waits: dict[str, set[Future[bytes]]] = {}
        self._fresh: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._bell: socket.socket | None = None
        self._is_closed = False

    def wait_for(self, key: str) -> Future[bytes]:
        """What stands first in the list `key`, as soon as there is one; cancel it to wait no longer."""
        future: Future[bytes] = Future()
        if self._pid != os.getpid():
            self._reset()  # the thread is the parent's
        with self._lock:
            self._waits.setdefault(key, set()).add(future)
            self._fresh.append(key)
            self._is_closed = False
            if self._thread is None:
                ours, its = socket.socketpair()
                ours.setblocking(False)
                its.setblocking(False)
                self._bell = ours
                self._thread = threading.Thread(
                    target=self._run, args=(its, ours), name="asyncworker-results", daemon=True
                )
                self._thread.start()
            self._ring()
        future.add_done_callback(lambda done: self._forget(key, done))
        return future

    def close(self) -> None:
        """End the thread and its connection; who still waits is told."""
        with self._lock:
            thread, self._is_closed = self._thread, True
            wanted = list(self._waits)
            self._ring()
        self._fail(wanted, BrokerUnavailable("the broker was closed while a result was waited for; wait again"))
        if thread is not None:
            thread.join(CLOSE_S)

    def _ring(self) -> None:
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):  # it rings already
                self._bell.send(b"!")

    def _forget(self, key: str, future: Future[bytes]) -> None:
        with self._lock:
            futures = self._waits.get(key, set())
            futures.discard(future)
            if not futures:
                self._waits.pop(key, None)
            if not self._waits:
                self._ring()  # from now on the thread waits for its end

    def _run(self, bell: socket.socket, ringer: socket.socket) -> None:
        line = _Line(self._pool, bell)
        idle_since: float | None = None
        while True:
            with self._lock:
                wanted = list(self._waits)
                fresh = list(self._fresh)
                self._fresh.clear()
                now = time.monotonic()
                idle_since = None if wanted else idle_since or now
                if self._is_closed or (idle_since is not None and now - idle_since >= self._linger_s):
                    self._thread = self._bell = None
                    break
            try:
                if wanted and not line.is_connected:
                    line.connect()
                    self.trouble = None
                for key, value in line.serve(wanted, fresh, None if wanted else self._linger_s):
                    self._give(key, value)
            except (redis.RedisError, AsyncworkerError) as error:
                line.close()
                self._troubled(error)
                line.wait(PAUSE_S)
            except Exception as error:  # whoever waits is told, and the next wait begins anew
                logger.exception("the thread that waits for results failed, and begins anew")
                line.close()
                self._fail(wanted, error)
        line.close()
        bell.close()
        ringer.close()

    def _give(self, key: str, value: bytes | Exception) -> None:
        with self._lock:
            futures = list(self._waits.get(key, ()))
        for future in futures:
            if future.set_running_or_notify_cancel():
                if isinstance(value, Exception):
                    future.set_exception(value)
                else:
                    future.set_result(value)

    def _fail(self, keys: Iterable[str], error: Exception) -> None:
        for key in keys:
            self._give(key, error)

    def _troubled(self, error: Exception) -> None:
        """What will pass is waited out, by each for as long as it has time; else all are told."""
        self.trouble = error
        if not isinstance(error, redis.RedisError | BrokerUnavailable) or not passes(error):
            with self._lock:
                wanted = list(self._waits)
            self._fail(wanted, error)


class _Line:
    """A connection of the watch's own: asks for keys, and hears when they change.

    Parameters:
        pool: Says how to connect.
        bell: Can be read when there is something new to ask.
    """

    def __init__(self, pool: Any, bell: socket.socket) -> None:
        self._pool = pool
        self._bell = bell
        self._connection: Any = None
        self._is_told = False
        #: The keys asked for whose answer has not come, in order; since when the first of them has not.
        self._asked: deque[str] = deque()
        self._heard_at = 0.0
        self._looked_at = 0.0
        self._changed: set[str] = set()

    def serve(
        self, wanted: list[str], fresh: list[str], at_most_s: float | None
    ) -> list[tuple[str, bytes | Exception]]:
        """Ask for what is new, wait until something happens, and return what has come; on a new connection for all.

        Raises:
            RedisError, AsyncworkerError: When the store is away.
        """
        if self._connection is None:
            self.wait(at_most_s or 0.0)
            return []
        now = time.monotonic()
        if not self._asked and now - self._looked_at >= self._every_s:
            fresh = wanted
        if fresh:
            self._ask(fresh)
        if fresh is wanted:
            self._looked_at = now
        self.wait(self._every_s if at_most_s is None else at_most_s)
        if self._asked and time.monotonic() - self._heard_at > SILENT_S:
            raise redis.TimeoutError(f"the store did not answer for {SILENT_S:.0f} s")
        found = list(self._read())
        if changed := self._changed & set(wanted):
            self._ask(changed)
        self._changed.clear()
        return found

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def _every_s(self) -> float:
        return LOOK_S if self._is_told else POLL_S

    def wait(self, at_most_s: float) -> None:
        """Wait until there is something to read, or the bell rings."""
        poll = select.poll()  # not select(), which knows no descriptor above 1023
        poll.register(self._bell, select.POLLIN)
        if self._connection is not None:
            poll.register(socket_of(self._connection), select.POLLIN)
        poll.poll(at_most_s * 1000)
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None
        self._asked.clear()
        self._changed.clear()

    def connect(self) -> None:
        """Connect, and have the store speak up, where it can.

        Raises:
            RedisError, AsyncworkerError: When the store is away.
        """
        connection = connection_of(self._pool, protocol=3)
        connection.connect()
        try:
            connection._parser.set_invalidation_push_handler(self._hear)
            connection.send_command("CLIENT", "TRACKING", "ON", check_health=False)
            connection.read_response(push_request=True)
            self._is_told = True
        except ResponseError as error:
            logger.info("the store does not say when a result comes (%s): it is asked each %g s", error, POLL_S)
            self._is_told = False
        except BaseException:
            connection.disconnect()
            raise
        self._connection = connection
        self._looked_at = float("-inf")

    def _ask(self, keys: Iterable[str]) -> None:
        if not self._asked:
            self._heard_at = time.monotonic()
        keys = list(keys)
        packed = self._connection.pack_commands([("LINDEX", key, 0) for key in keys])
        self._connection.send_packed_command(packed, check_health=False)
        self._asked.extend(keys)

    def _read(self) -> Iterable[tuple[str, bytes | Exception]]:
        while self._connection.can_read(0):
            self._heard_at = time.monotonic()
            value: Any
            try:
                value = self._connection.read_response(disable_decoding=True, push_request=True)
            except redis.ConnectionError:  # also what redis-py makes of a store that is loading
                raise
            except ResponseError as error:
                value = error
            if value is _CHANGED:
                continue
            key = self._asked.popleft()
            if isinstance(value, Exception) and passes(value):
                raise value
            if value is not None:
                yield key, value

    def _hear(self, push: list[Any]) -> object:
        """A key has changed; all have when the store was emptied, where there is nothing to look for."""
        for key in push[1] or ():
            self._changed.add(key.decode() if isinstance(key, bytes) else key)
        return _CHANGED
