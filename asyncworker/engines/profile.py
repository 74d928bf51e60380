"""What the invisible engine draws for a seed, without the engine: a few values to look at, and a digest of it all.

The client draws a browser's whole identity from the seed and the pins with `invisible_core.generate_profile`, so
the same call says what a launch would show. Few values tell visitors apart (200 seeds gave 15 pairs of a GPU and
a screen's width), so the digest is taken over everything that was drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from asyncworker.engines.importing import import_quietly
from asyncworker.errors import ConfigurationError, EngineMissing

#: Hex digits of a digest: enough to tell the visitors of a deployment apart, few enough to read in a log line.
DIGITS = 12

#: A message with a seed of its own draws once for each attempt; a worker meets few seeds at a time.
REMEMBERED = 256

#: What invisible_core says of a wrong pin may list every GPU that it knows.
LONGEST_REASON = 300


@dataclass(frozen=True)
class Drawn:
    """One visitor, as the installed invisible_core draws it.

    Attributes:
        digest: Of the whole profile, invisible_core's version, the locale and the time zone.
        drawn_by: Which version drew it: another one may draw another visitor from the same seed.
        fields: What a person wants to see of it, in order.
    """

    digest: str
    drawn_by: str
    fields: Mapping[str, str | int | float | bool]


def drawn(seed: int, pins: Mapping[str, Any], *, locale: str | None = None, timezone: str | None = None) -> Drawn:
    """Draw the visitor of a seed. The first call imports invisible_core (0.2 s), any other takes under 2 ms.

    Parameters:
        pins: As in ASYNCWORKER_PINS, field to value.
        locale, timezone: What the deployment sets; None: found at launch, by the exit address.

    Raises:
        ConfigurationError: When invisible_core does not take the pins.
        EngineMissing: When invisible_core does not import.
    """
    try:
        text = json.dumps(dict(pins), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise _wrong_pins(error) from error
    return _drawn(seed, text, locale, timezone)


@lru_cache(maxsize=REMEMBERED)
def _drawn(seed: int, pins: str, locale: str | None, timezone: str | None) -> Drawn:
    core = _core()
    pin = json.loads(pins)
    try:
        profile = core.generate_profile(seed, pin=pin or None)
        viewport = core.context_geometry(profile)["viewport"]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if not pin:
            raise
        raise _wrong_pins(error) from error
    everything = {"profile": asdict(profile), "core": core.__version__, "locale": locale, "timezone": timezone}
    canonical = json.dumps(everything, sort_keys=True, separators=(",", ":"), default=_in_order)
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:DIGITS]
    return Drawn(digest, f"invisible_core {core.__version__}", MappingProxyType(_fields(profile, viewport)))


def _fields(profile: Any, viewport: Mapping[str, int]) -> dict[str, str | int | float | bool]:
    return {
        "gpu": profile.gpu.renderer,
        "gpu_class": profile.gpu.class_tier,
        "screen": f"{profile.screen.width}x{profile.screen.height}",
        "dpr": profile.screen.dpr,
        "viewport": f"{viewport['width']}x{viewport['height']}",
        "hardware_concurrency": profile.hardware.concurrency,
        "audio_sample_rate": profile.audio.sample_rate,
        "dark_theme": profile.dark_theme,
        "branding": profile.branding,
        "ui_font": profile.font.ui_family,
        "user_agent": profile._raw["user_agent"],
    }


def _core() -> Any:
    try:
        return import_quietly("invisible_core")
    except ImportError as error:
        raise EngineMissing(
            f"invisible_core does not import ({error}); `pip install invisible-playwright` installs it",
            engine="invisible",
        ) from error


def _in_order(value: object) -> list[str]:
    """Sets have another order in each process."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    raise TypeError(f"a profile holds a {type(value).__name__}, of which no digest can be taken")


def _wrong_pins(error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split()).rstrip(".")
    if len(reason) > LONGEST_REASON:
        reason = f"{reason[: LONGEST_REASON - 1]}…"
    return ConfigurationError(
        f"ASYNCWORKER_PINS cannot be used: {reason}; correct or unset it", name="ASYNCWORKER_PINS"
    )
