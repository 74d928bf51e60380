"""Playwright's real driver: its stderr, its session, its death, and what a start that fails leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import Context, copy_context
from pathlib import Path
from typing import Any

import psutil
import pytest
from dramatiq.compat import StreamablePipe
from playwright.async_api import Error

from asyncworker import processes
from asyncworker.engines.driver import LONGEST_LINE, Driver
from asyncworker.processes import carriers
from tests.waiting import eventually

Talk = Callable[[str], None]

#: Playwright never asks for this error of its own, when a driver dies that was up.
PLAYWRIGHTS_OWN = "Connection closed while reading from the driver"


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Have every node run some JavaScript when it starts."""

    def talk(javascript: str) -> None:
        script = tmp_path / "talk.js"
        script.write_text(javascript)
        monkeypatch.setenv("NODE_OPTIONS", f"--require {script}")

    return talk


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """Every test leaves the descriptors and tasks that it found."""
    open_before = descriptors()
    yield
    with contextlib.suppress(AssertionError):  # the assertions below say more
        await eventually(lambda: not other_tasks(), "the tasks have ended")
        await eventually(lambda: descriptors() <= open_before, "the descriptors are closed")
    assert other_tasks() == set()
    assert descriptors() <= open_before


@pytest.fixture
def no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio tells of errors that no one asked for, when their future is collected."""
    yield
    gc.collect()
    complaints = [record.getMessage() for when in ("call", "teardown") for record in caplog.get_records(when)]
    assert [text for text in complaints if "never retrieved" in text and PLAYWRIGHTS_OWN not in text] == []


def other_tasks() -> set[asyncio.Task[Any]]:
    me = asyncio.current_task()
    return {task for task in asyncio.all_tasks() if task is not me}


def descriptors() -> set[tuple[int, str]]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add((int(entry.name), str(entry.readlink())))
    return {(number, target) for number, target in found if "/proc/" not in target}


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Driver]:
    driver = await Driver.start()
    try:
        yield driver
    finally:
        await driver.stop(10_000)


def node_of(driver: Driver) -> psutil.Process:
    (node,) = carriers(lambda token: token == driver.token)
    return node


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the driver said, as the log has it."""
    return [record.getMessage() for record in caplog.records if record.name == "asyncworker.driver"]


# living


async def test_a_driver_runs_in_a_session_of_its_own_under_its_token_and_knows_none_of_our_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASYNCWORKER_PROXY", "http://user:password@proxy:8080")
    monkeypatch.setenv("BESIDE", "them")
    async with running() as driver:
        node = node_of(driver)
        environment = node.environ()
        assert driver.token.role == "driver"
        assert os.getsid(node.pid) == node.pid
        assert driver.playwright.chromium.name == "chromium"
    assert not processes.lives(node.pid)
    assert environment["BESIDE"] == "them"
    assert not [name for name in environment if name.startswith("ASYNCWORKER_")]


async def test_a_ctrl_c_at_the_workers_terminal_does_not_reach_the_driver() -> None:
    """Playwright would have it in the worker's process group."""
    script = """
import asyncio, os, signal, sys
from asyncworker.engines.driver import Driver
from asyncworker.processes import carriers, lives

async def main():
    driver = await Driver.start()
    (node,) = carriers(lambda token: token == driver.token)
    signal.signal(signal.SIGINT, lambda *_: None)
    os.killpg(0, signal.SIGINT)
    context = await driver.playwright.request.new_context()  # a round trip through the driver
    await context.dispose()
    print(lives(node.pid), flush=True)
    await driver.stop(10_000)

asyncio.run(main())
"""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, start_new_session=True, stdout=subprocess.PIPE
    )
    out, _ = await worker.communicate()
    assert (out.strip(), worker.returncode) == (b"True", 0)


# stderr


