"""The stand-in's JavaScript: the few expressions that happen to be Python, too.

An expression, an arrow function or a `function` of such expressions and simple statements, divided by `;`. Names:
document (title, URL, cookie, querySelector, querySelectorAll, body), location (href, origin), navigator (userAgent,
language), localStorage and sessionStorage (getItem, setItem, removeItem, clear, length, key), JSON.stringify,
JSON.parse, Object.keys, Object.entries, the function's own parameters. `throw new Error("…")` throws.
Everything else throws a SyntaxError that says so: no operators but `+ - * /` and comparisons, no loops, no promises.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from typing import Any, Protocol

from tests.standin.dom import Document, Element

_FUNCTION = re.compile(
    r"\(*\s*(?:async\s+)?(?:function\s*\w*\s*\((?P<old>[^)]*)\)|(?:\((?P<list>[^)]*)\)|(?P<one>\w+))\s*=>)\s*(?P<body>.*)",
    re.DOTALL,
)
_THROW = re.compile(r"throw\s+(?:new\s+)?(?P<name>\w*Error)\((?P<text>.*)\)\s*", re.DOTALL)
_STRING = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.Gt: operator.gt,
    ast.LtE: operator.le, ast.GtE: operator.ge,
}  # fmt: skip


class ScriptError(Exception):
    """What the page threw."""


class Place(Protocol):
    """Where a script runs."""

    document: Document

    def cookie(self) -> str: ...
    def set_cookie(self, text: str) -> None: ...
    def storage(self, kind: str) -> dict[str, str]: ...
    def user_agent(self) -> str: ...
    def language(self) -> str: ...


class Function:
    """A function of the page."""

    def __init__(self, parameters: str, body: str) -> None:
        self.parameters = parameters.strip()
        self.body = body.strip().rstrip(";").strip()

    def call(self, place: Place, arguments: list[Any]) -> Any:
        scope: dict[str, Any] = {}
        for pattern, value in zip(_divided(self.parameters, ","), [*arguments, *[None] * 9], strict=False):
            names = [name.strip() for name in pattern.strip(" []{}").split(",") if name.strip()]
            if pattern.strip().startswith("["):
                scope.update(zip(names, value, strict=False))
            elif pattern.strip().startswith("{"):
                scope.update({name: value.get(name) for name in names})
            else:
                scope.update(dict.fromkeys(names, value))
        if self.body.startswith("{"):
            return _statements(self.body[1 : self.body.rindex("}")], place, scope)
        return _value(self.body, place, scope)


def run(source: str, place: Place) -> Any:
    """The value of a script, a Function when that is what it is."""
    text = source.strip().rstrip(";").strip()
    called = re.fullmatch(r"\((.*)\)\s*\(\s*\)", text, re.DOTALL)
    if called and (function := _function(called[1])):
        return function.call(place, [])
    return _function(text) or _statements(text, place, {})


def _function(text: str) -> Function | None:
    while text.startswith("(") and text.endswith(")") and _FUNCTION.fullmatch(text[1:-1].strip()):
        text = text[1:-1].strip()
    match = None if text.startswith("((") else _FUNCTION.fullmatch(text)
    if match is None:
        return None
    return Function(next(match[name] for name in ("old", "list", "one") if match[name] is not None), match["body"])


def _statements(text: str, place: Place, scope: dict[str, Any]) -> Any:
    last = None
    for statement in (one.strip() for one in _divided(text, ";")):
        if thrown := _THROW.fullmatch(statement):
            raise ScriptError(f"{thrown['name']}: {_value(thrown['text'] or repr(''), place, scope)}")
        if statement.startswith("return ") or statement == "return":
            return _value(statement.removeprefix("return").strip() or "null", place, scope)
        if statement:
            last = _value(re.sub(r"^(const|let|var)\s+", "", statement), place, scope)
    return last


def _divided(text: str, mark: str) -> list[str]:
    """Divide at a mark that is in no string and in no bracket."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(_STRING + r"|.", text, re.DOTALL):
        token = match[0]
        depth += (token in "([{") - (token in ")]}") if len(token) == 1 else 0
        if token == mark and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _value(text: str, place: Place, scope: dict[str, Any]) -> Any:
    spelled = re.sub(_STRING + r"|===|!==|\bawait\s+", lambda m: {"===": "==", "!==": "!="}.get(m[0], m[0])
                     if not m[0].startswith("await") else "", text)  # fmt: skip
    try:
        tree = ast.parse(spelled.strip()).body
    except (SyntaxError, ValueError):
        raise _unknown(text) from None
    if len(tree) != 1:
        raise _unknown(text)
    return _Evaluation(place, scope, text).statement(tree[0])


def _unknown(text: str) -> ScriptError:
    return ScriptError(f"SyntaxError: the stand-in engine does not run {text[:200]!r}; see tests/standin/script.py")


