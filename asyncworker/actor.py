"""@actor: an async function that receives a session, as a Dramatiq actor.

The decorator is sugar over `Runtime.session`; everything else is Dramatiq's: queues, priorities, retries, time
limits, results, callbacks, pipelines.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import dramatiq
from dramatiq import Broker, Message
from dramatiq.asyncio import get_event_loop_thread

from asyncworker.at_most_once import DELIVERY_OPTION
from asyncworker.broker import get_broker
from asyncworker.errors import DeclarationError, InvalidArguments
from asyncworker.identity import checked_seed, new_seed
from asyncworker.middleware import CONTEXT_OPTION, IDENTITY_OPTION, SESSION_OPTION, BrowserMiddleware
from asyncworker.pace import Pace
from asyncworker.paced import NAVIGATIONS_OPTION, PACE_OPTION
from asyncworker.producing import SentMessage, aside, awaitable, one_send
from asyncworker.session import Session, current_attempt
from asyncworker.unique import UNIQUE_OPTION, Unique

P = ParamSpec("P")
R = TypeVar("R")

#: An async function that receives a session, then what its messages carry.
_Function = Callable[Concatenate[Session, P], Coroutine[Any, Any, R]]

_IDENTITIES = ("deployment", "message")


class SessionActor(dramatiq.Actor[P, R]):
    """A Dramatiq actor whose function receives a `Session` first.

    Attributes:
        fn_async: The decorated function itself: `await title.fn_async(session, url)` runs it in a test.
    """

    fn_async: _Function[P, R]

    def __init__(self, fn: _Function[P, R], *, broker: Broker, options: dict[str, Any], **how: Any) -> None:
        self.fn_async = fn
        self._context_options = options.get(CONTEXT_OPTION) or {}
        # What a context has recorded is written when it closes, and the result may name it.
        self._is_recorded = any(name.startswith("record_") for name in self._context_options)
        self._signature = _signature(fn)
        self._takes_seed = _takes(self._signature, "seed")
        super().__init__(self._run_in_session(fn), broker=broker, options=options, **how)

    def message_with_options(
        self, *, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Message[R]:
        """Build a message; its seed is in its kwargs from here on.

        Arguments may still be missing: in a pipeline, the result of the message before is one.

        Raises:
            InvalidArguments: When the arguments do not fit the function.
            InvalidSeed: When the seed is none.
            BrokerUnavailable: When the deployment's seed is not known yet and the store does not answer.
        """
        given = dict(kwargs or {})
        self.check_arguments(tuple(args), given, partly=True)
        seed = given.get("seed")
        given["seed"] = self._default_seed() if seed is None else checked_seed(seed)
        return super().message_with_options(args=args, kwargs=given, **options)

    def send_with_options(
        self,
        *,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        delay: timedelta | int | None = None,
        **options: Any,
    ) -> Message[R]:
        """Send a message with options of its own; `delay` is in ms, or a timedelta.

        Raises:
            InvalidArguments: When the arguments do not fit the function, or one is missing.
            InvalidSeed: When the seed is none.
            BrokerUnavailable: When the broker did not take the message.
        """
        self.check_arguments(tuple(args), kwargs or {})
        with one_send(self.broker):
            return super().send_with_options(args=args, kwargs=kwargs, delay=delay, **options)

    async def amessage(self, *args: P.args, **kwargs: P.kwargs) -> Message[R]:
        """`message`, without blocking the loop: the first without a seed asks the store for the deployment's."""
        return await aside(self.broker, lambda: self.message(*args, **kwargs))

    async def asend(self, *args: P.args, **kwargs: P.kwargs) -> SentMessage[R]:
        """`send`, from any event loop and without blocking it; `.aresult()` of what it returns awaits the result."""
        return await self.asend_with_options(args=args, kwargs=kwargs)

    async def asend_with_options(
        self,
        *,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        delay: timedelta | int | None = None,
        **options: Any,
    ) -> SentMessage[R]:
        """`send_with_options`, from any event loop and without blocking it.

        When this is cancelled, the message may be sent nevertheless.
        """
        self.check_arguments(tuple(args), kwargs or {})
        return awaitable(
            await aside(self.broker, lambda: self.send_with_options(args=args, kwargs=kwargs, delay=delay, **options))
        )

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, partly: bool = False) -> None:
        """Raise InvalidArguments unless they fit the function; `partly`: some may still be missing."""
        named = kwargs if self._takes_seed else {name: kwargs[name] for name in kwargs if name != "seed"}
        try:
            bind = self._signature.bind_partial if partly else self._signature.bind
            bind(None, *args, **named)
        except TypeError as error:
            raise InvalidArguments(
                f"{self.actor_name}{_as_called(self._signature)} cannot be called with these arguments: {error}",
                actor=self.actor_name,
            ) from None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Called by a worker thread for each attempt.

        Raises:
            RuntimeError: Outside a worker.
        """
        if get_event_loop_thread() is None:
            raise RuntimeError(
                f"{self.actor_name} runs in a worker: send() it a message, or await its function itself, "
                "`.fn_async(session, ...)`, within `async with open_session() as session`"
            )
        return super().__call__(*args, **kwargs)

    @property
    def _middleware(self) -> BrowserMiddleware:
        """Of the broker that this actor is on now: tests move actors to another one."""
        return next(m for m in self.broker.middleware if isinstance(m, BrowserMiddleware))

    def _default_seed(self) -> int:
        if self.options.get(IDENTITY_OPTION) == "message":
            return new_seed()
        return self._middleware.deployment_seed()

    def _run_in_session(self, fn: _Function[P, R]) -> Callable[P, Awaitable[R]]:
        async def run(*args: P.args, **kwargs: P.kwargs) -> R:
            self.check_arguments(args, kwargs)
            attempt = current_attempt.get()
            runtime = self._middleware.runtime
            if attempt is None:
                raise RuntimeError(f"{self.actor_name} was called outside an attempt; send() it a message")
            checked_seed(kwargs.get("seed"))
            if not self._takes_seed:
                kwargs.pop("seed", None)
            async with runtime.session(
                attempt, context_options=self._context_options, close_behind=not self._is_recorded
            ) as session:
                return await fn(session, *args, **kwargs)

        run.__name__, run.__module__ = fn.__name__, fn.__module__
        return run


class _Decorator(Protocol):
    def __call__(self, fn: _Function[P, R], /) -> SessionActor[P, R]: ...


@overload
def actor(fn: _Function[P, R], /) -> SessionActor[P, R]: ...


@overload
def actor(
    *,
    actor_name: str | None = None,
    queue_name: str = "default",
    priority: int = 0,
    broker: Broker | None = None,
    identity: Literal["deployment", "message"] = "deployment",
    context_options: Mapping[str, Any] | None = None,
    unique: Unique | None = None,
    delivery: Literal["at_least_once", "at_most_once"] = "at_least_once",
    pace: str | Pace | None = None,
    navigations: bool = False,
    **options: Any,
) -> _Decorator: ...


def actor(
    fn: Callable[..., Awaitable[Any]] | None = None,
    /,
    *,
    actor_name: str | None = None,
    queue_name: str = "default",
    priority: int = 0,
    broker: Broker | None = None,
    identity: str = "deployment",
    context_options: Mapping[str, Any] | None = None,
    unique: Unique | None = None,
    delivery: str = "at_least_once",
    pace: str | Pace | None = None,
    navigations: bool = False,
    **options: Any,
) -> Any:
    """Declare an async function that receives a `Session` first as an actor.

    Parameters:
        actor_name: None: the module's path below the actors package, and the function's name, as `pages.title`.
        queue_name: The queue that its messages go to.
        priority: Lower numbers are started first among the messages that a worker holds.
        broker: None: the deployment's.
        identity: Whose seed a message without one gets: `deployment`, so that such messages share a browser and
            are one visitor, or `message`: a fresh one each, drawn when it is sent.
        context_options: More of Playwright's options of a new context, such as storage_state, viewport or
            extra_http_headers. What the worker's engine cannot honour refuses the message (Unsupported).
        unique: While one message with the same key waits or runs, sending another returns the first one's id. The key
            is a text with names of arguments in braces, as "{url}", or a function of arguments, by their names.
        delivery: `at_most_once`: a message that has begun is never run again by itself; where its worker died it is
            a dead letter with an unknown outcome, for a person.
        pace: How often messages of one site and exit may begin, over all workers: `"2/s"`, or a `Pace(...)`. Those
            that have to wait do so in the store, in order; by default the site is the host of the first URL argument.
        navigations: Each `goto`, `reload`, `go_back` and `go_forward` of a page of the session waits for its slot by
            itself, but the message's first one; what a click sends is counted, so that what comes next waits for it.
        options: Dramatiq's: max_retries, min_backoff, max_backoff, retry_when, throws, time_limit (ms), max_age
            (ms), store_results, result_ttl (ms), notify_shutdown, on_success, on_failure, pipe_ignore, …

    Raises:
        DeclarationError: When the function cannot be an actor, or the name is taken.
        ValueError: For an option or queue name that Dramatiq does not know.
    """

    def decorate(function: Callable[..., Awaitable[Any]]) -> SessionActor[..., Any]:
        _check_function(function)
        if identity not in _IDENTITIES:
            raise DeclarationError(f"identity={identity!r} is none of {', '.join(_IDENTITIES)}")
        home = broker or get_broker()
        if not any(isinstance(middleware, BrowserMiddleware) for middleware in home.middleware):
            raise DeclarationError(
                f"the broker of {function.__qualname__} was not made by asyncworker; leave broker= out, or add "
                "asyncworker's middleware to it"
            )
        name = actor_name or default_name(function, home)
        _check_name(home, name, function)
        guards = {
            option: value
            for option, value in (
                (UNIQUE_OPTION, unique),
                (DELIVERY_OPTION, delivery),
                (PACE_OPTION, pace),
                (NAVIGATIONS_OPTION, navigations or None),
            )
            if value is not None and value != "at_least_once"
        }
        declare = dramatiq.actor(
            actor_class=SessionActor,
            actor_name=name,
            queue_name=queue_name,
            priority=priority,
            broker=home,
            **options,
            **{SESSION_OPTION: True, IDENTITY_OPTION: identity, CONTEXT_OPTION: dict(context_options or {})},
            **guards,
        )
        return cast(SessionActor[..., Any], declare(function))

    return decorate if fn is None else decorate(fn)


def default_name(function: Callable[..., Any], broker: Broker) -> str:
    """`<module below the actors package>.<function>`: `pages.title` in `actors/pages.py`, `title` in `actors.py`."""
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        module = spec.name if spec else Path(getattr(main, "__file__", None) or "__main__").stem
    packages = [p for m in broker.middleware if isinstance(m, BrowserMiddleware) for p in m.settings.actors]
    if module in packages:
        return function.__name__
    for package in packages:
        module = module.removeprefix(f"{package}.")
    return f"{module}.{function.__name__}"


class _Bare:
    """An annotation that is shown as it was written: under postponed evaluation it is a text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _as_called(signature: inspect.Signature) -> inspect.Signature:
    """The signature as a producer sees it: without the session, and without the result's type."""
    parameters = [
        each.replace(annotation=_Bare(each.annotation)) if isinstance(each.annotation, str) else each
        for each in list(signature.parameters.values())[1:]
    ]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(fn)


