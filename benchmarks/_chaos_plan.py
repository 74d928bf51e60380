"""The plan of a chaos run: which fault, when, to which target; from the seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random

#: A worker that was not heard of for this long is dead; long freezes are longer, short ones shorter.
HEARTBEAT_MS = 5_000

#: Between two faults, in s.
LEAST_GAP_S = 0.8
MOST_GAP_S = 3.0

#: The first fault comes so long after the load begins, and the last one ends so long before it ends.
CALM_S = 2.0


class Deed(StrEnum):
    """What is done to a target."""

    kill = "kill"  # SIGKILL
    freeze = "freeze"  # SIGSTOP, and SIGCONT later
    bomb = "bomb"  # a message whose page outgrows its heap, on its first two attempts
    hog = "hog"  # a message whose page holds much memory


class Target(StrEnum):
    """Whom it is done to."""

    worker = "worker"  # a worker process
    command = "command"  # the `dramatiq` command over a worker process
    driver = "driver"
    browser = "browser"  # its main process
    page = "page"  # a renderer
    store = "store"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: After the load has begun.
        index: Which of the targets that are there, oldest first, by the remainder.
        for_s: How long a freeze lasts.
    """

    at_s: float
    deed: Deed
    target: Target
    index: int
    for_s: float = 0.0

    @property
    def what(self) -> str:
        return f"{self.deed} {self.target}"


_SHORT, _LONG = (0.3, 0.5 * HEARTBEAT_MS / 1000), (1.3 * HEARTBEAT_MS / 1000, 1.7 * HEARTBEAT_MS / 1000)
_MOMENT = (0.0, 0.0)

#: Dealt out in a random order, and then anew: a short run has some of each kind too.
_DECK: tuple[tuple[Deed, Target, tuple[float, float]], ...] = (
    *[(Deed.kill, Target.worker, _MOMENT)] * 2,
    (Deed.kill, Target.command, _MOMENT),
    *[(Deed.kill, Target.driver, _MOMENT)] * 2,
    *[(Deed.kill, Target.browser, _MOMENT)] * 5,
    *[(Deed.kill, Target.page, _MOMENT)] * 2,
    (Deed.kill, Target.store, _MOMENT),
    (Deed.freeze, Target.worker, _SHORT),
    (Deed.freeze, Target.worker, _LONG),
    (Deed.freeze, Target.driver, _SHORT),
    (Deed.freeze, Target.browser, _SHORT),
    (Deed.freeze, Target.page, _SHORT),
    (Deed.freeze, Target.store, _SHORT),
    (Deed.freeze, Target.store, _LONG),
    (Deed.bomb, Target.page, _MOMENT),
    (Deed.hog, Target.page, _MOMENT),
)


def plan(seed: int, seconds: float) -> list[Fault]:
    """The faults of a run whose load lasts for `seconds`; the same for the same seed."""
    random = Random(f"chaos {seed}")
    faults, at_s = [], CALM_S
    for deed, target, (least, most) in _cards(random):
        at_s += random.uniform(LEAST_GAP_S, MOST_GAP_S)
        fault = Fault(round(at_s, 3), deed, target, random.randrange(1 << 16), round(random.uniform(least, most), 3))
        if fault.at_s + fault.for_s > seconds - CALM_S:
            break
        faults.append(fault)
    return faults


def _cards(random: Random) -> Iterator[tuple[Deed, Target, tuple[float, float]]]:
    while True:
        yield from random.sample(_DECK, len(_DECK))
