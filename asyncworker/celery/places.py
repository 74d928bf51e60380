"""Which process of a Celery worker this is, and whether it may have a browser."""

from __future__ import annotations

from asyncworker.celery.process import Process

#: What `install` has made; None: it was not called, so the process is a script, or a worker of ours.
process: Process | None = None


def check() -> None:
    """Raise ForkedBrowser where no browser may be, and see to it that there is a loop where one may."""
    if process is not None:
        process.check()
