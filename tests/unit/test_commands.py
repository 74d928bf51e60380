"""Commands with bounds: one that does not get anywhere is killed, and nothing of it stays."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from asyncworker import commands
from asyncworker.commands import Patience, Step, run, shortened
from tests.waiting import BUSY_S

SHORT = Patience(stall_ms=1_000, overall_ms=20_000)

#: For a command that has to start others, or may be held up by the machine, before it is given up.
LONGER = Patience(stall_ms=3_000, overall_ms=60_000)


def python(program: str, *, patience: Patience = SHORT, **options: bool) -> Step:
    return Step((sys.executable, "-u", "-c", textwrap.dedent(program)), patience, **options)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def written_pids(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()]


def test_a_command_that_succeeds_gives_no_reason() -> None:
    assert run(python("print('fine')")) is None


def test_a_command_that_fails_gives_its_code_and_its_first_error() -> None:
    reason = run(python("import sys; print('E: no such package\\nbye'); sys.exit(100)"))
    assert reason == "exit code 100: E: no such package"


def test_without_a_line_that_calls_itself_an_error_the_last_one_is_told() -> None:
    assert run(python("import sys; print('one\\n\\x1b[31mtwo\\x1b[0m\\n'); sys.exit(1)")) == "exit code 1: two"


def test_a_command_that_is_not_there_says_so() -> None:
    assert run(Step(("/no/such/command",))) == "/no/such/command does not run: No such file or directory"


def test_a_silent_command_is_killed_within_the_stall_limit_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"""
        import os, subprocess, sys, time
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
        open({str(pids)!r}, "w").write(" ".join(str(c.pid) for c in children) + f" {{os.getpid()}}")
        time.sleep(600)
    """
    started = time.monotonic()
    reason = run(python(program, patience=LONGER))
    took = time.monotonic() - started
    assert reason == "no progress in 3 s"
    assert took < 3 + BUSY_S
    assert len(written_pids(pids)) == 3
    assert [pid for pid in written_pids(pids) if lives(pid)] == []


def test_a_command_that_ignores_sigterm_is_killed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "END_TIMEOUT_MS", 200)
    pids = tmp_path / "pids"
    program = f"""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(pids)!r}, "w").write(str(os.getpid()))
        time.sleep(600)
    """
    assert run(python(program, patience=LONGER)) == "no progress in 3 s"
    assert [lives(pid) for pid in written_pids(pids)] == [False]


def test_a_command_that_only_writes_lines_does_not_get_anywhere() -> None:
    program = """
        import time
        while True:
            print("error: connection timed out, trying again")
            time.sleep(0.02)
    """
    reason = run(python(program))
    assert reason == "no progress in 1 s: error: connection timed out, trying again"


def test_a_slow_download_that_gets_on_is_left_alone(tmp_path: Path) -> None:
    program = f"""
        import subprocess, sys
        download = "import time; f = open({str(tmp_path / "file")!r}, 'wb', 0)\\n" \\
                   "for _ in range(35): f.write(bytes(100_000)); time.sleep(0.1)"
        sys.exit(subprocess.run([sys.executable, "-c", download]).returncode)
    """
    assert run(python(program, patience=LONGER)) is None
    assert (tmp_path / "file").stat().st_size == 3_500_000


def test_a_command_that_gets_on_for_ever_ends_at_the_overall_limit() -> None:
    program = """
        import os, time
        with open(os.devnull, "wb", 0) as sink:
            while True:
                sink.write(bytes(100_000)); time.sleep(0.01)
    """
    patience = Patience(stall_ms=5_000, overall_ms=1_000)
    assert run(python(program, patience=patience)) == "not done in 1 s"


def test_an_interrupt_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "NEWS_EVERY_MS", 0)
    pids = tmp_path / "pids"
    program = f"""
        import os, time
        open({str(pids)!r}, "w").write(str(os.getpid()))
        print("x" * 200_000)
        time.sleep(600)
    """

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(python(program), on_news=interrupt)
    assert [lives(pid) for pid in written_pids(pids)] == [False]


def test_what_a_killed_download_leaves_in_its_temporary_directory_is_removed(tmp_path: Path) -> None:
    note = tmp_path / "note"
    program = f"""
        import pathlib, tempfile, time
        folder = tempfile.mkdtemp()
        (pathlib.Path(folder) / "half").write_bytes(bytes(10))
        pathlib.Path({str(note)!r}).write_text(folder)
        time.sleep(600)
    """
    assert run(python(program, own_temporary_directory=True)) is not None
    assert not Path(note.read_text()).exists()


def test_our_settings_do_not_reach_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCWORKER_PROXY", "http://u:hunter2@proxy:1")
    program = "import os, sys; sys.exit(any('hunter2' in text for text in os.environ.values()))"
    assert run(python(program)) is None


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = shortened("begin " + "x" * 1_000 + "\n end")
    assert text.startswith("begin x")
    assert text.endswith("x end")
    assert len(text) <= 300
