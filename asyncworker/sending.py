"""Send one message from outside the code, and wait for what becomes of it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import dramatiq
from dramatiq import Broker, Message
from dramatiq.results.errors import ResultFailure, ResultTimeout

from asyncworker.actor import SessionActor
from asyncworker.broker import get_broker
from asyncworker.deployment import import_actors
from asyncworker.errors import ConfigurationError
from asyncworker.middleware import ledger_of
from asyncworker.settings import Settings


@dataclass(frozen=True)
class Answer:
    """What became of a message. `error` and `result` are never both set."""

    ok: bool
    result: Any = None
    error: str | None = None

    def facts(self) -> dict[str, Any]:
        return {"ok": self.ok, "result": self.result, "error": self.error}

    def sentence(self) -> str:
        return str(self.result) if self.ok else f"failed: {self.error}"


@dataclass(frozen=True)
class Sent:
    """A message on its way."""

    broker: Broker
    message: Message[Any]

    @property
    def seed(self) -> int | None:
        """Its seed; None for an actor without a session."""
        return self.message.kwargs.get("seed")

    def facts(self) -> dict[str, Any]:
        message = self.message
        return {
            "message_id": message.message_id,
            "actor": message.actor_name,
            "queue": message.queue_name.removesuffix(".DQ"),
            "seed": self.seed,
        }

    def wait(self, timeout_ms: int) -> Answer:
        """Wait until the message has succeeded, or was given up after its last retry."""
        backend = self.broker.get_results_backend()
        try:
            return Answer(True, backend.get_result(self.message, block=True, timeout=timeout_ms))
        except ResultFailure as error:
            return Answer(False, error=str(error))
        except ResultTimeout:
            return Answer(False, error=self._overdue(timeout_ms))

    def _overdue(self, timeout_ms: int) -> str:
        rows = ledger_of(self.broker).rows(self.message.message_id)
        if not rows:
            return (
                f"no worker began it in {timeout_ms} ms; is one running? start `dramatiq asyncworker.actors` in the "
                "deployment's directory"
            )
        last = rows[-1]
        because = f": {last.error}" if last.error else ""
        return f"not done in {timeout_ms} ms; attempt {last.attempt} is {last.outcome}{because}"


def send_message(
    settings: Settings,
    actor_name: str,
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    delay_ms: int | None = None,
    queue: str | None = None,
    results: bool = False,
) -> Sent:
    """Send a message to a declared actor.

    Parameters:
        results: Store the result also when the actor does not ask for it.

    Raises:
        ConfigurationError: When the deployment has no such actor, or its actors do not import.
        InvalidArguments, InvalidSeed: When the message could never succeed.
        BrokerUnavailable: When the broker did not take it.
    """
    broker = get_broker(settings)
    try:
        import_actors(settings)
    except ImportError as error:
        raise ConfigurationError(str(error), name="ASYNCWORKER_ACTORS") from error
    actor = _actor(broker, actor_name)
    if isinstance(actor, SessionActor):
        actor.check_arguments(tuple(args), kwargs)
    options = {"store_results": True} if results else {}
    message = actor.message_with_options(args=tuple(args), kwargs=kwargs, **options)
    if queue is not None:
        message = message.copy(queue_name=queue)
    return Sent(broker, broker.enqueue(message, delay=delay_ms))


def _actor(broker: Broker, name: str) -> dramatiq.Actor[..., Any]:
    actor = broker.actors.get(name)
    if actor is not None:
        return actor
    close = difflib.get_close_matches(name, broker.actors, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(sorted(broker.actors)) or 'none'}"
    raise ConfigurationError(f"this deployment has no actor {name!r}; {hint}", name="ASYNCWORKER_ACTORS")
