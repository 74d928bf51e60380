"""A module of Celery tasks as one of actors.

What cannot be ported stays as it was, below a `# TODO port:` that says why.
A browser that the module keeps for its process, with the signal handlers that start and close it, goes when no task is
left that uses it; so does the Celery app.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m

from asyncworker.celery.port_body import MARK, with_comments
from asyncworker.celery.port_imports import used_names, with_imports
from asyncworker.celery.port_options import code
from asyncworker.celery.port_sends import Sends
from asyncworker.celery.port_task import Ported, port_task
from asyncworker.celery.port_types import BROWSER_TYPE, PLAYWRIGHT, SHARED, Types
from asyncworker.errors import ConfigurationError

#: Said once for what is no line's matter.
NOTES = {
    "app": 'an actor is run again when its worker process dies; delivery="at_most_once" is how it is not',
    "limit": "an actor without time_limit has ASYNCWORKER_TIME_LIMIT_MS",
    "seed": "the seed is given by its name only: title.send(url, seed=42)",
    "launch": "what the browser was launched with becomes settings: ASYNCWORKER_ENGINE, _HEADLESS, _PROXY, "
    "_LAUNCH_ARGS, _EXECUTABLE_PATH, _CHANNEL",
}


#: What starts a browser of the process, and what closes it.
_BROWSER_SIGNALS = ("worker_process_init", "worker_process_shutdown", "worker_init", "worker_shutdown")


@dataclass
class Result:
    """A module afterwards.

    Attributes:
        code: The source.
        ported: The names of the functions that are actors now.
        left: For those that are not: why.
        notes: What there is to know beside the code.
    """

    code: str
    ported: list[str] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_unfinished(self) -> bool:
        return MARK in self.code


def port(source: str, name: str = "the module") -> Result:
    """Port the source of a module.

    Raises:
        ConfigurationError: When it is no Python.
    """
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise ConfigurationError(f"{name} is no Python that can be read: {error}", name=name) from None
    return _Porting(module).result()


class _Porting:
    def __init__(self, module: cst.Module) -> None:
        self.module = module
        self.shared = dict(_shared_of(module))
        self.constants = set(_constants_of(module)) - self.shared.keys()
        self.ported: dict[str, Ported] = {}
        self.left: dict[str, list[str]] = {}
        self.needs: set[str] = set()

    def result(self) -> Result:
        body = [self._statement(each) for each in self.module.body]
        plain = {name for name, each in self.ported.items() if each.is_plain}
        sends = Sends(self.ported.keys() - plain, plain)
        body = [each.visit(sends) for each in body]
        self.needs |= sends.needs
        loggers = _Loggers()
        body = [each.visit(loggers) for each in body]
        self.needs |= loggers.needs
        body, launched = self._without_browser(list(body))
        body = self._without_app(body)
        module = with_imports(self.module.with_changes(body=body), self.module, self.needs)
        return Result(module.code, sorted(self.ported), self.left, list(self._notes(launched)))

    def _statement(self, statement: Any) -> Any:
        if isinstance(statement, cst.ClassDef) and any(code(each.value).endswith("Task") for each in statement.bases):
            return self._leave(statement.name.value, statement, ["it is a class"])
        if not isinstance(statement, cst.FunctionDef) or not _is_task(statement):
            return statement
        name = statement.name.value
        made = port_task(statement, self.shared, self.constants)
        if made.reasons:
            return self._leave(name, statement, made.reasons)
        self.ported[name] = made
        self.needs |= made.needs
        return made.function

    def _leave(self, name: str, statement: cst.BaseStatement, reasons: list[str]) -> Any:
        self.left[name] = reasons
        return with_comments(statement, reasons)

    def _without_browser(self, body: list[cst.BaseStatement]) -> tuple[list[cst.BaseStatement], bool]:
        """Drop the browser of the process and its handlers, unless something else uses them."""
        going = [each for each in body if self._is_browsers(each)]
        staying = [each for each in body if not any(each is other for other in going)]
        if not going or not self.shared.keys() & used_names(staying):
            return staying, bool(going)
        reason = "what is left uses this browser"
        return [
            with_comments(each, [reason]) if isinstance(each, cst.FunctionDef) and each in going else each
            for each in body
        ], False

    def _is_browsers(self, statement: cst.BaseStatement) -> bool:
        if isinstance(statement, cst.FunctionDef):
            return _is_handler(statement) and all(self._is_about_it(each) for each in _lines(statement.body))
        match statement:
            case cst.SimpleStatementLine(body=[cst.Assign() | cst.AnnAssign() as assign]):
                return set(_targets(assign)) <= self.shared.keys()
        return False

    def _is_about_it(self, statement: cst.BaseStatement) -> bool:
        """True for a statement of a handler that is about the browser, or about nothing outside of the handler."""
        if isinstance(statement, cst.If | cst.Try | cst.With):
            return all(self._is_about_it(each) for each in _lines(statement.body))
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        for each in statement.body:
            match each:
                case cst.Global() | cst.Pass():
                    continue
                case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
                    continue
                case cst.Assign() | cst.AnnAssign() if all(name.isidentifier() for name in _targets(each)):
                    continue
                case cst.Expr(value=cst.Call(func=cst.Attribute(value=cst.Name(value=name)))) if name in self.shared:
                    continue
            return False
        return True

    def _without_app(self, body: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
        apps = {name: each for each in body for name in _apps_of(each)}
        for name, statement in apps.items():
            others = [each for each in body if each is not statement]
            users = [each for each in others if name in used_names([each])]
            if not users:
                body = others
            for user in users:
                if isinstance(user, cst.SimpleStatementLine):
                    place = next(number for number, each in enumerate(body) if each is user)
                    body[place] = with_comments(user, ["this is about the Celery app"])
        return body

    def _notes(self, launched: bool) -> Iterator[str]:
        if self.ported:
            yield NOTES["app"]
        if any("time_limit" not in code(each.function.decorators[0]) for each in self.ported.values()):
            yield NOTES["limit"]
        if any(m.findall(each.function.params, m.Param(name=m.Name("seed"))) for each in self.ported.values()):
            yield NOTES["seed"]
        if launched:
            yield NOTES["launch"]


class _Loggers(cst.CSTTransformer):
    """`get_task_logger(name)` as `logging.getLogger(name)`; the session has one whose lines name the message."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: set[str] = set()

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if code(original_node.func) != "get_task_logger":
            return updated_node
        self.needs.add("logging")
        return updated_node.with_changes(func=cst.parse_expression("logging.getLogger"))


