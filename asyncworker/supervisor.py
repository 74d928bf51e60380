"""Keeps N independent worker processes: one that dies is replaced, the others go on with their pages.

One thread, one loop: it waits for signals and for what the workers write, reaps whatever has ended, and then decides
what is to be done. As it adopts the orphans below it, it reaps those too, also when it is process 1 of a container.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncworker import lineage, processes, scratch
from asyncworker.kept_worker import KeptWorker
from asyncworker.settings import Settings

logger = logging.getLogger("asyncworker.supervisor")

#: Everything was stopped in order.
STOPPED = 0
#: A worker had to be killed, was told twice to stop, or did not end well.
NOT_IN_ORDER = 1
#: A worker says with this exit code that what it was given cannot work: its options, or the actors.
HOPELESS = 2
#: A worker died again and again.
CRASH_LOOP = 3

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT)

#: What a worker may take beyond its own limits before it is killed.
MARGIN_MS = 10_000

#: How often is looked whether a worker is ready, or what was killed is gone.
LOOK_EVERY_S = 0.1
IDLE_S = 1.0


@dataclass(frozen=True)
class Policy:
    """When a worker is replaced, and how long stopping may take.

    Parameters:
        backoff_ms: The pause before a worker that died is replaced, doubled with each further death in a row.
        max_backoff_ms: The longest pause.
        steady_ms: A worker that was ready for so long has begun a new row.
        deaths: So many in a row are a crash loop.
        stop_ms: How long stopping in order may take before what is left is killed.
        short_stop_ms: The same after a second signal.
    """

    backoff_ms: int = 500
    max_backoff_ms: int = 30_000
    steady_ms: int = 5_000
    deaths: int = 5
    stop_ms: int = 760_000
    short_stop_ms: int = 50_000

    @classmethod
    def of(cls, settings: Settings, *, shutdown_ms: int) -> Policy:
        """As the settings and Dramatiq's `--worker-shutdown-timeout` have it."""
        # After the messages: those still running are cancelled and clean up, a launch may have to end, and browsers are
        # closed.
        ending_ms = settings.cleanup_timeout_ms + settings.stop_timeout_ms
        closing_ms = ending_ms + settings.launch_timeout_ms + 3 * settings.close_timeout_ms
        return cls(
            steady_ms=settings.crash_loop_ready_ms,
            deaths=settings.crash_loop_deaths,
            stop_ms=shutdown_ms + closing_ms + MARGIN_MS,
            short_stop_ms=settings.stop_timeout_ms + settings.close_timeout_ms,
        )

    def pause_ms(self, deaths: int) -> int:
        """The pause after so many deaths in a row, from 1."""
        return min(self.max_backoff_ms, self.backoff_ms << min(deaths - 1, 30))


@dataclass
class _Place:
    """One of the N places: its worker, or when the next one starts there."""

    number: int
    worker: KeptWorker | None = None
    start_at: float | None = 0.0  # None: no more
    ready_at: float | None = None
    deaths: int = 0
    kill_at: float | None = None


