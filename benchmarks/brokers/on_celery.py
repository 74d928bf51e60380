"""Celery, which runs no async functions: the same body, without `async`."""

from __future__ import annotations

from _stamps import parameters, stamp
from celery import Celery

app = Celery("on_celery", broker=parameters["url"], backend=parameters["url"] if parameters["results"] else None)
app.conf.task_ignore_result = not parameters["results"]  # in broker.py nothing is kept of a message that has ended
app.conf.broker_connection_retry_on_startup = True


@app.task(name="note")
def note(number: int) -> None:
    stamp(number)


send = note.delay


def later(number: int, delay_ms: int) -> None:
    note.apply_async((number,), countdown=delay_ms / 1000)
