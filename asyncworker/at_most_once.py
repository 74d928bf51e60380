"""Actors with delivery="at_most_once": what has begun once never begins again by itself.

Before the first attempt begins, the message in the store says so; what has begun and comes back from a worker that died
is a dead letter, whose outcome no one knows. Neither is anything else a reason to run it again: an attempt that raised
is a dead letter, too. `asyncworker dead retry` runs one again, for a person who has looked.
"""

from __future__ import annotations

import time
from typing import Any

import redis
from dramatiq import Actor, Broker, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import MiddlewareError, Shutdown, SkipMessage, TimeLimitExceeded

from asyncworker.errors import BrokerUnavailable, DeclarationError, EngineError, RefusedMessage, UnknownOutcome
from asyncworker.patience import patiently

#: The option of an actor.
DELIVERY_OPTION = "delivery"
AT_MOST_ONCE = "at_most_once"
DELIVERIES = ("at_least_once", AT_MOST_ONCE)

#: Options of a message that has begun: when, in UNIX ms, and in which worker process.
BEGUN_OPTION = "begun_ms"
BEGUN_BY_OPTION = "begun_by"

#: What ends an attempt of which no one can say how far it came.
CUT_OFF = (EngineError, TimeLimitExceeded, Shutdown, UnknownOutcome)


class Interrupted(UnknownOutcome, MiddlewareError):
    """This message had begun, and its worker died; its actor is not run again (delivery="at_most_once")."""


class NotNoted(RefusedMessage, MiddlewareError):
    """The store refuses to note that a message begins, so it does not."""


def check_delivery(actor: Actor[..., Any]) -> None:
    """Have an actor at most once run no message again; raise DeclarationError when its options say otherwise."""
    delivery = actor.options.get(DELIVERY_OPTION)
    if delivery is not None and delivery not in DELIVERIES:
        raise DeclarationError(f"delivery={delivery!r} of {actor.actor_name} is none of {', '.join(DELIVERIES)}")
    if delivery != AT_MOST_ONCE:
        return
    for name in ("max_retries", "retry_when"):
        if actor.options.get(name):
            raise DeclarationError(
                f"{actor.actor_name} has delivery={AT_MOST_ONCE!r} and {name}: no message of it is run again by "
                f"itself; leave {name} out"
            )
    actor.options["max_retries"] = 0


def begin(broker: Broker, message: MessageProxy, worker_id: str) -> None:
    """Have the store know that a message begins.

    Raises:
        Interrupted: When it has begun before.
        SkipMessage: When it was taken by another worker.
        NotNoted: When the store will not take it.
    """
    begun_ms, begun_by = message.options.get(BEGUN_OPTION), message.options.get(BEGUN_BY_OPTION)
    if begun_ms is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(begun_ms / 1000))
        raise Interrupted(
            f"message {message.message_id} ({message.actor_name}) began at {at} UTC on {begun_by}, which died or was "
            "taken for dead meanwhile; no one knows whether it took place, and it is not run again. Look, then say "
            f"`asyncworker dead retry {message.message_id}` or `... discard ...`",
            subject=message.message_id,
        )
    message.options |= {BEGUN_OPTION: int(time.time() * 1000), BEGUN_BY_OPTION: worker_id, "max_retries": 0}
    if not isinstance(broker, RedisBroker):
        return  # whose messages end with its process
    identifier, body = message.options["redis_message_id"], message.encode()

    def note() -> Any:
        return broker.do_rewrite(message.queue_name, identifier, body)

    try:
        is_ours = patiently(note, "note that a message begins", getattr(broker, "patience", None))
    except (redis.RedisError, BrokerUnavailable) as error:
        raise NotNoted(f"message {message.message_id} does not begin: {error}") from error
    if not is_ours:
        raise SkipMessage("it was taken by another worker before it began")


def was_cut_off(message: MessageProxy, exception: BaseException) -> bool:
    """True when no one knows whether the one attempt of a message took place."""
    return BEGUN_OPTION in message.options and isinstance(exception, CUT_OFF)
