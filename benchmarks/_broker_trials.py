"""What benchmarks/broker.py measures of one system: each trial by the worker's own stamps."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from _broker_systems import WARM_UP, Bench, Producer, System, Worker
from _harness import say
from _workshop import within

ALL = ("pickup", "idle", "drain", "enqueue", "memory", "recovery")

#: The number of a drain's first message; those of the pick-ups are below it.
DRAIN_FROM = 1_000_000
DRAIN_TIMEOUT_MS = 180_000

#: Memory: no delayed message is due while it is measured.
DELAY_MS = 3_600_000
#: A worker's memory is taken when it has stayed the same (within 1 %) for so long.
SETTLED_S = 2.0
SETTLE_TIMEOUT_S = 30.0


#: Lets a rival's failure be a finding about that rival.
Guard = Callable[[System], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Parameters:
        rotations: Turns of each system for pick-up, drain and enqueue.
        pickups: Messages sent to an idle worker in each turn.
        gaps_s: From one's beginning to the next's sending, at random between these.
        messages: Waiting messages to drain.
        idle_s: How long the CPU time of idle workers is taken.
        delayed: Delayed messages, for the memory.
        recovery_s: A recovery that takes longer is given up.
    """

    rotations: int
    pickups: int
    gaps_s: tuple[float, float]
    messages: int
    idle_s: float
    delayed: int
    recovery_s: float


@dataclass(frozen=True)
class Turn:
    """A system's turn in one rotation; what was not asked for is empty or None."""

    pickups_ms: tuple[float, ...] = ()
    drain_per_s: float | None = None
    enqueue_per_s: float | None = None


@dataclass(frozen=True)
class Memory:
    """A worker's memory, before and with delayed messages waiting."""

    before_mb: float
    after_mb: float
    messages: int


@dataclass(frozen=True)
class Recovered:
    """Seconds from the SIGKILL of a worker until another had begun all that it held; None: longer than `limit_s`."""

    seconds: float | None
    limit_s: float


def turn(bench: Bench, system: System, plan: Plan, number: int, only: Collection[str]) -> Turn:
    """One turn: an idle worker picks up what comes one at a time, then drains what has come together.

    Parameters:
        number: The rotation's; all systems have the same gaps in it.
    """
    gaps_s = [random.Random(number * 1_000 + place).uniform(*plan.gaps_s) for place in range(plan.pickups)]
    pickups_ms: tuple[float, ...] = ()
    enqueued = drained = None
    with bench.up(system, bench.server(system.name)) as (worker, producer):
        if "pickup" in only:
            pickups_ms = pickups(worker, producer, gaps_s)
        if "drain" in only or "enqueue" in only:
            enqueued, drained = drain(worker, producer, plan.messages)
    return Turn(pickups_ms, drained if "drain" in only else None, enqueued if "enqueue" in only else None)


def pickups(worker: Worker, producer: Producer, gaps_s: list[float], *, first: int = 0) -> tuple[float, ...]:
    """From just before each sending to the start of the body, in ms; the first message has the number `first`."""
    before = worker.begun()
    sent: list[int] = producer.ask(do="pickup", first=first, gaps_s=gaps_s)
    worker.await_begun(before + len(sent), DRAIN_TIMEOUT_MS)
    began = worker.times(range(first, first + len(sent)))
    return tuple((began[first + place] - at_ns) / 1e6 for place, at_ns in enumerate(sent))


def drain(worker: Worker, producer: Producer, messages: int) -> tuple[float, float]:
    """Messages/s of the sending while the worker is stopped, and of the worker once it may go on.

    The latter runs from the start of the first body to that of the last, which is its end, too.
    """
    before = worker.begun()
    with worker.stopped():
        seconds = producer.send(DRAIN_FROM, messages)
    worker.await_begun(before + messages, DRAIN_TIMEOUT_MS)
    began = worker.times(range(DRAIN_FROM, DRAIN_FROM + messages))
    return messages / seconds, drain_rate(began.values())


def drain_rate(began_ns: Collection[int]) -> float:
    """Messages/s from the first beginning to the last, which is the last of as many steps less one."""
    return (len(began_ns) - 1) / ((max(began_ns) - min(began_ns)) / 1e9)


