"""Results that outlive an absence of the store."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

import redis
from dramatiq import Message
from dramatiq.results.backend import DEFAULT_TIMEOUT
from dramatiq.results.backends import RedisBackend
from dramatiq.results.errors import ResultTimeout

from asyncworker.patience import PAUSE_S, Patience, passes, patiently
from asyncworker.result_watch import ResultWatch

R = TypeVar("R")

#: A wait is asked for in slices shorter than the connection's own time limit.
RESULT_SLICE_S = 2.0


class PatientResults(RedisBackend):  # type: ignore[misc]  # Dramatiq leaves its type open
    """Dramatiq's Redis results; a worker repeats storing one until it is taken.

    Waiting for a result asks again in slices shorter than the connection's own time limit, so that a long wait is
    no dead connection; limits below a second are kept too.

    Parameters:
        patience: Of the worker that stores; None: for ever.
    """

    def __init__(self, *, client: redis.Redis, patience: Patience | None = None, **options: Any) -> None:
        super().__init__(client=client, **options)
        self._patience = patience
        self.watch = ResultWatch(client.connection_pool)

    def get_result(self, message: Message[Any], *, block: bool = False, timeout: int | None = None) -> Any:
        """Get a result; see Dramatiq's. `timeout` is in ms, 10 seconds unless set.

        Raises:
            ResultMissing: When there is none yet and `block` is False.
            ResultTimeout: When there is none in time.
            ResultFailure: When the message was given up.
        """
        if not block:
            return super().get_result(message)
        key = self.build_message_key(message)
        deadline = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout) / 1000
        while (left := deadline - time.monotonic()) > 0:
            try:
                data = self.client.brpoplpush(key, key, max(0.01, min(left, RESULT_SLICE_S)))
            except redis.RedisError as error:
                if not passes(error) or deadline - time.monotonic() <= PAUSE_S:
                    raise
                time.sleep(PAUSE_S)  # it is away for the moment; the result is asked for again
                continue
            if data is not None:
                return self.unwrap_result(self.encoder.decode(data))
        raise ResultTimeout(message)

    async def aget_result(self, message: Message[R], *, timeout_ms: int) -> R:
        """Wait for a result without blocking the loop, whichever it is; woken by the result.

        Raises:
            ResultTimeout: When there is none in time; its cause is what the store said, where that was away.
            ResultFailure: When the message was given up.
        """
        future = self.watch.wait_for(self.build_message_key(message))
        try:
            data = await asyncio.wait_for(asyncio.wrap_future(future), timeout_ms / 1000)
        except TimeoutError:
            raise ResultTimeout(message) from self.watch.trouble
        result: R = self.unwrap_result(self.encoder.decode(data))
        return result

    def _store(self, message_key: str, result: Any, ttl: int) -> None:
        store = super()._store
        patiently(lambda: store(message_key, result, ttl), "store a result", self._patience)
