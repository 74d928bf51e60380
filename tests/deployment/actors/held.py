"""Actors without a browser that end when, and as, the test says."""

import time
from pathlib import Path

import dramatiq

#: So that a test that fails leaves no worker thread waiting.
LONGEST_S = 60


@dramatiq.actor(queue_name="held", max_retries=0)
def hold(path: str) -> None:
    """Run until the file is there."""
    wait_for(path)


def wait_for(path: str) -> None:
    """Return as soon as the file is there."""
    ends = time.monotonic() + LONGEST_S
    while not Path(path).exists() and time.monotonic() < ends:
        time.sleep(0.01)


@dramatiq.actor(queue_name="held", max_retries=1, min_backoff=20, max_backoff=40)
def need(path: str, *, seed: int | None = None) -> None:
    """Fail unless the file is there."""
    if not Path(path).exists():
        raise FileNotFoundError(f"no file {Path(path).name}, seed {seed}")
