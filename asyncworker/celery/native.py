"""Actors of this package send Celery's task signals, too, once a worker runs Celery tasks beside them.

So what a project has connected, to log or to count, sees a task that was ported to an actor as before. The sender is a
task of the actor's name, which is bound to the app and not registered.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals, states
from celery.app.task import Context
from celery.exceptions import Retry
from dramatiq import Broker, MessageProxy

from asyncworker.cancellations import Cancelled, as_cancelled
from asyncworker.celery.envelope import OPTION
from asyncworker.middleware import Middleware

_RETRIED = "celery_retried"
_STARTED = "celery_started"


class NativeSignals(Middleware):
    """The first of all middleware: when it is told of the end of a message, all others have decided about it.

    Parameters:
        app: The Celery app whose tasks the senders are.

    Attributes:
        hostname: The name of its worker here.
        consumer: The consumer of that, which is who receives messages.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.hostname = ""
        self.consumer: Any = None
        self._tasks: dict[str, Any] = {}

    def after_receive_message(self, broker: Broker, message: MessageProxy) -> None:
        if OPTION not in message.options:
            request = self._request(message)
            signals.task_received.send(sender=self.consumer, request=request)

    def begins(self, message: MessageProxy) -> None:
        """The actor's function is called next; told by the last of all middleware."""
        task, request = self._task(message), self._request(message)
        task.request_stack.push(request)
        setattr(message, _STARTED, time.monotonic())
        signals.task_prerun.send(
            sender=task, task_id=message.message_id, task=task, args=list(message.args), kwargs=message.kwargs
        )

    def after_retry_message(self, broker: Broker, message: MessageProxy, *, exception: BaseException) -> None:
        setattr(message, _RETRIED, True)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        started = getattr(message, _STARTED, None)
        if started is None:  # it has not begun, or is Celery's own
            return
        task = self._task(message)
        exception = as_cancelled(broker, message, exception)
        try:
            state = self._tell(task, message, started, result, exception)
            signals.task_postrun.send(
                sender=task,
                task_id=message.message_id,
                task=task,
                args=list(message.args),
                kwargs=message.kwargs,
                retval=result if exception is None else exception,
                state=state,
            )
        finally:
            task.request_stack.pop()
            setattr(message, _STARTED, None)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        if OPTION not in message.options and not message.failed:
            signals.task_revoked.send(
                sender=self._task(message),
                request=self._request(message),
                terminated=False,
                signum=None,
                expired=False,
            )

    def _tell(
        self, task: Any, message: MessageProxy, started: float, result: Any, exception: BaseException | None
    ) -> str:
        if exception is None:
            signals.task_success.send(sender=task, result=result, runtime=time.monotonic() - started)
            return str(states.SUCCESS)
        if isinstance(exception, Cancelled):
            signals.task_revoked.send(
                sender=task, request=self._request(message), terminated=True, signum=None, expired=False
            )
            return str(states.REVOKED)
        einfo = _info(exception)
        if getattr(message, _RETRIED, False):
            reason = Retry(exc=exception if isinstance(exception, Exception) else None)
            signals.task_retry.send(sender=task, request=self._request(message), reason=reason, einfo=einfo)
            return str(states.RETRY)
        signals.task_failure.send(
            sender=task,
            task_id=message.message_id,
            exception=exception,
            args=list(message.args),
            kwargs=message.kwargs,
            traceback=exception.__traceback__,
            einfo=einfo,
        )
        return str(states.FAILURE)

    def _task(self, message: MessageProxy) -> Any:
        name = message.actor_name
        if name not in self._tasks:
            kind: Any = type(name, (self._app.Task,), {"name": name, "__module__": __name__})
            kind.bind(self._app)
            self._tasks[name] = kind()
        return self._tasks[name]

    def _request(self, message: MessageProxy) -> Any:
        queue, retries = message.queue_name, message.options.get("retries", 0)
        return Context(
            id=message.message_id,
            task=message.actor_name,
            name=message.actor_name,
            args=list(message.args),
            kwargs=message.kwargs,
            retries=retries,
            root_id=message.message_id,
            hostname=self.hostname,
            delivery_info={"exchange": "", "routing_key": queue, "priority": 0, "redelivered": False},
            called_directly=False,
            is_eager=False,
        )


def _info(exception: BaseException) -> Any:
    return ExceptionInfo((type(exception), exception, exception.__traceback__ or sys.exc_info()[2]))
