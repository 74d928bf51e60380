"""get_broker(): the broker and the order of its middleware, written down once."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from uuid import uuid4

import dramatiq
import dramatiq.broker
import redis
from dramatiq import Broker, Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, dq_name
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
from asyncworker.consumer import WorkerConsumer
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.heartbeat import Heartbeat
from asyncworker.identity import new_seed
from asyncworker.ledger import Ledger, RedisLedger
from asyncworker.middleware import BrowserMiddleware
from asyncworker.patience import passes, patiently
from asyncworker.retries import Retries
from asyncworker.settings import Settings, load

_SCRIPT = (Path(__file__).parent / "broker.lua").read_text()

#: By the start of its id a broker of ours is told from Dramatiq's own, which says nothing while its worker is busy
#: and is waited for this long.
OURS = "asyncworker-"
PLAIN_TIMEOUT_MS = 60_000

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
    broker = WorkerBroker(
        client=client,
        where=str(url) if url else f"embedded Valkey in {settings.state_dir}",
        heartbeat_timeout_ms=settings.heartbeat_timeout_ms,
        send_timeout_ms=settings.send_timeout_ms,
    )
    broker.add_middleware(Heartbeat())
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
    """Dramatiq's Redis broker, with commands of its own in the store (broker.lua).

    An enqueue wakes an idle consumer, delayed messages wait in the store, and a worker that died has its messages
    taken back within the heartbeat timeout. The keys are Dramatiq's: its own workers and producers may stand on the
    other side of a queue.

    Parameters:
        where: The broker in words, without its password, for errors.
        heartbeat_timeout_ms: A worker that was not heard of for this long is taken for dead.
        send_timeout_ms: How long a producer tries to have a message taken.
    """

    def __init__(
        self, *, client: redis.Redis, where: str, heartbeat_timeout_ms: int = 15_000, send_timeout_ms: int = 10_000
    ) -> None:
        super().__init__(client=client, middleware=[], heartbeat_timeout=heartbeat_timeout_ms)
        self.broker_id = f"{OURS}{uuid4()}"
        self.where = where
        self._send_timeout_ms = send_timeout_ms
        self._script = client.register_script(_SCRIPT)
        self._held: defaultdict[str, set[str]] = defaultdict(set)

    @property
    def consumer_class(self) -> type[WorkerConsumer]:
        return WorkerConsumer

    def held(self, queue_name: str) -> set[str]:
        """The ids of what this process's worker holds of a queue."""
        return self._held[queue_name]

    def wake_key(self, queue_name: str) -> str:
        """The list by which an idle consumer of a queue is woken."""
        return f"{self.namespace}:{queue_name}.wake"

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue. Delayed messages wait in the store, so no consumer is made for them."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def flush(self, queue_name: str) -> None:
        """Drop all messages of a queue: waiting, delayed, and dead letters."""
        self.do_purge(queue_name)

    def recover(self, queue_name: str) -> int:
        """Say that this process lives, and take back what dead workers hold of a queue; returns how many messages."""
        recovered: int = self.do_recover(
            queue_name, self.heartbeat_timeout, max(self.heartbeat_timeout, PLAIN_TIMEOUT_MS), self.dead_message_ttl
        )
        return recovered

    def leave(self) -> None:
        """Say that this process's worker has stopped: what it still holds is taken back at once, not in time."""
        self.do_leave("")

    def _dispatch(self, command: str) -> Callable[..., Any]:
        def do(queue_name: str, *args: Any) -> Any:
            return self._script(keys=[self.namespace], args=[command, queue_name, self.broker_id, *args])

        return do

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue a message, `delay` ms from now; there is no longest delay.

        Raises:
            BrokerUnavailable: When the broker did not take it in time; `sent` says whether it may have. Not after an
                attempt: the retry, the next of a pipeline and a callback wait for the broker, since what is not
                enqueued then is lost.
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
        queue_name, identifier, changes = message.queue_name, str(uuid4()), {}
        options: dict[str, Any] = {}
        if delay is not None:
            queue_name, eta = dq_name(queue_name), current_millis() + delay
            identifier = f"{identifier}@{eta}"  # where the store reads it
            changes, options = {"queue_name": queue_name}, {"eta": eta}
        message = message.copy(**changes, options=options | {"redis_message_id": identifier})
        self.emit_before("enqueue", message, delay)
        self._deliver(message, queue_name, identifier)
        self.emit_after("enqueue", message, delay)
        return message

    def _deliver(self, message: Message[Any], queue_name: str, identifier: str) -> None:
        """Have a message taken, within `send_timeout_ms`; repeated under its id, which the store takes once."""
        body, deadline, may_be_sent = message.encode(), time.monotonic() + self._send_timeout_ms / 1000, False
        while True:
            try:
                self.do_enqueue(queue_name, identifier, body)
                return
            except redis.RedisError as error:
                may_be_sent = may_be_sent or _is_unclear(error)
                if passes(error) and time.monotonic() + PAUSE_S < deadline:
                    time.sleep(PAUSE_S)
                    continue
                outcome = "it may have been sent nevertheless" if may_be_sent else "it was not sent"
                raise BrokerUnavailable(
                    f"the broker ({self.where}) did not take message {message.message_id} for {message.actor_name} "
                    f"within {self._send_timeout_ms} ms (ASYNCWORKER_SEND_TIMEOUT_MS): {error}; {outcome}",
                    url=self.where,
                    sent=None if may_be_sent else False,
                ) from error


def _is_unclear(error: redis.RedisError) -> bool:
    """True when the connection was lost after the command may have gone out: no answer says what became of it."""
    refused = isinstance(error.__cause__ or error.__context__, ConnectionRefusedError | FileNotFoundError)
    return isinstance(error, redis.ConnectionError | redis.TimeoutError) and not (
        refused or "connecting to" in str(error)
    )


#: True in a worker thread while the hooks after an attempt run.
_after_attempt: ContextVar[bool] = ContextVar("asyncworker_after_attempt", default=False)


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
