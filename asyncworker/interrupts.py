"""Interrupts: ends the attempt of a message that was cancelled, and lets none begin.

Its thread is interrupted as by its time limit: the code is cancelled, its session is over and its context closed, each
within its bounds. Such a message is settled for good: no retry, no next of its pipeline, no callback, no dead letter.
Its row is `rejected` with the error `Cancelled`, and who waits for its result gets that error.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
from dataclasses import dataclass
from typing import Any

import redis
from dramatiq import Actor, Broker, Message, MessageProxy, Worker
from dramatiq.middleware import Middleware
from dramatiq.results import Results
from dramatiq.threading import raise_thread_exception

from asyncworker.cancellations import Cancellations, Cancelled, as_cancelled
from asyncworker.time_limit import TimeLimit

logger = logging.getLogger("asyncworker.worker")

#: A worker that runs something asks the store this often who was cancelled, in s; an idle one does not ask.
EVERY_S = 1.0

#: A thread that is not in its actor's code, so soon after the beginning or so close to the end, is looked at again.
AGAIN_S = 0.02

#: What a call of an actor's function looks like on a thread's stack.
_CALL = Actor.__call__.__code__


@dataclass
class _Running:
    message_id: str
    is_told: bool = False


class Interrupts(Middleware):
    """It stands last, so that the hooks of the others are not interrupted: only the actor's code is."""

    def __init__(self) -> None:
        self._running: dict[int, _Running] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._limit: TimeLimit | None = None

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        if _of(broker) is None:
            return
        self._limit = next((each for each in broker.middleware if isinstance(each, TimeLimit)), None)
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(broker,), name="asyncworker-interrupts", daemon=True)
        self._thread.start()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * EVERY_S)
            self._thread = None

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        cancellations = _of(broker)
        if cancellations is None:
            return
        if not cancellations.told_by_fetch:
            self._ask(cancellations, message)
        with self._lock:
            # Here, and not before: what is told from now on finds the message among the running.
            is_cancelled = message.message_id in cancellations
            if not is_cancelled:
                self._running[threading.get_ident()] = _Running(message.message_id)
        if is_cancelled:
            logger.info("message %s (%s) was cancelled and does not begin", message.message_id, message.actor_name)
            raise Cancelled

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._over()
        cancellations = _of(broker)
        if cancellations is None or exception is None:
            return
        if isinstance(error := as_cancelled(broker, message, exception), Cancelled):
            store_error(broker, message, error)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        self._over()

    def _ask(self, cancellations: Cancellations, message: MessageProxy) -> None:
        try:
            if cancellations.records.has(message.message_id):
                cancellations.look()
        except redis.RedisError as error:
            logger.warning("message %s begins; whether it was cancelled is not known: %s", message.message_id, error)

    def _over(self) -> None:
        """The actor's code has ended on this thread: from here on it is not interrupted, nor by what was on its way."""
        while True:
            try:
                with self._lock:
                    running = self._running.pop(threading.get_ident(), None)
                    if running is not None and running.is_told:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)
                return
            except Cancelled:
                continue

    def _run(self, broker: Broker) -> None:
        cancellations, waits_s, is_away = _of(broker), EVERY_S, False
        while cancellations is not None and not self._stop.wait(waits_s):
            if not self._running:
                continue
            try:
                cancellations.look()
                is_away = False
            except redis.RedisError as error:
                if not is_away:
                    logger.warning("who was cancelled is not known for now: %s", error)
                is_away = True
            waits_s = EVERY_S if self._interrupt(cancellations) else AGAIN_S

    def _interrupt(self, cancellations: Cancellations) -> bool:
        """Interrupt the threads whose messages were cancelled; False when one could not be, yet."""
        all_told = True
        with self._lock:
            for thread, running in self._running.items():
                if running.is_told or running.message_id not in cancellations:
                    continue
                if not _is_in_code(thread):
                    all_told = False
                    continue
                running.is_told = True
                raise_thread_exception(thread, Cancelled)  # type: ignore[no-untyped-call]
                logger.info("message %s was cancelled; its thread is interrupted", running.message_id)
                if self._limit is not None:
                    self._limit.expect_end(thread)
        return all_told


def _of(broker: Any) -> Cancellations | None:
    return getattr(broker, "cancellations", None)


def _is_in_code(thread: int) -> bool:
    """True while the thread is in its actor's function: what is raised elsewhere would end the thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is _CALL:
            return True
        frame = frame.f_back
    return False


def store_error(broker: Broker, message: Any, error: BaseException, *, may_store: bool = False) -> None:
    """Have who waits for the result of a cancelled message, or of what follows it in its pipeline, get the error.

    Parameters:
        may_store: What to do where the actor is not known here, and with it whether it stores results.
    """
    results = next((each for each in broker.middleware if isinstance(each, Results)), None)
    if results is None:
        return
    following: dict[str, Any] | None = dict(message.asdict())
    while following is not None:
        with contextlib.suppress(TypeError):
            one: Message[Any] = Message(**following)
            stores = one.options.get("store_results", may_store)
            ttl_ms = one.options.get("result_ttl", results.result_ttl)
            if one.actor_name in broker.actors:
                stores, ttl_ms = results._lookup_options(broker, one)  # type: ignore[no-untyped-call]
            if stores:
                results.backend.store_exception(one, error, ttl_ms)
        following = (following.get("options") or {}).get("pipe_target")
