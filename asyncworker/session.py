"""Session: what an actor receives for one attempt, and the attempt that it is."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncworker import identity as identities
from asyncworker.contexts import current_lease
from asyncworker.fencing import Fence
from asyncworker.generation import Lease
from asyncworker.identity import Identity
from asyncworker.once import Holder, OnLost, Step, Steps
from asyncworker.pacer import Pacer
from asyncworker.settings import Settings
from asyncworker.step_records import MemoryStepRecords

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

logger = logging.getLogger("asyncworker")


@dataclass(frozen=True)
class Attempt:
    """One execution of a message.

    Attributes:
        seed: The message's seed; None: the deployment's.
        number: Counted from 1 over all executions of the message, by the ledger.
        deadline: The loop's time at which the time limit passes; None: there is none, or it has not begun, since the
            session's page is not open yet.
    """

    seed: int | None = None
    message_id: str | None = None
    actor: str | None = None
    number: int = 1
    deadline: float | None = None
    fencing: Fence = field(default_factory=Fence, repr=False, compare=False)
    pacer: Pacer | None = field(default=None, repr=False, compare=False)

    @property
    def fence(self) -> int:
        """An integer that only grows over the attempts of a message, given by the store when a worker takes it.

        With RabbitMQ an attempt without a session asks the store for it here, which blocks for a round trip.
        """
        return self.fencing.value


#: The attempt that the running worker thread, and the code that it started on the loop, is at.
current_attempt: ContextVar[Attempt | None] = ContextVar("asyncworker_attempt", default=None)


class SessionLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines end with the facts of their attempt; they are attributes of the record, too."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        facts = dict(self.extra or {})
        kwargs["extra"] = {**facts, **kwargs.get("extra", {})}
        return f"{msg} [{' '.join(f'{name}={fact}' for name, fact in facts.items())}]", kwargs


class Session:
    """What an actor receives for one attempt, as a bound Celery task receives `self`.

    Attributes:
        seed: The seed of the message: the same on every attempt.
        identity: What a site sees as one visitor, derived from the seed.
        attempt: Which execution of which message this is.
        settings: The worker's settings.
        log: A logger whose lines say to which message, actor, attempt, seed, identity and browser they belong.
    """

    def __init__(
        self,
        lease: Lease,
        attempt: Attempt,
        identity: Identity,
        settings: Settings,
        *,
        steps: Steps | None = None,
        worker: str = "",
    ) -> None:
        self.attempt = attempt
        self.identity = identity
        self.seed = identity.seed
        self.settings = settings
        self.log = SessionLog(logger, facts_of(attempt, identity, lease))
        self._lease = lease
        self._steps = steps or Steps(MemoryStepRecords())
        self._worker = worker
        self._random: random.Random | None = None

    @property
    def page(self) -> Page:
        """The page, already open."""
        return self._open_lease().page

    @property
    def context(self) -> BrowserContext:
        """The fresh context of this attempt."""
        return self._open_lease().context

    @property
    def browser(self) -> Browser:
        """The browser, shared with other attempts; contexts opened on it here are closed with this session."""
        return self._open_lease().browser

    @property
    def generation(self) -> int:
        """Which launch of this worker process the browser is, counted from 1."""
        return self._lease.generation.number

    @property
    def random(self) -> random.Random:
        """Pseudo-random numbers derived from the seed: each attempt draws the same ones."""
        if self._random is None:
            self._random = identities.stream(self.seed, "session")
        return self._random

    def once(
        self, name: str, key: str | int | None = None, *, on_lost: OnLost = "open", wait_ms: int = 10_000
    ) -> contextlib.AbstractAsyncContextManager[Step]:
        """A step that is done once, over all attempts, duplicates and workers; what is promised stands in once.py.

            async with session.once("insert", url) as step:
                if not step.done:
                    step.value = await insert(url, unique_by=step.id)
            return step.value

        The step is done when the block ends without an exception. Outside a worker only this session knows of it.

        Parameters:
            name: Which step of this actor it is.
            key: Which of its effects, over all messages of this actor; None: this message's own.
            on_lost: What becomes of a step whose holder died, or whose block raised: `open`: the next one enters it;
                `unknown`: no one does, until a person has said by `asyncworker once resolve` what became of it.
            wait_ms: How long to wait for another message that holds it.

        Raises:
            StepHeld: When that was not done in time; this message is retried.
            StaleAttempt: When this attempt's message was taken by another worker.
            UnknownOutcome: When a person has to decide; the message is in the dead letters then.
            ValueError: For a name or key that cannot be one.
            redis.RedisError, BrokerUnavailable: When the store does not answer.
        """
        attempt = self.attempt
        holder = Holder(attempt.message_id or "", attempt.actor or "", self._worker, attempt.fencing)
        return self._steps.once(holder, name, key, on_lost=on_lost, wait_ms=wait_ms)

    async def pace(self, url: str) -> None:
        """Wait for a slot at a further URL's host, by the pace of this actor and the deployment's rules.

        The first URL's slot is taken before the code begins. However long the wait is, it is slept here, within the
        actor's time limit: code that has begun cannot be put off. Outside a worker, and where neither the actor nor a
        rule has a pace for the host, this returns at once.

        Raises:
            ValueError: When it is no http or https URL.
            BudgetSpent: When the day's budget is used up, and the pace says to reject then.
            SessionOver: When the session is over.
        """
        self._open_lease()
        if self.attempt.pacer is not None:
            await self.attempt.pacer.pace(url)
            self._open_lease()

    def _open_lease(self) -> Lease:
        ending = self._lease.ending
        # To the session's own code, which goes on although it was cancelled, each call says so: it takes its time.
        if ending.has_come and current_lease.get() is not self._lease:
            raise ending.error()
        return self._lease

    def __repr__(self) -> str:
        return f"<Session of {subject(self.attempt)}, seed {self.seed}, browser {self.generation}>"


def subject(attempt: Attempt) -> str:
    """Whose session it is, in words."""
    return f"message {attempt.message_id} ({attempt.actor})" if attempt.message_id else "open_session()"


def facts_of(attempt: Attempt, identity: Identity, lease: Lease) -> dict[str, object]:
    facts: dict[str, object] = {
        "message_id": attempt.message_id,
        "actor": attempt.actor,
        "attempt": attempt.number,
        "seed": identity.seed,
    }
    if identity.digest is not None:
        facts["identity"] = identity.digest
    return facts | {"browser": lease.generation.number}
