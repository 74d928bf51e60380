"""Whose process is this? Find, kill and reap by token; never by name.

Every driver and browser is started with a token in its environment. The token says which process launched it
and when that process was born, so that anyone on the host, also the next worker, can tell what is left over
from a dead one. A browser's helpers may overwrite their own environment (Chromium's zygotes do), so a token
stands for the whole session (setsid) of the process that carries it, unless that is the session of the worker
itself: a browser that was started without a session of its own shares it with all workers and a user's shell.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

#: The variable that carries the token. It does not start with ASYNCWORKER_: it is no setting.
VARIABLE = "_ASYNCWORKER_TOKEN"

# Anyone may have put anything there: a number that no int() takes must not end a sweep.
_FORM = re.compile(r"(\w+)\.(\d{1,18})\.(\d{1,18})\.(\w+)\.(\w+)\.(\d{1,18})", re.ASCII)


#: What a worker starts. An installation, which has a token too, may leave a service running that is meant to stay.
WORKERS_ROLES = ("browser", "driver")


@dataclass(frozen=True)
class Token:
    """Who launched a process: written into its environment as text.

    `pid` counts only within `namespace`: the same number is another process in another container. `session` is
    the owner's own, which no launch has to itself.
    """

    namespace: str
    pid: int
    born: int
    launch: str
    role: str = "browser"  # or "driver"
    session: int = 0

    def __str__(self) -> str:
        return f"{self.namespace}.{self.pid}.{self.born}.{self.launch}.{self.role}.{self.session}"

    @classmethod
    def parse(cls, text: str) -> Token | None:
        """The token in `text`; None when it is none of ours."""
        parts = _FORM.fullmatch(text)
        if parts is None:
            return None
        namespace, pid, born, launch, role, session = parts.groups()
        return cls(namespace, int(pid), int(born), launch, role, int(session))

    def owner_is_gone(self) -> bool:
        """True when the process that launched this one is known to be dead.

        False when it lives, and when it cannot be known from here (another namespace).
        """
        return self.namespace == _namespace() and is_gone(self.pid, self.born)


def new_token(role: str = "browser") -> Token:
    """A token for one launch by this process."""
    me = psutil.Process()
    return Token(_namespace(), me.pid, _own_birth(), secrets.token_hex(8), role, os.getsid(0))


def tokens(wanted: Callable[[Token], bool]) -> set[Token]:
    """The wanted tokens that live processes carry now."""
    return {token for _, token in _processes() if token is not None and wanted(token)}


def carriers(wanted: Callable[[Token], bool]) -> list[psutil.Process]:
    """All live processes that stand under a wanted token: carriers, and whoever shares a launch's own session.

    Never this process, nor what stands under the token that it has itself inherited.
    """
    return _standing_under(wanted, set())


def memory_mb(wanted: Callable[[Token], bool], *, enough_mb: float = 0.0) -> float:
    """The memory of all processes under a wanted token, in MB. Blocks for some ms: call it in a thread.

    Parameters:
        enough_mb: What processes share is counted once only where the sum is above this. Below it the sum of their
            resident memory is the answer: it is too much, and some fifty times as soon known.
    """
    found = carriers(wanted)
    resident = sum(map(_resident, found)) / 1e6
    return resident if resident <= enough_mb else sum(map(_proportional, found)) / 1e6


def kill(wanted: Callable[[Token], bool], *, timeout_ms: int = 5_000) -> int:
    """SIGKILL every process under a wanted token and wait until it is gone. Blocks: call it in a thread.

    Returns:
        How many processes were killed. Looks again after each round, since a dying tree may still fork.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    killed: set[int] = set()
    out_of_reach: set[int] = set()
    sessions: set[int] = set()  # kept over the rounds: what is forked late may be the only one left in its session
    while living := [one for one in _standing_under(wanted, sessions) if one.pid not in out_of_reach and _lives(one)]:
        parents = {process: _parent_of(process) for process in living}
        for process in living:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
            except psutil.AccessDenied:  # another user's, such as a setuid helper
                out_of_reach.add(process.pid)
                continue
            killed.add(process.pid)
        _wait_until_dead([process for process in living if process.pid not in out_of_reach], timeout_ms=200)
        _reap_adopted(parents)
        if time.monotonic() >= deadline:
            break
    return len(killed)


def kill_launch(token: Token, *, timeout_ms: int = 5_000) -> int:
    """Kill what was started with exactly this token. Blocks: call it in a thread."""
    return kill(lambda other: other == token, timeout_ms=timeout_ms)


def sweep(*, timeout_ms: int = 5_000) -> int:
    """Kill the drivers and browsers whose worker process is dead. Blocks: call it in a thread."""
    return kill(_is_left_over, timeout_ms=timeout_ms)


