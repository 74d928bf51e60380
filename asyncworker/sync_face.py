"""A synchronous face of asynchronous objects: the same methods and properties, called from a thread.

It is made of what the objects have, so that it serves each engine's classes: an attribute is read, and a method is
called, on the loop, what it returns is awaited there, and each object of the same package in the result gets a face in
its turn. What takes functions, handlers and predicates, gets some that have them called in a thread, from which the
page may be called again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable
from enum import Enum
from functools import cache, update_wrapper
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

from asyncworker.errors import SessionOver
from asyncworker.lane import Lane

logger = logging.getLogger("asyncworker.sync")

#: What is no object with calls of its own, although its class is of the same package.
_DATA = (str, bytes, int, float, dict, list, tuple, set, frozenset, Enum, BaseException, type)


class Role(Enum):
    """What a function that is given to a method is for."""

    predicate = "predicate"  # its error ends the wait that asks it; of a URL it is asked on the loop
    binding = "binding"  # its result and its error go to the page that calls it
    handler = "handler"


class Twin:
    """The synchronous face of one asynchronous object."""

    _aw_face: Face
    _aw_object: Any

    def __init__(self, face: Face, thing: Any) -> None:
        self._aw_face = face
        self._aw_object = thing

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._aw_face.attribute(self._aw_object, name)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._aw_object) if not name.startswith("_")]

    def __repr__(self) -> str:
        return repr(self._aw_object)

    def __str__(self) -> str:
        return str(self._aw_object)


class Face:
    """The twins of one session's objects; the same object has the same twin.

    Parameters:
        reach: Calls a function on the loop, awaits what it returns, and gives or raises what that gives or raises;
            the text says in an error what was called.
        lane: Where handlers run.
        package: Its objects get twins, with all that they return.
    """

    def __init__(self, reach: Callable[[str, Callable[[], Any]], Any], lane: Lane, package: str) -> None:
        self._reach = reach
        self._lane = lane
        self._package = package
        self._twins: WeakValueDictionary[int, Twin] = WeakValueDictionary()
        self._pairing = threading.Lock()
        self._adapted: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._unanswered: set[asyncio.Future[Any]] = set()
        self._raised: Exception | None = None
        self._is_closed = False

    def call(self, what: str, begin: Callable[[], Any]) -> Any:
        """Call `begin` on the loop, await what it returns, and give that with its twins."""
        with self._lane.left():
            result = self._reach(what, begin)
        return self.wrap(result)

    def close(self) -> None:
        """No handler is begun any more, and no one waits for one; on the loop."""
        self._is_closed = True
        self._lane.close()
        for future in tuple(self._unanswered):
            _settle(future, None, None)

    # --- there and back

    def wrap(self, value: Any, seen: dict[int, Any] | None = None) -> Any:
        """The value with the twins of what it holds."""
        kind: type = type(value)
        if kind in (list, dict, tuple):
            return _rebuilt(value, self.wrap, {} if seen is None else seen)
        if isinstance(value, _DATA) or kind.__module__.partition(".")[0] != self._package:
            return value
        with self._pairing:
            twin = self._twins.get(id(value))
            if twin is None:
                twin = self._twins[id(value)] = _twin_class(kind)(self, value)
            return twin

    def unwrap(self, value: Any, seen: dict[int, Any] | None = None) -> Any:
        """The value with the objects of the twins that it holds."""
        if isinstance(value, Twin):
            return value._aw_object
        if type(value) in (list, dict, tuple):
            return _rebuilt(value, self.unwrap, {} if seen is None else seen)
        return value

    def attribute(self, thing: Any, name: str) -> Any:
        kind: type = type(thing)
        if (function := _method(kind, name)) is None and not callable(getattr(thing, "__dict__", {}).get(name)):
            return self.call(f"{kind.__name__}.{name}", lambda: getattr(thing, name))

        def method(*args: Any, **kwargs: Any) -> Any:
            given = [self._argument(name, _parameter(function, i), value) for i, value in enumerate(args, 1)]
            named = {key: self._argument(name, key, value) for key, value in kwargs.items()}
            if self._raised is not None and inspect.iscoroutinefunction(function):
                error, self._raised = self._raised, None
                raise error
            return self.call(f"{kind.__name__}.{name}()", lambda: getattr(thing, name)(*given, **named))

        return update_wrapper(method, function) if function is not None else method

    def _argument(self, method: str, parameter: str, value: Any) -> Any:
        if callable(value) and not isinstance(value, Twin | type):
            return self._adapt(value, _role(method, parameter))
        return self.unwrap(value)

    # --- handlers and predicates

    def _adapt(self, function: Callable[..., Any], role: Role) -> Callable[..., Any]:
        """What the loop calls instead of a function; always the same, or a handler could not be removed."""
        try:
            key: Any = (function, role)
            hash(key)
        except TypeError:
            key = (id(function), role)
        if key not in self._adapted:
            self._adapted[key] = function, self._adapter(function, role)
        return self._adapted[key][1]

    def _adapter(self, function: Callable[..., Any], role: Role) -> Callable[..., Any]:
        def adapter(*args: Any) -> Any:
            if role is Role.predicate and all(isinstance(value, str) for value in args):
                return function(*args)  # of a URL, which must be answered at once
            # The turn is asked for at the event; the rest awaits the end. Engines look for a coroutine.
            return self._ended(self._begin(function, args), role)

        with contextlib.suppress(TypeError, ValueError):
            adapter.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # it gets as many arguments
        return adapter

    def _begin(self, function: Callable[..., Any], args: tuple[Any, ...]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)

        def handle() -> None:
            result, error = None, None
            try:
                result = self.unwrap(function(*(self.wrap(value) for value in args)))
            except BaseException as raised:  # noqa: BLE001 -- it goes to whoever waits for the answer
                # SystemExit would end the loop, and with it every other attempt.
                error = raised if isinstance(raised, Exception) else RuntimeError(f"a handler raised {raised!r}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)

        if self._is_closed or not self._lane.run(handle):
            _settle(future, None, None)
        return future

    async def _ended(self, future: asyncio.Future[Any], role: Role) -> Any:
        """What the function has returned, for the engine.

        The error of a handler goes to the next call of its own session, as in the synchronous API. The engine would
        have the next call of anyone raise it who shares the browser.
        """
        try:
            return await future
        except Exception as error:
            if role is not Role.handler:
                raise
            if not self._is_closed:
                logger.error("a handler of the page raised %r; the session's next call raises it", error)
                self._raised = error
            return None


def expect(actual: Any, message: str | None = None) -> Any:
    """Playwright's assertions about a page, locator or response of a synchronous session."""
    if not isinstance(actual, Twin):
        raise TypeError(f"expect() is about an object of a synchronous session, and {actual!r} is none")
    face, thing = actual._aw_face, actual._aw_object
    api = import_module(type(thing).__module__.rpartition(".")[0])
    return face.call("expect()", lambda: api.expect(thing, message))


