"""Workers that are told to stop, once and again, at any moment: no message is harmed, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from dramatiq import Message
from playwright.sync_api import sync_playwright

from asyncworker.engines.finding import find
from asyncworker.hurry import EXIT_TOLD_AGAIN
from asyncworker.processes import lives
from asyncworker.queues import Queues
from asyncworker.settings import load
from asyncworker.supervisor import NOT_IN_ORDER
from tests import operating
from tests.outage import Server, server_in
from tests.site import BehaviourSite
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment, Running

#: Told again, a process has this to end.
STOP_MS = 5_000

STOPPED = 0


@pytest.fixture
def deployment(state_dir: Path) -> Iterator[Deployment]:
    yield from _deployment(state_dir)


def _deployment(directory: Path, **settings: Any) -> Iterator[Deployment]:
    limits = {"stop_timeout_ms": STOP_MS, "close_timeout_ms": 3_000, "heartbeat_timeout_ms": 20_000}
    deployment = Deployment(directory, **(limits | settings))
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


def tell(worker: Running) -> None:
    """Tell it to stop, as a supervisor does: the command alone."""
    worker.command.terminate()


def stops(worker: Running, code: int, *, within_s: float) -> None:
    """It ends with this code in time, with all that it has started."""
    began = time.monotonic()
    assert worker.command.wait(within_s + BUSY_S) == code, worker.log[-3_000:]
    assert time.monotonic() - began < within_s + BUSY_S


@contextlib.contextmanager
def leaving_nothing(worker: Running) -> Iterator[None]:
    """No process that the worker has started, and no directory, is there afterwards."""
    pids = worker.ready().workers
    started = psutil.Process(worker.command.pid).children(recursive=True)
    yield
    wait_until(lambda: not [one for one in started if lives(one.pid)], "nothing of it runs")
    left = [path for pid in pids for path in Path(tempfile.gettempdir()).glob(f"aw-*-{pid}-*")]
    assert left == []


def loads(site: BehaviourSite, count: int = 1) -> None:
    wait_until(lambda: sum(site.requests.values()) >= count, f"{count} pages are loading")


def stands(deployment: Deployment, queue: str = "default") -> dict[str, int]:
    """How a queue stands, in how many messages."""
    queues = Queues(deployment.broker)
    return {part: getattr(queues.look(queue), part) for part in operating.PARTS}


def is_unharmed(deployment: Deployment, message: Message[Any], *, queue: str = "default", seed: int | None = 5) -> None:
    """The message waits for its next attempt as if there had been none."""
    (row,) = deployment.rows(message)
    assert (row.outcome, row.seed) == ("interrupted", seed)
    stand = stands(deployment, queue)
    assert (stand["running"], stand["dead"], stand["lost"]) == (0, 0, 0), stand
    assert stand["waiting"] + stand["delayed"] == 1, stand
    assert not deployment.broker.client.exists(f"dramatiq:{queue}.losses")
    assert deployment.dead_letters(queue) == {}


# --- once


def test_no_message_begins_after_the_signal_though_its_worker_was_waiting_for_one(deployment: Deployment) -> None:
    with deployment.worker("-p", "1", "-t", "4", "-Q", "noted") as worker:
        (pid,) = worker.ready().workers
        wait_until(lambda: operating.blocked(deployment) == 1, "it waits for a message")
        os.kill(pid, signal.SIGTERM)
        path = deployment.directory / "notes"
        sent = [deployment.send("note", str(path), number, queue="noted") for number in range(4)]
        worker.command.wait(30)
    assert not path.exists()
    assert {each.decode() for each in deployment.broker.client.lrange("dramatiq:noted", 0, -1)} == {  # type: ignore[union-attr]
        message.options["redis_message_id"] for message in sent
    }


def test_what_waits_for_a_thread_when_the_signal_comes_goes_back_and_does_not_begin(deployment: Deployment) -> None:
    path = deployment.directory / "notes"
    sent = [deployment.send("note", str(path), number, queue="noted", ms=20) for number in range(300)]
    with deployment.worker("-p", "1", "-t", "2", "-Q", "noted") as worker:
        (pid,) = worker.ready().workers
        wait_until(lambda: path.exists() and path.read_text().count("\n") > 20, "several are taken with one round trip")
        os.kill(pid, signal.SIGTERM)
        told_at = time.time()
        worker.command.wait(30)
    ended = [float(line.split()[1]) for line in path.read_text().splitlines()]
    begun_since = sum(at > told_at for at in ended)
    assert begun_since < 50, "that is half a second: the main thread looks for the signal once a second"
    stand = stands(deployment, "noted")
    assert (stand["waiting"] + stand["delayed"], stand["running"], stand["lost"]) == (len(sent) - len(ended), 0, 0)
    assert not deployment.broker.client.exists("dramatiq:noted.losses")


@pytest.mark.needs_browser
def test_what_outlasts_the_drain_budget_goes_back_to_its_queue_as_if_there_had_been_no_attempt(
    state_dir: Path, site: BehaviourSite
) -> None:
    with contextlib.contextmanager(_deployment)(state_dir, stop_timeout_ms=500) as deployment:
        with deployment.worker("-p", "1", "-t", "3", "--worker-shutdown-timeout", "1500") as worker:
            worker.ready()
            done = deployment.send("probe.text", f"{site.url}/slow?ms=1000")
            page = deployment.send("probe.text", f"{site.url}/slow?ms=8000", seed=5)  # neither has retries
            plain = deployment.send("hold", str(state_dir / "go"), queue="held")
            loads(site, 2)
            wait_until(lambda: deployment.rows(plain), "the plain one runs")
            with leaving_nothing(worker):
                tell(worker)
                stops(worker, STOPPED, within_s=6)
        assert deployment.result(done) == "slow"
        is_unharmed(deployment, page)
        is_unharmed(deployment, plain, queue="held", seed=None)
        (state_dir / "go").touch()
        with deployment.worker("-p", "1", "-t", "2"):
            assert deployment.result(page) == "slow"
            wait_until(lambda: deployment.broker.do_qsize("held") == 0, "the plain one is done")
        assert deployment.dead_letters("held") == {}


def browser() -> Path:
    found = find(load({}, engine="chromium"))
    assert found is not None
    if found.executable is not None:
        return found.executable
    with sync_playwright() as playwright:
        return Path(playwright.chromium.executable_path)


@pytest.fixture
def slow_browser(state_dir: Path) -> Callable[[float], dict[str, Any]]:
    """Settings of a browser that takes a while to start, and notes that it was."""

    def make(seconds: float) -> dict[str, Any]:
        script = state_dir / "slow"
        script.write_text(f"#!/bin/sh\ntouch '{state_dir}/launched'\nsleep {seconds}\nexec '{browser()}' \"$@\"\n")
        script.chmod(0o755)
        return {"executable_path": str(script)}

    return make


@pytest.mark.needs_browser
def test_a_stop_during_a_launch_has_the_message_run_to_its_end(
    state_dir: Path, site: BehaviourSite, slow_browser: Callable[[float], dict[str, Any]]
) -> None:
    with contextlib.contextmanager(_deployment)(state_dir, **slow_browser(2.5)) as deployment:
        with deployment.worker("-p", "1", "-t", "1") as worker:
            worker.ready()
            message = deployment.send("probe.text", f"{site.url}/cookie/get")
            wait_until((state_dir / "launched").exists, "the browser is launched")
            with leaving_nothing(worker):
                tell(worker)
                stops(worker, STOPPED, within_s=10)
        assert deployment.result(message) == ""


@pytest.mark.needs_browser
def test_a_stop_during_a_close_that_hangs_ends_with_the_closes_limit_and_keeps_the_result(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker("-p", "1", "-t", "1") as worker:
        message = deployment.send("probe.slow_close", site.product_url(1), 60_000)
        worker.wait_for_log("close began")
        with leaving_nothing(worker):
            tell(worker)
            stops(worker, STOPPED, within_s=8)
    assert site.product(1).title in deployment.result(message)
    assert [row.outcome for row in deployment.rows(message)] == ["succeeded"]


# --- again


@pytest.mark.needs_browser
@pytest.mark.parametrize("command", ["dramatiq", pytest.param("up", marks=pytest.mark.long)])
def test_a_second_sigterm_during_navigations_interrupts_them_and_they_are_run_as_if_nothing_had_been(
    deployment: Deployment, site: BehaviourSite, command: str
) -> None:
    """Reported as microsoft/playwright-python#1150."""
    start = deployment.worker if command == "dramatiq" else deployment.up
    with start("-p", "1", "-t", "1") as worker:
        worker.ready()
        message = deployment.send("probe.text", f"{site.url}/slow?ms=8000", seed=5)  # which has no retries
        loads(site)
        with leaving_nothing(worker):
            tell(worker)
            worker.wait_for_log("Stopping worker process")
            tell(worker)
            stops(worker, EXIT_TOLD_AGAIN if command == "dramatiq" else NOT_IN_ORDER, within_s=4)
    assert "told to stop again" in worker.log
    is_unharmed(deployment, message)
    with deployment.worker("-p", "1", "-t", "1"):
        assert deployment.result(message) == "slow"
        wait_until(
            lambda: (
                [(row.outcome, row.seed) for row in deployment.rows(message)] == [("interrupted", 5), ("succeeded", 5)]
            ),
            "its rows are closed",
        )


