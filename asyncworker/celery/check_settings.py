"""What becomes of a Celery app's settings on these workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from celery import Celery
from celery.app.defaults import DEFAULTS

from asyncworker.celery.findings import Finding, attention, differs, same

#: Celery's versions that this was compared with, from and to.
TESTED = ((5, 4), (5, 7))

_NO_PROCESSES = "no process is replaced by a count of tasks; browsers are, see ASYNCWORKER_RECYCLE_AFTER"
_NO_LOGGING = "Dramatiq's command sets up logging, and its handlers stay"
_NO_CLASS = "Celery's own class for its worker process; here that is Dramatiq's, and yours is not used"
_NO_SHUTDOWN = "a stop is Dramatiq's: SIGTERM, --worker-shutdown-timeout and ASYNCWORKER_STOP_TIMEOUT_MS"

#: Settings that mean something else here, or nothing, each with how to say it: what is not named is Celery's own, and
#: Celery's own code reads it here, too.
_SETTINGS: dict[str, tuple[Callable[[str, str], Finding], str]] = {
    "broker_url": (differs, 'becomes "asyncworker://": the broker of the deployment, ASYNCWORKER_BROKER_URL'),
    "broker_read_url": (attention, "would win over broker_url: remove it"),
    "broker_write_url": (attention, "would win over broker_url: remove it"),
    "broker_transport_options": (
        differs,
        "has no meaning for tasks: a message is held as long as its worker lives, not for a visibility_timeout, and "
        "the other options are of the transport that is left",
    ),
    "broker_use_ssl": (differs, "has no meaning: TLS is in ASYNCWORKER_BROKER_URL, as rediss:// or amqps://"),
    "task_always_eager": (attention, "tasks run in their producer and reach no worker, here as there"),
    "task_queue_max_priority": (
        differs,
        "has no meaning: there are the steps 0, 3, 6 and 9, and 0 is first, as with Celery's Redis; with RabbitMQ the "
        "highest number was",
    ),
    "task_acks_on_failure_or_timeout": (attention, "what failed is not left to a dead letter exchange of RabbitMQ"),
    "task_acks_on_failure": (attention, "what failed is not left to a dead letter exchange of RabbitMQ"),
    "task_acks_on_timeout": (attention, "what failed is not left to a dead letter exchange of RabbitMQ"),
    "worker_autoscaler": (attention, f"there is none: processes and threads are fixed; {_NO_CLASS}"),
    "worker_consumer": (attention, _NO_CLASS),
    "worker_agent": (attention, _NO_CLASS),
    "worker_timer": (differs, _NO_CLASS),
    "worker_max_tasks_per_child": (differs, _NO_PROCESSES),
    "worker_max_memory_per_child": (
        differs,
        "no process is replaced by its memory; browsers are, see ASYNCWORKER_RECYCLE_MEMORY_MB",
    ),
    "worker_prefetch_multiplier": (differs, "has no meaning: a process takes as many messages as it has threads"),
    "worker_disable_prefetch": (differs, "has no meaning: a process takes as many messages as it has threads"),
    "worker_eta_task_limit": (differs, "has no meaning: what has an eta waits in the broker, not in a worker"),
    "worker_proc_alive_timeout": (differs, "has no meaning: a worker_process_init may take its time"),
    "worker_lost_wait": (differs, "has no meaning: a dead process is noticed by its heartbeat"),
    "worker_pool_restarts": (differs, "has no meaning: `dramatiq` restarts its processes on SIGHUP"),
    "worker_state_db": (differs, "has no meaning: what was revoked is kept by the broker"),
    "worker_soft_shutdown_timeout": (differs, _NO_SHUTDOWN),
    "worker_enable_soft_shutdown_on_idle": (differs, _NO_SHUTDOWN),
    "worker_cancel_long_running_tasks_on_connection_loss": (
        differs,
        "has no meaning: a task that runs while the broker is away ends, and is acknowledged when that is back",
    ),
    "worker_redirect_stdouts": (differs, _NO_LOGGING),
    "worker_redirect_stdouts_level": (differs, _NO_LOGGING),
    "worker_hijack_root_logger": (differs, _NO_LOGGING),
    "worker_log_color": (differs, _NO_LOGGING),
    "worker_log_format": (differs, _NO_LOGGING),
    "worker_log_datefmt": (differs, _NO_LOGGING),
    "worker_task_log_format": (differs, _NO_LOGGING),
    "worker_task_log_datefmt": (differs, _NO_LOGGING),
}

_GREEN = ("eventlet", "gevent")


def settings_of(app: Celery) -> Iterator[Finding]:
    """Everything to say about the app's configuration."""
    for name, (level, what) in _SETTINGS.items():
        if name in DEFAULTS and app.conf.get(name) not in (DEFAULTS[name], None):
            yield level(name, what)
    yield from _pool(app)
    yield from _results(app)
    yield from _queues(app)
    yield from _steps(app)


def version_of(version: tuple[int, int], text: str) -> Iterator[Finding]:
    """What to say about the installed Celery."""
    first, last = TESTED
    if not first <= version <= last:
        tested = f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"
        yield attention("celery", f"this is Celery {text}; these workers were compared with {tested}")


def _pool(app: Celery) -> Iterator[Finding]:
    pool, concurrency = app.conf.worker_pool, app.conf.worker_concurrency
    if pool in _GREEN:
        yield attention(
            "worker_pool",
            f"there is no {pool}: write tasks `async def`, which share one loop, or run sync ones in several processes",
        )
    elif pool != DEFAULTS["worker_pool"]:
        yield differs("worker_pool", f"{pool!r} becomes `dramatiq asyncworker.actors -p 1`, with -t for threads")
    if concurrency and concurrency != 1:
        how = f"-t {concurrency}" if pool == "threads" else f"-p {concurrency} -t 1"
        yield differs(
            "worker_concurrency",
            f"{concurrency} becomes `{how}`; -p counts processes, each with a browser of its own, and -t the tasks at "
            "once in each",
        )


def _results(app: Celery) -> Iterator[Finding]:
    backend = app.conf.result_backend
    if not backend or backend == "disabled":
        yield same("result_backend", "no results are kept, as before")
    else:
        yield same(
            "result_backend",
            f"results stay where they are, in Celery's format ({backend.partition(':')[0]}); asyncworker:// would be "
            "the deployment's Redis",
        )


def _queues(app: Celery) -> Iterator[Finding]:
    # kombu's: a Broadcast has a fanout exchange.
    for queue in app.conf.task_queues or ():
        exchange: Any = getattr(queue, "exchange", None)
        if getattr(exchange, "type", "direct") == "fanout":
            name = getattr(queue, "alias", None) or queue.name  # a Broadcast's name is drawn anew each time
            yield attention(
                f"queue {name}", "a task for every worker is not carried; send one to a queue of each worker"
            )
        elif getattr(queue, "queue_arguments", None):
            names = ", ".join(sorted(queue.queue_arguments))
            yield attention(f"queue {queue.name}", f"arguments of RabbitMQ's queues are not carried: {names}")


def _steps(app: Celery) -> Iterator[Finding]:
    for kind in ("worker", "consumer"):
        for step in sorted(app.steps[kind], key=repr):
            yield attention(
                f"bootstep {step.__name__}", f"steps of Celery's {kind} are not run; connect a signal instead"
            )
    if app.user_options["worker"] or app.user_options["preload"]:
        yield attention("user_options", "workers are started by `dramatiq`, which does not know them: read a variable")
