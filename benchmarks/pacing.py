"""What paces keep, by a server's own log: real workers and the real store, with the fake engine in place of browsers.

    python benchmarks/pacing.py [--seconds 180] [--processes 4] [--stage rate|others|waiting|killed|held]

rate      one host at 600/min while work waits; half way as many workers again are added
others    the throughput of a host without a pace, beside that one and without it
waiting   10,000 messages for a slow host: how fast they are parked, what idle workers cost then, and how soon a message
          for another host starts
killed    the rate, with a worker killed each second and another one started
held      no request for 20 s from when the host is held
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from asyncworker import Pace, Session, actor, embedded
from asyncworker.broker import make_redis_broker
from asyncworker.fakes import FakeEngine
from asyncworker.middleware import browsers_of
from asyncworker.pace import key_of
from asyncworker.settings import load

SHOP, OTHER, SLOW = "http://shop.test/", "http://other.test/", "http://slow.test/"
PER_MINUTE = 600
THREADS = 4
MANY = 10_000


class Server:
    """Answers everything, and notes when it was asked for what."""

    def __init__(self) -> None:
        self.log: dict[str, list[float]] = {}
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=1_000))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        self.log.setdefault(line.decode().split()[1], []).append(time.monotonic())
        writer.write(b"HTTP/1.0 204 No Content\r\n\r\n")
        await writer.drain()
        writer.close()

    def of(self, url: str) -> list[float]:
        return list(self.log.get(f"/{url}", []))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()


def declare(state_dir: Path, port: int) -> tuple[Any, Any]:
    """The broker of a deployment, and its actors."""
    broker = make_redis_broker(load({}, engine="chromium", state_dir=state_dir))
    middleware = browsers_of(broker)
    middleware._engine = FakeEngine()

    async def ask(session: Session, url: str, work_ms: int = 20) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /{url} HTTP/1.0\r\n\r\n".encode())
        await reader.read()
        writer.close()
        await asyncio.sleep(work_ms / 1000)

    async def ask_slowly(session: Session, url: str) -> None:
        await ask(session, url)

    paced = actor(broker=broker, actor_name="paced", pace=f"{PER_MINUTE}/m")(ask)
    actor(broker=broker, actor_name="plain")(ask)
    actor(broker=broker, actor_name="slow", pace=Pace("1/h"))(ask_slowly)
    return broker, paced


def work(state_dir: Path, port: int) -> None:
    from dramatiq import Worker

    broker, _ = declare(state_dir, port)
    broker.emit_after("process_boot")
    worker = Worker(broker, worker_threads=THREADS)
    worker.start()
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM})
    worker.stop(10_000)
    broker.close()


class Stage:
    """A store, a server and workers."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.server = Server()
        embedded.ensure(state_dir)
        self.broker, _ = declare(state_dir, self.server.port)
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self, count: int) -> None:
        command = [sys.executable, __file__, "--worker", str(self.state_dir), str(self.server.port)]
        new = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(count)]
        for worker in new:
            assert worker.stdout is not None
            worker.stdout.readline()
        self.workers += new

    def kill_one(self) -> None:
        worker = self.workers.pop(0)
        worker.kill()
        worker.wait()

    def send(self, name: str, url: str, count: int, **kwargs: Any) -> None:
        made = self.broker.get_actor(name)
        for start in range(0, count, 1_000):
            self.broker.send_many([made.message(url, **kwargs) for _ in range(min(1_000, count - start))])

    def stop(self) -> None:
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            try:
                worker.wait(20)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.broker.alarm.stop()
        self.broker.settling.stop()
        self.broker.close()
        self.server.close()
        with contextlib.suppress(Exception):
            self.broker.client.shutdown(nosave=True)
        self.broker.client.close()


@contextlib.contextmanager
def staged(processes: int) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="asyncworker-pacing-") as directory:
        stage = Stage(Path(directory))
        try:
            stage.start(processes)
            yield stage
        finally:
            stage.stop()


def windows(times: list[float], window_s: float) -> tuple[int, int]:
    """The most and the fewest requests in any sliding window within the log."""
    most = max((sum(1 for at in times[i:] if at - begun < window_s) for i, begun in enumerate(times)), default=0)
    fewest = min(
        (
            sum(1 for at in times[i + 1 :] if at - begun <= window_s)
            for i, begun in enumerate(times)
            if begun + window_s <= times[-1]
        ),
        default=0,
    )
    return most, fewest


