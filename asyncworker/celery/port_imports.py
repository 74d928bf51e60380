"""The imports of a ported module: what it needs now, without what nothing uses any more."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

import libcst as cst
import libcst.matchers as m

from asyncworker.celery.port_options import code

_OURS = ("Session", "actor", "get_broker")


def with_imports(module: cst.Module, before: cst.Module, needs: set[str]) -> cst.Module:
    """Correct the imports.

    Parameters:
        module: The module, with the imports that it had.
        before: The module as it was: what it did not use then stays.
        needs: What it has to import now.
    """
    here = {each.strip() for each in before.code.splitlines()}
    here = {name for name in needs if f"import {name}" in here}
    gone = used_names(before.body) - used_names(module.body)
    body: list[Any] = []
    above: list[cst.EmptyLine] = []  # of imports that are gone
    for statement in module.body:
        kept = _import_line(statement, gone, is_async="Session" in needs) if _is_import(statement) else statement
        if kept is None:
            above += statement.leading_lines
            continue
        if above:
            lines = [*above, *kept.leading_lines] if _is_import(kept) else [*_comments(above), *kept.leading_lines]
            kept, above = kept.with_changes(leading_lines=lines), []
        body.append(kept)
    standard = [cst.parse_statement(f"import {name}") for name in ("asyncio", "logging") if name in needs - here]
    _insert(body, [cst.parse_statement(line) for line in _lines(needs)], _first_of_others(body))
    _insert(body, standard, _first(body))
    return module.with_changes(body=body)


def _insert(body: list[Any], lines: list[Any], place: int) -> None:
    """Insert lines at a place, with what stands above it above them."""
    if not lines:
        return
    if place < len(body) and _is_import(body[place]):
        lines[0] = lines[0].with_changes(leading_lines=body[place].leading_lines)
        body[place] = body[place].with_changes(leading_lines=[])
    else:
        lines[0] = lines[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    body[place:place] = lines


def _first(body: list[Any]) -> int:
    """Where the imports begin, but for those from __future__."""
    places = [number for number, each in enumerate(body) if _is_import(each) and _library(each) != "__future__"]
    return min(places, default=_after(body))


def _first_of_others(body: list[Any]) -> int:
    """Where the imports begin that are not the standard library's."""
    others = [
        number
        for number, each in enumerate(body)
        if _is_import(each) and _library(each) not in {*sys.stdlib_module_names, "__future__"}
    ]
    return min(others, default=_after(body))


def _library(statement: Any) -> str:
    imported = statement.body[0]
    if isinstance(imported, cst.Import):
        return code(imported.names[0].name).partition(".")[0]
    return code(imported.module).partition(".")[0] if imported.module is not None and not imported.relative else "."


def _comments(lines: list[cst.EmptyLine]) -> list[cst.EmptyLine]:
    return [each for each in lines if each.comment is not None]


def _lines(needs: Collection[str]) -> list[str]:
    ours = [name for name in _OURS if name in needs]
    lines = []
    if "dramatiq" in needs:
        lines.append("import dramatiq")
    if ours:
        lines.append(f"from asyncworker import {', '.join(ours)}")
    if "Retry" in needs:
        lines.append("from dramatiq.errors import Retry")
    return lines


def _is_import(statement: Any) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Import | cst.ImportFrom)


def _after(body: list[Any]) -> int:
    """After the last import, else after the docstring."""
    places = [number for number, each in enumerate(body) if _is_import(each)]
    if places:
        return places[-1] + 1
    is_docstring = bool(body) and m.matches(body[0], m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString())]))
    return int(is_docstring)


def _import_line(statement: Any, gone: set[str], *, is_async: bool) -> Any:
    """The import without the names that nothing uses any more; None: nothing is left of it."""
    (imported, *more) = statement.body
    if more or isinstance(imported.names, cst.ImportStar):
        return statement
    names = [each for each in imported.names if _bound(each) not in gone]
    if not names:
        return None
    names = [*names[:-1], names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
    changed = imported.with_changes(names=names)
    if isinstance(imported, cst.ImportFrom) and imported.module is not None:
        is_playwright = code(imported.module).endswith(".sync_api")
        if is_playwright and is_async and not any(_bound(each) == "sync_playwright" for each in names):
            library = code(imported.module).removesuffix(".sync_api")
            changed = changed.with_changes(module=cst.parse_expression(f"{library}.async_api"))
    return statement.with_changes(body=[changed])


def _bound(alias: cst.ImportAlias) -> str:
    if alias.asname is not None:
        return code(alias.asname.name)
    return code(alias.name).partition(".")[0]


class _Names(cst.CSTVisitor):
    """The names that are looked up: not those of attributes and keyword arguments."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._labels = 0

    def visit_Name(self, node: cst.Name) -> None:
        if not self._labels:
            self.found.add(node.value)

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:
        self._labels += 1

    def leave_Attribute_attr(self, node: cst.Attribute) -> None:
        self._labels -= 1

    def visit_Arg_keyword(self, node: cst.Arg) -> None:
        self._labels += 1

    def leave_Arg_keyword(self, node: cst.Arg) -> None:
        self._labels -= 1


def used_names(statements: Iterable[cst.CSTNode]) -> set[str]:
    """All names that statements use; an import uses none."""
    names = _Names()
    for statement in statements:
        statement.visit(names)
    return names.found
