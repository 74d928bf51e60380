"""An `async def` task that does the same, which Celery's own workers do not run."""

from __future__ import annotations

from _stamps import parameters, stamp
from celery import Celery

_url = parameters["url"]

app = Celery("on_adapter_async", broker=f"asyncworker+{_url}", backend=_url if parameters["results"] else None)
app.conf.task_ignore_result = not parameters["results"]


@app.task(name="note")
async def note(number: int) -> None:
    stamp(number)


send = note.delay
