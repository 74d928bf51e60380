"""Browsers that hang: found by their tokens and stopped, with helper processes that may end under the look."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from asyncworker import processes
from tests.workers import Running


def browsers(worker: Running) -> list[psutil.Process]:
    """All processes of a running worker's browsers."""
    tokens = worker.tokens("browser")
    return processes.carriers(lambda token: token in tokens)


def network_processes(below: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Through which Chromiums load everything but what they make themselves."""
    return [one for one in below if any("network.mojom.NetworkService" in word for word in words_of(one))]


def words_of(process: psutil.Process) -> list[str]:
    """Of its command line; none, when it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def suspend(running: Iterable[psutil.Process]) -> list[psutil.Process]:
    """SIGSTOP to each; those that were there to take it."""
    stopped = []
    for process in running:
        try:
            process.suspend()
        except psutil.NoSuchProcess:
            continue
        stopped.append(process)
    return stopped
