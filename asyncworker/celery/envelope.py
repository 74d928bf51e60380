"""A Celery message as a Dramatiq message, and back: headers, properties and body lie unchanged in one option."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from celery.utils.time import maybe_iso8601, maybe_make_aware
from dramatiq import Message
from kombu.utils.json import dumps, loads

from asyncworker.accounting import NAME_OPTION
from asyncworker.cancellations import TOLD_BY_WORKER
from asyncworker.celery.names import step_of, to_dramatiq

#: The option of a Dramatiq message that holds a Celery message, as kombu's virtual transports have it.
OPTION = TOLD_BY_WORKER

#: The option that says what has become of it here; see `Delivery`.
STATE_OPTION = "celery_state"

#: The actor that such messages are for; those of another priority step have one of their own.
ACTOR = "celery"

_JSON = "application/json"

#: Marks what kombu's JSON has for a value that JSON does not know.
_TAG = "__type__"


def actor_of(step: int) -> str:
    return f"{ACTOR}.p{step}" if step else ACTOR


def enveloped(payload: dict[str, Any], queue: str) -> tuple[Message[Any], int | None]:
    """A Celery message for a queue as a Dramatiq message, and its delay in ms."""
    facts = facts_of(payload)
    step = step_of(payload["properties"].get("priority"))
    message: Message[Any] = Message(
        queue_name=to_dramatiq(queue, step),
        actor_name=actor_of(step),
        args=(str(facts.get("task") or "?"),),  # for a person who looks at the message
        kwargs={},
        options={
            OPTION: json.loads(dumps(payload)),  # kombu's JSON knows dates and the like, Dramatiq's does not
            NAME_OPTION: facts.get("task"),
        },
        message_id=str(facts.get("id") or payload["properties"].get("correlation_id") or uuid4()),
    )
    return message, delay_ms(facts.get("eta"))


def opened(options: Mapping[str, Any]) -> dict[str, Any]:
    """The Celery message in the options of a Dramatiq message.

    Raises:
        KeyError: When there is none.
    """
    written = json.dumps(options[OPTION])
    read = loads if _TAG in written else json.loads  # kombu's takes longer, for dates and the like
    payload: dict[str, Any] = read(written)
    return payload


def facts_of(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a message says its task, id and eta: in the headers, or with the old protocol in the body."""
    headers: Mapping[str, Any] = payload.get("headers") or {}
    if "task" in headers or payload.get("content-type") != _JSON:
        return headers
    try:
        body = payload["body"]
        if payload["properties"].get("body_encoding") == "base64":
            body = base64.b64decode(body)
        read = json.loads(body)
    except (ValueError, TypeError, KeyError):
        return headers
    return read if isinstance(read, dict) else headers


def delay_ms(eta: object) -> int | None:
    """Milliseconds until an eta; None: it is not in the future, or is none. Without a zone it is UTC, as in Celery."""
    try:
        due = maybe_iso8601(eta)
        if not isinstance(due, datetime):
            return None
        left_s = (maybe_make_aware(due) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None  # what it says of it is for the task's worker to refuse
    return math.ceil(left_s * 1000) if left_s > 0 else None
