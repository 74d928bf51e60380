"""The real `celery worker` on a Redis of the test's own, for tests that compare with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncworker.settings import child_environment
from tests.waiting import wait_until

#: What it logs when it takes messages.
READY = " ready."


@contextlib.contextmanager
def celery_worker(
    app: str, *options: str, cwd: Path, url: str, log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `celery -A app worker` with its broker and results at `url`; stopped in order at the end."""
    command = [sys.executable, "-m", "celery", "-A", app, "worker", "--loglevel", "INFO", *options]
    more = {"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url} | (environment or {})
    with log.open("wb") as output:
        worker = subprocess.Popen(
            command,
            cwd=cwd,
            env=child_environment() | more,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: worker.poll() is not None or READY in log.read_text(), f"`{' '.join(command)}` is ready")
        assert worker.poll() is None, log.read_text()
        yield worker
    except BaseException:
        sys.stderr.write(f"--- the log of Celery's worker\n{log.read_text()[-8_000:]}\n")
        raise
    finally:
        worker.send_signal(signal.SIGTERM)
        try:
            worker.wait(40)
        except subprocess.TimeoutExpired:
            worker.kill()  # its children end with its pipe
            worker.wait()
            raise
