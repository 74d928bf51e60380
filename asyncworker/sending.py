"""Send one message from outside the code, and wait for what becomes of it."""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import dataclass, replace
from typing import Any

import dramatiq
import redis
from dramatiq import Broker, Message
from dramatiq.results.errors import ResultFailure, ResultTimeout

from asyncworker.actor import SessionActor
from asyncworker.broker import get_broker
from asyncworker.deployment import import_actors
from asyncworker.errors import ConfigurationError
from asyncworker.ledger import Row
from asyncworker.middleware import ledger_of
from asyncworker.settings import Settings
from asyncworker.visitor import Visitor, changed


@dataclass(frozen=True)
class Answer:
    """What became of a message. `error` and `result` are never both set.

    Attributes:
        identity: The digest of the identity that the answering attempt had; None with engines that draw none.
        drawn_by: Which version of what drew it.
        change: How it differs from the message's first, as a sentence; None: it does not.
        phases_ms: How long that attempt was in each phase; None where its row is not closed yet, or had no session.
    """

    ok: bool
    result: Any = None
    error: str | None = None
    identity: str | None = None
    drawn_by: str | None = None
    change: str | None = None
    phases_ms: dict[str, int] | None = None

    def facts(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "result": self.result,
            "error": self.error,
            "identity": self.identity,
            "drawn_by": self.drawn_by,
            "identity_changed": self.change is not None,
            "phases_ms": self.phases_ms,
        }

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
            answer = Answer(True, backend.get_result(self.message, block=True, timeout=timeout_ms))
        except ResultFailure as error:
            answer = Answer(False, error=str(error))
        except ResultTimeout:
            rows = ledger_of(self.broker).rows(self.message.message_id)
            return _with_identity(Answer(False, error=_overdue(rows, timeout_ms)), rows)
        with contextlib.suppress(redis.RedisError):  # the answer is there, whoever gave it
            answer = _with_identity(answer, ledger_of(self.broker).rows(self.message.message_id))
        return answer


def _overdue(rows: list[Row], timeout_ms: int) -> str:
    if not rows:
        return (
            f"no worker began it in {timeout_ms} ms; is one running? start `dramatiq asyncworker.actors` in the "
            "deployment's directory"
        )
    last = rows[-1]
    because = f": {last.error}" if last.error else ""
    return f"not done in {timeout_ms} ms; attempt {last.attempt} is {last.outcome}{because}"


def _with_identity(answer: Answer, rows: list[Row]) -> Answer:
    """The answer, with who gave it: the last attempt, whose row may not be closed yet, but has its identity."""
    if not rows:
        return answer
    last = rows[-1]
    change = None
    if last.identity_changed:
        change = changed(last.seed, Visitor.in_rows(rows, last.seed), Visitor.in_row(last))
    phases_ms = last.phases_ms or None
    return replace(answer, identity=last.identity, drawn_by=last.drawn_by, change=change, phases_ms=phases_ms)


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
