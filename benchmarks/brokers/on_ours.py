"""This project's broker with its middleware, and actors that need no browser."""

from __future__ import annotations

from asyncworker import get_broker

get_broker()

from _dramatiq import held, hold, later, note, send  # noqa: E402 -- actors are declared on the broker that is there

__all__ = ["held", "hold", "later", "note", "send"]
