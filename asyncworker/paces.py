"""The paces in the store, as whoever operates a deployment sees and changes them."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from asyncworker.errors import ConfigurationError, NotThere
from asyncworker.limiter import WITHOUT_END_MS, KeyState
from asyncworker.pace import DAY_MS, MINUTE_MS, Rate, host_of, names_of
from asyncworker.queues import now_ms, open_broker
from asyncworker.redis_broker import WorkerBroker
from asyncworker.settings import Settings

_UNITS_MS = {"ms": 1, "s": 1_000, "m": MINUTE_MS, "min": MINUTE_MS, "h": 60 * MINUTE_MS, "d": DAY_MS}
_DURATION = re.compile(r"(\d{1,9})\s*([a-z]+)", re.ASCII)


@dataclass(frozen=True)
class Key:
    """A key as it stands.

    Attributes:
        held_ms: For how long it is still held; None: it is not.
    """

    state: KeyState
    held_ms: int | None

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.state.subject} ({self.state.exit})"

    def facts(self) -> dict[str, Any]:
        """Everything, for a program."""
        state = self.state
        return {
            "key": state.key,
            "site": state.subject,
            "exit": state.exit,
            "rate": state.rate or None,
            "used_last_minute": state.used,
            "held_ms": self.held_ms,
            "held_until_ms": None if self.held_ms is None else round(state.held_until_ms or 0),
            "reason": state.reason or None,
            "waiting": state.waiting,
            "let_go": state.out,
            "running": state.running,
            "spent_today": state.spent,
            "budget": state.budget,
            "slowed": state.slowed,
        }


class Paces:
    """The keys that were used within a day or that messages wait for, and the rates that were set at run time.

    All methods raise redis.RedisError when the store does not answer; see `open_paces`.
    """

    def __init__(self, broker: WorkerBroker) -> None:
        self._broker = broker
        self._limiter = broker.limiter

    def all(self) -> list[Key]:
        """How every key stands, by name."""
        now = now_ms(self._broker)
        return [self._at(state, now) for state in self._limiter.states()]

    def rates(self) -> dict[str, str]:
        """What was set at run time, by name."""
        return self._limiter.rates()

    def set_rate(self, name: str, rate: str) -> list[Key]:
        """Set the rate of all keys that fall under a name, in place of their own; returns those that are there.

        Parameters:
            name: A host, with or without a port, `*.` and a domain, `default`, an account, or a whole key.

        Raises:
            ConfigurationError: For a rate that is none.
        """
        try:
            read = Rate.parse(rate)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        name = _named(name)
        self._limiter.set_rate(name, read)
        return self._under(name)

    def unset_rate(self, name: str) -> list[Key]:
        """Take back what `set_rate` has set for a name.

        Raises:
            NotThere: When nothing is set for it; it names the nearest.
        """
        name, rates = _named(name), self.rates()
        if name not in rates:
            raise _not_there(f"no rate is set for {name!r}", name, list(rates))
        self._limiter.set_rate(name, None)
        return self._under(name)

    def hold(self, name: str, *, for_ms: int | None, reason: str) -> list[Key]:
        """Let no message of a site go, through all its exits that are known, or of one key; returns how they stand.

        Parameters:
            for_ms: None: until `release`, for 31 days at most.

        Raises:
            NotThere: When no key is known by that name, and it is no whole key.
        """
        keys = [name] if "|" in name else [key.state.key for key in self._of(_named(name))]
        for key in keys:
            self._limiter.hold(key, for_ms=WITHOUT_END_MS if for_ms is None else for_ms, reason=reason)
        return [key for key in self.all() if key.state.key in keys]

    def release(self, name: str) -> list[tuple[Key, bool]]:
        """End the holds of a site or key, and all that is left of its slowing down.

        Returns:
            How each key stands, and whether it was held or slowed.

        Raises:
            NotThere: When no key is known by that name.
        """
        found = self._of(_named(name))
        for key in found:
            self._limiter.release(key.state.key)
        before = {key.state.key: key.held_ms is not None or key.state.slowed > 0 for key in found}
        return [(key, before[key.state.key]) for key in self.all() if key.state.key in before]

    def _of(self, name: str) -> list[Key]:
        known = self.all()
        if found := [key for key in known if name in (key.state.key, key.state.subject)]:
            return found
        subjects = list(dict.fromkeys(key.state.subject for key in known))
        raise _not_there(f"no key is known of {name!r} (a whole key is written host|exit)", name, subjects)

    def _under(self, name: str) -> list[Key]:
        return [key for key in self.all() if name in names_of(key.state.key)]

    def _at(self, state: KeyState, now: int) -> Key:
        left = None if state.held_until_ms is None else round(state.held_until_ms - now)
        return Key(state, left if left is not None and left > 0 else None)


@contextlib.contextmanager
def open_paces(settings: Settings) -> Iterator[Paces]:
    """The paces of the deployment's store, for the time of a command.

    Raises:
        BrokerUnavailable: When the store does not answer, now or later in the block.
        ConfigurationError: When there is no store here, or the broker is RabbitMQ.
    """
    if settings.broker_url is not None and settings.broker_url.is_rabbitmq:
        raise ConfigurationError(
            f"the broker {settings.broker_url} is RabbitMQ, where no message has a pace: that needs Redis or Valkey as "
            "the broker",
            name="ASYNCWORKER_BROKER_URL",
        )
    with open_broker(settings) as broker:
        yield Paces(broker)


def duration_ms(text: str) -> int:
    """Read `90s`, `10m`, `2h` or `1d`.

    Raises:
        ConfigurationError: For anything else, and for more than 31 days.
    """
    found = _DURATION.fullmatch(text.strip())
    ms = int(found[1]) * _UNITS_MS.get(found[2], 0) if found else 0
    if not 0 < ms <= WITHOUT_END_MS:
        raise ConfigurationError(f"{text!r} is no time that a key can be held for; write it as 90s, 10m, 2h or 1d")
    return ms


def _named(name: str) -> str:
    """A URL stands for its host."""
    return host_of(name) or name


def _not_there(what: str, name: str, names: list[str]) -> NotThere:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(names) or 'none'}"
    return NotThere(f"{what}; {hint}", name=name)
