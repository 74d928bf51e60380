"""Each attempt has a line in its worker's log; of many short ones in a second only the first have one each."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from asyncworker.attempt_log import LINES, AttemptLog
from asyncworker.ledger import Outcome, Row

SHORT = Row("id", 0, "note", None, "host:1", opened_ms=10, closed_ms=13, outcome=Outcome.succeeded)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> AttemptLog:
    caplog.set_level(logging.INFO, "asyncworker.worker")
    return AttemptLog()


def test_an_attempt_has_a_line(log: AttemptLog, caplog: pytest.LogCaptureFixture) -> None:
    log.ended(dataclasses.replace(SHORT, seed=42, generation=1, identity="ab12"), 2)
    assert caplog.messages == [
        "message_id=id actor=note attempt=2 seed=42 identity=ab12 browser=1 outcome=succeeded ms=3"
    ]


def test_more_short_ones_than_have_a_line_each_are_summed_up_by_actor(
    log: AttemptLog, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(LINES):
        log.ended(SHORT, 1)
    log.ended(SHORT, 1)
    log.ended(dataclasses.replace(SHORT, closed_ms=14), 1)
    log.ended(dataclasses.replace(SHORT, actor="count"), 1)
    assert len(caplog.messages) == LINES
    caplog.clear()
    log.next_period()
    count, note = caplog.messages
    assert count.startswith("actor=count outcome=succeeded attempts=1 ms_each=3.0 ")
    assert note.startswith("actor=note outcome=succeeded attempts=2 ms_each=3.5 ")
    caplog.clear()
    log.next_period()
    assert caplog.messages == [], "and said once"
    log.ended(SHORT, 1)
    assert len(caplog.messages) == 1, "the next second has its lines"


@pytest.mark.parametrize("other", [{"generation": 1}, {"outcome": Outcome.failed, "error": "ValueError: no"}])
def test_one_with_a_browser_or_with_another_outcome_always_has_its_line(
    log: AttemptLog, caplog: pytest.LogCaptureFixture, other: dict[str, object]
) -> None:
    for _ in range(LINES):
        log.ended(SHORT, 1)
    caplog.clear()
    log.ended(dataclasses.replace(SHORT, **other), 1)  # type: ignore[arg-type]
    assert len(caplog.messages) == 1
    log.next_period()
    assert len(caplog.messages) == 1, "and is not counted again"


def test_at_debug_each_has_its_line(log: AttemptLog, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "asyncworker.worker")
    for _ in range(2 * LINES):
        log.ended(SHORT, 1)
    assert len(caplog.messages) == 2 * LINES
