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
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from asyncworker import processes, scratch
from asyncworker.settings import child_environment
from asyncworker.threads import in_thread

if TYPE_CHECKING:
    from playwright.async_api import Playwright

logger = logging.getLogger("asyncworker.driver")

#: A line longer than this is cut: the log is for people.
LONGEST_LINE = 4_000

#: How long the rest of the driver's stderr may take to come, once the driver has ended.
LAST_LINES_TIMEOUT_S = 1.0

#: How long a start may take to notice that its driver was killed.
ABANDON_TIMEOUT_S = 10.0

#: What the driver that is being started in this context is started with; emptied as soon as it is up, since
#: Playwright's own tasks, and the code's event handlers in them, keep the context for ever.
_spawning: ContextVar[dict[str, Any]] = ContextVar("asyncworker_driver_spawning")


class Driver:
    """One running driver. `playwright` is Playwright's own object."""

    def __init__(
        self, playwright: Playwright, token: processes.Token, drain: asyncio.Task[None], directory: Path
    ) -> None:
        self.playwright = playwright
        self.token = token
        #: Where it and its browsers write for the moment; removed with it.
        self.directory = directory
        self.lost = False
        #: How many browsers use it, those being launched included.
        self.users = 0
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
        token = processes.new_token("driver")
        directory = scratch.make()  # at once: cancelled half way, it would be left behind
        reading, writing = os.pipe()
        drain = asyncio.create_task(_drain(os.fdopen(reading, "rb", 0)), name="asyncworker-driver-stderr")
        starting = asyncio.create_task(_start(token, writing, directory), name="asyncworker-driver-start")
        try:
            return cls(await asyncio.shield(starting), token, drain, directory)
        except BaseException:
            await asyncio.shield(_abandon(starting, token, drain, directory))
            raise

    def on_lost(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` once, on the loop, when the driver is gone without `stop`; soon, when it is already.

        Returns:
            What to call when it is no longer of interest: a driver outlives many browsers.
        """
        if self.lost:
            asyncio.get_running_loop().call_soon(callback)
            return lambda: None
        self._callbacks.append(callback)

        def forget() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return forget

    async def stop(self, timeout_ms: int) -> None:
        """Stop the driver, or kill it after `timeout_ms`. Never raises."""
        self._stopping = True
        stopping = asyncio.ensure_future(self.playwright.stop())
        await asyncio.wait({stopping}, timeout=timeout_ms / 1000)
        if not stopping.done():
            await in_thread(processes.kill_launch, self.token)
            await asyncio.wait({stopping}, timeout=1)
        if not stopping.done():
            stopping.cancel()
        elif not stopping.cancelled() and (error := stopping.exception()) is not None:
            logger.debug("the driver's stop said: %s", error)
        await _finish(self._drain)
        await in_thread(scratch.remove, self.directory)

    async def kill(self) -> None:
        """End a driver that does not answer; whoever waits for it is told that it is lost. Never raises."""
        await in_thread(processes.kill_launch, self.token)
        await self.ends_within(LAST_LINES_TIMEOUT_S)

    async def ends_within(self, seconds: float) -> bool:
        """Whether it is lost, or is so long from now; a call that meets its end may fail a moment before."""
        await asyncio.wait({self._drain}, timeout=seconds)
        return self._drain.done()

    def _stderr_ended(self, drain: asyncio.Task[None]) -> None:
        """The pipe ends when node does: nothing else holds its other end."""
        if self._stopping or drain.cancelled():  # cancelled with its loop: no one has stopped anything
            return
        self.lost = True
        asyncio.get_running_loop().run_in_executor(None, scratch.remove, self.directory)  # no one will stop it
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback)  # each by itself: one that fails must not hide the others


class _Spawner:
    """A loop's `subprocess_exec` while drivers are started on it; every other subprocess stays as it is."""

    def __init__(self, original: Callable[..., Awaitable[Any]]) -> None:
        self.original = original
        self.starts = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return self.original(*args, **(kwargs | _spawning.get({})))


@contextlib.contextmanager
def _spawn_with(**options: Any) -> Iterator[None]:
    """Give the subprocess that Playwright starts on this loop other options than Playwright chose.

    Playwright has no parameter for them. The loop's own `subprocess_exec` is the narrowest public place.
    """
    loop: Any = asyncio.get_running_loop()
    if not isinstance(loop.subprocess_exec, _Spawner):
        loop.subprocess_exec = _Spawner(loop.subprocess_exec)
    spawner: _Spawner = loop.subprocess_exec
    spawner.starts += 1
    token = _spawning.set(options)
    try:
        yield
    finally:
        _spawning.reset(token)
        options.clear()
        spawner.starts -= 1
        if spawner.starts == 0 and loop.subprocess_exec is spawner:
            loop.subprocess_exec = spawner.original


async def _start(token: processes.Token, stderr: int, directory: Path) -> Playwright:
    """Start Playwright's driver; closes `stderr`, whose copy the driver has."""
    from playwright.async_api import async_playwright

    environment = child_environment(**{processes.VARIABLE: str(token), "TMPDIR": str(directory)})
    try:
        with _spawn_with(stderr=stderr, env=environment, start_new_session=True):
            return await async_playwright().start()
    finally:
        os.close(stderr)


async def _abandon(
    starting: asyncio.Task[Playwright], token: processes.Token, drain: asyncio.Task[None], directory: Path
) -> None:
    """Leave nothing of a start that failed, or that no one waits for any more.

    Its node is killed, and the start then fails by itself; cancelled, it would leave tasks to complain later.
    """
    deadline = asyncio.get_running_loop().time() + ABANDON_TIMEOUT_S
    while not starting.done() and asyncio.get_running_loop().time() < deadline:
        await in_thread(processes.kill_launch, token)
        await asyncio.wait({starting}, timeout=0.05)
    starting.cancel()
    await asyncio.wait({starting}, timeout=1)
    await in_thread(processes.kill_launch, token)  # it may have come up after the last look
    await _finish(drain)
    await in_thread(scratch.remove, directory)


async def _finish(drain: asyncio.Task[None]) -> None:
    """Let the last lines of a driver that has ended come, and no longer."""
    await asyncio.wait({drain}, timeout=LAST_LINES_TIMEOUT_S)
    drain.cancel()
    await asyncio.wait({drain})


async def _drain(source: BinaryIO) -> None:
    """Log what the driver writes to stderr, line by line, until it ends."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), source
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
