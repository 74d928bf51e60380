"""Every error of asyncworker, and whose fault each is.

    AsyncworkerError
    ├── ConfigurationError        the deployment: settings, state directory, actors package
    │   ├── DeclarationError      the source code: an @actor that cannot work
    │   └── UnfitBroker           a store that answers, and that cannot be used as it is or as it is named
    ├── BrokerUnavailable         the store: away, refusing or full; nothing was sent
    ├── NotThere                  what a command names: there is no such queue or dead letter
    ├── RefusedMessage            the message: no retry can make it succeed, it is dead-lettered
    │   ├── InvalidArguments      wrong, missing or superfluous arguments
    │   ├── InvalidSeed           a seed that is no integer in 0 .. 2**63-1
    │   ├── UrlRefused            not a URL, or one that this deployment does not open
    │   ├── PathRefused           a file outside the output directory
    │   ├── BudgetSpent           the day's budget of its pace is used up, and the pace says to reject then
    │   ├── UnknownOutcome        what has begun before, and no one knows how it ended: a person decides
    │   └── Unsupported           something that the worker's engine cannot do
    ├── EngineError               the browser or what launches it; retried with the same seed
    │   ├── LaunchFailed          no browser came up in time
    │   │   └── EngineMissing     there is nothing to launch
    │   ├── BrowserCrashed        the browser died under the attempt
    │   │   └── BrowserRecycled   it was ended under the attempt, to be replaced
    │   ├── PageCrashed           only this page's renderer died
    │   ├── ExitDrifted           the proxy's exit changed under the browser
    │   ├── PhaseTimeout          a step of ours took too long (its name is in `phase`)
    │   └── ForkedBrowser         used in a forked child of the process that launched it
    ├── PaceDeferred              its site has no slot now; it waits in line, and no retry is used
    │   └── TooManyRequests       the site says to slow down; no worker asks it until that is over
    ├── StepHeld                  another message is at the same step; retried
    ├── StaleAttempt              the message was taken by another worker, which goes on with it
    └── SessionOver               the code kept a session beyond its attempt, or called on when it was cancelled

Playwright's own errors about a page (a timeout, a refused navigation, a missing selector) pass
through untouched: they are the page's or the code's, not ours.
"""

from __future__ import annotations

from typing import Any, ClassVar


class AsyncworkerError(Exception):
    """The root: catch it to catch everything that asyncworker itself raises.

    Keyword arguments become attributes, so that a log line or a handler can read what the sentence says.
    """

    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str | None = None, **fields: object) -> None:
        super().__init__(message or (self.__doc__ or type(self).__name__).strip().splitlines()[0])
        for name in self.fields:
            setattr(self, name, fields.pop(name, None))
        if fields:
            raise TypeError(f"{type(self).__name__} has no field {sorted(fields)[0]!r}")


class ConfigurationError(AsyncworkerError):
    """A setting cannot be used; `asyncworker settings` shows all of them.

    Not raised for a setting that is merely unwise: that is a warning in the log.
    """

    fields: ClassVar[tuple[str, ...]] = ("name",)
    name: str | None


class DeclarationError(ConfigurationError, TypeError):
    """An @actor cannot work as it is written; correct its declaration.

    Raised where it is declared, never in a worker.
    """


class UnfitBroker(ConfigurationError):
    """The broker answers and cannot be used: a cluster, a server too old, a wrong password. Correct what it says.

    `remedy` is the second half of the sentence, alone. Nothing was sent.

    Not raised for a broker that is away, full or loading: that is BrokerUnavailable. A worker that is up already
    waits, since a password may be changed under it.
    """

    fields = ("name", "remedy")
    remedy: str | None


class BrokerUnavailable(AsyncworkerError):
    """The broker did not take the message. Start it, or correct ASYNCWORKER_BROKER_URL.

    `sent` is False when nothing was sent, and None when the connection was lost before that was known. Of several
    messages that were sent together, `taken` are those that the broker has, and `untaken` the others, of which `sent`
    speaks; both are None when it was not about sending.

    Not raised in a worker, which waits for its broker and goes on.
    """

    fields = ("url", "sent", "taken", "untaken")
    url: str | None
    sent: bool | None
    taken: list[Any] | None
    untaken: list[Any] | None


class NotThere(AsyncworkerError, LookupError):
    """The store has no queue or dead letter of that name; correct it, from what `asyncworker queues` shows."""

    fields = ("name",)
    name: str | None


class RefusedMessage(AsyncworkerError):
    """This message can never succeed; correct what sends it. It is dead-lettered at once, without retries."""


class InvalidArguments(RefusedMessage, TypeError):
    """The arguments of the message do not fit the actor's signature; correct what sends it."""

    fields = ("actor",)
    actor: str | None


class InvalidSeed(RefusedMessage, ValueError):
    """A seed is an integer from 0 to 2**63-1; correct what sends the message."""

    fields = ("seed",)
    seed: object


class UrlRefused(RefusedMessage, ValueError):
    """This deployment does not open that URL; see ASYNCWORKER_ALLOWED_SCHEMES and ASYNCWORKER_DENY_PRIVATE_HOSTS.

    Not raised for a URL that merely fails to load: that is Playwright's own error, and is retried.
    """

    fields = ("url",)
    url: str | None