@pytest.mark.needs_browser
def test_a_second_sigterm_ends_a_launch_that_never_ends(
    state_dir: Path, slow_browser: Callable[[float], dict[str, Any]]
) -> None:
    with contextlib.contextmanager(_deployment)(state_dir, **slow_browser(600)) as deployment:
        with deployment.worker("-p", "1", "-t", "1") as worker:
            worker.ready()
            message = deployment.send("probe.text", "http://127.0.0.1:9/", seed=5)
            wait_until((state_dir / "launched").exists, "the browser is launched")
            with leaving_nothing(worker):
                tell(worker)
                worker.wait_for_log("Stopping worker process")
                tell(worker)
                stops(worker, EXIT_TOLD_AGAIN, within_s=STOP_MS / 1000)
        is_unharmed(deployment, message)


@pytest.mark.needs_browser
@pytest.mark.long
def test_a_second_sigterm_ends_a_close_that_hangs_before_its_own_limit(state_dir: Path, site: BehaviourSite) -> None:
    with contextlib.contextmanager(_deployment)(state_dir, close_timeout_ms=60_000) as deployment:
        with deployment.worker("-p", "1", "-t", "1") as worker:
            message = deployment.send("probe.slow_close", site.product_url(1), 90_000)
            worker.wait_for_log("close began")
            with leaving_nothing(worker):
                tell(worker)
                worker.wait_for_log("Stopping worker process")
                tell(worker)
                stops(worker, EXIT_TOLD_AGAIN, within_s=STOP_MS / 1000)
        assert site.product(1).title in deployment.result(message)


