"""Playwright's driver: the node process between this one and the stock browsers.

Playwright starts it with the worker's stderr, its process group and its environment. A Dramatiq worker's
stderr is a length-framed pipe, which one raw line of text silences for good; a Ctrl-C in the terminal goes to
the whole group and would take the driver, and every page with it, down before the worker has finished. So the
driver gets a pipe of its own, drained into the log, a session of its own, and a token by which it is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from asyncworker import processes
from asyncworker.settings import child_environment

if TYPE_CHECKING:
    from playwright.async_api import Playwright

logger = logging.getLogger("asyncworker.driver")

#: A line longer than this is cut: the log is for people.
LONGEST_LINE = 4_000

_spawning: ContextVar[dict[str, Any] | None] = ContextVar("asyncworker_driver_spawning", default=None)


class Driver:
    """One running driver. `playwright` is Playwright's own object."""

    def __init__(self, playwright: Playwright, token: processes.Token, drain: asyncio.Task[None]) -> None:
        self.playwright = playwright
        self.token = token
        self.lost = False
        self._drain = drain
        self._callbacks: list[Callable[[], None]] = []
        self._stopping = False
        drain.add_done_callback(self._stderr_ended)

    @classmethod
    async def start(cls) -> Driver:
        """Start a driver. Unbounded: the caller bounds it; a cancelled start leaves no process.

        Raises:
            playwright.async_api.Error: When node does not start.
        """
        from playwright.async_api import async_playwright

        token = processes.new_token("driver")
        reading, writing = os.pipe()
        drain = asyncio.create_task(_drain(reading), name="asyncworker-driver-stderr")
        try:
            with _spawn_with(stderr=writing, env=child_environment(**{processes.VARIABLE: str(token)})):
                playwright = await async_playwright().start()
        except BaseException:
            await asyncio.shield(asyncio.to_thread(processes.kill_launch, token))
            raise
        finally:
            os.close(writing)
        return cls(playwright, token, drain)

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once, when the driver is gone without `stop`."""
        self._callbacks.append(callback)

    async def stop(self, timeout_ms: int) -> None:
        """Stop the driver, or kill it after `timeout_ms`. Never raises."""
        self._stopping = True
        stopping = asyncio.ensure_future(self.playwright.stop())
        await asyncio.wait({stopping}, timeout=timeout_ms / 1000)
        if not stopping.done():
            await asyncio.to_thread(processes.kill_launch, self.token)
            await asyncio.wait({stopping}, timeout=1)
        if not stopping.done():
            stopping.cancel()
        elif not stopping.cancelled() and (error := stopping.exception()) is not None:
            logger.debug("the driver's stop said: %s", error)
        self._drain.cancel()
        await asyncio.wait({self._drain})

    def _stderr_ended(self, _: asyncio.Task[None]) -> None:
        """The pipe ends when node does: nothing else holds its other end."""
        if self._stopping:
            return
        self.lost = True
        for callback in self._callbacks:
            callback()


@contextlib.contextmanager
def _spawn_with(**options: Any) -> Iterator[None]:
    """Give the subprocess that Playwright starts on this loop other options than Playwright chose.

    Playwright has no parameter for them. The loop's own `subprocess_exec` is the narrowest public place; the
    context variable keeps every other subprocess that starts meanwhile as it is.
    """
    loop = asyncio.get_running_loop()
    original = loop.subprocess_exec

    async def subprocess_exec(*args: Any, **kwargs: Any) -> Any:
        chosen = _spawning.get()
        if chosen is not None:
            kwargs |= chosen | {"start_new_session": True}
        return await original(*args, **kwargs)

    token = _spawning.set(options)
    loop.subprocess_exec = subprocess_exec  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.subprocess_exec = original  # type: ignore[method-assign]
        _spawning.reset(token)


async def _drain(reading: int) -> None:
    """Log what the driver writes to stderr, line by line, until it ends."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0)
    )
    rest = b""
    try:
        while chunk := await reader.read(65_536):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                _log(line)
        _log(rest)
    finally:
        transport.close()


def _log(line: bytes) -> None:
    text = line.decode(errors="replace").rstrip()
    if text:
        logger.warning("driver: %s", text[:LONGEST_LINE])
