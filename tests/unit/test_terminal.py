"""What the command prints: texts from outside tamed, durations and widths."""

from __future__ import annotations

import json

import pytest
import typer

from asyncworker import terminal
from asyncworker.cli_dead_letters import duration_ms

NASTY = "\x1b[2Jé\u202e\x9b\ud800 [bold]日本\n\t."


def test_a_safe_text_keeps_what_can_be_read_and_shows_what_would_be_obeyed() -> None:
    assert terminal.safe(NASTY) == "\\x1b[2Jé\\u202e\\x9b\\ud800 [bold]日本\n\t."


def test_json_says_the_same_and_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"text": NASTY})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"text": NASTY}
    assert printed.removesuffix("\n").isprintable()
    assert "é" in printed


def test_a_line_keeps_its_indent_and_is_cut_to_the_width() -> None:
    assert terminal.one_line("  a \r\n b   c") == "  a b c"
    assert terminal.one_line("  a b c d", 6) == "  a b…"
    assert len(terminal.one_line("\x1b" * 50, 20)) == 20


def test_a_long_text_is_cut_and_says_how_long_it_is() -> None:
    assert terminal.cut("short") == "short"
    assert terminal.cut("x" * 5_000).endswith("… (5000 characters in all; --json prints them)")


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (None, "-"),
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1 s"),
        (59_999, "59 s"),
        (60_000, "1 min"),
        (3_599_999, "59 min"),
        (47 * 3_600_000, "47 h"),
        (48 * 3_600_000, "2 d"),
    ],
)
def test_an_age_is_in_the_largest_unit_that_fits(ms: int | None, said: str) -> None:
    assert terminal.age(ms) == said


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("90s", 90_000), ("15m", 900_000), ("2 h", 7_200_000), ("3d", 259_200_000)]
)
def test_a_typed_age_has_its_unit(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "5", "h", "-5s", "1.5h", "2 weeks", "٣d", "9" * 13 + "d"])
def test_an_age_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no age; write it as 500ms, 90s, 15m, 2h or 3d"):
        duration_ms(text)


def test_the_width_of_a_table_is_that_of_its_longest_cells() -> None:
    assert terminal.table_width([]) == 0
    assert terminal.table_width([("queue", "dead"), ("日本語", "12345")]) == 6 + 2 + 5
