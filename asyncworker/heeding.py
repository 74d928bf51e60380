"""Heeding: what a site says to the pages of a session is done for all workers.

    429 or 503 to a page that was sent somewhere ──► the key is held, for Retry-After or a back-off, and slowed
        page.goto(...) and its like               ──► raises TooManyRequests: the message waits in line again
        a click, a form, a script                 ──► the code is ended with it, as when its page has died
    2xx ──► a step back to the former rate, where the key was slowed

A site cannot see this: the answers are listened to, and the calls are wrapped on this side. Nothing is intercepted, as
a route would have it, which costs each request a round trip and switches the browser's cache off. So what the page
itself sends is not held back; with `navigations` it is counted when it is answered, and what comes next waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

from asyncworker.errors import TooManyRequests
from asyncworker.generation import Lease
from asyncworker.pace import Pace, host_of, shown
from asyncworker.pacer import Pacer
from asyncworker.retry_after import retry_after_ms

logger = logging.getLogger("asyncworker.worker")

#: The calls that send a page somewhere and give the answer.
CALLS = ("goto", "reload", "go_back", "go_forward")

#: So long it may take to tell the store what was heard: one that is away lets no one go, either.
TELL_S = 5.0

#: A key that was at its full rate is asked about again after this.
CLEAR_S = 30.0
MOST_CLEAR = 4_096


class Recovery:
    """Which keys are at their full rate, as far as this process knows, so that not each success is told.

    Parameters:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clear_until: dict[str, float] = {}

    def is_to_tell(self, key: str) -> bool:
        return self._clock() >= self._clear_until.get(key, 0.0)

    def is_clear(self, key: str) -> None:
        if len(self._clear_until) >= MOST_CLEAR:
            self._clear_until.clear()
        self._clear_until[key] = self._clock() + CLEAR_S

    def is_slowed(self, key: str) -> None:
        self._clear_until.pop(key, None)


@dataclass
class _Sent:
    """What one page is at.

    Attributes:
        calls: So many of CALLS are under way.
        paid: So many answers have had their slot before.
        refusal: What the call under way is to raise.
        last: The last answer that was looked at.
    """

    calls: int = 0
    paid: int = 0
    refusal: TooManyRequests | None = None
    last: Any = None

    def take(self) -> TooManyRequests | None:
        refusal, self.refusal = self.refusal, None
        return refusal


