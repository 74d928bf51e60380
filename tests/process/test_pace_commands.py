"""`asyncworker pace`, as a shell runs it: how keys stand, rates at run time, and holds by hand."""

from __future__ import annotations

import re

import pytest

from asyncworker import embedded
from asyncworker.errors import AsyncworkerError
from asyncworker.pace import Pace, Terms, key_of
from asyncworker.paces import duration_ms, open_paces
from tests.operating import facts, run
from tests.workers import Deployment

SHOP, PROXIED = key_of("shop.example"), key_of("shop.example", "http://proxy:3128")
OTHER = key_of("other.example:8080")


@pytest.fixture
def deployment(deployment: Deployment) -> Deployment:
    """Three keys are known: one site through two exits, and another site; a message of the latter is in line."""
    embedded.ensure(deployment.settings.state_dir)
    limiter = deployment.broker.limiter
    for key in (SHOP, PROXIED, OTHER):
        limiter.commit(key, Terms.of(Pace("1/h", budget=500, jitter=0.0)), hold_ms=0)
    limiter.arrive([(OTHER, "held a")], hold_ms=0)
    return deployment


def by_site(read: dict[str, object]) -> list[tuple[object, ...]]:
    keys = read["keys"]
    assert isinstance(keys, list)
    return [(key["site"], key["exit"], key["rate"], key["used_last_minute"], key["waiting"]) for key in keys]


def test_keys_are_shown_and_rates_are_set_and_taken_back_for_all_that_fall_under_a_name(
    deployment: Deployment,
) -> None:
    shown = facts(deployment, "pace")
    assert by_site(shown) == [
        ("other.example:8080", "direct", "1/h", 1, 1),
        ("shop.example", "direct", "1/h", 1, 0),
        ("shop.example", "http://proxy:3128", "1/h", 1, 0),
    ]
    assert shown["rates"] == {}
    assert {key["spent_today"] for key in shown["keys"]} == {1}
    table = run(deployment, "pace").stdout
    assert re.search(r"site +exit +rate +last min +waiting +running", table)
    assert re.search(r"other\.example:8080 +direct +1/h +1 +1 +0 +1 of 500 today", table)

    changed = facts(deployment, "pace", "set", "*.example", "30/m")
    assert {key["rate"] for key in changed["keys"]} == {"30/m"}
    assert len(changed["keys"]) == 3
    said = run(deployment, "pace", "set", "https://shop.example/p/1", "10/m").stdout
    assert "shop.example (direct), shop.example (http://proxy:3128)" in said
    assert facts(deployment, "pace")["rates"] == {"*.example": "30/m", "shop.example": "10/m"}
    assert "set at run time: *.example 30/m" in run(deployment, "pace").stdout
    with open_paces(deployment.settings) as paces:
        paces.unset_rate("*.example")
    facts(deployment, "pace", "unset", "shop.example")
    assert [rate for _, _, rate, *_ in by_site(facts(deployment, "pace"))] == ["1/h"] * 3
    assert "no key that is known yet" in run(deployment, "pace", "set", "elsewhere.example", "1/s").stdout


def test_sites_are_held_and_released_through_all_exits_or_one(deployment: Deployment) -> None:
    held = facts(deployment, "pace", "hold", "shop.example", "--for", "10m", "--reason", "asked us to")
    assert [key["key"] for key in held["keys"]] == [SHOP, PROXIED]
    assert all(590_000 < key["held_ms"] <= 600_001 and key["reason"] == "asked us to" for key in held["keys"])
    by_hand = run(deployment, "pace", "hold", OTHER).stdout
    assert re.match(r"other\.example:8080 \(direct\) is held for 3[01] d \(by hand\)", by_hand)
    shown = run(deployment, "pace", COLUMNS="60").stdout
    assert re.search(
        r"shop\.example \(direct\): 1/h, 1 in the last minute, .*; held for \d+ min \(asked us to\)", shown
    )
    assert "shop.example (direct) goes on" in run(deployment, "pace", "release", SHOP).stdout
    assert [key["changed"] for key in facts(deployment, "pace", "release", "shop.example")["keys"]] == [False, True]
    assert "1 message in line" in run(deployment, "pace", "release", "other.example:8080").stdout
    assert [key["held_ms"] for key in facts(deployment, "pace")["keys"]] == [None] * 3
    before = facts(deployment, "pace", "hold", "new.example|direct", "--for", "90s")["keys"]
    assert before[0]["held_ms"] > 80_000, "a whole key is held before its first message"


def test_what_is_not_there_or_cannot_be_is_one_sentence(deployment: Deployment) -> None:
    with open_paces(deployment.settings) as paces:
        for refused, said in (
            (
                lambda: paces.hold("shop.exampel", for_ms=1, reason=""),
                "no key is known of 'shop.exampel' .*mean shop.ex",
            ),
            (lambda: paces.release("nowhere"), "there are: other.example:8080, shop.example"),
            (lambda: paces.unset_rate("shop.example"), "no rate is set for 'shop.example'; there are: none"),
            (lambda: paces.set_rate("shop.example", "often"), "'often' is no rate; write it as 2/s"),
            (lambda: duration_ms("soon"), "'soon' is no time .* 90s, 10m, 2h or 1d"),
            (lambda: duration_ms("32d"), "'32d' is no time"),
        ):
            with pytest.raises(AsyncworkerError, match=said):
                refused()
    ended = run(deployment, "pace", "hold", "nowhere")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "asyncworker: no key is known of 'nowhere'" in ended.stderr


def test_without_a_message_of_a_paced_actor_there_is_nothing(deployment: Deployment) -> None:
    deployment.broker.client.flushall()
    assert "no key was used within a day" in run(deployment, "pace").stdout
    assert facts(deployment, "pace") == {"keys": [], "rates": {}}
    url = "amqp://guest@localhost:1"
    ended = run(deployment, "pace", ASYNCWORKER_BROKER_URL=url, ASYNCWORKER_STORE_URL="redis://localhost:1")
    assert ended.returncode == 2
    assert "RabbitMQ, where no message has a pace" in ended.stderr