def _is_task(function: cst.FunctionDef) -> bool:
    """`@app.task`, `@shared_task`, called or not."""
    for each in function.decorators:
        called = each.decorator.func if isinstance(each.decorator, cst.Call) else each.decorator
        if code(called) == "shared_task" or (isinstance(called, cst.Attribute) and called.attr.value == "task"):
            return True
    return False


def _is_handler(function: cst.FunctionDef) -> bool:
    connected = tuple(f"{name}.connect" for name in _BROWSER_SIGNALS)
    return any(code(each.decorator).partition("(")[0].endswith(connected) for each in function.decorators)


def _shared_of(module: cst.Module) -> Iterator[tuple[str, str]]:
    """The names that hold Playwright and the browser in the whole module, by what handlers and the module assign."""
    kept: dict[str, str] = {}
    handlers = [each for each in module.body if isinstance(each, cst.FunctionDef) and _is_handler(each)]
    for function in handlers:
        names = {name.name.value for each in m.findall(function, m.Global()) for name in each.names}  # type: ignore[attr-defined]
        types = Types({})
        types.learn(function)
        kept |= {name: kind for name, kind in types.names.items() if name in names}
    top = Types({})
    for line in module.body:
        match line:
            case cst.SimpleStatementLine(body=[cst.Assign(targets=[target], value=value)]):
                top.bind(target.target, top.of(value))
    kept |= top.names
    yield from ((name, kind) for name, kind in kept.items() if kind in (SHARED, PLAYWRIGHT, BROWSER_TYPE))


def _constants_of(module: cst.Module) -> Iterator[str]:
    for line in module.body:
        match line:
            case cst.SimpleStatementLine(body=[cst.Assign() | cst.AnnAssign() as assign]):
                yield from _targets(assign)


def _apps_of(statement: cst.BaseStatement) -> Iterator[str]:
    match statement:
        case cst.SimpleStatementLine(body=[cst.Assign(value=cst.Call(func=called)) as assign]):
            if code(called).rpartition(".")[2] == "Celery":
                yield from _targets(assign)


def _targets(assign: cst.Assign | cst.AnnAssign) -> list[str]:
    nodes = [each.target for each in assign.targets] if isinstance(assign, cst.Assign) else [assign.target]
    return [code(each) for each in nodes]


def _lines(body: cst.BaseSuite) -> Iterable[cst.BaseStatement]:
    return body.body if isinstance(body, cst.IndentedBlock) else []
