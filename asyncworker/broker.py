"""get_broker(): the broker and the order of its middleware, written down once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import dramatiq
import dramatiq.broker
import redis
from dramatiq import Broker, ConnectionClosed, Message, MessageProxy
from dramatiq.brokers.redis import RedisBroker, _RedisConsumer
from dramatiq.common import compute_backoff
from dramatiq.errors import DecodeError
from dramatiq.middleware import (
    AgeLimit,
    Callbacks,
    CurrentMessage,
    Pipelines,
    ShutdownNotifications,
    TimeLimit,
)
from dramatiq.middleware import Middleware as DramatiqMiddleware
from dramatiq.results import Results
from dramatiq.results.backend import DEFAULT_TIMEOUT, ResultBackend
from dramatiq.results.backends import RedisBackend
from dramatiq.results.errors import ResultTimeout

from asyncworker import embedded
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.identity import new_seed
from asyncworker.ledger import Ledger, RedisLedger
from asyncworker.middleware import BrowserMiddleware, Retries, emit_receive
from asyncworker.patience import passes, patiently
from asyncworker.settings import Settings, load

logger = logging.getLogger("asyncworker.broker")

T = TypeVar("T")

#: The deployment's seed, drawn by whoever asks first.
SEED_KEY = "asyncworker:seed"

#: A store that answers nothing for this long is away.
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0
RESULT_SLICE_S = 2.0
PAUSE_S = 0.2

#: Time limits are checked this often. Dramatiq's default of a second is long beside a page that takes 0.1 s.
TIME_LIMIT_CHECK_MS = 100


def get_broker(settings: Settings | None = None) -> Broker:
    """The deployment's broker: Dramatiq's global one, made from the settings when there is none yet.

    Making it opens no connection and starts no server: both happen with the first message that is sent or
    consumed. `@actor` calls this, so a producer needs nothing but to import its actors.

    Parameters:
        settings: The deployment's settings; None reads them from the environment.

    Raises:
        ConfigurationError: When a setting cannot be used, or another broker was made global that lacks
            asyncworker's middleware.
    """
    existing = dramatiq.broker.global_broker
    if existing is None:
        existing = make_broker(settings or load())
        dramatiq.set_broker(existing)
    elif not any(isinstance(middleware, BrowserMiddleware) for middleware in existing.middleware):
        raise ConfigurationError(
            f"the global Dramatiq broker ({type(existing).__name__}) was not made by asyncworker, so its workers "
            "have no browser; call asyncworker.get_broker() instead of dramatiq.set_broker(...), or before the "
            "first @dramatiq.actor"
        )
    return existing


def make_broker(settings: Settings) -> WorkerBroker:
    """A new broker for these settings, not made global."""
    url = settings.broker_url
    client = connect(settings)
    broker = WorkerBroker(client=client, where=str(url) if url else f"embedded Valkey in {settings.state_dir}")
    for middleware in middleware_in_order(
        settings,
        ledger=RedisLedger(client),
        results=PatientResults(client=client),
        draw_seed=lambda: _stored_seed(client),
    ):
        broker.add_middleware(middleware)
    return broker


def middleware_in_order(
    settings: Settings, *, ledger: Ledger, results: ResultBackend, draw_seed: Callable[[], int]
) -> list[DramatiqMiddleware]:
    """The middleware, in order: `before_` hooks run down the list, `after_` hooks up it."""
    return [
        AgeLimit(),  # may skip a message, so it comes before anything that begins one
        TimeLimit(time_limit=settings.time_limit_ms, interval=TIME_LIMIT_CHECK_MS),
        ShutdownNotifications(),
        CurrentMessage(),
        # The attempt's row is opened when all that may skip it has run, and closed when Retries has decided.
        BrowserMiddleware(settings, ledger=ledger, draw_seed=draw_seed),
        Callbacks(),
        Pipelines(),
        Retries(),
        Results(backend=results, result_ttl=settings.result_ttl_ms),  # stored before anything reports success
    ]


def connect(settings: Settings) -> redis.Redis:
    """A client of the deployment's store; it connects, and starts the embedded server, with its first command."""
    if settings.broker_url is not None:
        return redis.Redis.from_url(
            settings.broker_url.value,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            health_check_interval=30,
        )
    pool = redis.ConnectionPool(
        connection_class=EmbeddedConnection, state_dir=settings.state_dir, socket_timeout=SOCKET_TIMEOUT_S
    )
    return redis.Redis(connection_pool=pool)