class Heeding:
    """Listens to the pages of one session, also to those that it opens in its context.

    Parameters:
        pacer: Of the attempt.
        recovery: Of the process.
        spawn: Runs what outlives the session.
        end_code: Ends the session's code with an error.
    """

    def __init__(
        self,
        lease: Lease,
        pacer: Pacer,
        *,
        recovery: Recovery,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        end_code: Callable[[TooManyRequests], object],
    ) -> None:
        self._context: Any = lease.context
        self._pacer = pacer
        self._recovery = recovery
        self._spawn = spawn
        self._end_code = end_code
        self._pages: dict[Any, _Sent] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        for page in self._context.pages:
            self._adopt(page)
        self._context.on("page", self._adopt)
        if self._pacer.listens:
            self._context.on("response", self._answered)

    async def end(self) -> None:
        """Listen no more, and have the store know what was heard."""
        self._context.remove_listener("page", self._adopt)
        if self._pacer.listens:
            self._context.remove_listener("response", self._answered)
        await self._told()

    async def raised(self, error: TooManyRequests) -> None:
        """The code has raised this: unless a call of its page did, it speaks for itself here."""
        if error.key is None:
            key = self._pacer.key if error.url is None else self._of(error.url)[0]
            await self._refuse(error, key, said="TooManyRequests")

    # --- calls

    def _adopt(self, page: Any) -> None:
        if page in self._pages:
            return
        sent = self._pages[page] = _Sent()
        for name in CALLS:
            if (call := getattr(page, name, None)) is not None:
                setattr(page, name, self._heeded(page, sent, name, call))

    def _heeded(self, page: Any, sent: _Sent, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        async def heeded(*args: Any, **kwargs: Any) -> Any:
            if self._pacer.navigations:
                sent.paid = await self._wait(_target(page, name, args, kwargs))
            sent.calls += 1
            try:
                answer = await call(*args, **kwargs)
            except Exception as error:
                await self._raise(sent.take(), error)
                raise
            except asyncio.CancelledError:
                if (refusal := sent.take()) is not None:
                    self._end_code(refusal)
                raise
            finally:
                sent.calls -= 1
                sent.paid = 0
            if answer is not None and answer is not sent.last:
                self._look(answer, sent)
            await self._raise(sent.take(), None)
            return answer

        return heeded

    async def _wait(self, url: str | None) -> int:
        """Wait for the slot of a navigation; returns how many it has."""
        found = self._paced(url)
        if found is None or url is None:
            return 0
        if found[0] == self._pacer.key and not self._pacer.is_used:
            self._pacer.is_used = True  # it was taken before the code began
        else:
            await self._pacer.pace(url)
        return 1

    async def _raise(self, refusal: TooManyRequests | None, cause: Exception | None) -> None:
        if refusal is not None:
            await self._told()
            raise refusal from cause

    # --- answers

    def _answered(self, response: Any) -> None:
        if not response.request.is_navigation_request():
            return
        try:
            frame = response.frame
            if frame.parent_frame is not None:
                return
            sent = self._pages.setdefault(frame.page, _Sent())
        except Exception:  # noqa: BLE001 -- each client has its own for a page that it opens only when it is answered
            sent = _Sent()
        if response is sent.last:
            return
        refusal = self._look(response, sent)
        if refusal is not None and not sent.calls:
            sent.take()
            self._end_code(refusal)

    def _look(self, response: Any, sent: _Sent) -> TooManyRequests | None:
        """What is to be done about the answer to a page; returns the refusal that it is."""
        sent.last = response
        paid, sent.paid = sent.paid > 0, max(0, sent.paid - 1)
        url, status = response.url, response.status
        found = self._paced(url)
        if found is None:
            return None
        key, pace = found
        if self._pacer.navigations and not paid:
            self._tell(self._pacer.count(url), is_waited_for=False)
        if status in pace.slow_down_on:
            refusal = _refusal(url, status, response.headers)
            self._tell(self._refuse(refusal, key, said=str(status)))
            sent.refusal = refusal
            return refusal
        if 200 <= status < 300 and self._recovery.is_to_tell(key):
            self._tell(self._succeed(key), is_waited_for=False)
        return None

    def _paced(self, url: str | None) -> tuple[str, Pace] | None:
        """The key and the pace of a URL, where it has one."""
        return None if url is None or host_of(url) is None else self._pacer.of(url)

    def _of(self, url: str) -> tuple[str, Pace | None]:
        return self._paced(url) or (self._pacer.key, None)

    # --- what the store is told

    def _tell(self, telling: Coroutine[Any, Any, None], *, is_waited_for: bool = True) -> None:
        task = self._spawn(_within(TELL_S, telling))
        if is_waited_for:
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _told(self) -> None:
        if self._telling:
            await asyncio.wait(self._telling)

    async def _refuse(self, refusal: TooManyRequests, key: str, *, said: str) -> None:
        """Hold a key for all workers; a message of another key has to wait for that outside its own line."""
        refusal.key, refusal.line = key, key if key == self._pacer.key else None
        self._recovery.is_slowed(key)
        held_ms = await self._pacer.slow_down(key, for_ms=refusal.asked_ms, reason=said)
        if held_ms is None:
            refusal.wait_ms = refusal.asked_ms or await self._pacer.held_ms(key)
            return
        refusal.wait_ms = held_ms
        logger.warning(
            "%s says to slow down (%s): no worker asks it for %.1f s, and then less often",
            shown(key),
            said,
            held_ms / 1000,
        )

    async def _succeed(self, key: str) -> None:
        if not await self._pacer.succeeded(key):
            self._recovery.is_clear(key)


async def _within(seconds: float, telling: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await telling
    except TimeoutError:
        logger.warning("the store does not answer, so other workers have not heard what a site said")


def _target(page: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Where a call sends a page; None: that is not known."""
    if name != "goto":
        return str(page.url)
    url = kwargs.get("url", args[0] if args else None)
    return urljoin(page.url, url) if isinstance(url, str) else None


def _refusal(url: str, status: int, headers: Mapping[str, str]) -> TooManyRequests:
    after_ms = retry_after_ms(headers)
    for_how_long = "" if after_ms is None else f", for {after_ms} ms"
    return TooManyRequests(
        f"{host_of(url)} answered {status}: it says to slow down{for_how_long}; the message waits in line again and "
        "uses up no retry",
        retry_after_ms=after_ms,
        url=url,
        status=status,
    )
