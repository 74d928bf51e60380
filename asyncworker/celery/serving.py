"""Serving: a worker process runs the tasks of Celery apps beside its actors."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from typing import Any

import celery
import dramatiq
from celery import Celery, signals
from celery.app.utils import find_app
from celery.worker import state as celery_state
from dramatiq import Broker, MessageProxy, Worker
from dramatiq.middleware import CurrentMessage, Shutdown

from asyncworker.cancellations import Cancelled
from asyncworker.celery import names
from asyncworker.celery.async_tasks import is_async
from asyncworker.celery.bodies import adopt
from asyncworker.celery.delivery import Delivery, current_delivery
from asyncworker.celery.envelope import OPTION, actor_of, delay_ms, facts_of
from asyncworker.celery.limits import Limits
from asyncworker.celery.native import NativeSignals
from asyncworker.celery.node import Node
from asyncworker.celery.process_signals import ProcessSignals
from asyncworker.celery.rates import DeploymentRates, Rates, WorkerRates
from asyncworker.celery.sparing import spare
from asyncworker.celery.stores import SCHEME, is_ours, store_of
from asyncworker.errors import ConfigurationError
from asyncworker.limiter import PREFIX, Limiter, RedisLimiter
from asyncworker.losses import MAX_LOSSES_OPTION
from asyncworker.middleware import BootFailed, Middleware
from asyncworker.redis_broker import WorkerBroker
from asyncworker.settings import CeleryRates, Settings

logger = logging.getLogger("asyncworker.celery")

#: The oldest and the newest Celery with which the tests of this package have passed.
TESTED = ((5, 4), (5, 7))

#: What has to wait for longer than this goes back to the broker, in ms; a shorter wait is waited for here.
LONG_MS = 1_000

#: A message that has this attribute has come as far as to its actor.
_HANDED = "was_handed_to_celery"

#: Who waits sees this often whether the process stops, in s.
LOOK_S = 0.1


def serve(settings: Settings, broker: Broker, modules: Iterable[str]) -> list[Any]:
    """Have this process's worker run the tasks of the deployment's Celery apps; returns these.

    Parameters:
        modules: The modules of the deployment's actors, in which apps are looked for when no setting names one.

    Raises:
        ConfigurationError: When an app is not there, or sends its tasks elsewhere.
    """
    apps = [_find(name) for name in settings.celery_app] if settings.celery_app else _apps_in(modules)
    if apps:
        native = NativeSignals(apps[0])
        broker.add_middleware(native, before=type(broker.middleware[0]))
        broker.add_middleware(Serving(settings, apps, native))
    return apps


def _find(name: str) -> Any:
    try:
        app = find_app(name)
    except Exception as error:
        raise ConfigurationError(
            f"ASYNCWORKER_CELERY_APP={name}: that app does not import: {type(error).__name__}: {error}",
            name="ASYNCWORKER_CELERY_APP",
        ) from error
    if not isinstance(app, Celery):
        raise ConfigurationError(
            f"ASYNCWORKER_CELERY_APP={name} is no Celery app, but {type(app).__name__}", name="ASYNCWORKER_CELERY_APP"
        )
    url = app.conf.broker_write_url or app.conf.broker_url
    if not is_ours(url):
        raise ConfigurationError(
            f"the app {name} sends its tasks to {str(url).partition('://')[0] or 'no broker'}://, and this worker "
            f'takes them from {SCHEME}://; set broker_url="{SCHEME}://" in its configuration',
            name="ASYNCWORKER_CELERY_APP",
        )
    return app


def _apps_in(modules: Iterable[str]) -> list[Any]:
    found: dict[int, Any] = {}
    for name in modules:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, Celery) and is_ours(value.conf.broker_write_url or value.conf.broker_url):
                found[id(value)] = value
    return list(found.values())


class Serving(Middleware):
    """Hands the messages of Celery apps to Celery."""

    def __init__(self, settings: Settings, apps: list[Any], native: NativeSignals) -> None:
        self._settings = settings
        self._apps = apps
        self._native = native
        self._nodes: list[Node] = []
        self._rates: Rates = WorkerRates()
        self._broker: Any = None
        self._process: ProcessSignals | None = None
        self._limits: Limits | None = None

    # --- boot and shutdown

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        try:
            self._boot(broker, worker)
        except Exception as error:
            logger.exception("the Celery apps of this worker cannot be served")
            raise BootFailed(f"this worker cannot start: {type(error).__name__}: {error}") from error

    def _boot(self, broker: Broker, worker: Worker) -> None:
        self._broker = broker
        for app in self._apps:
            app.loader.init_worker()  # imports what the app's configuration names
            app.finalize()
        _warn(self._apps)
        spare()
        self._set_threads(worker)
        self._limits = Limits(broker, cleanup_s=self._settings.cleanup_timeout_ms / 1000)
        self._nodes = [Node(app, broker=broker, worker=worker, place=place) for place, app in enumerate(self._apps)]
        self._native.hostname, self._native.consumer = self._nodes[0].hostname, self._nodes[0].consumer
        if self._settings.celery_rates is CeleryRates.deployment:
            self._rates = DeploymentRates(_limiter(broker, self._apps[0]), getattr(broker, "patience", None))
        for node in self._nodes:
            node.consumer.rates = self._rates
            self._rates.begin(node.consumer)
            node.consumer.queues = queues_of(node.app)
            node.consumer.revoked.look()
            node.pool.limits = self._limits
            for task in node.app.tasks.values():
                adopt(task)
        self._declare(broker, worker)
        self._process = ProcessSignals(self._nodes)

    def _set_threads(self, worker: Worker) -> None:
        plain = [task.name for app in self._apps for task in own_tasks(app) if not is_async(task)]
        most = self._settings.celery_threads or (1 if plain else worker.worker_threads)
        if most < worker.worker_threads:
            logger.warning(
                "%d threads trimmed to %d: %s", worker.worker_threads, most, _why(plain, self._settings.celery_threads)
            )
        if most > 1 and plain and signals.worker_process_init.receivers:
            logger.warning(
                "handlers of worker_process_init are called in one of %d threads: what they make for a thread, such as "
                "a browser of Playwright's synchronous API, works in none of the others",
                most,
            )
        if most < worker.worker_threads or self._settings.celery_threads:
            worker.worker_threads = most
            worker.queue_prefetch = most

    def _declare(self, broker: Broker, worker: Worker) -> None:
        queues = list(dict.fromkeys(queue for app in self._apps for queue in queues_of(app)))
        say_begin: set[str] = getattr(broker, "queues_that_say_begin", set())
        for step in names.STEPS:
            for queue in queues:
                broker.declare_queue(names.to_dramatiq(queue, step))
                # A task that had begun is not run again, and one that had not is: so that has to be known for certain.
                say_begin.add(names.to_dramatiq(queue, step))
            dramatiq.Actor(
                self.run,
                broker=broker,
                actor_name=actor_of(step),
                queue_name=names.to_dramatiq(queues[0], step),
                priority=step,
                # Celery is told of each loss, of the last one too; see `Consumer.lose`.
                options={
                    "max_retries": 0,
                    MAX_LOSSES_OPTION: self._settings.max_losses + 1,
                    "time_limit": float("inf"),
                },
            )
        if isinstance(broker, WorkerBroker):
            for queue in queues:
                broker.precedence.order(names.all_steps(queue))
        if chosen := worker.consumer_whitelist:  # dramatiq's --queues, by either name
            named = [queue for queue in queues if {queue, names.to_dramatiq(queue)} & chosen]
            chosen |= {step for queue in named for step in names.all_steps(queue)}

    def after_worker_thread_boot(self, broker: Broker, thread: Any) -> None:
        if self._process is not None:
            self._process.thread_began(thread)

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if self._process is not None:
            self._process.began()

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        if self._process is not None:
            self._process.stops()

    def before_worker_thread_shutdown(self, broker: Broker, thread: Any) -> None:
        if self._process is not None:
            self._process.thread_ends(thread)

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        if self._process is not None:
            self._process.ended()
        if self._limits is not None:
            self._limits.stop()

    # --- messages

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if OPTION not in message.options:
            self._begin(message)
            self._native.begins(message)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """A Celery message that was cancelled (`asyncworker cancel`) before it began is a revoked task."""
        if not isinstance(exception, Cancelled) or OPTION not in message.options or hasattr(message, _HANDED):
            return
        delivery = Delivery(broker, message)
        node = self._node_of(task := facts_of(delivery.payload).get("task"))
        if task in node.app.tasks:
            node.consumer.request(delivery.message())._announce_revoked("revoked", False, None, False)

    def run(self, task: str) -> None:
        """The actor of all Celery messages. What their task comes to is Celery's to say, and no failure here."""
        delivery = Delivery(self._broker, CurrentMessage.get_current_message())  # type: ignore[arg-type]
        setattr(delivery.proxy, _HANDED, True)
        if delivery.has_ended:
            return
        message = delivery.message()
        facts = facts_of(delivery.payload)
        node = self._node_of(facts.get("task"))
        token = current_delivery.set(delivery)
        node.app.set_current()
        try:
            if delivery.losses > 0 and facts.get("task") in node.app.tasks:
                node.consumer.lose(delivery, message, most=self._settings.max_losses)
                if not delivery.requeue:
                    delivery.end()
                    return
                message = delivery.message()
                delivery.requeue = False
            if not self._waits(node, delivery, facts):
                self._hand_over(node, delivery, message)
        finally:
            current_delivery.reset(token)
            forget(message)

    def _hand_over(self, node: Node, delivery: Delivery, message: Any) -> None:
        self._begin(delivery.proxy)
        node.consumer.handle(message)
        if delivery.due is not None:
            eta, begin = delivery.due
            self._wait(eta - time.time())
            begin()
        if delivery.requeue:
            delivery.again(redelivered=True)
        else:
            delivery.end()

    def _begin(self, message: MessageProxy) -> None:
        if message.queue_name in getattr(self._broker, "queues_that_say_begin", ()):
            self._broker.begin(message)

    def _waits(self, node: Node, delivery: Delivery, facts: Any) -> bool:
        """Send what is too early back to the broker; True when it was."""
        left_ms = delay_ms(facts.get("eta")) or 0
        if left_ms > LONG_MS:
            delivery.again(delay_ms=left_ms)
            return True
        has_slot, task = delivery.state.pop("paced", False), facts.get("task")
        while task in node.app.tasks:
            wait = self._rates.wait(node.consumer, task, has_slot=has_slot)
            if wait.seconds * 1000 > LONG_MS:
                delivery.again(delay_ms=round(wait.seconds * 1000), paced=wait.has_slot)
                return True
            self._wait(wait.seconds)
            if wait.has_slot and (has_slot or not wait.seconds):
                break
            has_slot = wait.has_slot
        return False

    def _wait(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (left_s := ends - time.monotonic()) > 0:
            if getattr(self._broker, "is_stopping", False):
                raise Shutdown("the worker process is shutting down")
            time.sleep(min(LOOK_S, left_s))

    def _node_of(self, task: object) -> Node:
        return next((node for node in self._nodes if task in node.app.tasks), self._nodes[0])


def _limiter(broker: Any, app: Any) -> Limiter:
    """Where the deployment's rates are counted: in the broker, or in the store beside RabbitMQ."""
    if isinstance(broker, WorkerBroker):
        return broker.limiter
    store = store_of(app.conf.broker_write_url or app.conf.broker_url)
    return RedisLimiter(store, prefix=f"dramatiq{PREFIX}")


def _warn(apps: list[Any]) -> None:
    version = tuple(int(part) for part in celery.__version__.split(".")[:2] if part.isdigit())
    if version > TESTED[-1]:
        tested = " to ".join(".".join(map(str, each)) for each in TESTED)
        logger.warning("Celery %s is newer than what asyncworker was tested with: %s", celery.__version__, tested)
    for app in apps:
        for step in app.steps["worker"]:
            logger.warning("the bootstep %s of Celery's worker is not run: that worker is never started here", step)


def own_tasks(app: Any) -> list[Any]:
    """An app's tasks without Celery's own."""
    return [task for name, task in app.tasks.items() if not name.startswith("celery.")]


def queues_of(app: Any) -> list[str]:
    """The queues of an app: those that it names, and those that it sends to."""
    found = list(app.amqp.queues.consume_from)
    for route in (app.conf.task_routes or {}).values() if isinstance(app.conf.task_routes, dict) else ():
        queue = route.get("queue") if isinstance(route, dict) else route
        if isinstance(queue, str):
            found.append(queue)
    found += [task.queue for task in own_tasks(app) if isinstance(getattr(task, "queue", None), str)]
    return [str(getattr(queue, "name", queue)) for queue in found]


def forget(message: Any) -> None:
    """Have Celery's account of requests not keep one that is over."""
    request = celery_state.requests.pop((message.headers or {}).get("id"), None)
    if request is not None:
        for kept in (celery_state.scheduled_requests, celery_state.reserved_requests, celery_state.active_requests):
            kept.discard(request)


def _why(plain: list[str], chosen: int | None) -> str:
    if chosen:
        return "ASYNCWORKER_CELERY_THREADS"
    return (
        f"{len(plain)} Celery tasks are plain functions, {plain[0]} among them, and what they share is made in one "
        "thread (ASYNCWORKER_CELERY_THREADS says otherwise)"
    )
