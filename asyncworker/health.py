"""Health: what a worker process says of itself, to `asyncworker health` and at the deployment's port.

`ready`: it takes messages, and its browser was seen to finish a navigation, or is cold: no browser is up, since no
message has asked for one (with ASYNCWORKER_WARM that is `starting`). `starting`: it boots, its browser is being
launched, or is up and not proven. `draining`: it was told to stop, and finishes what it is at. `sick`: its loop or
its threads are blocked, its browser finishes no navigation, or none comes up. A process that is not live cannot help
itself; one whose browser is sick replaces that, and would lose its messages by a restart.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socketserver
import threading
import time
from pathlib import Path
from typing import Any

from dramatiq import Broker, Worker
from dramatiq.middleware import Middleware

from asyncworker import health_server
from asyncworker.errors import ConfigurationError
from asyncworker.health_sockets import members, new_socket_path
from asyncworker.identity import Identity
from asyncworker.middleware import BootFailed, BrowserMiddleware, serves_sessions
from asyncworker.probing import Probe, Prober, State
from asyncworker.settings import Settings
from asyncworker.watchdog import Watchdog

logger = logging.getLogger("asyncworker.health")

#: Of a reason no more is told: the error of a launch may hold the browser's whole log.
LONGEST_REASON = 500

#: How often a folder that others remove at the same moment is made anew.
MOST_TRIES = 5


class Health(Middleware):
    """Answers for a worker process, from before its boot until after its end.

    Parameters:
        settings: The deployment's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._browser: BrowserMiddleware | None = None
        self._watchdog: Watchdog | None = None
        self._prober: Prober | None = None
        self._probing: concurrent.futures.Future[None] | None = None
        self._servers = health_server.Servers()
        self._port: health_server.SharedPort | None = None
        self._path: Path | None = None
        self._local_url: str | None = None
        self._booted = self._draining = False
        self._looking = threading.Lock()
        self._state: State | None = None
        self._since_ms = 0

    # --- the worker's boot and end

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        self._browser = next((each for each in broker.middleware if isinstance(each, BrowserMiddleware)), None)
        self._watchdog = next((each for each in broker.middleware if isinstance(each, Watchdog)), None)
        self._booted = self._draining = False
        try:
            self._listen()
        except ConfigurationError as error:
            self._hang_up()
            raise BootFailed(f"this worker cannot start: {error}") from error

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if self._browser is not None and self._browser.loop_thread is not None and serves_sessions(broker, worker):
            if self._settings.probe_interval_ms and (page := health_server.local_page()) is not None:
                server, self._local_url = page
                self._servers.serve(server, "asyncworker-probe-page")
            begun = self._begin_probing(self._browser)
            self._probing = asyncio.run_coroutine_threadsafe(begun, self._browser.loop_thread.loop)
        self._booted = True
        self.look()

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self._draining = True
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self._hang_up()

    def _listen(self) -> None:
        try:
            self._path, server = self._own_socket()
            self._servers.serve(server, "asyncworker-health")
            members(self._settings)  # removes what dead ones have left
        except (OSError, ConfigurationError) as error:
            logger.warning("`asyncworker health` does not see this worker: %s", error)
        if self._settings.health_port:
            self._port = health_server.SharedPort(self._settings)
            self._port.begin()

    def _own_socket(self) -> tuple[Path, socketserver.BaseServer]:
        for _ in range(MOST_TRIES):
            path = new_socket_path(self._settings)
            with contextlib.suppress(FileNotFoundError):  # the last one of before has just removed the folder
                return path, health_server.own_socket(path, self.facts)
        raise FileNotFoundError(path)

    def _hang_up(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others' are still in it
                self._path.parent.rmdir()
            self._path = None
        if self._port is not None:
            self._port.end()
            self._port = None
        self._servers.stop()
        self._prober = None

    async def _begin_probing(self, browser: BrowserMiddleware) -> None:
        runtime = browser.runtime

        def home() -> Identity:
            return runtime.identity(browser.deployment_seed())

        self._prober = Prober(runtime.host, self._settings, home=home, local_url=self._local_url, told=self.look)
        self._prober.engine_problem = browser.engine_problem
        await self._prober.run()

    # --- what it says

    def look(self) -> tuple[State, str, bool]:
        """The state, why, and whether the process is live; a change is noted and told. Of any thread."""
        state, reason, live = self._verdict()
        with self._looking:
            former, self._state = self._state, state
            if former is not state:
                self._since_ms = round(time.time() * 1000)
        if former is not state and state is State.sick:
            logger.error("this worker is sick: %s", reason)
        elif former is State.sick and state is not State.sick:
            logger.info("this worker is no longer sick, but %s: %s", state.value, reason)
        return state, reason[:LONGEST_REASON], live

    def _verdict(self) -> tuple[State, str, bool]:
        watchdog, prober = self._watchdog, self._prober
        if watchdog is not None and (blocked := watchdog.blocked) is not None:
            return State.sick, blocked, False
        if self._draining:
            return State.draining, "it was told to stop, and finishes what it is at", True
        if watchdog is not None and (stuck := watchdog.stuck) is not None:
            return State.sick, stuck, True
        if not self._booted:
            return State.starting, "it boots", True
        if prober is not None:
            return prober.standing.state, prober.standing.reason, True
        if self._probing is not None:
            return State.starting, "it boots", True
        return State.ready, "it takes messages; none of its queues is of an actor with a session", True

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        state, reason, live = self.look()
        browser, prober = self._browser, self._prober
        slots = None
        if browser is not None:
            with contextlib.suppress(RuntimeError):  # it has no runtime yet, or none any more
                slots = browser.runtime.slots
        return {
            "pid": os.getpid(),
            "worker": browser.worker_id if browser is not None else None,
            "state": state,
            "live": live,
            "since_ms": self._since_ms,
            "reason": reason,
            "browser": prober.standing.generation if prober is not None else None,
            "slots": slots.total if slots is not None else None,
            "slots_in_use": slots.in_use if slots is not None else None,
            "probe": _told(prober.last) if prober is not None else None,
        }


def _told(probe: Probe | None) -> dict[str, Any] | None:
    if probe is None:
        return None
    return {"at_ms": probe.at_ms, "ms": probe.ms, "failure": probe.failure}
