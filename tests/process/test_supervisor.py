"""The supervisor with small programs in the place of workers: real processes, real signals, no broker."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncworker.processes import lives
from asyncworker.settings import child_environment
from asyncworker.supervisor import CRASH_LOOP, HOPELESS, NOT_IN_ORDER
from tests import namespaces
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what ends with its parent is Linux's to decide")

_RUN = """
import json, logging, sys
from asyncworker.supervisor import Policy, Supervisor
program, count, policy = json.loads(sys.argv[1])
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
sys.exit(Supervisor([sys.executable, "-c", program], count, policy=Policy(**policy)).run())
"""

#: What every program begins with.
READY = """
import os, signal, subprocess, sys, time
from pathlib import Path

def ready():
    Path(os.environ["_ASYNCWORKER_READY"]).write_text("")
    print("ready", os.getpid(), flush=True)

"""

STEADY = READY + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); time.sleep(60)"

STUBBORN = (
    READY + "signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True)); ready()\nwhile True: time.sleep(60)"
)


class Supervised:
    """A supervisor that runs, and its log so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def pids(self) -> list[int]:
        """The workers that have been ready so far."""
        return [int(pid) for pid in re.findall(r"^worker \d+ \| ready (\d+)$", self.log, re.MULTILINE)]

    def ready(self, count: int) -> list[int]:
        return wait_until(lambda: self.pids() if len(self.pids()) >= count else [], f"{count} have been ready")

    def logged(self, text: str, *, times: int = 1) -> None:
        wait_until(lambda: self.log.count(text) >= times, f"{times} x {text!r} in the log")


Keep = Callable[..., Supervised]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    """Starts a supervisor of a program; ends it, and what it has started, afterwards."""
    with contextlib.ExitStack() as stack:

        def keep(
            program: str,
            count: int = 1,
            *,
            within: tuple[str, ...] = (),
            stdin: int = subprocess.DEVNULL,
            **policy: int,
        ) -> Supervised:
            log = tmp_path / "log"
            policy = {"backoff_ms": 50, "steady_ms": 60_000} | policy
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*within, sys.executable, "-c", _RUN, json.dumps([program, count, policy])],
                    env=child_environment(),
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            stack.callback(_end, process)
            return Supervised(process, log)

        yield keep


