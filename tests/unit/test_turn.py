"""Whose turn it is to recycle: one process at a time, also after one that died, froze, or left its file behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncworker.turn import Turn


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "recycle.lock"


def test_one_has_it_at_a_time_and_its_file_goes_with_it(lock: Path) -> None:
    first, second = Turn(lock), Turn(lock)
    assert first.take(60_000)
    assert not second.take(60_000)
    first.give_back()
    assert not lock.exists()
    assert second.take(60_000)
    assert not first.take(60_000)
    second.give_back()
    assert not lock.exists()


def test_a_file_that_a_dead_holder_left_behind_is_taken_over(lock: Path) -> None:
    lock.write_text("99999999999.000\n")
    turn = Turn(lock)
    assert turn.take(60_000)
    turn.give_back()


def test_one_that_hangs_beyond_the_time_it_named_holds_up_no_one_and_they_still_take_turns(lock: Path) -> None:
    clock = Time()
    frozen, second, third = (Turn(lock, clock=clock) for _ in range(3))
    assert frozen.take(1_000)
    clock.now += 1
    assert not second.take(1_000)
    frozen.extend(5_000)
    clock.now += 5
    assert not second.take(60_000)
    clock.now += 0.1
    assert second.take(60_000)
    assert not third.take(60_000)
    frozen.give_back()  # it goes on, and what is in its file's place is not its own
    assert lock.exists()
    assert not third.take(60_000)
    second.give_back()
    assert not lock.exists()


def test_a_holder_that_has_not_yet_named_a_time_is_not_overdue(lock: Path) -> None:
    first, second = Turn(lock), Turn(lock)
    assert first.take(60_000)
    lock.write_text("")
    assert not second.take(60_000)
    first.give_back()


def test_a_lock_that_cannot_be_used_is_said_once_and_holds_no_one_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turn = Turn(tmp_path / "missing" / "recycle.lock")
    assert turn.take(1_000)
    turn.extend(1_000)
    turn.give_back()
    assert turn.take(1_000)
    assert caplog.text.count("cannot be used") == 1
    assert "set TMPDIR" in caplog.text


def test_a_link_in_its_place_is_not_followed(lock: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    lock.symlink_to(precious)
    assert Turn(lock).take(1_000)
    assert precious.read_text() == "precious"


def test_processes_of_one_user_look_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    turn = Turn()
    assert turn.take(1_000)
    assert [path.name for path in tmp_path.iterdir()] == [f"asyncworker-{os.geteuid()}-recycle.lock"]
    turn.give_back()
