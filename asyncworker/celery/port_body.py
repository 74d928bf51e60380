"""The body of a task as that of an actor: its page is the session's, and what Playwright does is awaited."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m

from asyncworker.celery.port_options import Options, code, milliseconds
from asyncworker.celery.port_types import ENTRY, PLAYWRIGHT, SHARED, Types, is_class, item_of

#: What stands above what was not ported.
MARK = "# TODO port:"

#: Functions that call no method of what they are handed.
_HARMLESS = (
    "print",
    "len",
    "list",
    "tuple",
    "set",
    "str",
    "repr",
    "isinstance",
    "bool",
    "enumerate",
    "reversed",
    "zip",
)

#: What blocks the loop; in a task it blocks nothing but that.
_BLOCKING = ("requests.", "urllib.request.", "subprocess.run", "subprocess.check_", "subprocess.call", "httpx.get",
             "httpx.post", "smtplib.")  # fmt: skip

_OPENERS = {"new_page": "page", "new_context": "context"}


@dataclass
class Plan:
    """What the session takes the place of.

    Attributes:
        page: The name of the variable that is the session's page; None: the code opens its pages itself.
        context: The name of the variable that is the session's context.
        context_options: What that context is opened with, as code.
        opens: The calls that open them, which go.
    """

    page: str | None = None
    context: str | None = None
    context_options: str | None = None
    opens: list[cst.Call] = field(default_factory=list)

    @property
    def ours(self) -> set[str]:
        return {name for name in (self.page, self.context) if name is not None}


def plan(function: cst.FunctionDef, types: Types, constants: Collection[str]) -> Plan:
    """Find the first context or page that a task opens, where each attempt opens it once."""
    finder = _Openings(types)
    function.body.visit(finder)
    made = Plan()
    if not finder.found:
        return made
    name, call = finder.found[0]
    kind = code(call.func).rpartition(".")[2]
    options = static_options(call, constants)
    if options is None or sum(name == other for other, _ in finder.found) > 1:
        return made
    made.context_options = options or None
    made.opens.append(call)
    if kind == "new_page":
        made.page = name
        return made
    made.context = name
    pages = [(page, each) for page, each in finder.in_context if code(each.func) == f"{name}.new_page"]
    if pages and sum(pages[0][0] == page for page, _ in finder.in_context) == 1:
        made.page = pages[0][0]
        made.opens.append(pages[0][1])
    return made


def static_options(call: cst.Call, constants: Collection[str]) -> str | None:
    """The options of a context as a dictionary that can stand in a decorator, empty for none; None: they cannot."""
    pairs = []
    for argument in call.args:
        if argument.keyword is None or argument.star or not _is_constant(argument.value, constants):
            return None
        pairs.append(f'"{argument.keyword.value}": {code(argument.value)}')
    return f"{{{', '.join(pairs)}}}" if pairs else ""


def _is_constant(node: cst.BaseExpression, constants: Collection[str]) -> bool:
    names = [each.value for each in m.findall(node, m.Name()) if isinstance(each, cst.Name)]
    plain = not m.findall(node, m.OneOf(m.Call(), m.Attribute(), m.Lambda(), m.FormattedString()))
    return plain and all(name in ("True", "False", "None") or name in constants for name in names)


class _Openings(cst.CSTVisitor):
    """Finds `page = browser.new_page()` and the like, where no loop or function stands around it."""

    def __init__(self, types: Types) -> None:
        self.types = types
        self.found: list[tuple[str, cst.Call]] = []
        self.in_context: list[tuple[str, cst.Call]] = []

    def visit_For(self, node: cst.For) -> bool:
        return False

    visit_While = visit_FunctionDef = visit_Lambda = visit_For  # type: ignore[assignment]

    def visit_Assign(self, node: cst.Assign) -> None:
        if len(node.targets) == 1:
            self._note(node.targets[0].target, node.value)

    def visit_WithItem(self, node: cst.WithItem) -> None:
        if node.asname is not None:
            self._note(node.asname.name, node.item)

    def _note(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        if not (isinstance(target, cst.Name) and isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute)):
            return
        owner, name = self.types.of(value.func.value), value.func.attr.value
        if owner == SHARED and name in _OPENERS:
            self.found.append((target.value, value))
        elif owner == "BrowserContext" and name == "new_page" and not value.args:
            self.in_context.append((target.value, value))


class Body(cst.CSTTransformer):
    """Rewrites a task's function.

    Attributes:
        reasons: Why it cannot be done.
        needs: What has to be imported.
    """

    def __init__(self, types: Types, made: Plan, options: Options, self_name: str | None) -> None:
        super().__init__()
        self.types, self.plan, self.options, self.self_name = types, made, options, self_name
        self.reasons: list[str] = []
        self.needs: set[str] = set()
        self.asks = False
        self.uses_browser = bool(made.opens)
        self._labels = 0
        self._inner: list[cst.CSTNode] = []
        self._opens = {id(each) for each in made.opens}

    # --- statements

    def leave_SimpleStatementLine(self, original_node: cst.SimpleStatementLine, updated_node: Any) -> Any:
        if len(original_node.body) != 1:
            return updated_node
        before, after = original_node.body[0], updated_node.body[0]
        match before:
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=value):
                if id(value) in self._opens:
                    return self._taken(name, updated_node)
                if self.types.of(value) in (SHARED, PLAYWRIGHT):
                    return cst.RemoveFromParent()  # it launches the browser
            case cst.Expr(value=cst.Call(func=cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value=end)))):
                if end in ("close", "stop") and (name in self.plan.ours or self.types.of(cst.Name(name)) in _SHARED):
                    return cst.RemoveFromParent()
        asked = getattr(before, "exc", None) or getattr(before, "value", None)  # raise, or a call that raises
        if isinstance(asked, cst.Call) and self._is_retry(asked):
            return updated_node.with_changes(body=[self._retry(asked, after)])
        return updated_node

    def _taken(self, name: str, line: cst.SimpleStatementLine) -> Any:
        """`page = session.page` in the place of what has opened it."""
        if name == self.plan.page:
            return line.with_changes(body=[_small(f"{name} = session.page")])
        if not self._context_is_used:
            return cst.RemoveFromParent()
        return line.with_changes(body=[_small(f"{name} = session.context")])

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        if not self._inner:
            name = self.plan.context
            uses = m.findall(node.body, m.Name(value=name)) if name is not None else []
            # its own name where it is opened, one for its page, and one where it is closed
            closes = (
                m.findall(node.body, m.Call(func=m.Attribute(value=m.Name(name), attr=m.Name("close")))) if name else []
            )
            self._context_is_used = len(uses) > len(closes) + len(self.plan.opens)
        self._inner.append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        self._inner.pop()
        return updated_node

    def visit_Global(self, node: cst.Global) -> None:
        self.reasons.append(
            f"it changes what is global in the process: {', '.join(each.name.value for each in node.names)}"
        )

    def visit_Lambda(self, node: cst.Lambda) -> None:
        self._inner.append(node)

    def leave_Lambda(self, original_node: cst.Lambda, updated_node: cst.Lambda) -> cst.Lambda:
        self._inner.pop()
        return updated_node

    def leave_Try(self, original_node: cst.Try, updated_node: cst.Try) -> Any:
        closing = updated_node.finalbody
        if closing is None or original_node.finalbody is None or closing.body.body:
            return updated_node
        if updated_node.handlers:
            return updated_node.with_changes(finalbody=None)
        return _unpacked(updated_node.leading_lines, updated_node.body)

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:
        kept, taken, awaited = [], [], 0
        for before, after in zip(original_node.items, updated_node.items, strict=True):
            kind = self.types.of(before.item)
            if id(before.item) in self._opens and before.asname is not None:
                name = code(before.asname.name)
                if name == self.plan.page or self._context_is_used:
                    taken.append(f"{name} = session.{'page' if name == self.plan.page else 'context'}")
                continue
            if kind in (ENTRY, *_SHARED):
                continue
            awaited += kind is not None
            kept.append(after.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        for line in reversed(taken):
            body = [cst.parse_statement(line), *updated_node.body.body]
            updated_node = updated_node.with_changes(body=updated_node.body.with_changes(body=body))
        if not kept:
            return _unpacked(updated_node.leading_lines, updated_node.body)
        if 0 < awaited < len(kept):
            self.reasons.append(f"one `with` has things of Playwright and others: {code(original_node.items[0].item)}")
        elif awaited:
            self._check_place("async with")
            updated_node = updated_node.with_changes(
                asynchronous=cst.Asynchronous(whitespace_after=cst.SimpleWhitespace(" "))
            )
        return updated_node.with_changes(items=kept)

    # --- expressions

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        if self.types.is_awaited(original_node) and id(original_node) not in self._opens:
            self.uses_browser = True
            if self._inner and isinstance(self._inner[-1], cst.Lambda) and self._inner[-1].body is original_node:
                return updated_node  # Playwright awaits what its handlers return
            self._check_place(f"{code(original_node.func)}()")
            return cst.Await(expression=updated_node)
        if code(original_node.func) == "time.sleep":
            self.needs.add("asyncio")
            self._check_place("time.sleep()")
            return cst.Await(expression=updated_node.with_changes(func=cst.parse_expression("asyncio.sleep")))
        if self._is_strangers(original_node):
            self.reasons.append(f"{code(original_node.func)}() is handed a thing of Playwright: make it async first")
        return updated_node

    def _is_strangers(self, call: cst.Call) -> bool:
        """True for a function that receives a page, say, and whose code is not seen from here."""
        if isinstance(call.func, cst.Attribute) and self.types.of(call.func.value) is not None:
            return False
        kinds = [self.types.of(each.value) or "" for each in call.args]
        return code(call.func) not in _HARMLESS and any(is_class(item_of(kind) or kind) for kind in kinds)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        if isinstance(updated_node.value, cst.Await) and not updated_node.value.lpar:
            updated_node = updated_node.with_changes(value=_in_parentheses(updated_node.value))
        match code(original_node):
            case text if self.self_name and text == f"{self.self_name}.request.retries":
                return cst.parse_expression("(session.attempt.number - 1)")
            case text if self.self_name and text == f"{self.self_name}.request.id":
                return cst.parse_expression("session.attempt.message_id")
        kind = self.types.of(original_node.value)
        if kind is not None and kind.startswith("event[") and original_node.attr.value == "value":
            self._check_place(code(original_node))
            return cst.Await(expression=updated_node)
        return updated_node

    def leave_Subscript(self, original_node: cst.Subscript, updated_node: cst.Subscript) -> cst.Subscript:
        if isinstance(updated_node.value, cst.Await) and not updated_node.value.lpar:
            return updated_node.with_changes(value=_in_parentheses(updated_node.value))
        return updated_node

    def leave_GeneratorExp(self, original_node: cst.GeneratorExp, updated_node: cst.GeneratorExp) -> Any:
        if not m.findall(updated_node, m.Await()):
            return updated_node
        return cst.ListComp(elt=updated_node.elt, for_in=updated_node.for_in)  # what takes it cannot await

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        if not self._labels and self.types.names.get(original_node.value) == SHARED:
            self.uses_browser = True
            return cst.parse_expression("session.browser")
        return updated_node

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:
        self._labels += 1

    def leave_Attribute_attr(self, node: cst.Attribute) -> None:
        self._labels -= 1

    def visit_Arg_keyword(self, node: cst.Arg) -> None:
        self._labels += 1

    def leave_Arg_keyword(self, node: cst.Arg) -> None:
        self._labels -= 1

    # --- retries

    def _is_retry(self, node: cst.Call) -> bool:
        return self.self_name is not None and code(node.func) == f"{self.self_name}.retry"

    def _retry(self, asked: cst.Call, statement: cst.BaseSmallStatement) -> cst.BaseSmallStatement:
        self.asks = True
        self.needs.add("Retry")
        given = {each.keyword.value: each.value for each in asked.args if each.keyword is not None}
        updated: Any = getattr(statement, "exc", None) or statement.value  # type: ignore[attr-defined]
        now = {each.keyword.value: code(each.value) for each in updated.args if each.keyword is not None}
        unknown = [name for name in given if name not in ("exc", "countdown")]
        if unknown or len(given) < len(asked.args):
            self.reasons.append(f"`{code(asked)}` says more than exc and countdown")
            return statement
        countdown = given.get("countdown")
        delay = self.options.retry_delay
        if countdown is not None:
            delay = milliseconds(countdown, now["countdown"])
        error = now.get("exc")
        cause = f" from {error}" if error is not None and isinstance(given["exc"], cst.Name) else ""
        text = f"str({error}), " if error is not None else ""
        return _small(f"raise Retry({text}delay={delay}){cause}")

    def _check_place(self, what: str) -> None:
        if len(self._inner) > 1:
            self.reasons.append(f"{what} stands in a function within the task, which would have to be awaited, too")


class Blocking(cst.CSTTransformer):
    """Marks the statements of an actor that block its loop."""

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        calls = [code(each.func) for each in m.findall(original_node, m.Call()) if isinstance(each, cst.Call)]
        found = [each for each in calls if each.startswith(_BLOCKING)]
        return with_comments(
            updated_node, [f"{each}() blocks the loop: await asyncio.to_thread(...)" for each in found]
        )


def with_comments(statement: Any, reasons: Iterable[str]) -> Any:
    """A statement with a `# TODO port:` for each of these above it."""
    lines = [cst.EmptyLine(indent=True, comment=cst.Comment(f"{MARK} {' '.join(each.split())}")) for each in reasons]
    return statement.with_changes(leading_lines=[*statement.leading_lines, *lines]) if lines else statement


_SHARED = (SHARED, PLAYWRIGHT)


def _small(text: str) -> cst.BaseSmallStatement:
    line: Any = cst.parse_statement(text)
    small: cst.BaseSmallStatement = line.body[0]
    return small


def _in_parentheses(node: cst.Await) -> cst.Await:
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _unpacked(leading: Any, body: cst.BaseSuite) -> Any:
    """The statements of a block that stands for itself now."""
    statements = list(_statements(body))
    if not statements:
        return cst.RemoveFromParent()
    first = statements[0]
    return cst.FlattenSentinel([first.with_changes(leading_lines=[*leading, *first.leading_lines]), *statements[1:]])


def _statements(body: cst.BaseSuite) -> Iterator[Any]:
    if isinstance(body, cst.IndentedBlock):
        yield from body.body
    else:
        yield cst.SimpleStatementLine(body=body.body)  # type: ignore[arg-type]
