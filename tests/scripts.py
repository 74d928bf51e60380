"""Ctrl-C for a script that is in the middle of its work: what it had started is seen, and has to be gone with it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

import psutil

from tests.waiting import wait_until


def status(process: psutil.Process) -> str:
    """As psutil has it; `gone` when it has ended."""
    try:
        return process.status() if process.is_running() else "gone"
    except psutil.NoSuchProcess:
        return "gone"


def interrupt(
    running: subprocess.Popen[str],
    when: Callable[[set[psutil.Process]], bool],
    what: str,
    *,
    timeout_ms: int,
    end_s: float,
) -> set[psutil.Process]:
    """Send SIGINT as soon as it is in the middle of its work; returns the processes that it had by then.

    Parameters:
        when: Told of these: whether it is; `what` says so in words.
        timeout_ms: How long that is waited for.
        end_s: How long its end is waited for.
    """
    me = psutil.Process(running.pid)
    seen: set[psutil.Process] = set()

    def is_in_the_middle() -> bool:
        assert running.poll() is None, running.communicate()
        seen.update(me.children(recursive=True))
        return when(seen)

    try:
        wait_until(is_in_the_middle, what, timeout_ms=timeout_ms)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=end_s)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, err
    assert {status(one) for one in seen} <= {"gone", psutil.STATUS_ZOMBIE}
    return seen