def _end(process: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    process.wait()
    for one in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def test_one_that_is_killed_is_replaced_and_the_others_go_on(keep: Keep) -> None:
    supervised = keep(STEADY, 3)
    first = supervised.ready(3)
    os.kill(first[1], signal.SIGKILL)
    replaced = supervised.ready(4)[3]
    assert all(lives(pid) for pid in (first[0], first[2], replaced))
    assert supervised.log.count("died: killed by SIGKILL; it is replaced in 50 ms") == 1
    supervised.process.terminate()
    assert supervised.process.wait(20) == 0
    assert not [pid for pid in supervised.pids() if lives(pid)]


def test_every_line_of_a_worker_comes_through_whole_and_says_which_it_is(keep: Keep) -> None:
    program = READY + (
        "number = os.environ['_ASYNCWORKER_READY'][-1]\n"
        "sys.stderr.write('half a ' + number); sys.stderr.flush(); time.sleep(0.05)\n"
        "sys.stderr.write(' line\\n\\n' + number * 200_000 + '\\nlast ' + number); sys.stderr.flush()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); time.sleep(60)"
    )
    supervised = keep(program, 3)
    supervised.logged("ready", times=3)
    supervised.process.terminate()
    supervised.process.wait(20)
    for number in "123":
        lines = [line for line in supervised.log.splitlines() if line.startswith(f"worker {number} | ")]
        said = [line.removeprefix(f"worker {number} | ") for line in lines]
        assert said[:2] == [f"half a {number} line", ""]
        assert "".join(said[2:-1]) == number * 200_000
        assert said[-1].startswith(f"last {number}ready")


def test_a_worker_that_dies_again_and_again_ends_everything_in_order_with_a_code_of_its_own(keep: Keep) -> None:
    program = READY + (
        "if os.environ['_ASYNCWORKER_READY'].endswith('1'): ready(); sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('in order', flush=True) or sys.exit(0))\n"
        "ready(); time.sleep(60)"
    )
    supervised = keep(program, 2, deaths=4)
    assert supervised.process.wait(30) == CRASH_LOOP
    assert [f"replaced in {ms} ms" in supervised.log for ms in (50, 100, 200, 400)] == [True, True, True, False]
    assert "worker 1 died 4 times in a row" in supervised.log
    assert "the last time: exit code 7" in supervised.log
    assert "worker 2 | in order" in supervised.log
    assert len(supervised.pids()) == 5


def test_a_worker_that_was_ready_for_a_while_begins_a_new_row(keep: Keep) -> None:
    supervised = keep(READY + "ready(); time.sleep(1.2); sys.exit(7)", deaths=2, steady_ms=200)
    supervised.ready(4)
    assert supervised.process.poll() is None
    supervised.process.terminate()
    assert supervised.process.wait(20) in (0, NOT_IN_ORDER)


def test_what_cannot_start_at_all_is_not_tried_again(keep: Keep) -> None:
    supervised = keep("import sys; print('no such module'); sys.exit(2)", 2)
    assert supervised.process.wait(20) == HOPELESS
    assert "cannot start, as its lines above say" in supervised.log
    assert supervised.log.count("no such module") <= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_workers_are_told_once_whoever_else_is_told(keep: Keep, number: signal.Signals) -> None:
    """A terminal sends Ctrl-C to the whole group; the workers are in none that it knows."""
    program = READY + (
        "signal.signal(signal.SIGINT, lambda *_: print('SIGINT', flush=True))\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('SIGTERM', flush=True) or sys.exit(0)); ready(); time.sleep(60)"
    )
    supervised = keep(program, 2)
    supervised.ready(2)
    os.killpg(supervised.process.pid, number)
    assert supervised.process.wait(20) == 0
    assert re.findall(r"SIG\w+$", supervised.log, re.MULTILINE) == ["SIGTERM", "SIGTERM"]


def test_sighup_is_dramatiqs_reload_and_reaches_every_worker(keep: Keep) -> None:
    supervised = keep(
        READY + "signal.signal(signal.SIGHUP, lambda *_: print('again', flush=True)); " + STEADY[len(READY) :], 2
    )
    supervised.ready(2)
    supervised.process.send_signal(signal.SIGHUP)
    supervised.logged("| again", times=2)
    supervised.process.terminate()
    assert supervised.process.wait(20) == 0


def test_a_terminal_that_is_closed_stops_the_workers_in_order(keep: Keep) -> None:
    ours, its = pty.openpty()
    try:
        supervised = keep(STEADY, 2, stdin=its)
        supervised.ready(2)
        supervised.process.send_signal(signal.SIGHUP)
        assert supervised.process.wait(20) == 0
        assert "SIGHUP: stopping 2 workers in order" in supervised.log
    finally:
        os.close(ours)
        os.close(its)


def test_a_second_signal_shortens_the_stop_and_what_is_left_is_killed(keep: Keep) -> None:
    supervised = keep(STUBBORN, 2, stop_ms=60_000, short_stop_ms=300)
    pids = supervised.ready(2)
    supervised.process.terminate()
    supervised.logged("| no", times=2)
    assert all(lives(pid) for pid in pids)
    supervised.process.terminate()
    assert supervised.process.wait(20) == NOT_IN_ORDER
    assert supervised.log.count("did not stop in time and is killed") == 2
    assert supervised.log.count("| no") == 4
    assert not [pid for pid in pids if lives(pid)]


def test_a_third_signal_kills_at_once(keep: Keep) -> None:
    supervised = keep(STUBBORN, stop_ms=60_000, short_stop_ms=60_000)
    supervised.ready(1)
    for times in (1, 2):
        supervised.process.terminate()
        supervised.logged("| no", times=times)
    supervised.process.terminate()
    assert supervised.process.wait(20) == NOT_IN_ORDER


def test_a_worker_that_does_not_stop_is_killed_with_what_it_has_started(keep: Keep) -> None:
    program = READY + (
        "child = subprocess.Popen(['sleep', '60']); print('child', child.pid, flush=True)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(60)"
    )
    supervised = keep(program, stop_ms=300)
    supervised.ready(1)
    child = int(re.search(r"child (\d+)", supervised.log)[1])  # type: ignore[index]
    supervised.process.terminate()
    assert supervised.process.wait(20) == NOT_IN_ORDER
    assert not lives(child)


def test_a_supervisor_that_is_killed_leaves_no_worker(keep: Keep) -> None:
    program = READY + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); time.sleep(60)"
    supervised = keep(program, 3)
    pids = supervised.ready(3)
    supervised.process.kill()
    supervised.process.wait()
    wait_until(lambda: not [pid for pid in pids if lives(pid)], "no worker is left")


