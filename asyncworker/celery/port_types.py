"""What Playwright's objects are and which of their methods are awaited, read from its own asynchronous classes.

Types are written as text: `Page`, `list[ElementHandle]`, and `event[Response]` for what `expect_response()` gives.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import libcst as cst

from asyncworker.engines.importing import import_quietly

#: Playwright itself, and the browser that all tasks share: these end with the porting, the latter as session.browser.
ENTRY, PLAYWRIGHT, BROWSER_TYPE, SHARED = "entry", "playwright", "browser type", "shared browser"

LAUNCHES = ("launch", "connect", "connect_over_cdp")

#: Names of functions that give the entry.
ENTRIES = ("sync_playwright",)


@cache
def _members() -> dict[str, dict[str, tuple[bool, str | None]]]:
    """For each class: its members, whether each is awaited when called, and what that gives."""
    api = import_quietly("playwright.async_api")
    names = vars(api) | vars(import_quietly("playwright.async_api._generated"))
    classes = {name: each for name, each in names.items() if isinstance(each, type)}
    return {
        name: {
            attribute: _described(member, names)
            for attribute, member in inspect.getmembers_static(each)
            if not attribute.startswith("_") and (isinstance(member, property) or inspect.isfunction(member))
        }
        for name, each in classes.items()
    }


def _described(member: Any, names: dict[str, Any]) -> tuple[bool, str | None]:
    function = member.fget if isinstance(member, property) else member
    try:
        hint = typing.get_type_hints(function, names).get("return")
    except (NameError, TypeError):
        hint = None
    return inspect.iscoroutinefunction(function), _written(hint)


def _written(hint: Any) -> str | None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return hint.__name__ if isinstance(hint, type) else None
    inner = [_written(each) for each in arguments if each is not type(None)]
    if len(inner) != 1 or inner[0] is None:
        return None
    if origin is list:
        return f"list[{inner[0]}]"
    if getattr(origin, "__name__", "").endswith("EventContextManager"):
        return f"event[{inner[0]}]"
    return inner[0]


def is_class(name: str) -> bool:
    """True for the name of one of Playwright's classes."""
    return name in _members()


def item_of(kind: str | None) -> str | None:
    """`Page` of `list[Page]` or `event[Page]`."""
    if kind is not None and kind.startswith(("list[", "event[")):
        return kind.partition("[")[2][:-1]
    return None


class Types:
    """What the expressions of a function are.

    Parameters:
        names: What is known of names from the start: its annotated parameters, and the browser of the module.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def learn(self, function: cst.FunctionDef) -> None:
        """Read the assignments of a function; in any order, so until nothing new is learnt."""
        before = -1
        while len(self.names) > before:
            before = len(self.names)
            function.body.visit(_Learner(self))

    def bind(self, target: cst.BaseExpression, kind: str | None) -> None:
        if isinstance(target, cst.Name) and kind is not None:
            self.names.setdefault(target.value, kind)

    def of(self, node: cst.BaseExpression) -> str | None:
        """The type of an expression; None: not one of Playwright's."""
        match node:
            case cst.Name():
                return self.names.get(node.value)
            case cst.Attribute():
                return self._attribute(node)
            case cst.Subscript():
                return item_of(self.of(node.value))
            case cst.Call(func=cst.Name(value=name)) if name in ENTRIES:
                return ENTRY
            case cst.Call(func=cst.Attribute(value=owner, attr=cst.Name(value=name))):
                return self._result(self.of(owner), name)
        return None

    def is_awaited(self, call: cst.Call) -> bool:
        """True for a call of a method that is a coroutine in the asynchronous API."""
        if not isinstance(call.func, cst.Attribute):
            return False
        owner = self.of(call.func.value)
        owner = "Browser" if owner == SHARED else owner
        return _members().get(owner or "", {}).get(call.func.attr.value, (False, None))[0]

    def _attribute(self, node: cst.Attribute) -> str | None:
        owner, name = self.of(node.value), node.attr.value
        if owner is None:
            return None
        if owner.startswith("event["):
            return item_of(owner) if name == "value" else None
        if owner == PLAYWRIGHT:
            return BROWSER_TYPE if name in ("chromium", "firefox", "webkit") else None
        return _members().get(owner, {}).get(name, (False, None))[1]

    def _result(self, owner: str | None, name: str) -> str | None:
        match owner, name:
            case None, _:
                return None
            case "entry", "start" | "__enter__":
                return PLAYWRIGHT
            case "browser type", _ if name in LAUNCHES:
                return SHARED
            case "shared browser", _:
                owner = "Browser"
        return _members().get(owner or "", {}).get(name, (False, None))[1]


class _Learner(cst.CSTVisitor):
    def __init__(self, types: Types) -> None:
        self.types = types

    def visit_Assign(self, node: cst.Assign) -> None:
        for each in node.targets:
            self.types.bind(each.target, self.types.of(node.value))

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if node.value is not None:
            self.types.bind(node.target, self.types.of(node.value))

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self.types.bind(node.target, self.types.of(node.value))

    def visit_WithItem(self, node: cst.WithItem) -> None:
        if node.asname is not None:
            kind = self.types.of(node.item)
            self.types.bind(node.asname.name, PLAYWRIGHT if kind == ENTRY else kind)

    def visit_For(self, node: cst.For) -> None:
        self.types.bind(node.target, item_of(self.types.of(node.iter)))

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self.types.bind(node.target, item_of(self.types.of(node.iter)))


def annotated(parameters: cst.Parameters) -> dict[str, str]:
    """The parameters that are annotated as one of Playwright's objects."""
    found = {}
    for each in (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params):
        if each.annotation is not None:
            name = cst.Module([]).code_for_node(each.annotation.annotation).strip("'\"").rpartition(".")[2]
            if is_class(name):
                found[each.name.value] = name
    return found
