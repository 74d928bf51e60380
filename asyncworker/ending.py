"""How a session comes to its end: whoever still calls it is told so, and launches nothing with it.

Code may catch its cancellation and go on, keep a page beyond its attempt, or leave a task behind. What it then calls
on the page or its context is refused here, by the object; what it calls on the browser, which it shares with others,
by whose code it is.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from asyncworker.errors import SessionOver

#: A refused call takes this long: code that catches everything and calls again must not keep the loop to itself.
REFUSAL_PAUSE_S = 0.05

#: What may be called on a page or context that is over: it ends what has ended.
HARMLESS = frozenset({"close"})

#: Of a browser and of its type: what would launch, open or end something that is not the session's own.
SHARED_CALLS = ("close", "launch", "launch_persistent_context", "launch_server", "connect", "connect_over_cdp")


class Ending:
    """Whether, and why, one session is over.

    Parameters:
        subject: Whose session it is, in words.
    """

    def __init__(self, subject: str = "this code") -> None:
        self.subject = subject
        self.reason: str | None = None

    @property
    def has_come(self) -> bool:
        return self.reason is not None

    def come(self, reason: str, *things: Any) -> None:
        """The session is over from here on, and with it these things; the first reason is the one to tell."""
        if self.reason is None:
            self.reason = reason
            for thing in things:
                _shut(thing, self)

    def error(self) -> SessionOver:
        return SessionOver(
            f"the session of {self.subject} is over ({self.reason}) and its context is closed; return values instead "
            "of keeping the session, and let a cancellation pass"
        )

    async def refuse(self) -> None:
        """Raise SessionOver when the session is over."""
        if self.has_come:
            await asyncio.sleep(REFUSAL_PAUSE_S)
            raise self.error()


#: The session whose code is running, with all the tasks that it has begun; None: no session's, but the runtime's own.
current_ending: ContextVar[Ending | None] = ContextVar("asyncworker_ending", default=None)


async def refuse_if_over() -> None:
    """Raise SessionOver when the session whose code is running is over."""
    if (ending := current_ending.get()) is not None:
        await ending.refuse()


def of_no_session() -> contextvars.Context:
    """The running context, for the runtime's own work: it is refused nothing, and outlives the session."""
    context = contextvars.copy_context()
    context.run(current_ending.set, None)
    return context


def guard_shared(thing: Any) -> None:
    """Have a browser, or its type, refuse what the code of a session that is over would begin or end by it."""
    for name in SHARED_CALLS:
        if (call := getattr(thing, name, None)) is not None and inspect.iscoroutinefunction(call):
            setattr(thing, name, _guarded(call))


def _guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(call, "is_guarded"):  # browsers of one driver share their type
        return call

    async def guarded(*args: Any, **kwargs: Any) -> Any:
        await refuse_if_over()
        return await call(*args, **kwargs)

    guarded.is_guarded = True  # type: ignore[attr-defined]
    return guarded


def _shut(thing: Any, ending: Ending) -> None:
    """Have each call of a page or context refused. Playwright has no way to say so; the methods are on its class."""

    async def refused(*_: Any, **__: Any) -> None:
        await ending.refuse()

    kind: type = type(thing)
    for name in _calls(kind):
        setattr(thing, name, refused)


@cache
def _calls(kind: type) -> tuple[str, ...]:
    names = (name for name, _ in inspect.getmembers(kind, inspect.iscoroutinefunction))
    return tuple(name for name in names if not name.startswith("_") and name not in HARMLESS)


class Interruption:
    """Tells the sessions of one piece of work that it is cancelled from outside: by its time limit, or a stop."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._listeners: list[Callable[[str], object]] = []

    def tell(self, reason: str) -> None:
        """On the loop, before the cancellation reaches the code."""
        self.reason = self.reason or reason
        for listener in tuple(self._listeners):
            listener(reason)

    @contextmanager
    def heard_by(self, listener: Callable[[str], object]) -> Iterator[None]:
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


#: How the work that is running is interrupted; None: by nothing but a plain cancellation.
current_interruption: ContextVar[Interruption | None] = ContextVar("asyncworker_interruption", default=None)
