"""seed -> Identity, and named streams of randomness drawn from the seed. Pure: no clock, no environment.

The seed travels in the message, so everything that is derived from it here is the same on every retry and
replay of that message, in any process.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncworker.errors import InvalidSeed

#: The largest seed: seeds fit a signed 64-bit integer, so that every store and language can carry them.
MAX_SEED = 2**63 - 1


def new_seed() -> int:
    """Draw a seed from the operating system's randomness."""
    return secrets.randbelow(MAX_SEED + 1)


def checked_seed(seed: object) -> int:
    """Return `seed` when it is one.

    Raises:
        InvalidSeed: When it is no integer (True and 7.0 are none) or outside 0 to 2**63-1.
    """
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise InvalidSeed(f"{_shortened(seed)} is no seed: a seed is an integer from 0 to 2**63-1", seed=seed)
    return seed


def _shortened(seed: object) -> str:
    """Whatever a message held, as a sentence can hold it."""
    if isinstance(seed, int) and seed.bit_length() > 256:  # Python refuses to write one of thousands of digits
        return f"an integer of {seed.bit_length()} bits"
    text = repr(seed)
    return text if len(text) <= 100 else f"{text[:99]}…"


def stream(seed: int, name: str) -> random.Random:
    """A generator of pseudo-random numbers of its own for each seed and name.

    Two names never share numbers, so drawing more of one (say, of `pace`) shifts nothing in another.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return random.Random(int.from_bytes(digest))  # noqa: S311 -- reproducible on purpose, not for secrets


@dataclass(frozen=True)
class Identity:
    """What a site sees as one visitor: the seed and whatever the deployment fixes beside it.

    Engines decide what of it they can honour, and which identities may share a browser (`launch_key`).

    Attributes:
        digest: A few hex digits of everything that the engine derives from the rest: equal for the same visitor,
            in any process. None before the engine was asked (`Engine.identify`), and always None with the stock
            engines, since a stock browser shows every seed the same visitor.
        drawn_by: Which version of what drew it, such as `invisible_core 53.48.0`: another one may draw another
            visitor from the same seed.
    """

    seed: int
    locale: str | None = None
    timezone: str | None = None
    proxy: str | None = field(default=None, repr=False)  # holds a password
    pins: Mapping[str, Any] = field(default_factory=dict, hash=False)
    digest: str | None = field(default=None, compare=False)  # follows from the rest, and may not be asked for yet
    drawn_by: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        checked_seed(self.seed)
