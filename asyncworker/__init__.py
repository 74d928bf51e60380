"""Dramatiq actors for browser work: one long-lived browser a worker, a fresh context a message.

A map, top to bottom; each file may import what stands above it in its group or in an earlier group:

    errors, identity, settings, ledger          core: no queue, no browser library
    processes, engines/, browser, loop, runtime the browser and one attempt on it
    embedded, middleware, broker, actor         the edges: Dramatiq
    deployment, actors                          entry of `dramatiq asyncworker.actors`
    guard                                       what the shipped actors refuse
    doctor, demo/, cli                          the command `asyncworker`
    testing, pytest_plugin                      for users' tests and ours

Browser libraries are imported on use: importing this package costs a producer no 0.4 s.
"""

from asyncworker.actor import SessionActor, actor
from asyncworker.broker import get_broker
from asyncworker.errors import AsyncworkerError
from asyncworker.middleware import Middleware
from asyncworker.runtime import Attempt, Session, open_session
from asyncworker.settings import Settings

__all__ = [
    "AsyncworkerError",
    "Attempt",
    "Middleware",
    "Session",
    "SessionActor",
    "Settings",
    "actor",
    "get_broker",
    "open_session",
]

__version__ = "0.1.0"
