"""get_broker(): the broker and the order of its middleware, written down once."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import cast

import dramatiq
import dramatiq.broker
from dramatiq.middleware import (
    AgeLimit,
    CurrentMessage,
    Pipelines,
    ShutdownNotifications,
)
from dramatiq.middleware import Middleware as DramatiqMiddleware
from dramatiq.results import Results
from dramatiq.results.backend import ResultBackend
from redis.backoff import NoBackoff
from redis.retry import Retry

from asyncworker.cancellations import Cancellations, RedisCancelRecords
from asyncworker.connecting import connect
from asyncworker.errors import BrokerUnavailable, ConfigurationError
from asyncworker.exchange import Exchange, NotSent, Unanswered
from asyncworker.fitness import Fitness
from asyncworker.health import Health
from asyncworker.heartbeat import Heartbeat
from asyncworker.hurry import Hurry
from asyncworker.identity import new_seed
from asyncworker.interrupts import Interrupts
from asyncworker.ledger import Kept, Ledger, RedisLedger
from asyncworker.losses import Losses
from asyncworker.middleware import BrowserMiddleware
from asyncworker.paced import Pacing
from asyncworker.producing import ProducerBroker
from asyncworker.redis_broker import WorkerBroker
from asyncworker.results import PatientResults
from asyncworker.retries import Callbacks, Retries
from asyncworker.settings import Settings, load
from asyncworker.step_records import RedisStepRecords, StepRecords
from asyncworker.supervised import Supervised
from asyncworker.time_limit import TimeLimit
from asyncworker.urls import SecretUrl
from asyncworker.watchdog import Watchdog

#: The deployment's seed, drawn by whoever asks first.
SEED_KEY = "asyncworker:seed"

#: A store of the ledger that is not the broker, too, is away when it has not answered once for this long.
LEDGER_TIMEOUT_S = 2.0
ONCE = Retry(NoBackoff(), 0)


def get_broker(settings: Settings | None = None) -> ProducerBroker:
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
    # A broker that someone has given this middleware by hand may lack what is only for convenience here.
    return cast(ProducerBroker, existing)


def make_broker(settings: Settings) -> ProducerBroker:
    """A new broker for these settings, not made global.

    Raises:
        ConfigurationError: When they name a broker that cannot be used.
    """
    if settings.broker_url is not None and settings.broker_url.is_rabbitmq:
        return _make_rabbitmq_broker(settings, settings.broker_url)
    return make_redis_broker(settings)


def make_redis_broker(settings: Settings) -> WorkerBroker:
    """The broker of settings that name Redis or Valkey, or none."""
    url, client = settings.broker_url, connect(settings)
    broker = WorkerBroker(
        client=client,
        where=str(url) if url else f"embedded Valkey in {settings.state_dir}",
        heartbeat_timeout_ms=settings.heartbeat_timeout_ms,
        send_timeout_ms=settings.send_timeout_ms,
        pacing=Pacing.of(settings),
    )
    broker.add_middleware(Supervised(settings))  # its hook after the boot is the last one to be called
    broker.add_middleware(Hurry(settings))  # and this one's after the shutdown
    broker.add_middleware(Health(settings))  # answers before all others begin, and until they have ended
    broker.add_middleware(Fitness())  # before anything else begins
    broker.add_middleware(Heartbeat(stop_timeout_ms=settings.stop_timeout_ms))
    if settings.store_url is not None:
        _add_middleware_with_store(broker, settings, settings.store_url)
        return broker
    for middleware in middleware_in_order(
        settings,
        # Rows travel with the acknowledgements, which go to the same store.
        ledger=RedisLedger(client, behind=broker.riding.put, kept=kept(settings)),
        step_records=RedisStepRecords(client, knows_claims=True),
        results=PatientResults(client=client, patience=broker.patience),
        draw_seed=lambda: _stored_seed(broker, broker.exchange, broker.where),
    ):
        broker.add_middleware(middleware)
    return broker


def _make_rabbitmq_broker(settings: Settings, url: SecretUrl) -> ProducerBroker:
    if settings.store_url is None:  # refused by the settings, which say what to set
        raise ConfigurationError(f"{url} is RabbitMQ, and there is no store", name="ASYNCWORKER_STORE_URL")
    try:
        from asyncworker.rabbitmq import Stopping, WorkerRabbitmqBroker
    except ModuleNotFoundError as error:
        if error.name != "pika":
            raise
        raise ConfigurationError(
            f"the broker {url} is RabbitMQ, and pika, which speaks to it, is not installed: "
            f"`{sys.executable} -m pip install 'asyncworker[rabbitmq]'`",
            name="ASYNCWORKER_BROKER_URL",
        ) from None
    broker = WorkerRabbitmqBroker(
        url=url, heartbeat_timeout_ms=settings.heartbeat_timeout_ms, send_timeout_ms=settings.send_timeout_ms
    )
    broker.add_middleware(Supervised(settings))
    broker.add_middleware(Hurry(settings))
    broker.add_middleware(Health(settings))
    broker.add_middleware(Stopping())
    _add_middleware_with_store(broker, settings, settings.store_url)
    return broker


def _add_middleware_with_store(broker: ProducerBroker, settings: Settings, url: SecretUrl) -> None:
    """The same middleware, whose data lie in a store that is not the broker."""
    own = settings.model_copy(update={"broker_url": url})
    client = connect(own)
    # No message waits for its row for long: what a store that is away does not take is kept, and written later.
    impatient = connect(own, socket_timeout=LEDGER_TIMEOUT_S, socket_connect_timeout=LEDGER_TIMEOUT_S, retry=ONCE)

    def draw_seed() -> int:
        with contextlib.closing(Exchange(client.connection_pool)) as exchange:
            return _stored_seed(broker, exchange, str(url))

    if broker.cancellations is None:  # where the broker is Redis, they lie there
        broker.cancellations = Cancellations(RedisCancelRecords(client, prefix="asyncworker:"))
    patience = broker.patience if isinstance(broker, WorkerBroker) else None
    ledger, results = RedisLedger(impatient, kept=kept(settings)), PatientResults(client=client, patience=patience)
    for middleware in middleware_in_order(
        settings, ledger=ledger, results=results, draw_seed=draw_seed, step_records=RedisStepRecords(client)
    ):
        broker.add_middleware(middleware)


def kept(settings: Settings) -> Kept:
    """How much the ledger of a deployment keeps."""
    return Kept(settings.ledger_age_ms, settings.ledger_rows)


def middleware_in_order(
    settings: Settings,
    *,
    ledger: Ledger,
    results: ResultBackend,
    draw_seed: Callable[[], int],
    step_records: StepRecords | None = None,
) -> list[DramatiqMiddleware]:
    """The middleware, in order: `before_` hooks run down the list, `after_` hooks up it."""
    return [
        Losses(ledger, max_losses=settings.max_losses),  # may have one wait for long, before its time runs
        AgeLimit(),  # may skip a message, so it comes before anything that begins one
        ShutdownNotifications(),
        CurrentMessage(),
        Watchdog(settings),  # until the loop has ended
        # The attempt's row is opened when all that may skip it has run, and closed when Retries has decided.
        BrowserMiddleware(settings, ledger=ledger, draw_seed=draw_seed, step_records=step_records),
        Callbacks(),
        Pipelines(),
        Retries(),
        Results(backend=results, result_ttl=settings.result_ttl_ms),  # stored before anything reports success
        TimeLimit(settings),  # of the actor alone: it begins late and ends early
        Interrupts(),  # the same, and what was cancelled is told to all others
    ]


_drawing = threading.Lock()


def _stored_seed(broker: ProducerBroker, exchange: Exchange, where: str) -> int:
    """The deployment's seed in the store; whoever asks first draws it, within the time for sending.

    Raises:
        BrokerUnavailable: When the store does not answer, or refuses.
    """
    refusal: BaseException | None
    with broker.one_send(), _drawing:  # who waits for the lock uses up its own time
        try:
            answers = exchange.ask([("SET", SEED_KEY, new_seed(), "NX"), ("GET", SEED_KEY)], broker.deadline())
            refusal = next((answer for answer in answers if isinstance(answer, Exception)), None)
        except (NotSent, Unanswered) as reason:
            refusal = reason.__cause__
    if refusal is None:
        return int(answers[1])
    raise BrokerUnavailable(
        f"the store ({where}) of the deployment's seed does not answer: {refusal}; nothing was sent",
        url=where,
        sent=False,
    ) from refusal
