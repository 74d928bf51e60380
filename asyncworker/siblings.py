"""Siblings: the workers of a broker on this host, so that one that died is taken for dead at once.

A worker on another host is taken for dead when it was not heard of for the heartbeat timeout. Of one on the same host
the kernel knows: each worker writes down where it lives, and the others look at each of their beats. What cannot be
known from here (another host, another container, a process that may not be looked at) is left to the timeout, and a
worker that is only frozen lives.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncworker import processes


@dataclass(frozen=True)
class Place:
    """Where a worker process lives.

    Attributes:
        host: The running kernel and the namespace of its process ids, within which a pid says who is meant; None where
            no kernel tells such things: then no one can be told to be dead.
        pid: Its number.
        born: When it was born; a number is given again.
    """

    host: str | None
    pid: int
    born: int

    def __str__(self) -> str:
        return f"{self.pid}.{self.born}"


def own_place() -> Place:
    """That of this process."""
    me = processes.new_token()
    return Place(_host(me.namespace), me.pid, me.born)


def dead_ones(places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Of the workers of this host, by their names, those whose process is known to be dead, with where they lived."""
    for name, text in places.items():
        pid, _, born = text.partition(".")
        if pid.isdecimal() and born.isdecimal() and processes.is_gone(int(pid), int(born)):
            yield name, text


def as_texts(read: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """What the store answers, as text."""
    return {name.decode(errors="replace"): text.decode(errors="replace") for name, text in read}


def _host(namespace: str) -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if str(Path("/proc/self").readlink()) != str(os.getpid()):  # /proc is of another namespace
            return None
    except OSError:  # no Linux
        return None
    # The numbers of namespaces are the same on many hosts.
    return f"{boot}.{namespace}"