def test_a_stop_while_a_worker_is_to_be_replaced_waits_for_nothing(keep: Keep) -> None:
    supervised = keep(READY + "ready(); sys.exit(7)", backoff_ms=60_000, max_backoff_ms=60_000)
    supervised.logged("replaced in 60000 ms")
    supervised.process.terminate()
    assert supervised.process.wait(30) == 0


def test_a_log_that_no_one_reads_any_more_ends_nothing(keep: Keep, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, json.dumps([STEADY, 1, {"backoff_ms": 50, "deaths": 9}])],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        start_new_session=True,
    )
    try:
        os.close(writing)
        with os.fdopen(reading, "rb") as log:
            first = int(next(line for line in iter(log.readline, b"") if b"ready" in line).split()[-1])
        os.kill(first, signal.SIGKILL)
        (second,) = wait_until(
            lambda: [one for one in psutil.Process(process.pid).children() if one.pid != first], "it is replaced"
        )
        process.terminate()
        assert process.wait(20) == 0
        assert not second.is_running()
    finally:
        _end(process)


def test_no_workers_status_is_lost_among_the_orphans_that_are_reaped(keep: Keep) -> None:
    """Each start leaves twenty orphans that end while the supervisor waits for workers, too."""
    program = READY + (
        "for _ in range(20): subprocess.run(['sh', '-c', 'setsid sleep 0.2 & exit 0'])\n"
        "ready(); time.sleep(0.3); sys.exit(9)"
    )
    supervised = keep(program, 2, deaths=3)
    supervised.ready(4)
    assert supervised.process.wait(30) == CRASH_LOOP
    died = re.findall(r"died: ([^;]*);|the last time: ([^;]*);", supervised.log)
    assert {how or last for how, last in died} == {"exit code 9"}


def test_an_orphan_below_it_becomes_its_own_and_is_reaped(keep: Keep) -> None:
    program = READY + (
        "shell = ['sh', '-c', 'setsid sleep 60 >/dev/null 2>&1 & echo $!']\n"
        "print('orphan', int(subprocess.check_output(shell)), flush=True)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); time.sleep(60)"
    )
    supervised = keep(program)
    supervised.ready(1)
    orphan = psutil.Process(int(re.search(r"orphan (\d+)", supervised.log)[1]))  # type: ignore[index]
    assert orphan.ppid() == supervised.process.pid
    orphan.kill()
    wait_until(lambda: not psutil.pid_exists(orphan.pid), "no zombie is left")
    supervised.process.terminate()
    assert supervised.process.wait(20) == 0


def test_as_process_1_it_reaps_what_no_one_else_can(keep: Keep) -> None:
    namespaces.needed()
    program = READY + (
        "for _ in range(20): subprocess.run(['sh', '-c', 'setsid sleep 0.2 & exit 0'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); time.sleep(60)"
    )
    supervised = keep(program, 2, within=namespaces.UNSHARE)
    supervised.ready(2)
    init = namespaces.init_below(supervised.process.pid)
    wait_until(lambda: len(init.children(recursive=True)) == 2, "the workers alone are left, and no zombie")
    init.terminate()
    assert supervised.process.wait(20) == 0
