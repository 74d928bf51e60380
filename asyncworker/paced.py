"""Paced messages: which have a pace, and by what they are counted.

    @actor(pace="2/s")                                   # of each host, through each exit
    @actor(pace=Pace("30/m", key=lambda account: account))
    @actor(pace=Pace(max_concurrent=1, budget="500/day"))

A message's subject is the host of its first URL, or what the pace's `key` makes of its arguments; where there is
neither it is the actor itself. Who sends it writes the subject into its id in the store, so that the store can have it
wait without a worker: ten thousand of one host cost the others nothing. The exit is added by the worker that takes it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dramatiq import Actor, Broker, Message

from asyncworker.errors import ConfigurationError, DeclarationError, InvalidArguments, PaceDeferred
from asyncworker.limiter import Limiter
from asyncworker.pace import DIRECT, Pace, Rules, as_pace, first_host, key_of, pace_for, written
from asyncworker.pacer import Pacer
from asyncworker.settings import Settings
from asyncworker.unique import arguments_of, function_of, has_session, parameters_of, signature_of

#: The option of an actor.
PACE_OPTION = "pace"

#: The option by which each navigation of an actor's pages waits for a slot.
NAVIGATIONS_OPTION = "navigations"

#: In an id, what is before the subject.
MARK = "~"


class Pacing:
    """What a process knows of paces.

    Parameters:
        rules: The deployment's; None: there are none.
        exit_: The address that traffic leaves by here.
        hold_ms: A message goes to its worker so long before its slot at most.
    """

    def __init__(self, *, rules: Rules | None = None, exit_: str = DIRECT, hold_ms: float = 250) -> None:
        self.rules = rules
        self.exit = exit_
        self.hold_ms = hold_ms

    @classmethod
    def of(cls, settings: Settings) -> Pacing:
        """That of a deployment.

        Raises:
            ConfigurationError: When its file of rules cannot be read.
        """
        proxy = settings.proxy_parts
        rules = None if settings.pace_file is None else _read(settings.pace_file)
        return cls(rules=rules, exit_=proxy.server if proxy else DIRECT, hold_ms=settings.pace_hold_ms)

    def concerns(self, actor: Actor[..., Any] | None) -> bool:
        """Whether messages of an actor may have a pace."""
        if actor is None or not has_session(actor):
            return False
        return self.rules is not None or actor.options.get(PACE_OPTION) is not None

    def concerns_queue(self, broker: Broker, queue_name: str) -> bool:
        """Whether messages of a queue may have one."""
        actors = list(broker.actors.values())
        return any(actor.queue_name == queue_name and self.concerns(actor) for actor in actors)

    def subject_of(self, broker: Broker, message: Any) -> str | None:
        """What a message is counted by; None: it has no pace.

        Raises:
            InvalidArguments: When the pace's key cannot be made from its arguments.
        """
        actor = broker.actors.get(message.actor_name)
        if actor is None or not self.concerns(actor):
            return None
        own: Pace | None = actor.options.get(PACE_OPTION)
        if own is not None and own.key is not None:
            return _by_function(actor, own.key, message)
        host = first_host(message.args, message.kwargs)
        if host is None:
            return actor.actor_name if own is not None else None
        return host if own is not None or (self.rules and self.rules.of(host)) else None

    def mark(self, broker: Broker, message: Any) -> str:
        """What is added to the id of a message: empty where it has no pace."""
        subject = self.subject_of(broker, message)
        return "" if subject is None else f"{MARK}{written(subject)}"

    def key(self, subject: str) -> str:
        return key_of(subject, self.exit)

    def pacer(
        self, broker: Broker, message: Any, *, limiter: Limiter, member: str, seed: Callable[[], int], **how: Any
    ) -> Pacer | None:
        """What the attempt of a message waits by; None: it has no pace."""
        actor = broker.get_actor(message.actor_name)
        own: Pace | None = actor.options.get(PACE_OPTION)
        subject = self.subject_of(broker, message)
        pace = None if subject is None else pace_for(own, self.rules, subject)
        if subject is None or pace is None:
            return None
        return Pacer(
            limiter,
            key=self.key(subject),
            pace=pace,
            member=member,
            pace_of=lambda host: pace_for(own, self.rules, host),
            exit_=self.exit,
            counts_by_message=pace.key is not None,
            seed=seed(),
            hold_ms=self.hold_ms,
            navigations=bool(actor.options.get(NAVIGATIONS_OPTION)),
            **how,
        )


def check_pace(actor: Actor[..., Any], pacing: Pacing, *, is_kept: bool, broker: str) -> None:
    """Have an actor's pace be one; raise DeclarationError when it cannot be kept.

    Parameters:
        is_kept: The broker can have messages wait in line.
        broker: What it is, in words.
    """
    given = actor.options.get(PACE_OPTION)
    if given is not None:
        if not has_session(actor):
            raise DeclarationError(
                f"{actor.actor_name} has pace={given!r}, but no session, in which its slot is waited for; declare it "
                "with asyncworker's @actor"
            )
        if not is_kept:
            raise DeclarationError(
                f"{actor.actor_name} has pace={given!r}, which needs Redis or Valkey as the broker, and this is "
                f"{broker}: paced messages wait in line there"
            )
        actor.options[PACE_OPTION] = _checked(actor, given)
    if actor.options.get(NAVIGATIONS_OPTION) and not pacing.concerns(actor):
        raise DeclarationError(f"{actor.actor_name} has navigations=True and no pace that they could wait for")
    if has_session(actor):
        # Dramatiq takes what an actor throws for no failure, and logs no traceback of it.
        throws = actor.options.get("throws") or ()
        actor.options["throws"] = (*(throws if isinstance(throws, tuple) else (throws,)), PaceDeferred)


def _checked(actor: Actor[..., Any], given: object) -> Pace:
    try:
        pace = as_pace(given)
    except ValueError as error:
        raise DeclarationError(f"{actor.actor_name}: {error}") from None
    if pace == Pace(key=pace.key, jitter=pace.jitter, slow_down_on=pace.slow_down_on):
        raise DeclarationError(
            f"{actor.actor_name} has a pace that limits nothing: give a rate, max_concurrent or budget"
        )
    if pace.key is not None:
        known = list(signature_of(function_of(actor)).parameters)[1:]
        for name in parameters_of(pace.key):
            if name not in known:
                raise DeclarationError(
                    f"the key of {actor.actor_name}'s pace asks for {name!r}, which is none of its arguments: "
                    f"{', '.join(known)}"
                )
    return pace


def _by_function(actor: Actor[..., Any], key: Callable[..., Any], message: Message[Any]) -> str | None:
    try:
        arguments = arguments_of(actor, message)
        subject = key(**{name: arguments[name] for name in parameters_of(key)})
    except Exception as error:
        raise InvalidArguments(
            f"the pace's key of a message for {message.actor_name} cannot be made from its arguments: "
            f"{type(error).__name__}: {error}",
            actor=message.actor_name,
        ) from error
    if subject is not None and not isinstance(subject, str | int):
        raise InvalidArguments(
            f"the pace's key of a message for {message.actor_name} is {subject!r}; it is a text, an integer or None",
            actor=message.actor_name,
        )
    return None if subject is None else str(subject)


def _read(path: Path) -> Rules:
    try:
        return Rules.read(tomllib.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the paces in {path} cannot be used: {error}", name="ASYNCWORKER_PACE_FILE") from None
