"""Pacer: how one attempt waits for its slots."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import redis

from asyncworker.errors import BrokerUnavailable, BudgetSpent, PaceDeferred
from asyncworker.limiter import WITHOUT_END_MS, Answer, Limiter, Verdict
from asyncworker.pace import Pace, Terms, host_of, key_of, shown
from asyncworker.threads import in_thread

logger = logging.getLogger("asyncworker.worker")

#: A store that does not answer is asked again after this: without an answer no one may go.
AGAIN_S = 0.5

P = ParamSpec("P")
R = TypeVar("R")


class Pacer:
    """The slots of one attempt.

    Parameters:
        limiter: Who gives them.
        key: Of the message.
        pace: Of the message.
        member: How the limiter names the message.
        pace_of: Gives the pace of a further URL's subject; None: it has none.
        exit_: The address that traffic leaves by.
        counts_by_message: All that the message asks for is counted by its own key.
        seed: Of the jitter.
        hold_ms: A wait for no longer is slept before the code begins.
        navigations: Each navigation of its pages waits for a slot by itself.
        on_due: Told in how many ms a line is to be looked at.
        sleep: Sleeps so many seconds.

    Attributes:
        is_used: A page was sent somewhere in the message's own slot.
    """

    def __init__(
        self,
        limiter: Limiter,
        *,
        key: str,
        pace: Pace,
        member: str,
        pace_of: Callable[[str], Pace | None],
        exit_: str,
        counts_by_message: bool,
        seed: int,
        hold_ms: float,
        navigations: bool = False,
        on_due: Callable[[float], object] = lambda ms: None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.limiter = limiter
        self.key = key
        self._pace = pace
        self._member = member
        self._pace_of = pace_of
        self._exit = exit_
        self._counts_by_message = counts_by_message
        self._seed = seed
        self._hold_ms = hold_ms
        self.navigations = navigations
        self.is_used = False
        self._on_due = on_due
        self._sleep = sleep
        self._has_begun = False

    @property
    def listens(self) -> bool:
        """Whether what pages do by themselves is to be seen: then the client tells of each of their requests."""
        return self.navigations or bool(self._pace.slow_down_on)

    async def begin(self) -> None:
        """Take the message's own slot, once, and wait for it.

        Raises:
            PaceDeferred: When it is too far off.
            BudgetSpent: When the day's budget is used up, and the pace says to reject then.
        """
        if self._has_begun:
            return
        answer = await self._commit(self.key, self._pace, self._member, self._hold_ms)
        if answer.verdict is Verdict.later:
            raise self._deferral(answer.wait_ms)
        if answer.wait_ms > 0:
            await self._sleep(answer.wait_ms / 1000)
            # Whoever was told to slow down meanwhile spoke for this one, too.
            if (held_ms := await self._ask(self.limiter.held_ms, self.key)) > 0:
                raise self._deferral(held_ms)
        self._has_begun = True

    async def pace(self, url: str) -> None:
        """Take a slot for a further URL, and wait for it as long as it takes.

        Raises:
            ValueError: When it is no http or https URL.
            BudgetSpent: When the day's budget is used up, and the pace says to reject then.
        """
        found = self.of(url)
        if found is None:
            return
        key, pace = found
        while (answer := await self._commit(key, pace, "", WITHOUT_END_MS)).verdict is Verdict.later:
            await self._sleep(max(self._hold_ms, answer.wait_ms) / 1000)
        await self._sleep(answer.wait_ms / 1000)
        while (held_ms := await self._ask(self.limiter.held_ms, key)) > 0:
            await self._sleep(held_ms / 1000)

    async def count(self, url: str) -> None:
        """Take a slot for what was asked for already: whoever comes next waits for it."""
        if (found := self.of(url)) is not None:
            with contextlib.suppress(BudgetSpent):
                await self._commit(*found, "", WITHOUT_END_MS)

    async def slow_down(self, key: str, *, for_ms: float | None, reason: str) -> float | None:
        """Hold a key, since its site says so; returns for how many ms, None: it was held already."""
        return await self._ask(self.limiter.slow_down, key, for_ms=for_ms, reason=reason)

    async def succeeded(self, key: str) -> int:
        """Say that a site has answered well; returns how often its rate is still halved."""
        return await self._ask(self.limiter.succeeded, key)

    async def held_ms(self, key: str) -> float:
        """For how long a key is still held."""
        return await self._ask(self.limiter.held_ms, key)

    def of(self, url: str) -> tuple[str, Pace] | None:
        """The key and the pace of a URL for this message; None: it has no pace."""
        host = host_of(url)
        if host is None:
            raise ValueError(f"{url!r} is no http or https URL, so it has no pace")
        if self._counts_by_message:
            return self.key, self._pace
        pace = self._pace_of(host)
        return None if pace is None else (key_of(host, self._exit), pace)

    async def _commit(self, key: str, pace: Pace, member: str, most_ms: float) -> Answer:
        terms = Terms.of(pace, seed=self._seed)
        answer = await self._ask(self.limiter.commit, key, terms, member=member, hold_ms=self._hold_ms, most_ms=most_ms)
        if answer.next_due_ms is not None:
            self._on_due(answer.next_due_ms)
        if answer.verdict is Verdict.spent:
            raise BudgetSpent(
                f"the budget of {pace.budget} a day for {shown(key)} is used up, and over_budget='reject'", key=key
            )
        return answer

    async def _ask(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        is_away = False
        while True:
            try:
                return await in_thread(call, *args, **kwargs)
            except (redis.RedisError, BrokerUnavailable) as error:
                if not is_away:
                    logger.warning("no one may go to %s until the store answers: %s", shown(self.key), error)
                is_away = True
                await self._sleep(AGAIN_S)

    def _deferral(self, wait_ms: float) -> PaceDeferred:
        return PaceDeferred(
            f"{shown(self.key)} has no slot for {wait_ms:.0f} ms; the message waits in line",
            key=self.key,
            wait_ms=wait_ms,
        )