class _Evaluation:
    def __init__(self, place: Place, scope: dict[str, Any], text: str) -> None:
        self.place = place
        self.scope = scope
        self.text = text

    def statement(self, node: ast.stmt) -> Any:
        if isinstance(node, ast.Expr):
            return self.of(node.value)
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            raise _unknown(self.text)
        target, value = node.targets[0], self.of(node.value)
        if isinstance(target, ast.Name):
            self.scope[target.id] = value
        elif ast.unparse(target) == "document.cookie":
            self.place.set_cookie(value)
        elif ast.unparse(target) == "document.title":
            self.place.document.title = value
        else:
            raise _unknown(self.text)
        return value

    def of(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.of(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                names = [key.id if isinstance(key, ast.Name) else self.of(key) for key in keys if key is not None]
                return dict(zip(names, map(self.of, values), strict=True))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.of(operand)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.sum(self.of(left), self.of(right))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.of(left), self.of(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.of(left), self.of(right))
            case ast.Name(id=name):
                return self.name(name)
            case ast.Attribute(value=owner, attr=name):
                return self.member(self.of(owner), name)
            case ast.Subscript(value=owner, slice=index):
                return self.of(owner)[self.of(index)]
            case ast.Call(func=function, args=arguments):
                return self.of(function)(*map(self.of, arguments))
        raise _unknown(self.text)

    @staticmethod
    def sum(left: Any, right: Any) -> Any:
        return f"{left}{right}" if isinstance(left, str) or isinstance(right, str) else left + right

    def name(self, name: str) -> Any:
        if name in self.scope:
            return self.scope[name]
        if name in ("null", "undefined"):
            return None
        if name in ("true", "false"):
            return name == "true"
        if name in ("window", "globalThis", "self"):
            return _Named(self, "window")
        if name in ("document", "location", "navigator", "JSON", "Object"):
            return _Named(self, name)
        if name in ("localStorage", "sessionStorage"):
            return self.place.storage(name.removesuffix("Storage"))
        raise ScriptError(f"ReferenceError: {name} is not defined (in the stand-in engine)")

    def member(self, owner: Any, name: str) -> Any:
        members: dict[str, Callable[[], Any]] = {}
        if isinstance(owner, _Named):
            return owner.member(name)
        if isinstance(owner, Element):
            members = {"textContent": owner.text_content, "innerText": owner.inner_text, "innerHTML": owner.inner_html,
                       "id": lambda: owner.attributes.get("id", ""), "tagName": owner.tag.upper,
                       "getAttribute": lambda: owner.attributes.get}  # fmt: skip
        elif isinstance(owner, list | str):
            members = {"length": lambda: len(owner)}
        elif isinstance(owner, dict) and name not in owner:
            members = _storage_members(owner)
        elif isinstance(owner, dict):
            return owner[name]
        if owner is None:
            raise ScriptError(f"TypeError: can't access property {name!r} of null")
        if name not in members:
            raise _unknown(self.text)
        return members[name]()


def _storage_members(items: dict[str, str]) -> dict[str, Callable[[], Any]]:
    return {
        "getItem": lambda: items.get,
        "setItem": lambda: lambda key, value: items.__setitem__(str(key), str(value)),
        "removeItem": lambda: lambda key: items.pop(key, None) and None,
        "clear": lambda: items.clear,
        "key": lambda: lambda index: [*items, None][min(index, len(items))],
        "length": lambda: len(items),
    }


class _Named:
    """One of the page's own objects."""

    def __init__(self, evaluation: _Evaluation, name: str) -> None:
        self.evaluation = evaluation
        self.its_name = name

    def member(self, name: str) -> Any:
        place = self.evaluation.place
        document = place.document
        members: dict[str, Callable[[], Any]] = {
            "document.title": lambda: document.title,
            "document.URL": lambda: document.url,
            "document.cookie": place.cookie,
            "document.body": lambda: document.first("body"),
            "document.documentElement": lambda: document.first("html"),
            "document.querySelector": lambda: document.first,
            "document.querySelectorAll": lambda: document.select,
            "document.location": lambda: _Named(self.evaluation, "location"),
            "location.href": lambda: document.url,
            "location.origin": lambda: origin(document.url),
            "navigator.userAgent": place.user_agent,
            "navigator.language": place.language,
            "JSON.stringify": lambda: lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False),
            "JSON.parse": lambda: json.loads,
            "Object.keys": lambda: list,
            "Object.entries": lambda: lambda value: [list(pair) for pair in value.items()],
        }
        if self.its_name == "window":
            return self.evaluation.name(name)
        if f"{self.its_name}.{name}" not in members:
            raise _unknown(self.evaluation.text)
        return members[f"{self.its_name}.{name}"]()


def origin(url: str) -> str:
    match = re.match(r"(https?://[^/?#]+)", url)
    return match[1] if match else "null"
