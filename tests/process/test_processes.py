"""Whose process is this? Real processes, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncworker import processes
from asyncworker.processes import Token, carriers, kill, kill_launch, lives, new_token, sweep
from asyncworker.settings import child_environment
from tests.chromium import executable
from tests.waiting import wait_until

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc and prctl are Linux's")

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a shell line or Python code under a token, by default in a session of its own; ends it afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(
        token: Token | str | None = None, *, shell: str = "exec sleep 60", code: str = "", session: bool = True
    ) -> subprocess.Popen[str]:
        environment = child_environment()
        if token is not None:
            environment[processes.VARIABLE] = str(token)
        process = subprocess.Popen(
            [sys.executable, "-c", code, processes._namespace()] if code else ["sh", "-c", shell],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=session,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its group is of its number when it has its own session
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        process.communicate()


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace of the test's own: no sweep of a worker elsewhere on this machine takes away what the test has
    left over, and the test's sweeps leave theirs alone.

    Code in another process puts itself there, with the name that `start` passes on: `processes._namespace = …`.
    """
    name = f"test{os.getpid()}"
    monkeypatch.setattr(processes, "_namespace", lambda: name)


def says(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def carries(token: Token) -> Callable[[], bool]:
    return lambda: bool(carriers(lambda other: other == token))


def of_a_dead_owner() -> Token:
    """As written by a process whose number this one has inherited."""
    mine = new_token()
    return replace(mine, born=mine.born - 1)


# tokens


def test_a_token_is_read_as_it_was_written() -> None:
    token = new_token("driver")
    assert Token.parse(str(token)) == token
    assert token.role == "driver"
    assert token.session == os.getsid(0)


def test_every_launch_has_a_token_of_its_own() -> None:
    assert len({str(new_token()) for _ in range(100)}) == 100


@given(st.text() | st.lists(st.text(), min_size=6, max_size=6).map(".".join))
def test_whatever_stands_in_the_variable_is_a_token_or_none(text: str) -> None:
    token = Token.parse(text)
    assert token is None or Token.parse(str(token)) == token


@pytest.mark.parametrize(
    "text",
    ["", "....", "1.2.3.4", "a.b.c.d.e.f", "1.²3.4.f.browser.5", "1.٣.4.f.browser.5", f"1.{'9' * 5000}.4.f.browser.5"],
)
def test_what_is_not_a_token_is_none_of_ours(text: str) -> None:
    assert Token.parse(text) is None


def test_this_process_is_not_gone() -> None:
    assert not new_token().owner_is_gone()


def test_an_owner_is_gone_when_its_number_belongs_to_a_later_process() -> None:
    assert of_a_dead_owner().owner_is_gone()


def test_an_owner_that_only_waits_for_its_parent_is_gone(start: Start) -> None:
    owner = start(code="from asyncworker.processes import new_token; print(new_token())")
    token = Token.parse(says(owner))
    assert token is not None
    assert token.pid == owner.pid
    wait_until(lambda: psutil.Process(owner.pid).status() == psutil.STATUS_ZOMBIE, "the owner is a zombie")
    assert token.owner_is_gone()
    assert not lives(owner.pid)


def test_an_owner_in_another_namespace_is_never_known_to_be_gone() -> None:
    assert not replace(of_a_dead_owner(), namespace="4026530000").owner_is_gone()


def test_an_owner_that_cannot_be_looked_at_is_not_known_to_be_gone(start: Start) -> None:
    """Taken for gone, its browsers would be killed, by a process that may open no more files, say."""
    looking = start(
        code=f"""
import resource
from asyncworker.processes import Token
token = Token.parse("{new_token()}")
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
print(token.owner_is_gone())
"""
    )
    assert says(looking) == "False"


def test_a_process_that_is_hidden_is_not_known_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(pid: int) -> int:
        raise FileNotFoundError(pid)

    token, ended = new_token(), of_a_dead_owner()
    monkeypatch.setattr(processes, "_birth", hidden)
    assert not token.owner_is_gone()
    assert processes.is_gone(2**22 + 1, ended.born)  # no pid is as large


def test_a_fork_launches_in_its_own_name(start: Start) -> None:
    forking = start(
        code="""
import os
from asyncworker.processes import new_token
before = new_token()
if os.fork() == 0:
    after = new_token()
    print(after.pid == os.getpid(), after.born != 0, (after.pid, after.born) != (before.pid, before.born), flush=True)
    os._exit(0)
os.wait()
"""
    )
    assert says(forking) == "True True True"


def test_a_number_that_no_process_has_does_not_live(start: Start) -> None:
    process = start(shell="exit 0")
    process.wait()
    assert not lives(process.pid)
    assert lives(os.getpid())


# kill


def test_one_launch_is_killed_and_no_other(start: Start) -> None:
    token = new_token()
    condemned, spared = start(token), start(new_token())
    wait_until(carries(token), "the process carries its token")
    assert kill_launch(token) == 1
    assert condemned.wait() == -signal.SIGKILL
    assert spared.poll() is None


def test_killing_a_launch_that_never_was_kills_nothing() -> None:
    assert kill_launch(new_token()) == 0


def test_the_whole_tree_of_a_launch_is_killed(start: Start) -> None:
    token = new_token()
    start(token, shell="sleep 60 & (sleep 60 & wait) & wait")
    wait_until(lambda: len(carriers(lambda other: other == token)) == 4, "the tree is up")
    assert kill_launch(token) == 4
    assert not carries(token)()


def test_helpers_that_have_overwritten_their_environment_are_killed_with_their_session(start: Start) -> None:
    token = new_token()
    leader = start(token, shell="env -i sleep 60 & echo $!; wait")
    helper = psutil.Process(int(says(leader)))
    wait_until(lambda: helper.environ() == {}, "the helper has no environment")
    assert helper in carriers(lambda other: other == token)
    assert kill_launch(token) == 2
    assert not lives(helper.pid)
    assert leader.wait() == -signal.SIGKILL


def test_what_is_forked_while_its_tree_dies_is_killed_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard case: it carries no token, and whoever did is dead when it is looked for."""
    token = new_token()
    leader = start(
        token,
        code="""
import subprocess, sys
for line in sys.stdin:
    print(subprocess.Popen(["sleep", "60"], env={}).pid, flush=True)
""",
    )
    wait_until(carries(token), "the process carries its token")
    late: list[int] = []

    def kill_late(process: psutil.Process, kill: Callable[[psutil.Process], None] = psutil.Process.kill) -> None:
        if process.pid == leader.pid and not late:
            assert leader.stdin is not None
            leader.stdin.write("fork\n")
            leader.stdin.flush()
            late.append(int(says(leader)))
            wait_until(lambda: psutil.Process(late[0]).environ() == {}, "the late one has no environment")
        kill(process)

    monkeypatch.setattr(psutil.Process, "kill", kill_late)
    assert kill_launch(token) == 2
    assert not lives(late[0])


def test_a_process_out_of_reach_does_not_save_the_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setuid helper, such as Chromium's sandbox, belongs to root and cannot be killed by a user."""
    token = new_token()
    sandbox, browser = start(token), start(token)
    wait_until(lambda: len(carriers(lambda other: other == token)) == 2, "both carry their token")

    def kill_allowed(process: psutil.Process, kill: Callable[[psutil.Process], None] = psutil.Process.kill) -> None:
        if process.pid == sandbox.pid:
            raise psutil.AccessDenied(process.pid)
        kill(process)

    monkeypatch.setattr(psutil.Process, "kill", kill_allowed)
    began = time.monotonic()
    assert kill_launch(token, timeout_ms=60_000) == 1
    assert time.monotonic() - began < 30, "it is not tried again and again"
    assert not lives(browser.pid)
    assert lives(sandbox.pid)


def test_the_exit_status_is_left_to_whoever_started_the_process(start: Start) -> None:
    token = new_token()
    process = start(token)
    wait_until(carries(token), "the process carries its token")
    kill_launch(token)
    assert process.wait() == -signal.SIGKILL


async def test_a_loop_learns_how_its_subprocess_ended(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        token = new_token()
        environment = child_environment(**{processes.VARIABLE: str(token)})
        process = await asyncio.create_subprocess_exec("sleep", "60", env=environment)
        assert await asyncio.to_thread(kill_launch, token) == 1
        assert await process.wait() == -signal.SIGKILL
    assert not caplog.records  # asyncio warns when another one has taken the status


@linux_only
def test_a_worker_that_is_the_init_of_its_container_keeps_no_zombie(start: Start) -> None:
    init = start(
        code="""
import ctypes, subprocess, psutil
from asyncworker import processes
from asyncworker.settings import child_environment
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
token = processes.new_token()
browser = subprocess.Popen(
    ["sh", "-c", "(sleep 60 & wait) & sleep 60 & echo up; wait"],
    env=child_environment(**{processes.VARIABLE: str(token)}),
    stdout=subprocess.PIPE,
    start_new_session=True,
)
browser.stdout.readline()
while len(processes.carriers(lambda other: other == token)) < 4:
    pass
print(processes.kill_launch(token), browser.wait(), psutil.Process().children(recursive=True), flush=True)
"""
    )
    assert says(init) == "4 -9 []"


@pytest.mark.needs_browser
def test_a_real_browser_and_its_helpers_without_a_token_are_killed(start: Start) -> None:
    chromium = executable()
    token = new_token()
    with tempfile.TemporaryDirectory(prefix="aw-", ignore_cleanup_errors=True) as profile:
        browser = start(
            token,
            shell=f"exec '{chromium}' --headless --no-sandbox --user-data-dir='{profile}' --remote-debugging-port=0 "
            "about:blank 2>/dev/null",
        )
        members = wait_until(lambda: _scrubbed_members(browser.pid, token), "a helper has overwritten its environment")
        everything = carriers(lambda other: other == token)
        assert set(members) < set(everything)
        assert kill_launch(token) >= len(everything)
        assert not [process for process in everything if lives(process.pid)]
        browser.wait()


def _scrubbed_members(session: int, token: Token) -> list[psutil.Process]:
    """Members of a session in whose environment the token cannot be read; only once the browser has a renderer."""
    members = [process for process in psutil.process_iter() if _session(process.pid) == session]
    if not any("--type=renderer" in " ".join(_words(process)) for process in members):
        return []
    with_token = {process.pid for process, found in processes._processes() if found == token}
    return [process for process in members if process.pid not in with_token]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


# sweep


@pytest.mark.usefixtures("namespace")
def test_a_sweep_kills_what_a_dead_worker_left(start: Start) -> None:
    owner = start(
        code="""
import subprocess, sys, time
from asyncworker import processes
from asyncworker.settings import child_environment
processes._namespace = lambda: sys.argv[1]
token = processes.new_token()
subprocess.Popen(
    ["sh", "-c", "env -i sleep 60 & echo $$ $!; wait"],
    env=child_environment(**{processes.VARIABLE: str(token)}),
    stdin=subprocess.DEVNULL,
    start_new_session=True,
)
time.sleep(60)
"""
    )
    left = [int(number) for number in says(owner).split()]
    sweep()
    assert all(lives(pid) for pid in left), "their owner is alive"
    owner.kill()
    owner.wait()
    sweep()
    assert not any(lives(pid) for pid in left)


@pytest.mark.usefixtures("namespace")
def test_a_sweep_spares_what_is_not_known_to_be_left(start: Start) -> None:
    spared = {
        "a live owner's": start(new_token()),
        "another namespace's": start(replace(of_a_dead_owner(), namespace="4026530000")),
        "a stranger's": start("1.²3.4.f.browser.5"),
        "no one's": start(),
    }
    dead = of_a_dead_owner()
    condemned = start(dead)
    wait_until(lambda: len([one for one in spared.values() if _session(one.pid) == one.pid]) == 4, "all are up")
    wait_until(carries(dead), "the condemned one carries its token")
    sweep()
    assert condemned.wait() == -signal.SIGKILL
    assert {whose for whose, process in spared.items() if process.poll() is not None} == set()


@pytest.mark.usefixtures("namespace")
def test_a_browser_in_its_workers_session_does_not_condemn_the_session(start: Start) -> None:
    """invisible_playwright starts its browser so; the session is that of all workers, and of a user's shell."""
    shell = start(
        code="""
import subprocess, sys, time
bystander = subprocess.Popen(["sleep", "60"])
owner = subprocess.Popen([sys.executable, "-c", '''
import subprocess, sys, time
from asyncworker import processes
from asyncworker.settings import child_environment
processes._namespace = lambda: sys.argv[1]
environment = child_environment(**{processes.VARIABLE: str(processes.new_token())})
print(subprocess.Popen(["sleep", "60"], env=environment).pid, flush=True)
time.sleep(60)
''', sys.argv[1]], stdout=subprocess.PIPE, text=True)
browser = int(owner.stdout.readline())
owner.kill()
owner.wait()
print(bystander.pid, browser, flush=True)
sys.stdin.readline()
bystander.kill()
"""
    )
    bystander, browser = (int(number) for number in says(shell).split())
    assert os.getsid(browser) == os.getsid(bystander) == shell.pid
    sweep()
    assert not lives(browser)
    assert lives(bystander)
    assert shell.poll() is None
    shell.communicate("done\n")


@pytest.mark.usefixtures("namespace")
def test_a_process_never_sweeps_itself_nor_its_own_launch_away(start: Start) -> None:
    sweeping = start(
        of_a_dead_owner(),
        code="""
import subprocess, sys
from asyncworker import processes
processes._namespace = lambda: sys.argv[1]
sibling = subprocess.Popen(["sleep", "60"], start_new_session=True)
processes.sweep()
print(sibling.poll(), flush=True)
sibling.kill()
sibling.wait()
""",
    )
    assert says(sweeping) == "None"
    assert sweeping.wait() == 0


def test_this_process_does_not_stand_under_its_own_launches(start: Start) -> None:
    start(new_token(), session=False)
    mine = new_token()
    found = wait_until(
        lambda: carriers(lambda token: (token.pid, token.born) == (mine.pid, mine.born)), "the launch is found"
    )
    assert [process.ppid() for process in found] == [os.getpid()]
    assert kill(lambda token: (token.pid, token.born) == (mine.pid, mine.born)) == 1


def test_a_process_is_never_told_to_be_older_than_what_was_before_it() -> None:
    for _ in range(5):
        before = time.time()
        script = "from asyncworker.processes import up_since; print(up_since())"
        told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
        assert float(told.stdout) >= before