def idle_percents(bench: Bench, systems: list[System], seconds: float, guard: Guard) -> dict[str, float]:
    """The CPU time of idle workers' processes, in percent of a core; all in the same seconds, beside each other."""
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for system in systems:
            with guard(system):
                workers[system.name], _ = stack.enter_context(bench.up(system, bench.server(system.name)))
        time.sleep(SETTLED_S)
        spent_s, began = {name: worker.child.cpu_s() for name, worker in workers.items()}, time.monotonic()
        time.sleep(seconds)
        seconds = time.monotonic() - began
        return {name: 100 * (worker.child.cpu_s() - spent_s[name]) / seconds for name, worker in workers.items()}


def memory(bench: Bench, system: System, messages: int) -> Memory:
    """The memory of a worker, before and with that many delayed messages waiting."""
    with bench.up(system, bench.server(system.name)) as (worker, producer):
        before_mb = settled_mb(worker)
        producer.send(0, messages, do="later", delay_ms=DELAY_MS)
        after_mb = settled_mb(worker)
        if worker.begun() != WARM_UP:
            raise ValueError(f"{system.name}: messages delayed for an hour have begun")
    return Memory(before_mb, after_mb, messages)


def settled_mb(worker: Worker) -> float:
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    now_mb = worker.child.rss_mb()
    while True:
        before_mb = now_mb
        time.sleep(SETTLED_S)
        now_mb = worker.child.rss_mb()
        if abs(now_mb - before_mb) <= 0.01 * before_mb or time.monotonic() >= deadline:
            return now_mb


class Recovery:
    """A worker that holds as many messages as it has threads was killed, and another, idle one is up.

    The time limits are the systems' own.
    """

    def __init__(self, bench: Bench, system: System, limit_s: float) -> None:
        self._bench = bench
        self._limit_s = limit_s
        self._held = range(bench.threads)
        server = bench.server(f"{system.name}-recovery")
        victim = bench.worker(system, server, holds=True)
        producer = bench.producer(system, server, victim)
        producer.send(0, len(self._held), do="hold")
        victim.await_begun(len(self._held), DRAIN_TIMEOUT_MS)
        self._rescuer = bench.worker(system, server)
        self._rescuer.child.await_ready()
        self._killed_ns = time.monotonic_ns()
        bench.end(victim, producer)

    def wait(self) -> Recovered:
        """Wait for the last of them, as long as is allowed."""
        left_s = self._limit_s - (time.monotonic_ns() - self._killed_ns) / 1e9
        seconds = None
        with contextlib.suppress(TimeoutError):
            within(max(0.0, left_s) * 1_000, lambda: self._rescuer.begun() >= len(self._held), lambda: "")
            seconds = (max(self._rescuer.times(self._held).values()) - self._killed_ns) / 1e9
        self._bench.end(self._rescuer)
        return Recovered(seconds, self._limit_s)


@dataclass(frozen=True)
class Quiet:
    """What is measured once, beside the rotations."""

    idle: Mapping[str, float]
    memory: Mapping[str, Memory]
    recovery: Mapping[str, Recovered]


def quiet(bench: Bench, systems: list[System], plan: Plan, only: Collection[str], guard: Guard) -> Quiet:
    """Idle workers, memory, and recovery, which takes its time while the others are measured."""
    recoveries: dict[str, Recovery] = {}
    idle: dict[str, float] = {}
    memories: dict[str, Memory] = {}
    if "recovery" in only:
        say("recovery: workers that hold messages are killed")
        for system in systems:
            if system.recovers:
                recoveries[system.name] = Recovery(bench, system, plan.recovery_s)
    if "idle" in only:
        say(f"idle workers, {plan.idle_s:.0f} s")
        idle = idle_percents(bench, systems, plan.idle_s, guard)
    for system in systems if "memory" in only else ():
        if system.delays:
            say(f"memory of {system.name} with {plan.delayed} delayed messages")
            with guard(system):
                memories[system.name] = memory(bench, system, plan.delayed)
    return Quiet(idle, memories, {name: recovery.wait() for name, recovery in recoveries.items()})


def order(systems: list[System], number: int) -> list[System]:
    """The systems' order in a rotation: each comes first in turn, A B C, B C A, …"""
    first = number % len(systems)
    return [*systems[first:], *systems[:first]]