class EmbeddedConnection(redis.UnixDomainSocketConnection):
    """A connection to the embedded server, which it starts when none is running."""

    def __init__(self, *, state_dir: Path, **options: Any) -> None:
        super().__init__(path=str(embedded.socket_path(state_dir)), **options)
        self._state_dir = state_dir

    def _connect(self) -> Any:
        embedded.ensure(self._state_dir)
        return super()._connect()


class WorkerBroker(RedisBroker):
    """Dramatiq's Redis broker, with errors that say what happened and a consumer that loses nothing.

    Parameters:
        where: The broker in words, without its password, for errors.
    """

    def __init__(self, *, client: redis.Redis, where: str) -> None:
        super().__init__(client=client, middleware=[])
        self.where = where

    @property
    def consumer_class(self) -> type[WorkerConsumer]:
        return WorkerConsumer

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue a message.

        Raises:
            BrokerUnavailable: When the broker did not take it. Not after an attempt: the retry, the next of a
                pipeline and a callback wait for the broker, since what is not enqueued then is lost.
        """
        if _after_attempt.get():
            return patiently(lambda: self._enqueue(message, delay), "enqueue what follows an attempt")
        return self._enqueue(message, delay)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        if signal != "process_message":
            super().emit_after(signal, *args, **kwargs)
            return
        token = _after_attempt.set(True)
        try:
            super().emit_after(signal, *args, **kwargs)
        finally:
            _after_attempt.reset(token)

    def _enqueue(self, message: Message[Any], delay: int | None) -> Message[Any]:
        try:
            return super().enqueue(message, delay=delay)
        except redis.RedisError as error:
            raise BrokerUnavailable(
                f"the broker ({self.where}) did not take message {message.message_id} for {message.actor_name}: "
                f"{error}; it was not sent",
                url=self.where,
            ) from error


#: True in a worker thread while the hooks after an attempt run.
_after_attempt: ContextVar[bool] = ContextVar("asyncworker_after_attempt", default=False)


class WorkerConsumer(_RedisConsumer):
    """Dramatiq's consumer, with every failure of the store as a connection error, so that it is tried again."""

    broker: WorkerBroker

    def ack(self, message: MessageProxy) -> None:
        self._patiently(lambda: super(WorkerConsumer, self).ack(message))

    def nack(self, message: MessageProxy) -> None:
        self._patiently(lambda: super(WorkerConsumer, self).nack(message))

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        self._as_connection_error(lambda: super(WorkerConsumer, self).requeue(messages))

    def __next__(self) -> MessageProxy | None:
        while True:
            if not self.message_cache:
                self._fetch()
            if not self.message_cache:
                # Nothing is waiting, or this worker holds all it may: come back after a growing pause.
                self.misses, pause_ms = compute_backoff(self.misses, max_backoff=self.timeout)
                time.sleep(pause_ms / 1000)
                return None
            self.misses = 0
            message = self._read(self.message_cache.pop(0))
            if message is not None:
                self.queued_message_ids.add(message.message_id)
                emit_receive(self.broker, message)
                return message

    def _fetch(self) -> None:
        room = self.prefetch - self.outstanding_message_count
        if room > 0:
            self.message_cache = self._as_connection_error(lambda: self.broker.do_fetch(self.queue_name, room))

    def _read(self, body: bytes | None) -> MessageProxy | None:
        """The message in `body`; None when it is none: it is in the dead letters then."""
        if body is None:  # its id was in the queue, its body is gone: flushed meanwhile
            return None
        try:
            message = MessageProxy(Message.decode(body))
            reason = _misfit(message)
        except DecodeError as error:
            reason = str(error.error)
        if reason is None:
            return message
        self._reject_body(body, reason)
        return None

    def _patiently(self, work: Callable[[], None]) -> None:
        """Repeat an acknowledgement until it is taken: given up, the message would be run again."""
        patiently(lambda: self._as_connection_error(work), "acknowledge a message")

    def _as_connection_error(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except redis.RedisError as error:
            raise ConnectionClosed(f"{self.broker.where}: {error}") from error
        except BrokerUnavailable as error:
            raise ConnectionClosed(error) from error

    def _reject_body(self, body: bytes, reason: str) -> None:
        """Move a body that is no message to the dead letters, with its bytes as they came."""
        identifier = self._identify(body)
        logger.error(
            "queue %r held a body that is no Dramatiq message (%s); it is in the dead letters as %s: %.200r",
            self.queue_name,
            reason,
            identifier,
            body,
        )
        if identifier is not None:
            patiently(lambda: self.broker.do_nack(self.queue_name, identifier), "reject a body")

    def _identify(self, body: bytes) -> str | None:
        """The id under which this consumer fetched `body`: a fetch returns bodies only."""
        namespace = self.broker.namespace
        fetched = f"{namespace}:__acks__.{self.broker.broker_id}.{self.queue_name}"
        client: Any = self.broker.client
        identifiers = patiently(lambda: sorted(client.smembers(fetched)), "read what was fetched")
        if not identifiers:
            return None
        bodies = patiently(
            lambda: client.hmget(f"{namespace}:{self.queue_name}.msgs", identifiers), "read what was fetched"
        )
        matching = (identifier for identifier, other in zip(identifiers, bodies, strict=True) if other == body)
        found = next(matching, None)
        return found.decode() if found is not None else None


class PatientResults(RedisBackend):  # type: ignore[misc]  # Dramatiq leaves its type open
    """Dramatiq's Redis results; a worker repeats storing one until it is taken.

    Waiting for a result asks again in slices shorter than the connection's own time limit, so that a long wait is
    no dead connection; limits below a second are kept too.
    """

    def get_result(self, message: Message[Any], *, block: bool = False, timeout: int | None = None) -> Any:
        """Get a result; see Dramatiq's. `timeout` is in ms, 10 seconds unless set.

        Raises:
            ResultMissing: When there is none yet and `block` is False.
            ResultTimeout: When there is none in time.
            ResultFailure: When the message was given up.
        """
        if not block:
            return super().get_result(message)
        key = self.build_message_key(message)
        deadline = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout) / 1000
        while (left := deadline - time.monotonic()) > 0:
            try:
                data = self.client.brpoplpush(key, key, max(0.01, min(left, RESULT_SLICE_S)))
            except redis.RedisError as error:
                if not passes(error) or deadline - time.monotonic() <= PAUSE_S:
                    raise
                time.sleep(PAUSE_S)  # it is away for the moment; the result is asked for again
                continue
            if data is not None:
                return self.unwrap_result(self.encoder.decode(data))
        raise ResultTimeout(message)

    def _store(self, message_key: str, result: Any, ttl: int) -> None:
        store = super()._store
        patiently(lambda: store(message_key, result, ttl), "store a result")


def _misfit(message: MessageProxy) -> str | None:
    """Why a decoded body is still no message; None: it is one."""
    wanted = {
        "actor_name": str,
        "message_id": str,
        "queue_name": str,
        "kwargs": dict,
        "options": dict,
        "message_timestamp": int | float,
    }
    for name, kind in wanted.items():
        if not isinstance(getattr(message, name), kind):
            return f"its {name} is {getattr(message, name)!r}"
    if not isinstance(message.options.get("redis_message_id"), str):
        return "its options have no redis_message_id"
    return None


_drawing = threading.Lock()


def _stored_seed(client: Any) -> int:
    """The deployment's seed in the store; whoever asks first draws it.

    Raises:
        BrokerUnavailable: When the store does not answer.
    """
    try:
        with _drawing:
            client.set(SEED_KEY, new_seed(), nx=True)
            return int(client.get(SEED_KEY))
    except redis.RedisError as error:
        raise BrokerUnavailable(
            f"the deployment's seed could not be read from the broker: {error}; nothing was sent"
        ) from error
