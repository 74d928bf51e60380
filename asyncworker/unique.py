"""Unique messages: while one with the same key waits or runs, another is not sent.

    @actor(unique="{url}")                    # by an argument
    @actor(unique=lambda url: url.lower())    # by a function of arguments, by their names
    @actor(unique="report")                   # one message of this actor at all

The key is computed where a message is sent, from its arguments, and holds for its actor within its queue. The broker
gives it in the step of the store in which it takes the message, and the message holds it until it is acknowledged or a
dead letter, over delays, retries and the deaths of its workers: it has the key for as long as its body lies in its
queue, so what has ended in whatever way holds none. `send`, `asend` and `send_many` return the first one's id for what
was not sent. A retried dead letter takes its key again, unless another message has it.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from dramatiq import Actor, Broker, Message

from asyncworker.errors import DeclarationError, InvalidArguments

#: The option of an actor: a text with its arguments' names in braces, or a function of some of its arguments.
UNIQUE_OPTION = "unique"

#: What makes a key.
Unique = str | Callable[..., str | int | None]

_KINDS_OF_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def unique_keys(broker: Broker, pairs: Iterable[tuple[Message[Any], object]]) -> dict[int, str]:
    """The keys of those messages that have one, by their place."""
    return {place: key for place, (message, _) in enumerate(pairs) if (key := unique_key(broker, message))}


def unique_key(broker: Broker, message: Message[Any]) -> str:
    """The key of a message; empty: it is not unique, or its actor is not known here.

    Raises:
        InvalidArguments: When its arguments make none.
    """
    actor = broker.actors.get(message.actor_name)
    unique: Unique | None = actor.options.get(UNIQUE_OPTION) if actor is not None else None
    if actor is None or unique is None:
        return ""
    try:
        arguments = arguments_of(actor, message)
        if isinstance(unique, str):
            key: object = unique.format(**arguments)
        else:
            key = unique(**{name: arguments[name] for name in parameters_of(unique)})
    except Exception as error:
        raise InvalidArguments(
            f"the unique key of a message for {message.actor_name} cannot be made from its arguments: "
            f"{type(error).__name__}: {error}",
            actor=message.actor_name,
        ) from error
    if key is None:
        return ""
    if not isinstance(key, str | int):
        raise InvalidArguments(
            f"the unique key of a message for {message.actor_name} is {key!r}; it is a text, an integer or None",
            actor=message.actor_name,
        )
    return f"{message.actor_name}:{key}"


def check_unique(actor: Actor[..., Any]) -> None:
    """Raise DeclarationError unless the actor's option can make keys."""
    unique: object = actor.options.get(UNIQUE_OPTION)
    if unique is None:
        return
    if isinstance(unique, str) and unique:
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(unique) if field is not None]
        except ValueError as error:
            raise DeclarationError(f"unique={unique!r} of {actor.actor_name}: {error}") from None
        names = [field.replace("[", ".").partition(".")[0] for field in fields]
    elif callable(unique):
        names = list(parameters_of(unique))
    else:
        raise DeclarationError(
            f"unique={unique!r} of {actor.actor_name} is neither a text, with its arguments' names in braces, nor a "
            "function of its arguments"
        )
    known = list(signature_of(function_of(actor)).parameters)[has_session(actor) :]
    for name in names:
        if name not in known:
            raise DeclarationError(
                f"unique of {actor.actor_name} asks for {name!r}, which is none of its arguments: {', '.join(known)}"
            )


def arguments_of(actor: Actor[..., Any], message: Message[Any]) -> dict[str, Any]:
    """What each of the function's parameters gets."""
    signature, kwargs = signature_of(function_of(actor)), message.kwargs
    parameters = signature.parameters
    if "seed" not in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        kwargs = {name: value for name, value in kwargs.items() if name != "seed"}
    bound = signature.bind(*[None] * has_session(actor), *message.args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def function_of(actor: Actor[..., Any]) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(actor, "fn_async", actor.fn)
    return function


def has_session(actor: Actor[..., Any]) -> int:
    """How many parameters come from the worker."""
    return 1 if hasattr(actor, "fn_async") else 0


@lru_cache(maxsize=1024)
def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a function that makes keys."""
    return tuple(name for name, each in signature_of(function).parameters.items() if each.kind not in _KINDS_OF_ANY)