class PathRefused(RefusedMessage, ValueError):
    """Files are written below ASYNCWORKER_OUTPUT_DIR only; give a relative path without `..`."""

    fields = ("path",)
    path: str | None


class BudgetSpent(RefusedMessage):
    """The budget of this pace is used up for today, and over_budget="reject"; set a greater one, or send it tomorrow.

    Not raised with over_budget="defer", the default: such a message waits for the next day.
    """

    fields = ("key",)
    key: str | None


class UnknownOutcome(RefusedMessage):
    """No one knows whether this took place; look, then run `asyncworker once resolve` or `asyncworker dead retry`.

    Whoever had begun it was lost. `subject` is the step, or the message of an actor with delivery="at_most_once".

    Not raised where an effect may take place again: by default the next one simply enters the step.
    """

    fields = ("subject",)
    subject: str | None


class Unsupported(RefusedMessage, NotImplementedError):
    """The worker's engine cannot do this; set another ASYNCWORKER_ENGINE, or use what the sentence names instead.

    Not raised for what Playwright itself refuses on a stock browser: that is its own error.
    """

    fields = ("engine", "capability")
    engine: str | None
    capability: str | None


class EngineError(AsyncworkerError):
    """The browser failed, not the code: the message is retried with the same seed."""

    fields: ClassVar[tuple[str, ...]] = ("engine", "generation")
    engine: str | None
    generation: int | None


class LaunchFailed(EngineError):
    """The browser did not start; run `asyncworker doctor`.

    Its `phase` is `launch`, as that of a PhaseTimeout while a message waits for one.

    Not raised when a running browser dies: that is BrowserCrashed.
    """

    phase = "launch"


class EngineMissing(LaunchFailed):
    """The engine is not installed; run `asyncworker doctor --install`."""


class BrowserCrashed(EngineError):
    """The browser died under this attempt; it is retried with the same seed on a new one.

    Not raised for a crash of another page in the same browser, nor for the death of the worker process.
    """


class BrowserRecycled(BrowserCrashed):
    """A browser that is replaced was ended under this attempt; it is retried with the same seed, at no cost.

    Raised when the attempt outlasts ASYNCWORKER_RECYCLE_DRAIN_MS, which is longer than its time limit unless set.
    """


class PageCrashed(EngineError):
    """The page's renderer died; the browser lives on. The message is retried with the same seed."""


class ExitDrifted(EngineError):
    """The proxy's exit address changed, or could not be verified; the message is retried on a new browser.

    Raised by invisible_playwright's engine alone, which announces the address that it had at its launch.
    """


class PhaseTimeout(EngineError, TimeoutError):
    """A step of the runtime took too long; the message is retried, or set its ASYNCWORKER_..._TIMEOUT_MS higher.

    `phase` names the step: `wait` (for a slot or a browser that is free), `launch`, or `context` (with its page).

    Not raised for the actor's own code: that is Dramatiq's TimeLimitExceeded, whose time begins when the page is open,
    or Playwright's TimeoutError. Nor for a context that does not close: that costs its browser, and no message.
    """

    fields = ("phase", "engine", "generation")
    phase: str | None


class ForkedBrowser(EngineError):
    """A browser cannot be used in a fork of the process that launched it: launch after the fork, or use spawn."""


class PaceDeferred(AsyncworkerError):
    """This message has no slot at its site now; it waits in line, and is then run again, not retried.

    Raised before the code begins. Not raised for a wait of ASYNCWORKER_PACE_HOLD_MS or less, which is slept.
    """

    fields: ClassVar[tuple[str, ...]] = ("key", "wait_ms")
    key: str | None
    wait_ms: float | None


class TooManyRequests(PaceDeferred):
    """The site says to slow down: no worker asks it before that is over; this message is retried then, uncounted.

    Raise it where a site says so in its own words: with `retry_after_ms` where it says for how long, and with `url`
    where it is another site than the message's. The calls that send a page somewhere, as `page.goto`, raise it in a
    session of an actor with a pace for an answer of 429 or 503; code that catches it deals with that itself.

    Not raised by calls without such an answer: after a click the code is ended, as it is when its page has died.
    """

    fields = ("key", "wait_ms", "retry_after_ms", "url", "status", "line")
    retry_after_ms: float | None
    url: str | None
    status: int | None
    line: str | None

    @property
    def asked_ms(self) -> float | None:
        """The time that the site asks for; None: it names none, or what is none."""
        after = self.retry_after_ms
        return after if isinstance(after, int | float) and 0 < after < float("inf") else None


class StepHeld(AsyncworkerError):
    """Another message holds this step and was not done with it in time; this one is retried like after any failure.

    Not raised for an earlier attempt of the same message: a later one takes its place at once.
    """

    fields = ("step",)
    step: str | None


class StaleAttempt(AsyncworkerError):
    """This attempt's message was taken by another worker, which goes on with it; it is not retried from here.

    Raised where a step is entered, confirmed or completed, not for what the code does without one.
    """

    fields = ("step", "fence")
    step: str | None
    fence: int | None


class SessionOver(AsyncworkerError):
    """This session is over, and its context closed: return values instead of keeping it, and let a cancellation pass.

    Its attempt has ended, or was cancelled by its time limit or by a stop.

    Not raised for a session whose browser died: that is BrowserCrashed.
    """
