"""The embedded server: a real one, asked for, left alone, killed and stopped by real processes."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from asyncworker import embedded, processes
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from tests.waiting import wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc and prctl are Linux's")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")

NOBODY = 65534

Python = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def python() -> Iterator[Python]:
    """Runs Python code in a process of its own, its arguments in `sys.argv`; ends it afterwards."""
    started: list[subprocess.Popen[str]] = []

    def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen(command, text=True, **(pipes | options)))
        return started[-1]

    yield python
    for process in started:
        process.kill()
        process.communicate()


PREAMBLE = """
import os, sys, time
from pathlib import Path
from asyncworker import embedded
from asyncworker.errors import AsyncworkerError
state_dir = Path(sys.argv[1])

def say(*words):
    print(*words, flush=True)
"""


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line or process.poll() is None, process.communicate()[1]
    return line


def tell(process: subprocess.Popen[str], line: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def client(path: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(path), retry=Retry(NoBackoff(), 0))


def pid_of(state_dir: Path) -> int:
    """The server's own word for its number, not its pid file's."""
    with client(embedded.socket_path(state_dir)) as server:
        return int(server.info("server")["process_id"])


def servers_in(state_dir: Path) -> list[int]:
    """The live servers that work in a directory."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(state_dir)
        and "-server" in " ".join(process.info["cmdline"] or ())
        and processes.lives(process.pid)
    ]


# starting


def test_the_server_listens_on_a_socket_of_this_user_and_on_no_port(state_dir: Path) -> None:
    path = embedded.ensure(state_dir)
    assert path == state_dir / "valkey.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    with client(path) as server:
        assert server.config_get("port") == {"port": "0"} or server.config_get("port") == {b"port": b"0"}
    assert not [one for one in psutil.Process(pid_of(state_dir)).net_connections("inet") if one.status == "LISTEN"]


def test_a_server_with_much_to_read_is_handed_out_when_it_has_read_it(state_dir: Path) -> None:
    keys = 400_000
    with client(embedded.ensure(state_dir)) as server:
        for first in range(0, keys, 10_000):  # each of them is answered in time on a busy machine, too
            server.eval("for i = 1, 10000 do redis.call('set', 'key' .. ARGV[1] + i, i) end", 0, first)
    embedded.stop(state_dir, for_good=False)
    with client(embedded.ensure(state_dir)) as server:
        assert server.dbsize() == keys


def test_asking_again_gives_the_same_server(state_dir: Path) -> None:
    assert embedded.ensure(state_dir) == embedded.ensure(state_dir)
    assert servers_in(state_dir) == [pid_of(state_dir)]


def test_the_server_is_started_once_however_many_processes_ask_at_the_same_moment(
    state_dir: Path, python: Python
) -> None:
    asking = [
        python('say("ready"); sys.stdin.readline(); say(embedded.ensure(state_dir)); sys.stdin.readline()', state_dir)
        for _ in range(8)
    ]
    assert {says(process) for process in asking} == {"ready"}
    for process in asking:
        tell(process)
    assert {says(process) for process in asking} == {str(state_dir / "valkey.sock")}
    assert len(servers_in(state_dir)) == 1
    assert (state_dir / "valkey.log").read_text().count("Ready to accept connections") == 1


def test_threads_that_ask_at_the_same_moment_all_get_the_server(state_dir: Path) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(8)

    def ask() -> None:
        gate.wait()
        try:
            for _ in range(20):
                embedded.make_state_dir(state_dir)
            embedded.ensure(state_dir)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(servers_in(state_dir)) == 1


def test_the_files_of_the_server_are_this_users_alone_wherever_they_lie(state_dir: Path) -> None:
    state_dir.chmod(0o755)
    with client(embedded.ensure(state_dir)) as server:
        server.set("secret", "in a message")
    shown = [
        path for path in state_dir.rglob("*") if path.name != "valkey.lock" and stat.S_IMODE(path.stat().st_mode) & 0o77
    ]
    assert shown == []