def left_over() -> list[tuple[psutil.Process, Token]]:
    """What a sweep would kill, each with the token that it stands under."""
    carried = {process: _token_of(process) for process in carriers(_is_left_over) if _lives(process)}
    # A helper that has overwritten its environment is told by the carrier that shares its session.
    of_session = {_session_of(process.pid): token for process, token in carried.items() if token is not None}
    found = ((process, token or of_session.get(_session_of(process.pid))) for process, token in carried.items())
    return [(process, token) for process, token in found if token is not None]


def session_members(session: int) -> list[psutil.Process]:
    """The live processes of a session (setsid)."""
    return [one for one in psutil.process_iter() if _session_of(one.pid) == session and _lives(one)]


def lives(pid: int) -> bool:
    """True when a process of that number is alive; a zombie is not."""
    try:
        return _lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def is_gone(pid: int, born: int) -> bool:
    """True when the process that had this number, and was born then, is known to be dead: a zombie is.

    False when it lives, and when it cannot be known: no file may be opened, or another user's process is hidden.

    Parameters:
        born: As a token says it.
    """
    try:
        return _birth(pid) != born
    except (FileNotFoundError, ProcessLookupError):
        return not _has_number(pid)
    except OSError:
        return False


def up_since() -> float:
    """When this process had started for certain, by the clock that dates files.

    Linux counts in ticks of, usually, 10 ms, and cuts off: the end of the tick is told. psutil's answer is off by up to
    a second.
    """
    if sys.platform != "linux":
        return psutil.Process().create_time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - (_own_birth() + 1) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _is_left_over(token: Token) -> bool:
    return token.role in WORKERS_ROLES and token.owner_is_gone()


def _processes() -> Iterator[tuple[psutil.Process, Token | None]]:
    for process in psutil.process_iter():
        yield process, _token_of(process)


def _token_of(process: psutil.Process) -> Token | None:
    try:
        text = process.environ().get(VARIABLE)
    except (psutil.Error, OSError):
        return None
    return Token.parse(text) if text else None


def _standing_under(wanted: Callable[[Token], bool], sessions: set[int]) -> list[psutil.Process]:
    """Carriers, and the members of `sessions`, to which the carriers' own ones are added."""
    inherited = _token_of(psutil.Process())
    found: dict[int, psutil.Process] = {}
    others: list[tuple[int, psutil.Process]] = []
    for process, token in _processes():
        session = _session_of(process.pid)
        if token is not None and token != inherited and wanted(token):
            found[process.pid] = process
            if session != token.session:
                sessions.add(session)
        else:
            others.append((session, process))
    sessions -= {os.getsid(0), -1}
    found.update({process.pid: process for session, process in others if session in sessions})
    found.pop(os.getpid(), None)
    return list(found.values())


def _wait_until_dead(condemned: Iterable[psutil.Process], *, timeout_ms: int) -> None:
    """Wait, and leave the exit status to whoever started the process: psutil's own wait would take it away."""
    deadline = time.monotonic() + timeout_ms / 1000
    while any(_lives(process) for process in condemned) and time.monotonic() < deadline:
        time.sleep(0.005)


def _reap_adopted(parents: dict[psutil.Process, int]) -> None:
    """Reap the dead that became this process's children with their parents' death: it is then an init."""
    for process, parent in parents.items():
        if parent != os.getpid() and _parent_of(process) == os.getpid():
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _parent_of(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def _proportional(process: psutil.Process) -> int:
    """Its own memory, and its part of what it shares, in bytes; all that is resident where the system does not tell."""
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return _resident(process)
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))


def _lives(process: psutil.Process) -> bool:
    """A zombie does not live: it waits for its parent and can be killed no more."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _own_birth() -> int:
    return _birth_of(os.getpid())


@cache
def _birth_of(pid: int) -> int:
    return _birth(pid) or 0  # no zombie asks


def _birth(pid: int) -> int | None:
    """When a process started, in a unit that a step of the wall clock does not change; None: it is a zombie.

    Raises:
        ProcessLookupError, FileNotFoundError: When there is none of this number, or it is hidden.
        OSError: When the look failed.
    """
    if sys.platform != "linux":
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
        except psutil.ZombieProcess:
            return None
        except psutil.NoSuchProcess:
            raise ProcessLookupError(pid) from None
        except psutil.Error as error:
            raise OSError(str(error)) from error
    # Field 3, a letter, and field 22, in clock ticks since boot; the name in field 2 may hold spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _has_number(pid: int) -> bool:
    """Whether there is a process of that number, also where /proc hides other users' ones (`hidepid`)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _namespace() -> str:
    try:
        link = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no such thing outside Linux
        return "host"
    return "".join(character for character in link if character.isdigit()) or "host"