class Supervisor:
    """Keeps workers until it is told to stop, or gives up.

    Parameters:
        command: The command line of one worker.
        count: How many.
        policy: When they are replaced, and how long stopping may take.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command
        self._policy = policy or Policy()
        self._clock = clock
        self._places = [_Place(number) for number in range(1, count + 1)]
        self._directory = Path()
        self._selector = selectors.DefaultSelector()
        self._code = STOPPED
        self._told = 0  # how often it was told to stop
        self._stop_by: float | None = None
        self._some_were_ready = False
        self._hangup_stops = False

    def run(self) -> int:
        """Keep the workers; returns the exit code. Nothing of them is left then."""
        lineage.prepare()
        lineage.adopt_orphans()
        self._hangup_stops = os.isatty(0)  # else SIGHUP means what it means to dramatiq: load the code anew
        self._directory = scratch.make()
        try:
            with self._signals_heard() as heard:
                while not self._all_ended():
                    self._look_at_all()
                    self._wait(heard)
        finally:
            self._kill_all()
            scratch.remove(self._directory)
        return self._code

    # --- what comes in

    @contextlib.contextmanager
    def _signals_heard(self) -> Iterator[socket.socket]:
        """Signals arrive as bytes that the loop reads, so that nothing happens between two of its steps."""
        reading, writing = socket.socketpair()
        with reading, writing:
            for end in (reading, writing):
                end.setblocking(False)
            self._selector.register(reading, selectors.EVENT_READ)
            wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
            numbers = [*STOPPING_SIGNALS, signal.SIGCHLD]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
                numbers.append(signal.SIGHUP)
            before = {number: signal.signal(number, lambda *_: None) for number in numbers}
            try:
                yield reading
            finally:
                signal.set_wakeup_fd(wakeup)
                for number, handler in before.items():
                    signal.signal(number, handler)
                self._selector.close()

    def _wait(self, heard: socket.socket) -> None:
        for key, _ in self._selector.select(self._patience_s()):
            if key.fileobj is heard:
                with contextlib.suppress(BlockingIOError):
                    for number in heard.recv(4096):
                        self._hear(signal.Signals(number))
            else:
                self._pass_on(key.data)

    def _patience_s(self) -> float:
        settled = all(place.worker is not None and place.ready_at is not None for place in self._places)
        return IDLE_S if settled and not self._told else LOOK_EVERY_S

    def _hear(self, number: signal.Signals) -> None:
        if number in STOPPING_SIGNALS or (number is signal.SIGHUP and self._hangup_stops):
            self._told += 1
            if self._told == 1:
                logger.info("%s: stopping %d workers in order", number.name, len(self._workers()))
                self._stop()
            else:
                self._hurry(number)
        elif number is signal.SIGHUP:
            for worker in self._workers():
                worker.send(number)

    def _pass_on(self, worker: KeptWorker) -> None:
        text = worker.lines()
        if text is None:
            self._selector.unregister(worker.output)
        else:
            _write(text)

    # --- what is done

    def _look_at_all(self) -> None:
        self._reap()
        now = self._clock()
        for place in self._places:
            if place.worker is not None:
                self._look_at(place, place.worker, now)
            elif place.start_at is not None and now >= place.start_at:
                self._start(place)
        if self._stop_by is not None and now >= self._stop_by:
            self._kill_the_slow()

    def _reap(self) -> None:
        """Reap whatever has ended: workers, and the orphans that became this process's children."""
        commands = {worker.pid: worker for worker in self._workers() if worker.exit_code is None}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if worker := commands.get(ended[0]):
                    worker.ended(os.waitstatus_to_exitcode(ended[1]))

    def _start(self, place: _Place) -> None:
        place.start_at, place.ready_at, place.kill_at = None, None, None
        place.worker = KeptWorker(place.number, self._command, self._directory / f"ready-{place.number}")
        self._selector.register(place.worker.output, selectors.EVENT_READ, place.worker)
        logger.info("worker %d is started (process %d)", place.number, place.worker.pid)

    def _look_at(self, place: _Place, worker: KeptWorker, now: float) -> None:
        if worker.exit_code is None:
            if place.ready_at is None and worker.is_ready():
                place.ready_at = now
                self._some_were_ready = True
        elif place.kill_at is None:  # seen for the first time
            place.kill_at = now + self._policy.stop_ms / 1000
            _sweep()
        if worker.is_gone():
            self._bury(place, worker, now)
        elif place.kill_at is not None and now >= place.kill_at:
            worker.kill()

    def _bury(self, place: _Place, worker: KeptWorker, now: float) -> None:
        """A worker has ended; decide what follows in its place."""
        with contextlib.suppress(KeyError):  # it has said its last already
            self._selector.unregister(worker.output)
        _write(worker.last_lines())
        worker.close()
        place.worker = None
        code = worker.exit_code or 0
        if self._stop_by is not None:
            if code != 0 and place.ready_at is not None:  # one that was still starting may be stopped in any way
                self._code = self._code or NOT_IN_ORDER
                logger.error("worker %d did not stop in order: %s", place.number, _how(code))
            return
        steady = place.ready_at is not None and now - place.ready_at >= self._policy.steady_ms / 1000
        place.deaths = 1 if steady else place.deaths + 1
        self._decide(place, code, now)

    def _decide(self, place: _Place, code: int, now: float) -> None:
        if code == HOPELESS and not self._some_were_ready:
            self._give_up(f"worker {place.number} cannot start, as its lines above say", HOPELESS)
        elif place.deaths >= self._policy.deaths:
            self._give_up(
                f"worker {place.number} died {place.deaths} times in a row without being ready for "
                f"{self._policy.steady_ms} ms, the last time: {_how(code)}; its lines above say why",
                CRASH_LOOP,
            )
        else:
            pause_ms = self._policy.pause_ms(place.deaths)
            place.start_at = now + pause_ms / 1000
            logger.error("worker %d died: %s; it is replaced in %d ms", place.number, _how(code), pause_ms)

    def _give_up(self, why: str, code: int) -> None:
        logger.critical("%s; giving up, and stopping the other workers in order", why)
        self._code = code
        self._stop()

    # --- the end

    def _stop(self) -> None:
        if self._stop_by is None:
            self._stop_by = self._clock() + self._policy.stop_ms / 1000
        for place in self._places:
            place.start_at = None
        for worker in self._workers():
            worker.send(signal.SIGTERM)

    def _hurry(self, number: signal.Signals) -> None:
        """Told again: have the workers end at once; told a third time: kill them."""
        self._code = self._code or NOT_IN_ORDER
        limit_ms = self._policy.short_stop_ms if self._told == 2 else 0
        self._stop_by = min(self._stop_by or 0.0, self._clock() + limit_ms / 1000)
        logger.warning("%s again: what still runs in %d ms is killed", number.name, limit_ms)
        for worker in self._workers():
            worker.send(signal.SIGTERM)

    def _kill_the_slow(self) -> None:
        for worker in self._workers():
            if worker.exit_code is None:
                logger.error("worker %d did not stop in time and is killed", worker.number)
            self._code = self._code or NOT_IN_ORDER
            worker.kill()
        self._stop_by = self._clock() + LOOK_EVERY_S * 10  # once more, should something be left

    def _all_ended(self) -> bool:
        return all(place.worker is None and place.start_at is None for place in self._places)

    def _kill_all(self) -> None:
        """After an error of this process's own; else there is nothing to kill but what dead workers left."""
        for worker in self._workers():
            worker.kill()
        _sweep()
        self._reap()

    def _workers(self) -> list[KeptWorker]:
        return [place.worker for place in self._places if place.worker is not None]


def _sweep() -> None:
    """End what dead workers left, now: the worker that takes their place would, but it has to start first."""
    if killed := processes.sweep():
        logger.warning("killed %d processes that dead workers left behind", killed)
    scratch.sweep()


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _write(text: bytes) -> None:
    """Write to stderr; a reader that has gone away is no reason to end."""
    while text:
        try:
            text = text[os.write(sys.stderr.fileno(), text) :]
        except BlockingIOError:  # someone who shares it has made it so
            select.select([], [sys.stderr.fileno()], [], IDLE_S)
        except OSError:
            return
