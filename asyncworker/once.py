"""Steps that are done once: `async with session.once("insert", url) as step`.

A step is known by its actor, its name and its key, over all attempts, messages and workers. Its record in the store is
open (or there is none), held by one entry, done with a value, or unknown. What is promised:

- What is done stays done, for ASYNCWORKER_ONCE_TTL_MS: whoever enters then sees `step.done` and `step.value`.
- At any time one entry holds a step, and only the one that holds it can complete it. That one is an attempt whose
  message is still its worker's; any other gets StaleAttempt, when it enters or when it completes.
- What is not promised, since no store can: that an effect elsewhere and the completion here happen together. A worker
  that is killed between them leaves a step whose effect took place and that is not done. With `on_lost="open"` the next
  one enters it again, so the step runs at least once until it is complete. With `on_lost="unknown"` no one does: it
  runs at most once until a person decides. Exactly once needs the other side: an effect that may be repeated, or one
  that is refused there by `step.id` (a unique column in its transaction, an idempotency key).

Who holds a step no more, in the order in which that is asked:

1. The holder's message is its worker's no more: that was silent for the heartbeat timeout (killed, frozen, cut off),
   and another took it. Where the broker is the store, this is read in the step of the store in which a step is entered.
2. A later attempt of the same message enters: its fence is greater, so the earlier attempt has ended or is stale.
3. Another message with the same key finds the holder's lease over. A thread of the holder's process renews it six
   times in its length (the heartbeat timeout), whatever its loop is at. A lease that is over is looked at twice, a
   third of its length apart, since a store that was away could not have been told.

Another message that finds the step held waits for it for `wait_ms`, and raises StepHeld then: it is retried like after
any failure. What leaves the block without completing it (an exception, a time limit) leaves the step open for the next;
with `on_lost="unknown"` its outcome is unknown, unless the code has said `step.leave_open()`: that nothing took place.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import redis

from asyncworker.errors import BrokerUnavailable, StaleAttempt, StepHeld, UnknownOutcome
from asyncworker.fencing import Fence
from asyncworker.shielding import shielded
from asyncworker.step_records import Entry, StepRecords

logger = logging.getLogger("asyncworker")

OnLost = Literal["open", "unknown"]

#: Who waits for a held step looks this often, in s.
LOOK_S = 0.2

#: A completion that the store does not take is tried again after this, in s.
PAUSE_S = 0.2

#: So many times in its length a lease is renewed.
RENEWALS = 6

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Holder:
    """The attempt that enters steps."""

    message_id: str
    actor: str
    worker: str
    fencing: Fence


class Step:
    """A step that was entered.

    Attributes:
        id: Its actor, name and key as one text, the same for all attempts and messages: to make an effect unique by.
        fence: The fence of the attempt that has entered it.
        done: True when it was done before: then there is nothing to do.
    """

    def __init__(self, steps: Steps, entry: Entry, *, done: bool, value: Any = None) -> None:
        self.id = entry.step
        self.fence = entry.fence
        self.done = done
        self._steps = steps
        self._entry = entry
        self._value = value
        self._is_harmless = False

    @property
    def value(self) -> Any:
        """What was stored when it was done; set it to store it: anything that JSON has."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        if self.done:
            raise RuntimeError(f"step {self.id} is done already; set its value within `if not step.done:`")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the value of step {self.id} must be what JSON has: {error}") from None
        self._value = value

    def leave_open(self) -> None:
        """Say that the effect has not taken place: an exception then leaves the step open, whatever `on_lost`."""
        self._is_harmless = True

    async def confirm(self) -> None:
        """Ask the store whether this attempt still holds the step: right before an effect that cannot be taken back.

        Raises:
            StaleAttempt: When it does not.
        """
        if not await asyncio.to_thread(self._steps.records.confirm, self._entry):
            raise stale(self._entry)


