"""Launcher: brings one browser up at a time for each key, within its bound, and not at once again after a failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from asyncworker.engines import Engine, Launched
from asyncworker.errors import EngineError, LaunchFailed
from asyncworker.generation import Clock
from asyncworker.identity import Identity
from asyncworker.settings import Settings

logger = logging.getLogger("asyncworker.browser")

#: A pause after failed launches grows to this and no further.
LONGEST_BACKOFF_MS = 60_000

#: The engine keeps the launch's limit itself and cleans up; one that does not is left behind after this.
ENGINE_GRACE_S = 5.0


@dataclass
class _Backoff:
    """When a key may be launched again after failures."""

    failures: int = 0
    not_before: float = 0.0


class Launcher:
    """Launches browsers of one engine.

    Parameters:
        too_late: Called with a browser that came up after its launch was given up.
    """

    def __init__(self, engine: Engine, settings: Settings, clock: Clock, *, too_late: Callable[[Launched], None]):
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._too_late = too_late
        self._backoffs: dict[Hashable, _Backoff] = {}
        #: Why the latest launch failed; None: it did not.
        self.failure: str | None = None

    async def launch(self, key: Hashable, identity: Identity) -> Launched:
        """Launch a browser, after the pause that earlier failures of its key ask for.

        Raises:
            LaunchFailed: When it did not come up in time, or not at all.
        """
        backoff = self._backoffs.setdefault(key, _Backoff())
        if (pause := backoff.not_before - self._clock.monotonic()) > 0:
            logger.warning("waiting %d ms before %s is launched again", pause * 1000, self._engine.name)
            await self._clock.sleep(pause)
        try:
            launched = await self._bounded(identity)
        except LaunchFailed as error:
            backoff.failures += 1
            doubled = self._settings.launch_backoff_ms * 2 ** min(backoff.failures - 1, 16)
            backoff.not_before = self._clock.monotonic() + min(doubled, LONGEST_BACKOFF_MS) / 1000
            self.failure = f"launch {backoff.failures} in a row failed: {error}"
            logger.error("%s", self.failure)
            raise
        del self._backoffs[key]
        self.failure = None
        return launched

    async def _bounded(self, identity: Identity) -> Launched:
        limit_ms = self._settings.launch_timeout_ms
        launching = asyncio.ensure_future(self._engine.launch(identity))
        await asyncio.wait({launching}, timeout=limit_ms / 1000 + ENGINE_GRACE_S)
        if not launching.done():
            launching.add_done_callback(self._ended_too_late)
            raise LaunchFailed(
                f"{self._engine.name} did not start in {limit_ms} ms (ASYNCWORKER_LAUNCH_TIMEOUT_MS); "
                "run `asyncworker doctor`",
                engine=self._engine.name,
            )
        try:
            return launching.result()
        except EngineError:
            raise
        except Exception as error:
            raise LaunchFailed(
                f"{self._engine.name} did not start: {type(error).__name__}: {error}; run `asyncworker doctor`",
                engine=self._engine.name,
            ) from error

    def _ended_too_late(self, launching: asyncio.Future[Launched]) -> None:
        if not launching.cancelled() and launching.exception() is None:
            self._too_late(launching.result())
