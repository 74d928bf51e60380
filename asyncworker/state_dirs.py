"""The state directory: whose it is, and where the embedded server's socket in it is."""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
import tempfile
from pathlib import Path

from asyncworker.errors import ConfigurationError

#: A unix socket's path holds at most 107 bytes on Linux, 103 on macOS.
LONGEST_SOCKET_PATH = 100


def socket_path(state_dir: Path) -> Path:
    """Where the server of a state directory listens.

    In the directory itself, unless that path is too long for a socket: then below /tmp, in a folder that only this
    user may enter. By whatever name a process knows the directory, and whatever its TMPDIR, it is the same socket.
    """
    state_dir = state_dir.resolve()
    path = state_dir / "valkey.sock"
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]
    return Path("/tmp") / f"asyncworker-{os.getuid()}-{digest}" / "valkey.sock"  # noqa: S108 -- owner is checked


def make_state_dir(state_dir: Path) -> None:
    """Create the state directory for this user alone.

    Raises:
        ConfigurationError: When it cannot be created or written.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=state_dir):
            pass
    except OSError as error:
        raise unwritable(state_dir, error) from error


def unwritable(state_dir: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"the state directory {state_dir} cannot be written ({error.strerror}); set ASYNCWORKER_STATE_DIR to "
        "one that can, or ASYNCWORKER_BROKER_URL to a broker that runs elsewhere",
        name="ASYNCWORKER_STATE_DIR",
    )


def refuse_another_users(state_dir: Path) -> None:
    """The directory and the socket in it are this user's; root's rights make no difference.

    A server that root started in another user's directory would write files there that the user cannot read, and
    would be reached through a socket that the user could have put there.

    Raises:
        ConfigurationError: When one is another user's; nothing was changed or started.
    """
    for path in (state_dir, socket_path(state_dir)):
        try:
            owner = path.stat().st_uid
        except OSError:
            continue  # not there yet, or not to be entered, which is said where it is written
        if owner != os.geteuid():
            raise ConfigurationError(
                f"{path} belongs to {_user(owner)}, and this process is {_user(os.geteuid())}'s: the embedded Valkey "
                "serves one user; run as that user, or set ASYNCWORKER_STATE_DIR to a directory of this one's, or "
                "ASYNCWORKER_BROKER_URL to a broker for both",
                name="ASYNCWORKER_STATE_DIR",
            )


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"


def refuse_a_strangers(folder: Path, state_dir: Path) -> None:
    """Below /tmp anyone may have made the socket's folder first, and would be this deployment's broker.

    Raises:
        ConfigurationError: When it is not this user's alone.
    """
    if folder == state_dir.resolve():
        return
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise unwritable(state_dir, error) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigurationError(
            f"{folder} is not this user's alone, and the embedded Valkey would listen there; remove it, or set "
            f"ASYNCWORKER_STATE_DIR to a path of less than {LONGEST_SOCKET_PATH - len('/valkey.sock')} bytes",
            name="ASYNCWORKER_STATE_DIR",
        )
