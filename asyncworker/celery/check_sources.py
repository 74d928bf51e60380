"""Where an app's source code uses a browser library, and what becomes of that on these workers.

A synchronous Playwright belongs to the thread that has started it. Here that is the worker thread that runs tasks, and
not the one that imports modules.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from asyncworker.celery.findings import Finding, attention, differs, same

_LIBRARIES = ("playwright", "patchright", "invisible_playwright")

#: What starts a browser library, or a browser of its own.
_SYNC = ("sync_playwright", "InvisiblePlaywright")
_ASYNC = ("async_playwright", "AsyncInvisiblePlaywright")

_LAUNCHES = ("launch", "launch_persistent_context", "connect", "connect_over_cdp")

_IN_PARENT = ("worker_init", "celeryd_init", "celeryd_after_setup", "worker_ready", "import_modules")

_SHARED = "`from asyncworker.celery import browser, session` has the worker's own browser, usable from any thread"

_AT_IMPORT = (
    "made when the module is imported, in a thread that runs no task: every task then fails. Make it in "
    f"worker_process_init, or use the shared one: {_SHARED}"
)


@dataclass
class _Function:
    """A function of a module, and how it comes to be called."""

    name: str
    is_task: bool = False
    signals: list[str] = field(default_factory=list)


def browsers_of(path: Path, *, tasks: Collection[str]) -> Iterator[Finding]:
    """How one module uses browser libraries.

    Parameters:
        tasks: The names of its functions that are tasks' bodies.
    """
    try:
        tree = ast.parse(path.read_text(), str(path))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        yield differs(str(path), f"its source cannot be read: {error}")
        return
    if not any(library in _imported(tree) for library in _LIBRARIES):
        return
    for statement in tree.body:
        yield from _within(statement, None, str(path), tasks)


def _imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _within(node: ast.AST, function: _Function | None, path: str, tasks: Collection[str]) -> Iterator[Finding]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        # What stands within a function is called with it, as far as anyone can tell.
        function = function or _Function(node.name, node.name in tasks, list(_signals_of(node)))
    elif isinstance(node, ast.Call):
        finding = _about(node, function, f"{path}:{node.lineno}")
        if finding is not None:
            yield finding
    for child in ast.iter_child_nodes(node):
        yield from _within(child, function, path, tasks)


def _signals_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """`worker_process_init` of `@worker_process_init.connect` and `@signals.worker_process_init.connect(...)`."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(called, ast.Attribute) and called.attr == "connect":
            yield ast.unparse(called.value).rpartition(".")[2]


def _about(call: ast.Call, function: _Function | None, where: str) -> Finding | None:
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in _SYNC:
        return _about_sync(f"{name}()", function, where)
    if name in _ASYNC:
        if function is None:
            return attention(f"{name}()", _AT_IMPORT, where)
        return same(f"{name}()", f"runs on a loop of the code's own; {_SHARED}", where)
    if name in _LAUNCHES and function is None and isinstance(call.func, ast.Attribute) and _is_browser_type(call.func):
        return attention(f"{name}()", _AT_IMPORT, where)
    return None


def _is_browser_type(called: ast.Attribute) -> bool:
    return ast.unparse(called.value).rpartition(".")[2] in ("chromium", "firefox", "webkit")


def _about_sync(name: str, function: _Function | None, where: str) -> Finding:
    if function is None:
        return attention(name, _AT_IMPORT, where)
    parents = [signal for signal in function.signals if signal in _IN_PARENT]
    if parents:
        return attention(
            name, f"made by {parents[0]}, in a thread that runs no task: move it to worker_process_init", where
        )
    if function.is_task:
        return same(name, f"a browser for each task, as before; {_SHARED}", where)
    if "worker_process_init" in function.signals:
        return same(name, f"one browser for each worker process, at -t 1; {_SHARED}", where)
    return differs(
        name,
        f"{function.name}() makes it in the thread that calls it first, so run these tasks at -t 1; {_SHARED}",
        where,
    )
