"""Which broker, and which store, a URL of the adapter names: `asyncworker://` or `asyncworker+redis://host/0`."""

from __future__ import annotations

import threading
from typing import Any

import redis

from asyncworker.broker import get_broker, make_broker
from asyncworker.connecting import connect
from asyncworker.errors import ConfigurationError
from asyncworker.producing import ProducerBroker
from asyncworker.settings import Settings, load

SCHEME = "asyncworker"

_brokers: dict[str, ProducerBroker] = {}
_making = threading.Lock()


def settings_of(url: str | None) -> Settings:
    """The settings of the deployment that a URL names; kombu and Celery leave the `asyncworker+` of one out."""
    where = _behind(url)
    return load(broker_url=where) if where else load()


def store_of(url: str | None) -> redis.Redis:
    """A client of the store of results and of remote control: with RabbitMQ as the broker, of ASYNCWORKER_STORE_URL."""
    settings = settings_of(url)
    return connect(settings.model_copy(update={"broker_url": settings.store_url or settings.broker_url}))


def broker_of(url: str | None) -> ProducerBroker:
    """The broker that a URL names: the deployment's global one, or one for the URL behind it."""
    where = _behind(url)
    if not where:
        try:
            return get_broker()
        except ConfigurationError:  # the process has another global broker, for its own actors
            pass
    with _making:
        if where not in _brokers:
            _brokers[where] = make_broker(settings_of(url))
        return _brokers[where]


def is_ours(url: Any) -> bool:
    """True for a URL of this transport."""
    scheme = str(url or "").partition("://")[0]
    return scheme == SCHEME or scheme.startswith(f"{SCHEME}+")


def _behind(url: str | None) -> str:
    text = (url or "").strip()
    text = text.removeprefix(f"{SCHEME}+")
    return "" if text.startswith(f"{SCHEME}:") or "://" not in text else text
