"""Is a seed still the visitor that its message began as? Pure: it reads and writes a message's options and rows.

A seed names a visitor only together with what draws it, and a message may be run again a week later by a worker
whose engine draws otherwise. So a message carries who it was at its first session, and whoever runs it compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from asyncworker.identity import Identity
from asyncworker.ledger import Row

#: Options of a message, written at its first session; they come back with each retry and replay.
SEED_OPTION = "identity_seed"
DIGEST_OPTION = "identity_digest"
DRAWN_BY_OPTION = "identity_drawn_by"

#: A message comes from outside: what is longer than this is no digest or version of ours.
LONGEST = 100


@dataclass(frozen=True)
class Visitor:
    """Whom a site sees, in three words."""

    seed: int
    digest: str
    drawn_by: str

    @classmethod
    def of(cls, identity: Identity) -> Visitor | None:
        """The visitor that an engine has drawn; None: it draws none, as the stock ones."""
        return _visitor(identity.seed, identity.digest, identity.drawn_by)

    @classmethod
    def in_options(cls, options: Mapping[str, Any]) -> Visitor | None:
        """The visitor that a message carries; None when it carries none, or nonsense."""
        return _visitor(*(options.get(name) for name in (SEED_OPTION, DIGEST_OPTION, DRAWN_BY_OPTION)))

    @classmethod
    def in_row(cls, row: Row) -> Visitor | None:
        """The visitor of one attempt; None when it had none, or its message names no seed."""
        return _visitor(row.seed, row.identity, row.drawn_by)

    @classmethod
    def in_rows(cls, rows: Iterable[Row], seed: int | None) -> Visitor | None:
        """The visitor of the first of a message's attempts that had one of this seed."""
        found = (cls.in_row(row) for row in rows if row.seed == seed)
        return next((visitor for visitor in found if visitor is not None), None)

    def write(self, options: MutableMapping[str, Any]) -> None:
        """Have a message carry it."""
        options.update({SEED_OPTION: self.seed, DIGEST_OPTION: self.digest, DRAWN_BY_OPTION: self.drawn_by})


def change(before: Visitor | None, identity: Identity) -> str | None:
    """How the visitor of a seed has changed, as a sentence; None when it has not, or nothing is known of it.

    Parameters:
        before: Who the message was when it first ran.
        identity: Who it is now; another seed is another visitor by intention, which is no change.
    """
    if before is None or before.seed != identity.seed or before.digest == identity.digest:
        return None
    return changed(identity.seed, before, Visitor.of(identity))


def changed(seed: int | None, before: Visitor | None, now: Visitor | None) -> str:
    """The sentence about a seed that is another visitor now.

    Parameters:
        before: Who it was; None: known to the worker's log only.
        now: Who it is; None: what a stock engine shows.
    """
    is_now = f"{now.digest}, drawn by {now.drawn_by}" if now else "the one that a stock engine shows for every seed"
    was = f"{before.digest}, drawn by {before.drawn_by}" if before else "the one that the worker's log names"
    return f"seed {seed} is another visitor now: {is_now}; when the message first ran it was {was}"


def _visitor(seed: object, digest: object, drawn_by: object) -> Visitor | None:
    words = [word for word in (digest, drawn_by) if isinstance(word, str) and 0 < len(word) <= LONGEST]
    if type(seed) is not int or len(words) != 2 or not all(word.isprintable() for word in words):
        return None
    return Visitor(seed, *words)
