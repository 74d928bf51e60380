"""What `asyncworker cancel` says of each place where a message may have been."""

from __future__ import annotations

import pytest

from asyncworker.cancelling import Cancellation, Found
from asyncworker.cli_cancel import sentence

CASES = {
    Found.waiting: (True, "was waiting and is dropped"),
    Found.delayed: (True, "was delayed and is dropped"),
    Found.lost: (True, "was with a worker that has died; it is dropped"),
    Found.running: (True, "was running on host:7 and ended after 20 ms (rejected)"),
    Found.ended: (True, "had been cancelled already"),
    Found.dead: (False, "is a dead letter, which no worker takes; `asyncworker dead discard` drops it"),
    Found.noted: (True, "is noted as cancelled: the worker that takes it drops it, or ends it if it is running"),
    Found.unknown: (False, "should one come with that id, it is dropped"),
}


@pytest.mark.parametrize("found", list(Found))
def test_each_place_has_its_sentence(found: Found) -> None:
    is_cancelled, words = CASES[found]
    said = sentence(Cancellation("m1", found, is_cancelled, "rejected", "host:7", 20), 500)
    assert "m1" in said
    assert said.endswith(words)


@pytest.mark.parametrize(
    ("found", "outcome", "words"),
    [
        (Found.running, None, "is running on host:7 and has not ended within 500 ms; its worker ends it"),
        (Found.running, "succeeded", "was running on host:7 and has succeeded before its worker heard of this"),
        (Found.ended, "succeeded", "had ended already: succeeded"),
        (Found.ended, None, "had ended already: how is not known"),
    ],
)
def test_what_is_not_cancelled_is_said_as_it_is(found: Found, outcome: str | None, words: str) -> None:
    assert words in sentence(Cancellation("m1", found, False, outcome, "host:7"), 500)
