"""The same with an `async def` task, which Celery's own workers do not run."""

from __future__ import annotations

from _stamps import stamp
from on_adapter import app


@app.task(name="async_note")
async def note(number: int) -> None:
    stamp(number)


send = note.delay