def _takes(signature: inspect.Signature, name: str) -> bool:
    parameters = signature.parameters.values()
    return name in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)


def _check_function(function: Callable[..., Any]) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if not inspect.iscoroutinefunction(function):
        raise DeclarationError(
            f"{name} is not async: an actor with a session runs on the worker's asyncio loop. Write `async def`, "
            "and move blocking work into `await asyncio.to_thread(...)`; for work without a browser use "
            "@dramatiq.actor"
        )
    parameters = list(_signature(function).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise DeclarationError(f"{name} must take the session first: async def {name}(session: Session, ...)")
    if parameters[0].name == "seed" or _names_another_type(parameters[0].annotation):
        raise DeclarationError(
            f"the first parameter of {name} is {parameters[0]}, but an actor receives the session there: "
            f"async def {name}(session: Session, ...)"
        )
    seed = next((parameter for parameter in parameters if parameter.name == "seed"), None)
    if seed is not None and seed.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise DeclarationError(f"{name} takes seed by position only, but it comes by name: write `*, seed`")


def _names_another_type(annotation: object) -> bool:
    """True when the first parameter is annotated as something that is no session."""
    if annotation is inspect.Parameter.empty or annotation is Any:
        return False
    if isinstance(annotation, str):
        return annotation.strip("'\"").rpartition(".")[2] not in ("Session", "Any")
    return not (isinstance(annotation, type) and issubclass(annotation, Session))


def _check_name(broker: Broker, name: str, function: Callable[..., Any]) -> None:
    other = broker.actors.get(name)
    if other is None:
        return
    where = getattr(other, "fn_async", other.fn)
    raise DeclarationError(
        f"two actors are named {name!r}: {where.__module__}.{where.__qualname__} and "
        f"{function.__module__}.{function.__qualname__}; give one of them actor_name=..."
    )
