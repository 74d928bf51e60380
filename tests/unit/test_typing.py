"""tests/typing is checked by mypy, never run: what type-checks, and what does not, line by line."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "typing"

#: (file, line) to the codes of its errors, in alphabetical order.
Errors = dict[tuple[str, int], list[str]]


def test_what_users_write_type_checks_and_only_the_marked_lines_of_refused_do_not() -> None:
    wanted, found = _marked(), _reported()
    assert {place: codes for place, codes in found.items() if place not in wanted} == {}, "errors without a mark"
    assert {place: codes for place, codes in wanted.items() if place not in found} == {}, "marks without an error"
    assert found == wanted


def test_there_are_expected_failures_and_expected_passes() -> None:
    assert {name for name, _ in _marked()} == {"refused.py"}
    assert (FOLDER / "accepted.py").read_text().count("assert_type(") > 20


@cache
def _reported() -> Errors:
    """What mypy says about the folder, with this project's own settings, which are strict."""
    command = [sys.executable, "-m", "mypy", "--no-pretty", "--no-error-summary", "--show-error-codes", str(FOLDER)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 2: mypy itself did not run
    errors: Errors = {}
    for line in done.stdout.splitlines():
        told = re.fullmatch(r"(.+?):(\d+): error: .*\[([\w-]+)\]", line)
        if told is None:
            assert ": note: " in line, f"not understood: {line}"
            continue
        path = Path(told[1])
        assert path.parent == FOLDER.relative_to(ROOT), f"an error elsewhere: {line}"
        errors.setdefault((path.name, int(told[2])), []).append(told[3])
    return {place: sorted(codes) for place, codes in errors.items()}


def _marked() -> Errors:
    return {
        (path.name, number): [code.strip() for code in mark[1].split(",")]
        for path in sorted(FOLDER.glob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if (mark := re.search(r"  # E: (.+)$", line))
    }
