"""`asyncworker pace`, as a shell runs it: how keys stand, rates at run time, and holds by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncworker import embedded
from asyncworker.cli import app as command_line
from asyncworker.errors import AsyncworkerError, ConfigurationError
from asyncworker.pace import Pace, Terms, key_of
from asyncworker.paces import duration_ms, open_paces
from asyncworker.settings import load
from asyncworker.terminal import console
from tests.operating import environment, run
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


def said(deployment: Deployment, *words: str, columns: int = 120) -> str:
    """What the command prints, called in this process: one of its own costs a second of CPU each time."""
    before, console.width = console.width, columns  # an environment is looked at when a process begins
    try:
        result = CliRunner().invoke(command_line, ["pace", *words], env=environment(deployment))
    finally:
        console.width = before
    assert result.exit_code == 0, result.output
    return result.output


def facts(deployment: Deployment, *words: str) -> Any:
    return json.loads(said(deployment, *words, "--json"))


def by_site(read: dict[str, object]) -> list[tuple[object, ...]]:
    keys = read["keys"]
    assert isinstance(keys, list)
    return [(key["site"], key["exit"], key["rate"], key["used_last_minute"], key["waiting"]) for key in keys]


def test_keys_are_shown_and_rates_are_set_and_taken_back_for_all_that_fall_under_a_name(
    deployment: Deployment,
) -> None:
    shown = json.loads(run(deployment, "pace", "--json").stdout)
    assert by_site(shown) == [
        ("other.example:8080", "direct", "1/h", 1, 1),
        ("shop.example", "direct", "1/h", 1, 0),
        ("shop.example", "http://proxy:3128", "1/h", 1, 0),
    ]
    assert shown["rates"] == {}
    assert {key["spent_today"] for key in shown["keys"]} == {1}
    table = said(deployment)
    assert re.search(r"site +exit +rate +last min +waiting +running", table)
    assert re.search(r"other\.example:8080 +direct +1/h +1 +1 +0 +1 of 500 today", table)

    changed = facts(deployment, "set", "*.example", "30/m")
    assert {key["rate"] for key in changed["keys"]} == {"30/m"}
    assert len(changed["keys"]) == 3
    both = "shop.example (direct), shop.example (http://proxy:3128)"
    assert both in said(deployment, "set", "https://shop.example/p/1", "10/m")
    assert facts(deployment)["rates"] == {"*.example": "30/m", "shop.example": "10/m"}
    assert "set at run time: *.example 30/m" in said(deployment)
    with open_paces(deployment.settings) as paces:
        paces.unset_rate("*.example")
    facts(deployment, "unset", "shop.example")
    assert [rate for _, _, rate, *_ in by_site(facts(deployment))] == ["1/h"] * 3
    assert "no key that is known yet" in said(deployment, "set", "elsewhere.example", "1/s")


def test_sites_are_held_and_released_through_all_exits_or_one(deployment: Deployment) -> None:
    held = facts(deployment, "hold", "shop.example", "--for", "10m", "--reason", "asked us to")
    assert [key["key"] for key in held["keys"]] == [SHOP, PROXIED]
    assert all(590_000 < key["held_ms"] <= 600_001 and key["reason"] == "asked us to" for key in held["keys"])
    by_hand = said(deployment, "hold", OTHER)
    assert re.match(r"other\.example:8080 \(direct\) is held for 3[01] d \(by hand\)", by_hand)
    shown = said(deployment, columns=60)
    assert re.search(
        r"shop\.example \(direct\): 1/h, 1 in the last minute, .*; held for \d+ min \(asked us to\)", shown
    )
    assert "shop.example (direct) goes on" in said(deployment, "release", SHOP)
    assert [key["changed"] for key in facts(deployment, "release", "shop.example")["keys"]] == [False, True]
    assert "1 message in line" in said(deployment, "release", "other.example:8080")
    assert [key["held_ms"] for key in facts(deployment)["keys"]] == [None] * 3
    before = facts(deployment, "hold", "new.example|direct", "--for", "90s")["keys"]
    assert before[0]["held_ms"] > 80_000, "a whole key is held before its first message"


def test_what_is_not_there_or_cannot_be_is_one_sentence(deployment: Deployment) -> None:
    with open_paces(deployment.settings) as paces:
        for refused, sentence in (
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
            with pytest.raises(AsyncworkerError, match=sentence):
                refused()
    ended = run(deployment, "pace", "hold", "nowhere")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "asyncworker: no key is known of 'nowhere'" in ended.stderr


def test_without_a_message_of_a_paced_actor_there_is_nothing(deployment: Deployment) -> None:
    deployment.broker.client.flushall()
    assert "no key was used within a day" in said(deployment)
    assert facts(deployment) == {"keys": [], "rates": {}}
    rabbitmq = load({}, broker_url="amqp://guest@localhost:1", store_url="redis://localhost:1")
    with pytest.raises(ConfigurationError, match="RabbitMQ, where no message has a pace"), open_paces(rabbitmq):
        pass
