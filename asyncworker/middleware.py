"""What fires when: boot, shutdown, attempts.

Hooks record facts; whatever may fail runs in the actor's own call stack, since Dramatiq logs an exception of a
hook and runs the actor anyway. Derive from `Middleware` and add it with `get_broker().add_middleware(...)` to
have what Celery's signals give:

    ========================  ==========================================================================
    Celery's signal           hook
    ========================  ==========================================================================
    worker_process_init       after_process_boot(broker)
    worker_ready              after_worker_boot(broker, worker)
    before_task_publish       before_enqueue(broker, message, delay)
    after_task_publish        after_enqueue(broker, message, delay)
    task_received             after_receive_message(broker, message)
    task_prerun               before_process_message(broker, message)
    task_postrun              after_process_message(broker, message, result=..., exception=...)
    task_success              after_process_message with exception None
    task_failure              after_process_message with an exception; after_nack when no retry is left
    task_retry                after_retry_message(broker, message, exception=...)
    task_revoked              after_skip_message(broker, message)
    worker_shutting_down      before_worker_shutdown(broker, worker)
    worker_process_shutdown   after_worker_shutdown(broker, worker)
    ========================  ==========================================================================

All are Dramatiq's own but `after_receive_message` and `after_retry_message`, which Dramatiq lacks. A third of ours,
`after_lose_message`, is called by the next worker that has a message whose worker process had died under it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from dramatiq import Actor, Broker, MessageProxy, Worker
from dramatiq.asyncio import set_event_loop_thread
from dramatiq.middleware import Middleware as DramatiqMiddleware
from dramatiq.middleware import MiddlewareError

from asyncworker import processes, scratch
from asyncworker.accounting import LOSSES_OPTION, Accounting, keep_in_dead_letter, known_as, now_ms, outcome_of
from asyncworker.at_most_once import AT_MOST_ONCE, DELIVERY_OPTION, begin, check_delivery
from asyncworker.backlog import Backlog
from asyncworker.cancellations import as_cancelled
from asyncworker.engines import Engine
from asyncworker.errors import AsyncworkerError, DeclarationError, EngineError, InvalidArguments, TooManyRequests
from asyncworker.fencing import Fence
from asyncworker.heartbeat import consumed_queues
from asyncworker.ledger import Ledger, Outcome, Row
from asyncworker.loop import LoopThread
from asyncworker.once import Steps
from asyncworker.paced import NAVIGATIONS_OPTION, PACE_OPTION, Pacing, check_pace
from asyncworker.pacer import Pacer
from asyncworker.runtime import Runtime, set_runtime
from asyncworker.session import Attempt, current_attempt
from asyncworker.settings import DEFAULT_SLOTS, Settings
from asyncworker.step_records import MemoryStepRecords, StepRecords
from asyncworker.unique import UNIQUE_OPTION, check_unique

logger = logging.getLogger("asyncworker.worker")

#: The option of an actor that receives a session; `@actor` sets it.
SESSION_OPTION = "session"

#: The option that says whose seed a message without one gets: `deployment` or `message`.
IDENTITY_OPTION = "identity"

#: The option that holds more of Playwright's options of a new context.
CONTEXT_OPTION = "context_options"

#: A worker process stores its counts this often while it works, and at its end.
COUNT_EVERY_S = 1.0

#: A worker thread between two messages makes some ten round trips to the store, and after each waits for the
#: interpreter's lock, which the busy loop thread keeps for this long: at Python's default of 5 ms a slot would stay
#: empty for up to 50 ms after each message.
SWITCH_INTERVAL_S = 0.0005

#: How long the boot may ask for the engine before it goes on.
CHECK_TIMEOUT_MS = 10_000


#: An attribute of a message's proxy: how its attempt has failed, where its actor deals with that itself and returns.
FAILED_WITH = "failed_with"


class Middleware(DramatiqMiddleware):
    """Dramatiq's middleware with the two hooks that it lacks beside Celery's signals, and one for lost messages."""

    def after_receive_message(self, broker: Broker, message: MessageProxy) -> None:
        """Called when this worker has taken a message from its queue, before it waits for a thread."""

    def after_retry_message(self, broker: Broker, message: MessageProxy, *, exception: BaseException) -> None:
        """Called after a failed message was enqueued again; its option `retries` counts from 1."""

    def after_lose_message(self, broker: Broker, message: MessageProxy, *, losses: int, row: Row | None) -> None:
        """Called before the next attempt of a message whose worker process had died under it.

        Parameters:
            losses: How often that has happened.
            row: The attempt's, with its worker, seed and last phase; None: the ledger was not to be had.
        """


class NotDeclared(DeclarationError, MiddlewareError):
    """An actor's options cannot be; any other exception of a hook would be logged, and the actor declared."""