def test_the_server_knows_none_of_our_settings_and_no_token(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its title overwrites its environment in /proc, so a wrapper writes down what it is started with."""
    real = embedded.binary()
    assert real is not None
    wrapper = state_dir / "valkey-server"
    wrapper.write_text(f'#!/bin/sh\nenv > {shlex.quote(str(state_dir))}/env\nexec {shlex.quote(str(real))} "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setattr(embedded, "binary", lambda: wrapper)
    monkeypatch.setenv("ASYNCWORKER_PROXY", "http://user:password@proxy:8080")
    monkeypatch.setenv(processes.VARIABLE, str(processes.new_token()))
    monkeypatch.setenv("BESIDE", "them")
    embedded.ensure(state_dir)
    names = {line.partition("=")[0] for line in (state_dir / "env").read_text().splitlines()}
    assert "BESIDE" in names
    assert not [name for name in names if name.startswith("ASYNCWORKER_") or name == processes.VARIABLE]


@pytest.mark.parametrize("name", ["state dir", "zürich", "x" * 60 + "/" + "y" * 60])
def test_a_state_directory_may_have_any_path(state_dir: Path, name: str) -> None:
    folder = state_dir / name
    path = embedded.ensure(folder)
    try:
        assert len(os.fsencode(path)) <= 107
        with client(path) as server:
            assert server.ping()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert servers_in(folder) == [pid_of(folder)]
    finally:
        assert embedded.stop(folder)
    assert not path.exists()
    assert path.parent == folder or not path.parent.exists()


def test_a_state_directory_is_one_by_whatever_name_it_is_known(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = state_dir / ("x" * 80) / ("y" * 40), state_dir / "link"
    folder.mkdir(parents=True)
    link.symlink_to(folder)
    path = embedded.ensure(folder)
    try:
        monkeypatch.setenv("TMPDIR", str(state_dir))
        monkeypatch.setattr("tempfile.tempdir", None)
        assert embedded.ensure(link) == path
        assert len(servers_in(folder)) == 1
    finally:
        assert embedded.stop(link)


# living


def test_the_server_survives_the_death_of_whoever_started_it(state_dir: Path, python: Python) -> None:
    starter = python("say(embedded.ensure(state_dir)); time.sleep(60)", state_dir)
    path = Path(says(starter))
    starter.kill()
    starter.wait()
    assert embedded.answers(path)


def test_a_ctrl_c_at_the_terminal_of_whoever_started_it_does_not_reach_the_server(
    state_dir: Path, python: Python
) -> None:
    starter = python("say(embedded.ensure(state_dir)); time.sleep(60)", state_dir, start_new_session=True)
    path = Path(says(starter))
    server = pid_of(state_dir)
    assert os.getsid(server) != os.getsid(starter.pid)
    os.killpg(starter.pid, signal.SIGINT)
    assert starter.wait(30) != 0
    assert embedded.answers(path)
    assert pid_of(state_dir) == server


def test_what_was_stored_survives_the_servers_death(state_dir: Path) -> None:
    path = embedded.ensure(state_dir)
    with client(path) as server:
        for number in range(100):
            server.rpush("queue", number)
        assert server.config_get("appendfsync")["appendfsync"] == "always", "answered is written, and not soon written"
    first = pid_of(state_dir)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not embedded.answers(path), "the server is dead")
    assert path.exists(), "a killed server leaves its socket behind"
    embedded.ensure(state_dir)
    assert pid_of(state_dir) != first
    with client(path) as server:
        assert server.llen("queue") == 100


@pytest.mark.parametrize("refusal", ["a password", "a script that does not end"])
def test_a_server_that_refuses_to_answer_is_not_replaced(state_dir: Path, refusal: str) -> None:
    """A second one on the same files would destroy them, and the clients of the first would go on with it."""
    path = embedded.ensure(state_dir)
    first, admin = pid_of(state_dir), client(path)
    admin.set("kept", "yes")
    busy = threading.Thread(target=_run_for_ever, args=(path,))
    if refusal == "a password":
        admin.config_set("requirepass", "secret")
    else:
        admin.config_set("busy-reply-threshold", 10)
        busy.start()
        wait_until(lambda: _refuses_a_ping(path), "the server is busy")
    with pytest.raises(redis.RedisError), client(path) as other:
        other.ping()
    try:
        assert embedded.ensure(state_dir) == path
        assert servers_in(state_dir) == [first]
    finally:
        if busy.ident is not None:
            admin.script_kill()
            busy.join()
        admin.config_set("requirepass", "")
        assert admin.get("kept") == b"yes"
        admin.close()


def _run_for_ever(path: Path) -> None:
    with client(path) as server, pytest.raises(redis.ResponseError):
        server.eval("while true do end", 0)


def _refuses_a_ping(path: Path) -> bool:
    with client(path) as server:
        try:
            return not server.ping()
        except redis.RedisError:
            return True


def test_a_server_without_room_for_another_client_is_reported_and_not_replaced(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = client(embedded.ensure(state_dir))
    first = pid_of(state_dir)
    monkeypatch.setattr(embedded, "START_TIMEOUT_MS", 300)
    admin.config_set("maxclients", 1)
    try:
        with pytest.raises(BrokerUnavailable, match=f"process {first} does not answer"):
            embedded.ensure(state_dir)
        assert servers_in(state_dir) == [first]
    finally:
        admin.config_set("maxclients", 100)
        admin.close()


def test_a_server_that_hangs_is_reported_and_not_replaced(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = embedded.ensure(state_dir)
    server = psutil.Process(pid_of(state_dir))
    server.suspend()
    try:
        with monkeypatch.context() as hasty:
            hasty.setattr(embedded, "answers", partial(embedded.answers, timeout_ms=100))
            hasty.setattr(embedded, "START_TIMEOUT_MS", 300)
            with pytest.raises(BrokerUnavailable, match=f"process {server.pid} does not answer.*asyncworker down"):
                embedded.ensure(state_dir)
        assert servers_in(state_dir) == [server.pid]
    finally:
        server.resume()
    assert embedded.ensure(state_dir) == path
    assert pid_of(state_dir) == server.pid


# stopping


def test_stopping_leaves_no_process_and_no_socket_and_keeps_the_data(state_dir: Path, python: Python) -> None:
    path = embedded.ensure(state_dir)
    with client(path) as server:
        server.set("kept", "yes")
    number = pid_of(state_dir)
    assert embedded.stop(state_dir)
    assert not processes.lives(number)
    assert not path.exists()
    assert not embedded.answers(path)
    later = python(
        "import redis; say(redis.Redis(unix_socket_path=str(embedded.ensure(state_dir))).get('kept'))", state_dir
    )
    assert says(later) == "b'yes'"


def test_stopping_what_does_not_run_says_so(state_dir: Path) -> None:
    assert not embedded.stop(state_dir / "never")
    assert not (state_dir / "never").exists()
    embedded.ensure(state_dir)
    assert embedded.stop(state_dir)
    assert not embedded.stop(state_dir)


@pytest.mark.parametrize("gone", ["valkey.pid", "valkey.sock"])
def test_a_server_is_stopped_that_has_lost_its_file(state_dir: Path, gone: str) -> None:
    embedded.ensure(state_dir)
    number = pid_of(state_dir)
    (state_dir / gone).unlink()
    assert embedded.stop(state_dir)
    wait_until(lambda: not processes.lives(number), "the server has ended")


def test_a_process_that_has_inherited_the_servers_number_is_left_alone(state_dir: Path) -> None:
    """In containers numbers come again, and the state directory may be a worker's working directory."""
    with subprocess.Popen(["sleep", "60"], cwd=state_dir) as worker:
        (state_dir / "valkey.pid").write_text(f"{worker.pid}\n")
        try:
            assert not embedded.stop(state_dir, for_good=False)
            (state_dir / "valkey.pid").write_text(f"{worker.pid}\n")
            embedded.ensure(state_dir)
            assert pid_of(state_dir) != worker.pid
            assert worker.poll() is None
        finally:
            worker.kill()


def test_a_server_that_does_not_end_is_reported_with_its_number(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.ensure(state_dir)
    server = psutil.Process(pid_of(state_dir))
    monkeypatch.setattr(embedded, "answers", partial(embedded.answers, timeout_ms=100))
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_MS", 300)
    server.suspend()
    try:
        with pytest.raises(BrokerUnavailable, match=f"process {server.pid} did not end in 300 ms.*valkey.log"):
            embedded.stop(state_dir)
    finally:
        server.resume()
    wait_until(lambda: not processes.lives(server.pid), "it ends when it can")


@linux_only
def test_a_server_that_no_init_reaps_counts_as_stopped(state_dir: Path, python: Python) -> None:
    init = python(
        """
import ctypes
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
embedded.STOP_TIMEOUT_MS = 3_000
embedded.ensure(state_dir)
say(embedded.stop(state_dir))
say(os.wait()[1])
""",
        state_dir,
    )
    assert says(init) == "True"
    assert says(init) == "0"


def test_a_worker_older_than_down_does_not_bring_the_server_back_and_a_later_process_does(
    state_dir: Path, python: Python
) -> None:
    asks = """
say("up")
for line in sys.stdin:
    try:
        say(embedded.ensure(state_dir))
    except AsyncworkerError as error:
        say(f"{type(error).__name__}: {error}")
"""
    path = str(state_dir / "valkey.sock")
    older = python(asks, state_dir)
    assert says(older) == "up"
    tell(older)
    assert says(older) == path
    assert embedded.stop(state_dir)
    for _ in range(2):
        tell(older)
        refusal = says(older)
        assert refusal.startswith("BrokerUnavailable: ")
        assert "asyncworker down" in refusal
        assert "start this process again" in refusal
    assert servers_in(state_dir) == []
    later = python(asks, state_dir)  # at once: not a second later, by some coarse clock
    assert says(later) == "up"
    tell(later)
    assert says(later) == path
    tell(older)
    assert says(older) == path, "a server that runs is everyone's"


def test_a_stop_that_is_not_for_good_lets_everyone_start_it_again(state_dir: Path) -> None:
    embedded.ensure(state_dir)
    assert embedded.stop(state_dir, for_good=False)
    embedded.ensure(state_dir)
    assert servers_in(state_dir) == [pid_of(state_dir)]


# what cannot work


def test_a_state_directory_below_a_file_is_refused_with_the_setting_to_change(state_dir: Path) -> None:
    (state_dir / "file").touch()
    with pytest.raises(ConfigurationError, match="ASYNCWORKER_STATE_DIR") as refused:
        embedded.ensure(state_dir / "file" / "state")
    assert refused.value.name == "ASYNCWORKER_STATE_DIR"
    assert str(state_dir / "file" / "state") in str(refused.value)
    assert not embedded.stop(state_dir / "file" / "state")


@linux_only
def test_a_state_directory_that_nothing_can_write_is_refused_with_the_setting_to_change() -> None:
    for work in (embedded.ensure, embedded.stop):
        with pytest.raises(ConfigurationError, match="ASYNCWORKER_STATE_DIR"):
            work(Path("/proc/sys"))
    with pytest.raises(ConfigurationError, match="ASYNCWORKER_STATE_DIR"):
        embedded.ensure(Path("/proc/sys/asyncworker"))


@root_only
def test_a_state_directory_of_another_user_is_refused_with_the_setting_to_change(state_dir: Path) -> None:
    state_dir.chmod(0o700)
    code = f"""
import os, sys
from pathlib import Path
from asyncworker import embedded
from asyncworker.errors import ConfigurationError
embedded.answers(Path("/nowhere"))  # imports what the other user may not be able to read
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
for folder in (Path(sys.argv[1]), Path(sys.argv[1]) / "below"):
    try:
        embedded.ensure(folder)
    except ConfigurationError as error:
        print(error.name)
"""
    run = subprocess.run([sys.executable, "-c", code, state_dir], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["ASYNCWORKER_STATE_DIR"] * 2, run.stderr


@root_only
@pytest.mark.parametrize("theirs", ["the directory", "the socket"])
def test_root_starts_and_stops_nothing_in_another_users_directory(state_dir: Path, theirs: str) -> None:
    folder = state_dir / "theirs"
    folder.mkdir(mode=0o700)
    if theirs == "the socket":
        (folder / "valkey.sock").touch()
    what = folder if theirs == "the directory" else folder / "valkey.sock"
    os.chown(what, NOBODY, NOBODY)
    before = sorted(folder.iterdir())
    for work in (embedded.ensure, embedded.stop):
        with pytest.raises(ConfigurationError, match=rf"{what} belongs to .*\(?{NOBODY}.*ASYNCWORKER_STATE_DIR"):
            work(folder)
    assert sorted(folder.iterdir()) == before, "something was written"
    assert what.stat().st_uid == NOBODY
    assert servers_in(folder) == []


@pytest.mark.parametrize("whose", ["everyone's", "a link", pytest.param("a stranger's", marks=root_only)])
def test_a_folder_for_the_socket_that_is_not_this_users_alone_is_refused(state_dir: Path, whose: str) -> None:
    """Whoever made it first would be this deployment's broker."""
    folder = state_dir / ("x" * 110)
    below_tmp = embedded.socket_path(folder).parent
    try:
        if whose == "a link":
            (state_dir / "target").mkdir(mode=0o700)
            below_tmp.symlink_to(state_dir / "target")
        else:
            below_tmp.mkdir(mode=0o700)
        if whose == "everyone's":
            below_tmp.chmod(0o777)
        if whose == "a stranger's":
            os.chown(below_tmp, NOBODY, NOBODY)
        folder.mkdir()
        for work in (embedded.ensure, embedded.stop):
            with pytest.raises(ConfigurationError, match=r"not this user's alone.*ASYNCWORKER_STATE_DIR"):
                work(folder)
    finally:
        below_tmp.unlink() if below_tmp.is_symlink() else below_tmp.rmdir()


def test_without_a_server_on_the_machine_the_broker_url_is_the_remedy(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "binary", lambda: None)
    with pytest.raises(ConfigurationError, match="ASYNCWORKER_BROKER_URL"):
        embedded.ensure(state_dir)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("no program at all", ConfigurationError),
        ("#!/bin/sh\necho 'Fatal config file error' >&2; exit 1\n", BrokerUnavailable),
        ("#!/bin/sh\nexec sleep 60\n", BrokerUnavailable),
    ],
    ids=["not executable code", "refuses", "never returns"],
)
def test_a_server_that_does_not_start_is_reported(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, program: str, error: type[Exception]
) -> None:
    broken = state_dir / "valkey-server"
    broken.write_text(program)
    broken.chmod(0o700)
    monkeypatch.setattr(embedded, "binary", lambda: broken)
    monkeypatch.setattr(embedded, "START_TIMEOUT_MS", 300)
    with pytest.raises(error) as raised:
        embedded.ensure(state_dir)
    said = str(raised.value)
    assert "ASYNCWORKER_BROKER_URL" in said if error is ConfigurationError else "valkey.log" in said
    assert ("Fatal config file error" in said) == ("Fatal" in program)


def test_a_lock_that_is_never_let_go_does_not_hold_everyone_for_ever(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "START_TIMEOUT_MS", 100)
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_MS", 100)
    with (state_dir / "valkey.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BrokerUnavailable, match=r"valkey\.lock"):
            embedded.ensure(state_dir)
