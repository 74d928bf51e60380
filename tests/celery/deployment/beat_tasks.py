"""The app of a beat process."""

from __future__ import annotations

from facts_tasks import app

app.conf.beat_schedule = {"soon": {"task": "facts.order", "schedule": 1.0, "args": ("by beat",)}}