class Steps:
    """The steps that the attempts of a process enter.

    Parameters:
        records: Where they are kept.
        lease_ms: How long the holder of a step is taken for alive without a sign of life.
        kept_ms: How long a step that is done is known.
    """

    def __init__(self, records: StepRecords, *, lease_ms: int = 15_000, kept_ms: int = 7 * 24 * 3_600_000) -> None:
        self.records = records
        self.lease_ms = lease_ms
        self.kept_ms = kept_ms
        self._held: set[Entry] = set()
        self._renewing: threading.Thread | None = None
        self._lock = threading.Lock()

    @contextlib.asynccontextmanager
    async def once(
        self, holder: Holder, name: str, key: str | int | None, *, on_lost: OnLost, wait_ms: int
    ) -> AsyncIterator[Step]:
        """Enter a step; see Session.once."""
        step_id = step_name(holder, name, key)
        if on_lost not in ("open", "unknown"):
            raise ValueError(f"on_lost={on_lost!r} is neither 'open' nor 'unknown'")
        fence = await asyncio.to_thread(lambda: holder.fencing.value)
        entry = Entry(
            step_id,
            f"{fence}.{next(_numbers)}",
            fence,
            holder.message_id,
            holder.worker,
            on_lost,
            self.lease_ms,
            self.kept_ms,
            holder.fencing.claim,
        )
        step = await self._enter(entry, time.monotonic() + wait_ms / 1000)
        if step.done:
            yield step
            return
        self._hold(entry)
        try:
            yield step
            await shielded(asyncio.to_thread(self._complete, entry, json.dumps(step.value)))
        except BaseException as error:
            if not isinstance(error, StaleAttempt):
                how = "open" if on_lost == "open" or step._is_harmless else "unknown"
                await shielded(asyncio.to_thread(self._leave, entry, how))
            raise
        finally:
            self._held.discard(entry)

    async def _enter(self, entry: Entry, deadline: float) -> Step:
        while True:
            entering = asyncio.ensure_future(asyncio.to_thread(self.records.enter, entry))
            try:
                word, *rest = await asyncio.shield(entering)
            except asyncio.CancelledError:
                # It may get the step all the same, and nothing took place.
                await shielded(asyncio.wait({entering}))
                if not entering.cancelled() and entering.exception() is None:
                    await shielded(asyncio.to_thread(self._leave, entry, "open"))
                raise
            match word:
                case "yours":
                    return Step(self, entry, done=False)
                case "done":
                    return Step(self, entry, done=True, value=json.loads(rest[0]))
                case "stale":
                    raise stale(entry)
                case "unknown":
                    raise _unknown(entry, *rest)
            if time.monotonic() + LOOK_S >= deadline:
                raise StepHeld(
                    f"step {entry.step} is held by message {rest[0]} on {rest[1]}, and was not done in time; this "
                    "message is retried",
                    step=entry.step,
                )
            await asyncio.sleep(LOOK_S)

    def _complete(self, entry: Entry, value: str) -> None:
        deadline = time.monotonic() + self.lease_ms / 1000
        while True:
            try:
                is_done = self.records.complete(entry, value)
                break
            except redis.RedisError as error:
                if time.monotonic() + PAUSE_S >= deadline:
                    raise BrokerUnavailable(
                        f"step {entry.step} has run, but the store did not take its completion within "
                        f"{self.lease_ms} ms: {error}; it counts as not complete"
                    ) from error
                time.sleep(PAUSE_S)
        if not is_done:
            raise stale(entry)

    def _leave(self, entry: Entry, how: str) -> None:
        try:
            self.records.leave(entry, how)
        except redis.RedisError as error:
            logger.warning("step %s is held until its lease is over: %s", entry.step, error)

    def _hold(self, entry: Entry) -> None:
        with self._lock:
            self._held.add(entry)
            if self._renewing is None:
                self._renewing = threading.Thread(target=self._renew, name="asyncworker-once", daemon=True)
                self._renewing.start()

    def _renew(self) -> None:
        """Renew the leases of what is held, until nothing is."""
        while True:
            time.sleep(self.lease_ms / RENEWALS / 1000)
            with self._lock:
                if not self._held:
                    self._renewing = None
                    return
            for entry in list(self._held):
                try:
                    if not self.records.renew(entry):
                        self._held.discard(entry)
                except redis.RedisError as error:
                    logger.warning("the lease of step %s is not renewed: %s", entry.step, error)


def step_name(holder: Holder, name: str, key: str | int | None) -> str:
    """A step as one text. The name has no colon, and the key comes last, so no two steps have the same.

    Raises:
        ValueError: When the name cannot be one, or the key is empty.
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            f"a step's name is letters, digits, and any of _.-, not {name!r}; what differs goes into its key"
        )
    if key is None:
        key = holder.message_id
    if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
        raise ValueError(
            f"the key of step {name} is a text or an integer that tells one effect from others, not {key!r}"
        )
    return f"{holder.actor}:{name}:{key}"


def stale(entry: Entry) -> StaleAttempt:
    return StaleAttempt(
        f"this attempt of message {entry.message} (fence {entry.fence}) is stale: its worker was taken for dead and "
        f"the message was taken by another, or step {entry.step} was, so it is not completed here; nothing is left to "
        "do, the other attempt goes on",
        step=entry.step,
        fence=entry.fence,
    )


def _unknown(entry: Entry, message: str, worker: str, since_ms: str) -> UnknownOutcome:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(int(since_ms) / 1000))
    return UnknownOutcome(
        f"no one knows whether step {entry.step} took place: message {message} on {worker} entered it and was lost "
        f"(noted at {at} UTC). Look, then say `asyncworker once resolve '{entry.step}' done` or `... open`, and "
        f"`asyncworker dead retry {entry.message}`",
        subject=entry.step,
    )
