"""How a pace is written, which one holds, and what a key is."""

from __future__ import annotations

import tomllib

import pytest

from asyncworker.pace import (
    Pace,
    Rate,
    Rules,
    Terms,
    as_pace,
    first_host,
    host_of,
    key_of,
    names_of,
    pace_for,
    parts_of,
)


@pytest.mark.parametrize(
    ("text", "count", "per_ms"),
    [
        ("2/s", 2, 1_000),
        ("30/m", 30, 60_000),
        ("1/10s", 1, 10_000),
        ("10/h", 10, 3_600_000),
        ("500/day", 500, 86_400_000),
        (" 5 / 2 min ", 5, 120_000),
        ("3/500ms", 3, 500),
    ],
)
def test_a_rate_is_read_as_it_is_said(text: str, count: int, per_ms: int) -> None:
    rate = Rate.parse(text)
    assert (rate.count, rate.per_ms) == (count, per_ms)
    assert Rate.parse(str(rate)) == rate, "and is written so that it is read again"


@pytest.mark.parametrize(
    "text", ["", "2", "/s", "0/s", "-1/s", "2/0s", "2/fortnight", "1.5/s", "2 s", "9999/s", "1/99day"]
)
def test_what_is_no_rate_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="no rate") as refused:
        Pace(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rate": 3}, "per_ms"),
        ({"rate": "3/s", "per_ms": 5}, "per_ms"),
        ({"rate": "3/s", "burst": 0}, "burst"),
        ({"burst": 2}, "without a rate"),
        ({"rate": "3/s", "jitter": 1.0}, "jitter"),
        ({"rate": "3/s", "max_concurrent": 0}, "max_concurrent"),
        ({"budget": "5/h"}, "budget"),
        ({"budget": 5, "over_budget": "drop"}, "over_budget"),
        ({"rate": "3/s", "key": "url"}, "key"),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Pace(**given)  # type: ignore[arg-type]


def test_a_pace_is_a_rate_or_a_pace() -> None:
    assert as_pace("2/s") == Pace(2, per_ms=1_000) == Pace(Rate(2, 1_000))
    with pytest.raises(ValueError, match="pace=5"):
        as_pace(5)


def test_a_minute_has_room_for_at_most_as_many_slots_as_the_rate_says() -> None:
    interval_us = Rate.parse("600/m").interval_us
    assert 590 <= 60_000_000 // interval_us < 600


def test_of_two_paces_each_part_is_the_stricter_one() -> None:
    own = Pace("2/s", burst=3, max_concurrent=4, budget="900/day", over_budget="reject")
    both = own.stricter(Pace("10/m", max_concurrent=8, budget="500/day"))
    assert (both.rate, both.burst) == (Rate.parse("10/m"), 1)
    assert (both.max_concurrent, both.budget, both.over_budget) == (4, 500, "defer")
    assert own.stricter(None) is own
    assert own.stricter(Pace(max_concurrent=1)).burst == 3


def test_the_host_is_that_of_the_first_url_wherever_it_stands() -> None:
    assert first_host(("x", 3, "HTTPS://Shop.Example.:443/a"), {}) == "shop.example"
    assert first_host(("x",), {"seed": 1, "url": "http://shop.example:8080/"}) == "shop.example:8080"
    assert first_host(("ftp://shop.example", "httpfoo", None), {}) is None
    assert host_of("http://[::1") is None


def test_a_key_has_a_subject_and_an_exit_and_no_secret_characters() -> None:
    key = key_of("account 7@x|y", "http://proxy:8080")
    assert parts_of(key) == ("account 7@x|y", "http://proxy:8080")
    assert not set(" @\n") & set(key)


def test_a_rate_is_looked_up_by_the_most_exact_name() -> None:
    names = names_of(key_of("a.shop.example:8080"))
    assert names[1:] == ("a.shop.example:8080", "a.shop.example", "*.shop.example", "*.example", "default")
    assert names[0] == "a.shop.example:8080|direct"


RULES = """
[pace]
"other.example" = "1/s"

[pace."shop.example"]
rate = "10/m"
max_concurrent = 2

[pace."*.example"]
rate = "30/m"

[pace.default]
rate = 5
per_ms = 1000
"""


def test_a_deployments_rules_have_wildcards_and_a_default() -> None:
    rules = Rules.read(tomllib.loads(RULES))
    assert rules.of("shop.example") == Pace("10/m", max_concurrent=2)
    assert rules.of("other.example") == Pace("1/s")
    assert rules.of("a.b.example") == Pace("30/m")
    assert rules.of("elsewhere") == Pace("5/s")
    assert pace_for(Pace("2/s"), rules, "shop.example") == Pace("10/m", max_concurrent=2)
    assert pace_for(Pace("1/m"), rules, "elsewhere") == Pace("1/m")
    assert pace_for(None, Rules({}), "elsewhere") is None


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ('[pac."x"]\nrate="1/s"', "'pac'"),
        ('[pace."x"]\nrat="1/s"', "pace.\"x\".*'rat'"),
        ('[pace."x"]\nrate="1/x"', 'pace."x".*no rate'),
        ('[pace."a*"]\nrate="1/s"', "wildcard"),
        ("pace = 3", "no table"),
        ("[pace]\nx = 3", "rate or a table"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_its_name(document: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Rules.read(tomllib.loads(document))


def test_terms_are_what_a_limiter_reckons_with() -> None:
    terms = Terms.of(Pace("2/s", max_concurrent=3, budget=9, over_budget="reject"), seed=4)
    assert (terms.interval_us, terms.burst, terms.rate) == (502_500, 1, "2/s")
    assert (terms.max_concurrent, terms.budget, terms.rejects, terms.seed) == (3, 9, True, 4)
    assert Terms.of(Pace(max_concurrent=1)).interval_us == 0
