"""Where ported tasks are sent: `delay` as `send`, `apply_async` as `send_with_options`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import libcst as cst

from asyncworker.celery.port_body import with_comments
from asyncworker.celery.port_options import code, milliseconds

#: What a task can do that an actor cannot.
_CANVAS = ("s", "si", "signature", "chunks", "map", "starmap", "apply", "retry", "AsyncResult", "subtask")


class Sends(cst.CSTTransformer):
    """Rewrites the sends of tasks that are actors now.

    Parameters:
        actors: The names of those with a session, which can be sent from a loop.
        plain: The names of the others.
    """

    def __init__(self, actors: Collection[str], plain: Collection[str]) -> None:
        super().__init__()
        self.actors, self.plain = set(actors), set(plain)
        self.needs: set[str] = set()
        self._functions: list[bool] = []
        self._found: list[str] = []  # what has no counterpart, in the statement that is looked at

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._functions.append(node.asynchronous is not None)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> Any:
        self._functions.pop()
        return self._noted(updated_node)

    def visit_Lambda(self, node: cst.Lambda) -> None:
        self._functions.append(False)

    def leave_Lambda(self, original_node: cst.Lambda, updated_node: cst.Lambda) -> cst.Lambda:
        self._functions.pop()
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        return self._noted(updated_node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        called = original_node.func
        if not isinstance(called, cst.Attribute) or not isinstance(called.value, cst.Name):
            return updated_node
        name, method = called.value.value, called.attr.value
        if name not in self.actors | self.plain:
            return updated_node
        if method == "delay":
            return self._sent(name, "send", updated_node)
        if method == "apply_async":
            arguments = _options_of(updated_node)
            if arguments is not None:
                return self._sent(name, "send_with_options", updated_node.with_changes(args=arguments))
        if method in (*_CANVAS, "apply_async"):
            self._found.append(f"an actor has no counterpart of {code(original_node)}")
        return updated_node

    def _sent(self, name: str, method: str, call: cst.Call) -> Any:
        on_loop = bool(self._functions) and self._functions[-1]
        if on_loop and name in self.plain:
            self.needs.add("asyncio")
            function = cst.Arg(cst.parse_expression(f"{name}.{method}"))
            return cst.Await(cst.Call(cst.parse_expression("asyncio.to_thread"), [function, *call.args]))
        new = call.with_changes(func=cst.parse_expression(f"{name}.{'a' if on_loop else ''}{method}"))
        return cst.Await(new) if on_loop else new

    def _noted(self, statement: Any) -> Any:
        found, self._found = self._found, []
        return with_comments(statement, found)


def _options_of(call: cst.Call) -> list[cst.Arg] | None:
    """The arguments of `apply_async` as those of `send_with_options`; None: one has no counterpart."""
    names = ["args", "kwargs"]
    new = []
    for place, argument in enumerate(call.args):
        name = argument.keyword.value if argument.keyword is not None else names[place] if place < 2 else None
        value = argument.value
        if argument.star or name not in ("args", "kwargs", "countdown"):
            return None
        if name == "countdown":
            name, value = "delay", cst.parse_expression(milliseconds(value))
        new.append(
            cst.Arg(
                keyword=cst.Name(name),
                value=value,
                equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
            )
        )
    return new
