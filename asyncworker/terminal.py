"""What the command's modules print with."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

console = Console()
errors = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]

#: What the commands that change something end with.
CODES = "Exit code 0: done; 1: not all of it was done, or the answer was no; 2: it cannot be done, and why."


#: Texts from outside are cut to this many characters.
LONGEST_TEXT = 2_000


def print_facts(facts: dict[str, Any], as_json: bool, sentence: str) -> None:
    if as_json:
        print_json(facts)
    else:
        say(sentence)


def table_width(rows: list[tuple[str, ...]]) -> int:
    """How wide a table of these cells is that has no box: 0 for none."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return sum(widths) + 2 * len(widths[1:])


def print_json(facts: dict[str, Any]) -> None:
    """One line of JSON; what a terminal would obey, or could not show, is written as \\u…."""
    text = json.dumps(facts, ensure_ascii=False, default=str)
    if not text.isprintable():
        text = "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)
    sys.stdout.write(text + "\n")


def say(sentence: str, to: Console = console, style: str | None = None) -> None:
    """Print a line as it is: not wrapped, nothing in it taken for markup."""
    to.print(Text(safe(sentence)), style=style, soft_wrap=True)


def fail(sentence: str) -> NoReturn:
    """Print why a command cannot do what it was told, and end with exit code 2."""
    say(f"asyncworker: {sentence}", errors, style="red")
    raise SystemExit(2)


def ask(preview: str, question: str, *, yes: bool) -> None:
    """Ask in the terminal whether to go on; ends the command when the answer is no, or no one can give one."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(f"{preview}: add --yes to do it, since there is no terminal here to ask at; nothing was changed")
    say(preview, errors)
    if not typer.confirm(question, err=True):
        say("nothing was changed", errors)
        raise typer.Exit(1)


def safe(text: str) -> str:
    """A text from outside without what a terminal would obey: escape sequences, or a change of direction."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in text
    )


def cut(text: str) -> str:
    """A text from outside that is not longer than a person reads; says how much there is."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} … ({len(text)} characters in all; --json prints them)"


def one_line(text: str, width: int | None = None) -> str:
    """A text from outside as one line, not longer than `width`; its indent stays."""
    indent = text[: len(text) - len(text.lstrip(" "))]
    line = indent + safe(" ".join(text[:LONGEST_TEXT].split()))
    return line if width is None or len(line) <= width else f"{line[: width - 1]}…"


def age(ms: int | None) -> str:
    """A duration in the largest unit that fits it; `-` for none."""
    if ms is None:
        return "-"
    for limit, size, unit in ((1_000, 1, "ms"), (60_000, 1_000, "s"), (3_600_000, 60_000, "min")):
        if ms < limit:
            return f"{ms // size} {unit}"
    return f"{ms // 3_600_000} h" if ms < 48 * 3_600_000 else f"{ms // 86_400_000} d"


def counted(number: int, noun: str) -> str:
    """`1 message`, `2 messages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
