"""The entry of `dramatiq asyncworker.actors`: its import is the start of a worker process.

It makes the broker, with the embedded server up when none is configured, and imports the deployment's actors:
each package or module of ASYNCWORKER_ACTORS, and the modules of a package in sorted order.
"""

from __future__ import annotations

from asyncworker.deployment import start

broker = start()