def _role(method: str, parameter: str) -> Role:
    if "predicate" in parameter or "url" in parameter:
        return Role.predicate
    return Role.binding if method.startswith("expose_") else Role.handler


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _rebuilt(value: Any, convert: Callable[[Any, dict[int, Any]], Any], seen: dict[int, Any]) -> Any:
    """A list, dict or tuple of what is converted; one may hold itself."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, dict):
        items: dict[Any, Any] = {}
        seen[id(value)] = items
        items.update((key, convert(item, seen)) for key, item in value.items())
        return items
    if isinstance(value, tuple):
        return tuple(convert(item, seen) for item in value)
    elements: list[Any] = []
    seen[id(value)] = elements
    elements.extend(convert(item, seen) for item in value)
    return elements


@cache
def _method(kind: type, name: str) -> Callable[..., Any] | None:
    """The function that a class has as a method of this name; None: it has a property, or nothing."""
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    return found if inspect.isroutine(found) else None


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _parameter(function: Callable[..., Any] | None, position: int) -> str:
    names = _parameters(function) if function is not None else ()
    return names[position] if position < len(names) else ""


@cache
def _twin_class(kind: type) -> type[Twin]:
    """The class of the twins of one class; what is an asynchronous context manager is a plain one there."""
    bases = (_Managed, Twin) if hasattr(kind, "__aenter__") else (Twin,)
    return type(kind.__name__, bases, {"__doc__": kind.__doc__, "__module__": __name__})


class _Managed:
    """`with` for a twin whose object has `async with`."""

    _aw_face: Face
    _aw_object: Any

    def __enter__(self) -> Any:
        thing = self._aw_object
        return self._aw_face.call(f"with {type(thing).__name__}", thing.__aenter__)

    def __exit__(self, *raised: Any) -> bool | None:
        thing = self._aw_object
        try:
            ended = self._aw_face.call(f"with {type(thing).__name__}", lambda: thing.__aexit__(*raised))
        except SessionOver:
            if raised[1] is None:
                raise
            return None  # what was raised in the block is what to see
        return bool(ended)
