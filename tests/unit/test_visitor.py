"""Who a message was when it first ran, carried in its options."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncworker.identity import MAX_SEED, Identity
from asyncworker.ledger import Row
from asyncworker.visitor import Visitor, change, changed

WHO = Visitor(42, "8472c6ff5bfe", "invisible_core 53.48.0")


def identity(seed: int = 42, digest: str | None = WHO.digest, drawn_by: str | None = WHO.drawn_by) -> Identity:
    return Identity(seed, digest=digest, drawn_by=drawn_by)


def row(attempt: int, digest: str | None, seed: int | None = 42) -> Row:
    return Row("m1", attempt, "pages.title", seed, "host:7", 1_000, identity=digest, drawn_by=digest and "fake 1")


def test_a_visitor_comes_back_with_its_message_beside_other_options() -> None:
    options: dict[str, Any] = {"retries": 3}
    WHO.write(options)
    assert Visitor.in_options(json.loads(json.dumps(options))) == WHO
    assert options["retries"] == 3


def test_an_identity_is_a_visitor_once_it_is_drawn() -> None:
    assert Visitor.of(identity()) == WHO
    assert Visitor.of(Identity(42)) is None


@pytest.mark.parametrize(
    "nonsense",
    [
        {"identity_seed": None},
        {"identity_seed": True},
        {"identity_seed": "42"},
        {"identity_digest": None},
        {"identity_digest": 7},
        {"identity_digest": ""},
        {"identity_digest": "a\nline of its own"},
        {"identity_digest": ["8472c6ff5bfe"]},
        {"identity_drawn_by": {}},
        {"identity_drawn_by": "x" * 101},
    ],
    ids=str,
)
def test_what_came_from_outside_and_is_none_is_no_visitor(nonsense: dict[str, Any]) -> None:
    options: dict[str, Any] = {}
    WHO.write(options)
    assert Visitor.in_options(options | nonsense) is None


def test_the_first_attempt_that_had_an_identity_says_who_it_was() -> None:
    rows = [row(1, None), row(2, "other", seed=MAX_SEED), row(3, "first"), row(4, "second")]
    assert Visitor.in_rows(rows, 42) == Visitor(42, "first", "fake 1")
    assert Visitor.in_rows(rows[:2], 42) is None
    assert Visitor.in_rows([row(1, "first", seed=None)], None) is None


@pytest.mark.parametrize(
    ("before", "now"),
    [(None, identity()), (WHO, identity()), (WHO, identity(seed=43, digest="another")), (None, Identity(42))],
)
def test_nothing_is_said_of_the_same_visitor_an_unknown_one_or_another_seed(before: Visitor | None, now: Any) -> None:
    assert change(before, now) is None


def test_a_change_names_the_seed_and_both_visitors_with_their_versions() -> None:
    sentence = change(WHO, identity(digest="aaaaaaaaaaaa", drawn_by="invisible_core 54.0.0"))
    assert sentence == (
        "seed 42 is another visitor now: aaaaaaaaaaaa, drawn by invisible_core 54.0.0; when the message first ran it "
        "was 8472c6ff5bfe, drawn by invisible_core 53.48.0"
    )


def test_a_stock_engine_after_one_that_draws_is_a_change_too() -> None:
    said = change(WHO, Identity(42))
    assert said is not None
    assert "seed 42 is another visitor now: the one that a stock engine shows for every seed;" in said
    assert "worker's log" in changed(42, None, WHO)
