"""The sockets at which worker processes say how they are, and how they are asked, also those that do not answer.

Each worker process listens at a unix socket whose name says which process it is. It lies in the deployment's state
directory where there is one, else in a folder below /tmp that only this user may enter. A process that is frozen does
not answer, and is sick; the sockets of dead ones are removed by whoever finds them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncworker import processes
from asyncworker.errors import ConfigurationError
from asyncworker.probing import State
from asyncworker.settings import Settings
from asyncworker.state_dirs import LONGEST_SOCKET_PATH, make_state_dir

#: A worker that has not answered for so long is frozen, or a call keeps its interpreter.
ANSWER_TIMEOUT_S = 2.0

#: So many are asked at once.
MOST_AT_ONCE = 64

_FORM = re.compile(r"(\w+)-(\d{1,18})-(\d{1,18})\.sock", re.ASCII)

#: The worst of several is what they are together.
ORDER = (State.sick, State.starting, State.draining, State.ready)


@dataclass(frozen=True)
class Member:
    """A worker process of the deployment, by its socket."""

    path: Path
    owner: processes.Token


def deployment_id(settings: Settings) -> str:
    """Names the deployment on this host."""
    return hashlib.sha256(os.fsencode(settings.state_dir.resolve())).hexdigest()[:16]


def new_socket_path(settings: Settings) -> Path:
    """Where this process is to listen; the folder is there then.

    Raises:
        ConfigurationError: When there is no folder that is this user's alone.
    """
    if settings.broker_url is None:
        make_state_dir(settings.state_dir)  # as the embedded server does a moment later
    me = processes.new_token()
    name = f"{me.namespace}-{me.pid}-{me.born}.sock"
    in_state_dir, below_tmp = _folders(settings)
    fits = len(os.fsencode(in_state_dir / name)) <= LONGEST_SOCKET_PATH
    if fits and settings.state_dir.is_dir() and _made(in_state_dir):
        return in_state_dir / name
    if _made(below_tmp):
        return below_tmp / name
    raise ConfigurationError(
        f"neither {in_state_dir} nor {below_tmp} can be made a directory of this user alone; remove them, or set "
        "ASYNCWORKER_STATE_DIR to a directory that can be written",
        name="ASYNCWORKER_STATE_DIR",
    )


def members(settings: Settings) -> list[Member]:
    """The worker processes of the deployment on this host, by pid; what dead ones left is removed.

    Raises:
        ConfigurationError: When another user's directory may not be looked at.
    """
    found = []
    for folder in _folders(settings):
        for path in _listed(folder):
            parts = _FORM.fullmatch(path.name)
            if parts is None:
                continue
            owner = processes.Token(parts[1], int(parts[2]), int(parts[3]), launch="")
            if owner.owner_is_gone():
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                found.append(Member(path, owner))
    return sorted(found, key=lambda member: member.owner.pid)


def ask_all(asked: Sequence[Member]) -> list[dict[str, Any]]:
    """What they say of themselves, all asked at once; one that does not answer in time is sick. Blocks."""
    if not asked:
        return []
    with ThreadPoolExecutor(min(len(asked), MOST_AT_ONCE), thread_name_prefix="asyncworker-ask") as pool:
        return [answer for answer in pool.map(ask, asked) if answer is not None]


def ask(member: Member) -> dict[str, Any] | None:
    """What one says of itself; None when it has ended. Blocks, at most for `ANSWER_TIMEOUT_S`."""
    try:
        answer: dict[str, Any] = json.loads(_said(member.path))
        return answer
    except FileNotFoundError:
        return None  # it has ended in order
    except (OSError, ValueError) as error:
        if member.owner.owner_is_gone():
            with contextlib.suppress(OSError):
                member.path.unlink()
            return None
        if isinstance(error, ConnectionRefusedError) and not _is_known(member):
            return None  # of another container, which leaves its sockets on a volume that both have
        return _silent(member, error)


def together(answers: Sequence[dict[str, Any]]) -> State | None:
    """What several are: all that the worst of them is; None: there are none."""
    states = {answer["state"] for answer in answers}
    return next((state for state in ORDER if state in states), None)


def _folders(settings: Settings) -> tuple[Path, Path]:
    digest = deployment_id(settings)
    # Not TMPDIR: whoever asks may have another one.
    below_tmp = Path("/tmp") / f"asyncworker-{os.geteuid()}-{digest}-health"  # noqa: S108 -- its owner is checked
    return settings.state_dir.resolve() / "health", below_tmp


def _made(folder: Path) -> bool:
    """True when the folder is there, and this user's alone."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return private and os.access(folder, os.W_OK)


def _listed(folder: Path) -> list[Path]:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or (status.st_uid != os.geteuid() and os.geteuid() != 0):
            raise PermissionError
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError:
        raise ConfigurationError(
            f"{folder} is another user's: ask for the health of its workers as that user, or as root",
            name="ASYNCWORKER_STATE_DIR",
        ) from None


def _said(path: Path) -> bytes:
    """What is said there to whoever connects."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWER_TIMEOUT_S)
        asking.connect(str(path))
        with asking.makefile("rb") as answer:
            return answer.read()


def _is_known(member: Member) -> bool:
    return member.owner.namespace == processes.new_token().namespace


def _silent(member: Member, error: Exception) -> dict[str, Any]:
    """What is said of a process that is there and does not answer."""
    said = "a call keeps its interpreter, or it is starved"
    with contextlib.suppress(psutil.Error):
        if _is_known(member) and psutil.Process(member.owner.pid).status() == psutil.STATUS_STOPPED:
            said = "it is stopped (SIGSTOP); `kill -CONT` lets it go on"
    waited = isinstance(error, TimeoutError | BlockingIOError)
    what = f"does not answer within {ANSWER_TIMEOUT_S * 1000:.0f} ms" if waited else f"gives no answer ({error!r})"
    return {
        "pid": member.owner.pid,
        "worker": None,
        "state": State.sick,
        "live": False,
        "since_ms": round(time.time() * 1000),
        "reason": f"it {what}: {said}",
        "browser": None,
        "slots": None,
        "slots_in_use": None,
        "probe": None,
    }
