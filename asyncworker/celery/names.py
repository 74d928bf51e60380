"""Names of queues: Celery's as Dramatiq takes them, and back; each priority of a queue is a queue of its own.

Redis lists have no priorities, so kombu's Redis transport has a list for each step of them, and 0 is taken first. So it
is here: `celery`, `celery.p3`, `celery.p6`, `celery.p9`, and of what a worker holds the lowest number runs first.
"""

from __future__ import annotations

import re

#: Kombu's own: a priority counts as the next lower step.
STEPS = (0, 3, 6, 9)

#: Dramatiq's rule for a queue's name.
_ALLOWED = re.compile(r"[a-zA-Z_][a-zA-Z0-9._-]*")

#: What Dramatiq, and this module, append to a name.
_SUFFIXED = re.compile(r"\.(DQ|XQ|p[369])$")
_STEP = re.compile(r"\.p([369])$")

#: Names that had to be changed begin so; each character but letters, digits and - is its code in hex between _ and _.
_MARK = "celery__"
_CHANGED = re.compile(r"[^a-zA-Z0-9-]")
_CODE = re.compile(r"_([0-9a-f]+)_")


def step_of(priority: object) -> int:
    """The step that a priority counts as; what is none counts as 0."""
    try:
        number = max(0, min(9, int(priority)))  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return 0
    return max(step for step in STEPS if step <= number)


def to_dramatiq(queue: str, step: int = 0) -> str:
    """The Dramatiq queue of a Celery queue's priority step; a name that Dramatiq takes stays as it is."""
    if not _ALLOWED.fullmatch(queue) or _SUFFIXED.search(queue) or queue.startswith(_MARK):
        queue = _MARK + _CHANGED.sub(lambda found: f"_{ord(found[0]):x}_", queue)
    return f"{queue}.p{step}" if step else queue


def to_celery(queue: str) -> str:
    """The Celery queue whose messages lie in a Dramatiq queue."""
    queue = _STEP.sub("", queue)
    if not queue.startswith(_MARK):
        return queue
    return _CODE.sub(lambda found: chr(int(found[1], 16)), queue.removeprefix(_MARK))


def all_steps(queue: str) -> list[str]:
    """The Dramatiq queues of a Celery queue."""
    return [to_dramatiq(queue, step) for step in STEPS]
