"""The commands `asyncworker celery …`: how a Celery code base comes here."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncworker.errors import ConfigurationError
from asyncworker.terminal import Json, console, errors, print_json, say

if TYPE_CHECKING:
    from asyncworker.celery.check import Report
    from asyncworker.celery.findings import Finding

celery = typer.Typer(
    help="Celery's tasks on these workers, and the way from one to the other.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_STYLES = {"attention": "red", "differs": "yellow", "same": "green"}

_HEADINGS = {"settings": "settings", "signals": "signals", "sources": "browsers in the source"}


def _need(*modules: str) -> None:
    """Say which extra to install where one of these is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} cannot be imported here; the extra has it: pip install 'asyncworker[celery]'"
        )


@celery.command(
    epilog="Exit code 0: it runs as it is; 1: something needs a decision; 2: it cannot be loaded, and why.",
)
def check(
    app: Annotated[str, typer.Argument(help="The Celery app, as `celery -A` takes it: proj.app:app.")],
    as_json: Json = False,
) -> None:
    """Report what becomes of a Celery app on these workers: its tasks, settings, signals and browsers.

    The app's modules are imported; nothing is run, sent or changed.
    """
    _need("celery", "kombu")
    from asyncworker.celery.check import check as look

    report = look(app)
    if as_json:
        print_json(report.facts())
    else:
        for line, style in _lines(report):
            say(line, console, style)
    raise typer.Exit(1 if report.needs_attention else 0)


@celery.command(
    epilog="Exit code 0: all of it is ported; 1: a `# TODO port:` in the code says what is not; 2: it cannot be read.",
)
def port(
    file: Annotated[Path, typer.Argument(help="The module with the tasks.", exists=True, dir_okay=False)],
) -> None:
    """Print a module of Celery tasks as one of actors; the file stays as it is.

    What there is to know beside the code is printed to stderr.
    """
    _need("celery", "libcst")
    from asyncworker.celery.port import port as as_actors

    try:
        source = file.read_text()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is no text in UTF-8: {error}", name=str(file)) from None
    result = as_actors(source, str(file))
    sys.stdout.write(result.code)
    for note in result.notes:
        say(f"note: {note}", errors)
    for name, reasons in result.left.items():
        say(f"{name} is still a task: {'; '.join(reasons)}", errors, "yellow")
    raise typer.Exit(1 if result.is_unfinished else 0)


def _lines(report: Report) -> Iterator[tuple[str, str | None]]:
    for task in report.tasks:
        options = "".join(f" {name}={value}" for name, value in task.options.items())
        yield f"task {task.name}{options}", "bold"
        yield from _about(task.findings) if task.findings else [("  runs as it is", _STYLES["same"])]
    for group, heading in _HEADINGS.items():
        findings: list[Finding] = getattr(report, group)
        if findings:
            yield heading, "bold"
            yield from _about(findings)
    many = sum(each.level == "attention" for each in report.findings)
    yield (f"{many} of this needs a decision" if many else "it runs as it is"), "bold"


def _about(findings: list[Finding]) -> Iterator[tuple[str, str]]:
    here = Path.cwd()
    for each in findings:
        where = ""
        if each.where is not None:
            with contextlib.suppress(ValueError):
                where = f" ({Path(each.where).relative_to(here)})"
            where = where or f" ({each.where})"
        yield f"  {each.level:<9} {each.subject}: {each.what}{where}", _STYLES[each.level]
