"""The task of `on_celery` on this project's workers: one setting is another."""

from __future__ import annotations

from _stamps import parameters
from on_celery import app, later, note, send

app.conf.broker_url = f"asyncworker+{parameters['url']}"

__all__ = ["app", "later", "note", "send"]
