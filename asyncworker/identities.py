"""Which visitor is a seed? Shown to a person, without any engine installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncworker.engines import profile
from asyncworker.engines.profile import Drawn
from asyncworker.identity import checked_seed
from asyncworker.settings import EngineName, Settings


@dataclass(frozen=True)
class Shown:
    """A seed with what the invisible engine shows for it in this deployment."""

    seed: int
    settings: Settings
    drawn: Drawn

    @property
    def note(self) -> str | None:
        """What a stock engine makes of it; None for the invisible one."""
        engine = self.settings.engine
        if engine is EngineName.invisible:
            return None
        return (
            f"The engine {engine} of this deployment shows every seed the same visitor; this is what the invisible "
            "engine would show."
        )

    def facts(self) -> dict[str, Any]:
        """Everything, for a program."""
        return {
            "seed": self.seed,
            "digest": self.drawn.digest,
            "drawn_by": self.drawn.drawn_by,
            **self.drawn.fields,
            "locale": self.settings.locale,
            "timezone": self.settings.timezone,
            "pins": self.settings.pins,
            "engine": str(self.settings.engine),
            "note": self.note,
        }


def read_seed(text: str) -> int:
    """The seed that someone has typed.

    Raises:
        InvalidSeed: When it is none.
    """
    digits = text.removeprefix("-")
    return checked_seed(int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 100 else text)


def show(settings: Settings, seed: int) -> Shown:
    """Draw the visitor of a seed with the deployment's pins, locale and time zone.

    Raises:
        ConfigurationError: When ASYNCWORKER_PINS cannot be used.
        EngineMissing: When invisible_core is not installed.
    """
    who = profile.drawn(seed, settings.pins, locale=settings.locale, timezone=settings.timezone)
    return Shown(seed, settings, who)


def render(shown: Shown, console: Console) -> None:
    """Print it as a table, and below it what a person has to know."""
    facts = shown.facts()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in ("seed", "digest", "drawn_by", *shown.drawn.fields):
        table.add_row(Text(name.replace("_", " ")), _text(facts[name]))
    for name in ("locale", "timezone"):
        table.add_row(Text(name), Text(facts[name]) if facts[name] else Text("by the exit address", style="dim"))
    for pin, value in shown.settings.pins.items():
        table.add_row(Text(f"pinned {pin}"), _text(value))
    console.print(table)
    if shown.note is not None:
        console.print(shown.note, highlight=False, soft_wrap=True)


def _text(value: object) -> Text:
    return Text({True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value))