async def test_what_the_driver_writes_to_stderr_is_in_the_log_tagged_line_by_line(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    talk("console.error('first\\n\\n  second ü'); process.stderr.write('third')")
    async with running():
        await eventually(lambda: len(said(caplog)) == 2, "two lines are in the log")
    assert said(caplog) == ["driver: first", "driver:   second ü", "driver: third"]
    assert {record.levelno for record in caplog.records if record.name == "asyncworker.driver"} == {logging.WARNING}


async def test_the_last_words_of_a_driver_are_in_the_log(talk: Talk, caplog: pytest.LogCaptureFixture) -> None:
    talk("process.on('exit', () => require('fs').writeSync(2, 'goodbye\\n'))")
    async with running():
        pass
    assert said(caplog) == ["driver: goodbye"]


async def test_lines_without_end_and_bytes_without_meaning_are_cut_and_replaced(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    talk(
        "const fs = require('fs'); fs.writeSync(2, 'x'.repeat(50000) + '\\n');"
        "fs.writeSync(2, Buffer.from([0x66, 0xff, 0xfe, 0x0a]));"
    )
    async with running():
        await eventually(lambda: said(caplog)[-1:] == ["driver: f\ufffd\ufffd"], "the last line is in the log")
    assert max(len(line) for line in said(caplog)) == LONGEST_LINE + len("driver: ")


async def test_a_driver_that_writes_without_end_is_not_held_up(talk: Talk, caplog: pytest.LogCaptureFixture) -> None:
    """An undrained pipe is full after 64 KiB, and whoever writes to it stands still."""
    talk("const fs = require('fs'); for (let i = 0; i < 1000; i++) fs.writeSync(2, 'x'.repeat(99) + '\\n');")
    async with running():
        await eventually(lambda: len(said(caplog)) == 1_000, "all lines are in the log")


class WithoutDescriptor(io.StringIO):
    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


class Nothing:
    """Not even closed: what pythonw and some frozen programs have."""


@pytest.fixture(params=["no descriptor", "no file at all", "closed", "none", "dramatiq's pipe"])
def stderr(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """A worker's stderr of some kind; called, it gives what was written to it."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    closed = io.StringIO()
    closed.close()
    kinds: dict[str, Any] = {
        "no descriptor": WithoutDescriptor(),
        "no file at all": Nothing(),
        "closed": closed,
        "none": None,
        "dramatiq's pipe": StreamablePipe(sending),  # type: ignore[no-untyped-call]
    }
    chosen = kinds[request.param]
    monkeypatch.setattr(sys, "stderr", chosen)

    def written() -> Any:
        if isinstance(chosen, io.StringIO) and not chosen.closed:
            return chosen.getvalue()
        return receiving.recv_bytes() if receiving.poll() else ""

    yield written
    receiving.close()
    sending.close()


async def test_a_driver_starts_and_is_heard_whatever_the_workers_stderr_is(
    stderr: Callable[[], Any], talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    talk("console.error('raw text')")
    async with running():
        await eventually(lambda: said(caplog) == ["driver: raw text"], "the line is in the log")
    assert stderr() == "", "a raw line would silence a worker's framed log for good"


def test_a_driver_starts_where_the_worker_has_no_stderr_at_all(tmp_path: Path) -> None:
    """With descriptor 2 closed, the next pipe that is opened gets that number."""
    script = """
import asyncio, logging, os, sys
from asyncworker.engines.driver import Driver

async def main():
    driver = await Driver.start()
    await driver.stop(10_000)
    print("started and stopped")

logging.basicConfig(stream=sys.stdout, format="%(message)s")
asyncio.run(main())
"""
    talk = tmp_path / "talk.js"
    talk.write_text("console.error('raw text')")
    run = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"NODE_OPTIONS": f"--require {talk}"},  # noqa: TID251 -- tests are no part of the package
        check=False,
    )
    assert run.stdout.splitlines() == ["driver: raw text", "started and stopped"]


# its end


async def test_the_death_of_a_driver_is_told_once_to_everyone_who_asked() -> None:
    async with running() as driver:
        told: list[str] = []
        driver.on_lost(lambda: told.append("first"))
        driver.on_lost(lambda: told.append("second"))
        forget = driver.on_lost(lambda: told.append("no longer"))
        forget()
        forget()
        node_of(driver).kill()
        await eventually(lambda: len(told) == 2, "both were told")
        assert driver.lost
        driver.on_lost(lambda: told.append("late"))
        await eventually(lambda: len(told) == 3, "who asks later is told, too")
        with pytest.raises(Error):
            await driver.playwright.request.new_context()
    assert told == ["first", "second", "late"]


async def test_a_callback_that_fails_does_not_keep_the_others_from_being_told() -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with running() as driver:
        told = asyncio.Event()

        def fail() -> None:
            raise ValueError("of the callback")

        driver.on_lost(fail)
        driver.on_lost(told.set)
        node_of(driver).kill()
        await asyncio.wait_for(told.wait(), 10)
    assert [str(failure["exception"]) for failure in failures] == ["of the callback"]


async def test_a_driver_that_is_stopped_is_not_lost() -> None:
    told: list[str] = []
    async with running() as driver:
        driver.on_lost(lambda: told.append("lost"))
        node = node_of(driver)
    assert told == []
    assert not driver.lost
    assert not processes.lives(node.pid)
    await driver.stop(10_000)


async def test_a_driver_that_does_not_end_is_killed() -> None:
    driver = await Driver.start()
    node = node_of(driver)
    node.suspend()
    await driver.stop(200)
    assert not processes.lives(node.pid)
    assert not driver.lost


async def test_a_loop_that_ends_under_a_driver_is_not_the_drivers_death() -> None:
    def run() -> None:
        async def main() -> None:
            driver = await Driver.start()
            drivers.append(driver)
            driver.on_lost(lambda: told.append("lost"))
            driver._drain.cancel()
            await asyncio.wait({driver._drain})
            await asyncio.sleep(0)
            await driver.stop(10_000)

        asyncio.run(main())

    drivers: list[Driver] = []
    told: list[str] = []
    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert told == []
    assert not drivers[0].lost


# starts that fail


@pytest.mark.usefixtures("no_complaints")
@pytest.mark.parametrize("turns", [1, 30])
async def test_a_start_cancelled_half_way_leaves_nothing(turns: int) -> None:
    """Nothing is also no task and no descriptor: the fixture looks for them."""
    start = asyncio.create_task(Driver.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    assert not start.done()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not ours()


@pytest.mark.usefixtures("no_complaints")
async def test_a_start_cancelled_when_node_is_up_leaves_nothing(talk: Talk) -> None:
    talk("Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 60000)")  # up, and silent
    start = asyncio.create_task(Driver.start())
    (node,) = await eventually(ours, "node is up")
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not processes.lives(node.pid)


@pytest.mark.usefixtures("no_complaints")
async def test_a_driver_that_dies_at_once_is_an_error_and_leaves_nothing(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    talk("console.error('no memory'); process.exit(1)")
    with pytest.raises(Exception, match=r"driver|closed"):
        await Driver.start()
    assert not ours()
    assert said(caplog) == ["driver: no memory"]


def ours() -> list[psutil.Process]:
    mine = processes.new_token()
    return carriers(lambda token: (token.pid, token.born) == (mine.pid, mine.born))


# neighbours


async def test_another_subprocess_of_the_loop_keeps_its_own_stderr_and_session() -> None:
    start = asyncio.create_task(Driver.start())
    await asyncio.sleep(0)
    others = [
        await asyncio.create_subprocess_exec("sh", "-c", "echo mine >&2; ps -o sid= -p $$", stdout=-1, stderr=-1)
        for _ in range(3)
    ]
    assert not start.done(), "they were started meanwhile"
    for other in others:
        out, err = await other.communicate()
        assert err == b"mine\n"
        assert int(out) == os.getsid(0)
    driver = await start
    await driver.stop(10_000)


async def test_drivers_started_at_the_same_moment_each_have_their_own(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    talk("console.error('up')")
    drivers = await asyncio.gather(*(Driver.start() for _ in range(2)))
    try:
        nodes = [node_of(driver) for driver in drivers]
        assert len({node.pid for node in nodes}) == 2
        assert [os.getsid(node.pid) for node in nodes] == [node.pid for node in nodes]
        await eventually(lambda: said(caplog) == ["driver: up"] * 2, "each was heard")
    finally:
        await asyncio.gather(*(driver.stop(10_000) for driver in drivers))


async def test_code_in_a_handler_of_playwrights_starts_its_subprocesses_as_it_likes() -> None:
    """Playwright's tasks keep the context in which its driver was started."""
    contexts: list[Context] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        if "PipeTransport.run" in repr(coro):
            contexts.append(copy_context())
        return asyncio.Task(coro, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(factory)
    async with running():
        another = asyncio.create_task(Driver.start())
        await asyncio.sleep(0)
        assert not another.done()
        command = ("sh", "-c", "echo mine >&2; ps -o sid= -p $$")
        other = await asyncio.create_task(
            asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE),
            context=contexts[0],
        )
        out, err = await other.communicate()
        assert err == b"mine\n"
        assert int(out) == os.getsid(0)
        await (await another).stop(10_000)


async def test_the_loop_is_as_it_was_once_a_driver_is_up() -> None:
    loop = asyncio.get_running_loop()
    before = loop.subprocess_exec
    async with running():
        assert loop.subprocess_exec == before
    start = asyncio.create_task(Driver.start())
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert loop.subprocess_exec == before
