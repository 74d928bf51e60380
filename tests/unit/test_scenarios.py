"""What was reported from the field has its tests, and what no test of a run can show is looked for in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.readme import ROOT

LIST = (ROOT / "tests" / "SCENARIOS.md").read_text()

#: What ends processes by the name of their program, or looks for processes by it.
BY_NAME = re.compile(r"\b(pkill|killall|pgrep|pidof|taskkill)\b")


def rows() -> list[list[str]]:
    lines = [line for line in LIST.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_each_report_has_tests_that_exist(row: list[str]) -> None:
    reported, claim, tests = row
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", each) for each in reported.split(", ")), reported
    assert claim
    named = re.findall(r"`([^`]+)::(test_\w+)`", tests)
    assert named
    assert len(named) == len(tests.split(", "))
    for path, name in named:
        assert name in named_in(ROOT / path), f"{path} has no {name}"


def _code() -> Iterator[Path]:
    for folder in ("asyncworker", "actors", "benchmarks", "examples", "tests"):
        yield from (path for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))
    yield ROOT / "Makefile"


def test_nothing_here_kills_by_name() -> None:
    """A process is known by its number and its token; one of the same name may be anyone's."""
    found = [f"{path.relative_to(ROOT)}: {line}" for path in _code() for line in _lines_by_name(path)]
    assert found == []


def _lines_by_name(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines() if BY_NAME.search(line)]