def test_a_second_sigterm_ends_a_thread_that_sees_no_interrupt_in_time_and_loses_nothing(
    deployment: Deployment,
) -> None:
    with deployment.worker("-p", "1", "-t", "1", "-Q", "noted") as worker:
        worker.ready()
        message = deployment.send("note", str(deployment.directory / "notes"), 0, queue="noted", ms=60_000)
        wait_until(lambda: deployment.rows(message), "it runs")
        with leaving_nothing(worker):
            tell(worker)
            worker.wait_for_log("Stopping worker process")
            tell(worker)
            stops(worker, EXIT_TOLD_AGAIN, within_s=STOP_MS / 1000)
    is_unharmed(deployment, message, queue="noted", seed=None)


def test_a_reload_that_a_stop_overtakes_is_one_stop_in_order(deployment: Deployment) -> None:
    """Dramatiq's main process sends SIGHUP to its workers to reload them, and SIGTERM when it is told to stop then."""
    with deployment.worker("-p", "1", "-t", "1", "-Q", "noted") as worker:
        (pid,) = worker.ready().workers
        message = deployment.send("note", str(deployment.directory / "notes"), 0, queue="noted", ms=2_000)
        wait_until(lambda: deployment.rows(message), "it runs")
        os.kill(pid, signal.SIGHUP)
        worker.wait_for_log("Stopping worker process")
        assert worker.stop() == STOPPED
    assert "told to stop again" not in worker.log
    assert [row.outcome for row in deployment.rows(message)] == ["succeeded"]


def test_a_third_sigterm_ends_at_once(state_dir: Path) -> None:
    with contextlib.contextmanager(_deployment)(state_dir, stop_timeout_ms=60_000) as deployment:
        with deployment.worker("-p", "1", "-t", "1", "-Q", "noted") as worker:
            worker.ready()
            message = deployment.send("note", str(state_dir / "notes"), 0, queue="noted", ms=90_000)
            wait_until(lambda: deployment.rows(message), "it runs")
            with leaving_nothing(worker):
                tell(worker)
                worker.wait_for_log("Stopping worker process")
                tell(worker)
                worker.wait_for_log("told to stop again")
                tell(worker)
                stops(worker, EXIT_TOLD_AGAIN, within_s=1)
            assert "before all has ended" in worker.log
        is_unharmed(deployment, message, queue="noted", seed=None)


def test_a_second_sigterm_while_the_store_is_away_waits_for_it_no_longer(state_dir: Path) -> None:
    with (
        server_in(state_dir) as server,
        contextlib.contextmanager(_deployment)(
            state_dir, broker_url=server.url, stop_timeout_ms=20_000, heartbeat_timeout_ms=2_000
        ) as deployment,
    ):
        server.start()
        path = state_dir / "notes"
        with deployment.worker("-p", "1", "-t", "1", "-Q", "noted") as worker:
            worker.ready()
            deployment.send("note_and_answer", str(path), 0, queue="noted", ms=1_000)
            wait_until(lambda: stands(deployment, "noted")["running"] == 1, "it runs")
            server.stop()
            wait_until(path.exists, "it is done")
            worker.wait_for_log("trying again in")
            with leaving_nothing(worker):
                tell(worker)
                worker.wait_for_log("Stopping worker process")
                tell(worker)
                stops(worker, EXIT_TOLD_AGAIN, within_s=6)
        _is_run_again(server, deployment, path)


def _is_run_again(server: Server, deployment: Deployment, path: Path) -> None:
    server.start()
    with deployment.worker("-p", "1", "-t", "1", "-Q", "noted"):
        wait_until(lambda: path.read_text().count("\n") == 2, "it is run again")
        wait_until(lambda: deployment.broker.do_qsize("noted") == 0, "it is done")