def report(title: str, times: list[float], seconds: float) -> None:
    window_s = min(60.0, seconds / 2)
    most, fewest = windows(times, window_s)
    allowed = PER_MINUTE * window_s / 60
    print(
        f"{title}: {len(times)} requests; in every {window_s:.0f} s {fewest} to {most}, allowed {allowed:.0f}",
        flush=True,
    )


def rate(processes: int, seconds: float, *, kills: bool = False) -> None:
    with staged(processes) as stage:
        stage.send("paced", SHOP, round(PER_MINUTE * seconds / 60 * 1.5))
        ends, half = time.monotonic() + seconds, time.monotonic() + seconds / 2
        has_more = False
        while time.monotonic() < ends:
            time.sleep(1)
            if kills:
                stage.kill_one()
                stage.start(1)
            elif not has_more and time.monotonic() > half:
                stage.start(processes)
                has_more = True
        report("killed" if kills else "rate", stage.server.of(SHOP), seconds)


def others(processes: int, seconds: float) -> None:
    found = []
    for with_shop in (False, True, False, True):
        with staged(processes) as stage:
            if with_shop:
                stage.send("paced", SHOP, round(PER_MINUTE * seconds / 60 * 2))
            stage.send("plain", OTHER, round(seconds * 3_000))
            time.sleep(seconds / 4)
            found.append(len(stage.server.of(OTHER)) / (seconds / 4))
    print(f"others: a second, without and with the paced host in turn: {[round(each) for each in found]}", flush=True)


def waiting(processes: int) -> None:
    with staged(processes) as stage:
        stage.send("slow", SLOW, 1)
        while not stage.server.of(SLOW):
            time.sleep(0.01)
        processes_of = [psutil.Process(worker.pid) for worker in stage.workers]
        idle_s, idle_mb = _cost(processes_of, 5)
        began = time.monotonic()
        stage.send("slow", SLOW, MANY)
        sent_s = time.monotonic() - began
        while sum(state.waiting for state in stage.broker.limiter.states()) < MANY:
            time.sleep(0.005)
        parked_s = time.monotonic() - began
        cost_s, cost_mb = _cost(processes_of, 5)
        lags = []
        for number in range(20):
            url = f"{OTHER}{number}"
            began = time.monotonic()
            stage.send("plain", url, 1, work_ms=0)
            while not stage.server.of(url):
                time.sleep(0.0005)
            lags.append((stage.server.of(url)[0] - began) * 1000)
        print(
            f"waiting: {MANY} sent in {sent_s:.2f} s and parked {parked_s - sent_s:.2f} s after that; CPU of "
            f"{processes} workers {idle_s:.2f} % before, {cost_s:.2f} % then; memory {idle_mb:.0f} MB, "
            f"{cost_mb:.0f} MB; "
            f"another host's message starts after {sorted(lags)[10]:.1f} ms (median), {max(lags):.1f} ms (most)",
            flush=True,
        )


def _cost(found: list[psutil.Process], seconds: float) -> tuple[float, float]:
    def spent() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in found)

    before = spent()
    time.sleep(seconds)
    return (spent() - before) / seconds * 100, sum(each.memory_info().rss for each in found) / 1e6


def held(processes: int) -> None:
    with staged(processes) as stage:
        stage.send("paced", SHOP, 1_000)
        time.sleep(3)
        at = time.monotonic()
        stage.broker.limiter.hold(key_of("shop.test"), for_ms=20_000, reason="429")
        after = time.monotonic()
        time.sleep(23)
        late = [each - at for each in stage.server.of(SHOP) if each > after]
        print(f"held: the first request after the hold came {min(late):.3f} s after it", flush=True)
        print("held: those before 20 s:", [round(each, 3) for each in late if each < 20], flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        work(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--stage", choices=["rate", "others", "waiting", "killed", "held"], action="append")
    given = parser.parse_args()
    for stage in given.stage or ["rate", "others", "waiting", "killed", "held"]:
        if stage in ("rate", "killed"):
            rate(given.processes, given.seconds, kills=stage == "killed")
        elif stage == "others":
            others(given.processes, given.seconds / 4)
        elif stage == "held":
            held(given.processes)
        else:
            waiting(given.processes)


if __name__ == "__main__":
    main()