class BootFailed(MiddlewareError):
    """The worker process has no loop or no engine to ask, so it ends instead of failing every message."""


def emit_receive(broker: Broker, message: MessageProxy) -> None:
    """Call every middleware's `after_receive_message`, as Dramatiq calls its own hooks."""
    emit(broker, "after_receive_message", message)


def emit(broker: Broker, hook: str, message: MessageProxy, **facts: Any) -> None:
    for middleware in reversed(broker.middleware):
        if isinstance(middleware, Middleware):
            try:
                getattr(middleware, hook)(broker, message, **facts)
            except Exception:
                logger.critical("unexpected failure in %s of %r", hook, middleware, exc_info=True)


class BrowserMiddleware(Middleware):
    """The browser of a worker process, and the account of its attempts.

    Parameters:
        settings: The deployment's settings.
        ledger: Where attempts are recorded.
        draw_seed: Gives the deployment's seed, drawing it when it is the first to ask; may block.
        engine: What launches browsers; None: the one that the settings name.
        step_records: Where steps that are done once are kept; None: in this process.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ledger: Ledger,
        draw_seed: Callable[[], int],
        engine: Engine | None = None,
        step_records: StepRecords | None = None,
    ) -> None:
        self.settings = settings
        self.steps = Steps(
            step_records or MemoryStepRecords(),
            lease_ms=settings.heartbeat_timeout_ms,
            kept_ms=settings.once_ttl_ms,
        )
        self.ledger = ledger
        self.worker_id = ""
        self._draw_seed = draw_seed
        self._engine = engine
        self._seed = settings.seed
        self._loop: LoopThread | None = None
        self._runtime: Runtime | None = None
        self._accounting = Accounting(ledger)
        self._next_count = 0.0
        self._counts_losses = False
        self._is_warming = False
        #: Why the engine cannot launch, as the boot found it; None: it can.
        self.engine_problem: str | None = None

    @property
    def actor_options(self) -> set[str]:
        return {
            SESSION_OPTION,
            IDENTITY_OPTION,
            CONTEXT_OPTION,
            DELIVERY_OPTION,
            UNIQUE_OPTION,
            PACE_OPTION,
            NAVIGATIONS_OPTION,
        }

    @property
    def runtime(self) -> Runtime:
        """The worker's runtime.

        Raises:
            RuntimeError: Outside a worker.
        """
        if self._runtime is None:
            raise RuntimeError(
                "an actor runs in a worker: send() it a message and start `dramatiq asyncworker.actors`, or await "
                "its function `.fn_async(session, ...)` within open_session()"
            )
        return self._runtime

    @property
    def loop_thread(self) -> LoopThread | None:
        """The loop of the worker process, with its thread; None outside a worker."""
        return self._loop

    @property
    def backlog(self) -> Backlog:
        """What the ledger's store has not taken yet."""
        return self._accounting.backlog

    def keeps_waiting(self, broker: Broker, queue_name: str) -> bool:
        """Whether messages of the queue have to wait for a browser that is being launched here. Of any thread."""
        runtime = self._runtime
        if not self._is_warming and (runtime is None or not runtime.host.keeps_waiting):
            return False
        actors = [actor for actor in list(broker.actors.values()) if actor.queue_name == queue_name]
        return any(actor.options.get(SESSION_OPTION) for actor in actors)

    def deployment_seed(self) -> int:
        """The seed of messages that name none. May ask the store, once."""
        if self._seed is None:
            self._seed = self._draw_seed()
        return self._seed

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        try:
            check_unique(actor)
            check_delivery(actor)
            check_pace(
                actor,
                getattr(broker, "pacing", None) or Pacing(),
                is_kept=getattr(broker, "can_pace", False),
                broker=type(broker).__name__,
            )
        except DeclarationError as error:
            raise NotDeclared(str(error)) from None
        asked = [name for name in (UNIQUE_OPTION, DELIVERY_OPTION) if actor.options.get(name)]
        if asked and not getattr(broker, "can_guard", False):
            raise NotDeclared(
                f"{actor.actor_name} has {' and '.join(asked)}, which needs Redis or Valkey as the broker, and this is "
                f"{type(broker).__name__}; guard the effect by `session.once(...)` instead, which needs a store only"
            )

    # --- boot and shutdown

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        try:
            self._boot(broker, worker)
        except Exception as error:
            # Any other exception of a hook is logged, and the worker goes on without what it should have made.
            raise BootFailed(f"this worker cannot start: {error}") from error

    def _boot(self, broker: Broker, worker: Worker) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.worker_id = f"{socket.gethostname()}:{os.getpid()}"
        self._loop = LoopThread(cleanup_timeout_ms=self.settings.cleanup_timeout_ms)
        self._loop.start()
        set_event_loop_thread(self._loop)  # type: ignore[arg-type]  # Dramatiq's interface, not its class
        self._runtime = Runtime(self.settings, engine=self._engine)
        self._runtime.on_attempt = self._accounting.numbered
        self._runtime.on_session = self._accounting.session_began
        self._runtime.default_seed = self.deployment_seed
        self._runtime.steps, self._runtime.worker_id = self.steps, self.worker_id
        set_runtime(self._runtime, self._loop.loop)
        # Where the broker does not say what has begun, or who lives, the ledger has to.
        self._counts_losses = bool(getattr(broker, "leaves_losses_to_ledger", False))
        self._accounting.start(beats_as=self.worker_id if self._counts_losses else None)
        threading.Thread(target=self._sweep, name="asyncworker-sweep", daemon=True).start()
        self._runtime.limit(self.settings.slots or DEFAULT_SLOTS)
        if serves_sessions(broker, worker):
            self._trim(worker)
            self._check_engine()
            self._is_warming = self.settings.warm
        worker.queue_prefetch = worker.worker_threads  # no message waits here while another worker is idle

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if self._is_warming:
            threading.Thread(target=self._warm, name="asyncworker-warm", daemon=True).start()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        loop, runtime = self._loop, self._runtime
        if loop is None or runtime is None:
            return
        try:
            loop.drain(timeout_ms=self.settings.stop_timeout_ms)
            # A launch may have to end first; then each browser and the driver are closed within their bounds.
            limit_ms = self.settings.launch_timeout_ms + 3 * self.settings.close_timeout_ms
            loop.call(runtime.close(), timeout_ms=limit_ms)
        except TimeoutError:
            logger.error("the browsers did not close in time; killing them")
        finally:
            self._accounting.stop()
            mine = processes.new_token()
            processes.kill(lambda token: (token.pid, token.born) == (mine.pid, mine.born))
            self._record_counts(runtime)
            set_runtime(None)
            set_event_loop_thread(None)
            loop.stop()
            self._loop = self._runtime = None

    def interrupt_all(self) -> None:
        """Say in the ledger that what still runs was interrupted: the process ends under it, and gives it back."""
        self._accounting.interrupt_all(at_ms=now_ms())

    def _trim(self, worker: Worker) -> None:
        """Fit the worker's threads to the contexts that it may have."""
        slots, reason = self.settings.slots or DEFAULT_SLOTS, "ASYNCWORKER_SLOTS"
        engine = self.runtime.engine
        if engine.max_contexts is not None and engine.max_contexts < slots:
            slots, reason = engine.max_contexts, f"a browser of the engine {engine.name} serves no more at once"
        if slots < worker.worker_threads:
            logger.warning(
                "%d threads trimmed to %d slots (%s): concurrency is the request rate",
                worker.worker_threads,
                slots,
                reason,
            )
            worker.worker_threads = slots

    def _check_engine(self) -> None:
        if self._loop is None:
            return
        try:
            found = self._loop.call(self.runtime.engine.check(), timeout_ms=CHECK_TIMEOUT_MS)
            logger.info("engine: %s", found)
        except EngineError as error:
            self.engine_problem = f"this worker has no browser: {error}"
            logger.critical("%s", self.engine_problem)
        except TimeoutError:
            logger.error("the engine %s did not say in time whether it is there", self.runtime.engine.name)

    def _warm(self) -> None:
        loop, runtime = self._loop, self._runtime
        try:
            if loop is not None and runtime is not None:
                identity = runtime.identity(self.deployment_seed())
                loop.call(runtime.host.warm(identity), timeout_ms=self.settings.browser_wait_ms + 5_000)
        except (AsyncworkerError, TimeoutError) as error:
            logger.error("the browser could not be launched at boot: %s", error)
        finally:
            self._is_warming = False

    def _sweep(self) -> None:
        if killed := processes.sweep():
            logger.warning("killed %d processes that dead workers left behind", killed)
        if removed := scratch.sweep():
            logger.warning("removed %d temporary directories that dead workers left behind", removed)

    # --- attempts

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        actor = broker.get_actor(message.actor_name)
        seed = message.kwargs.get("seed")
        if seed is None and actor.options.get(SESSION_OPTION):
            # Sent by a producer that knows nothing of seeds: written into the message, so that retries keep it.
            seed = message.kwargs["seed"] = self.deployment_seed()
        row = Row(
            message_id=message.message_id,
            attempt=message.options.get("retries", 0) + 1,
            actor=known_as(message),
            seed=seed if isinstance(seed, int) else None,
            worker=self.worker_id,
            opened_ms=now_ms(),
        )
        has_session = bool(actor.options.get(SESSION_OPTION))
        at_once = has_session or self._counts_losses or bool(message.options.get(LOSSES_OPTION))
        row = self._accounting.begin(message, row, at_once=at_once, has_session=has_session)
        fence = self._fence(message, has_session)
        pacer = self._pacer(broker, message) if has_session else None
        current_attempt.set(Attempt(row.seed, row.message_id, row.actor, row.attempt, fencing=fence, pacer=pacer))
        if actor.options.get(DELIVERY_OPTION) == AT_MOST_ONCE:
            begin(broker, message, self.worker_id)

    def _pacer(self, broker: Any, message: MessageProxy) -> Pacer | None:
        """What the attempt waits by; None: its message has no pace, or none that could be found out."""
        if not getattr(broker, "can_pace", False):
            return None
        try:
            return broker.pacing.pacer(  # type: ignore[no-any-return]
                broker,
                message,
                limiter=broker.limiter,
                member=broker.member(message),
                seed=self.deployment_seed,
                on_due=lambda ms: broker.ring_in(message.queue_name, ms),
                sleep=broker.pace_sleep,
            )
        except InvalidArguments:  # its actor refuses them, too, with its own words
            return None

    def _fence(self, message: MessageProxy, at_once: bool) -> Fence:
        """The fence that the message was fetched with; where the broker gives none, the store does."""
        fetched: Fence | None = getattr(message, "fencing", None)
        fence = fetched or Fence(draw=self.steps.records.draw_fence)
        if at_once and fetched is None and not self._accounting.backlog.is_away:  # else whoever needs it asks
            try:
                fence.value  # noqa: B018 -- drawn before the attempt begins
            except redis.RedisError as error:
                logger.warning("the attempt of message %s has no fence yet: %s", message.message_id, error)
        return fence

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        exception = as_cancelled(broker, message, exception or getattr(message, FAILED_WITH, None))
        outcome = outcome_of(exception)
        if outcome is Outcome.deferred and message.failed and isinstance(exception, TooManyRequests):
            outcome = Outcome.failed  # one at most once is put off by no one
        self._close_row(outcome, exception)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._close_row(Outcome.rejected, None)

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:
        keep_in_dead_letter(broker, message)

    def _close_row(self, outcome: Outcome, exception: BaseException | None) -> None:
        current_attempt.set(None)
        if not self._accounting.close(outcome, exception, at_ms=now_ms()):
            return
        is_due = time.monotonic() >= self._next_count and not self._accounting.backlog.is_away
        if self._runtime is not None and is_due:
            self._next_count = time.monotonic() + COUNT_EVERY_S
            self._record_counts(self._runtime)

    def _record_counts(self, runtime: Runtime) -> None:
        if runtime.host.counts:
            try:
                self.ledger.count(self.worker_id, runtime.counts())
            except redis.RedisError as error:
                logger.warning("the counts of this worker could not be stored: %s", error)


def browsers_of(broker: Broker) -> BrowserMiddleware:
    """The middleware of a broker that has the browsers, and the account of their attempts."""
    return next(each for each in broker.middleware if isinstance(each, BrowserMiddleware))


def ledger_of(broker: Broker) -> Ledger:
    """The account of attempts that a broker's middleware keeps."""
    return browsers_of(broker).ledger


def backlog_of(broker: Broker) -> Backlog:
    """What the ledger's store has not taken yet from this process."""
    return browsers_of(broker).backlog


def steps_of(broker: Broker) -> Steps:
    """The steps that are done once, as a broker's middleware keeps them."""
    return browsers_of(broker).steps


def serves_sessions(broker: Broker, worker: Worker) -> bool:
    """True when one of the worker's queues belongs to an actor that receives a session."""
    queues = {actor.queue_name for actor in broker.actors.values() if actor.options.get(SESSION_OPTION)}
    return bool(queues & consumed_queues(broker, worker))
