"""Celery's messages and queues as Dramatiq has them, and back."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from hypothesis import given
from hypothesis import strategies as some
from kombu.exceptions import OperationalError

from asyncworker.celery import names, stores
from asyncworker.celery.envelope import OPTION, delay_ms, enveloped, opened
from asyncworker.celery.serving import serve
from asyncworker.errors import ConfigurationError
from asyncworker.settings import load

#: An app whose tasks go elsewhere.
ELSEWHERE = Celery("elsewhere", broker="redis://127.0.0.1/0", set_as_current=False)

#: Dramatiq's own rule.
ALLOWED = re.compile(r"[a-zA-Z_][a-zA-Z0-9._-]*")


@given(some.text(min_size=1), some.sampled_from(names.STEPS))
def test_any_name_of_a_queue_becomes_one_that_dramatiq_takes_and_back(queue: str, step: int) -> None:
    name = names.to_dramatiq(queue, step)
    assert ALLOWED.fullmatch(name)
    assert not name.endswith((".DQ", ".XQ"))
    assert names.to_celery(name) == queue


@given(some.text(min_size=1), some.text(min_size=1))
def test_no_two_queues_get_the_same_name(one: str, other: str) -> None:
    assert (one == other) == (names.to_dramatiq(one) == names.to_dramatiq(other))


def test_ordinary_names_stay_as_they_are() -> None:
    assert [names.to_dramatiq(name) for name in ("celery", "mail-high", "a.b_c")] == ["celery", "mail-high", "a.b_c"]
    assert names.to_dramatiq("mail:high") == "celery__mail_3a_high"
    assert names.all_steps("celery") == ["celery", "celery.p3", "celery.p6", "celery.p9"]


@pytest.mark.parametrize(("priority", "step"), [(None, 0), (0, 0), (2, 0), (3, 3), (5, 3), (8, 6), (9, 9), (99, 9)])
def test_a_priority_counts_as_the_next_lower_step(priority: object, step: int) -> None:
    assert names.step_of(priority) == step


def message(**headers: Any) -> dict[str, Any]:
    properties = {"correlation_id": "id", "delivery_info": {"exchange": "", "routing_key": "q"}, "priority": 0}
    return {
        "body": "W10=",
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": "t", "id": "id"} | headers,
        "properties": properties | {"body_encoding": "base64", "delivery_tag": "tag"},
    }


def test_a_message_comes_back_as_it_was_sent_also_with_dates_in_its_headers() -> None:
    sent = message(x_at=datetime(2026, 1, 2, tzinfo=UTC), x_text="ü")
    carried, delay = enveloped(sent, "q")
    assert (carried.message_id, carried.queue_name, carried.actor_name, carried.args) == ("id", "q", "celery", ("t",))
    assert delay is None
    assert opened(json.loads(carried.encode())["options"]) == sent
    assert carried.options[OPTION]["headers"]["x_text"] == "ü"


def test_a_message_of_the_old_protocol_has_its_id_and_its_task_in_its_body() -> None:
    body = {"task": "old", "id": "old-id", "args": [], "kwargs": {}}
    sent = {**message(), "headers": {}, "body": json.dumps(body)}
    del sent["properties"]["body_encoding"]
    carried, _ = enveloped(sent, "q")
    assert (carried.message_id, carried.args) == ("old-id", ("old",))


def test_an_eta_is_a_delay_and_one_without_a_zone_is_utc() -> None:
    now = datetime.now(UTC)
    soon = now + timedelta(seconds=60)
    elsewhere = soon.astimezone(timezone(timedelta(hours=-5)))
    for eta in (soon, elsewhere, soon.replace(tzinfo=None)):
        assert delay_ms(eta.isoformat()) == pytest.approx(60_000, abs=2_000)
    assert delay_ms((now - timedelta(days=1)).isoformat()) is None
    assert [delay_ms(each) for each in (None, "no date", 7)] == [None, None, None]


def test_a_url_says_whose_broker_it_is() -> None:
    assert [stores.is_ours(url) for url in ("asyncworker://", "asyncworker+redis://h/0")] == [True, True]
    assert [stores.is_ours(url) for url in ("redis://h/0", None, "memory://")] == [False, False, False]
    assert str(stores.settings_of("redis://h:7/1").broker_url) == "redis://h:7/1"


WITHOUT_CELERY = """
import sys
sys.modules["celery"] = sys.modules["kombu"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "celery" else found(name, *rest)
import asyncworker, asyncworker.deployment
try:
    import asyncworker.celery
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_celery_all_else_is_there_and_the_adapter_names_its_extra() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_CELERY], capture_output=True, text=True, check=True)
    assert "pip install 'asyncworker[celery]'" in run.stdout


def test_a_producer_that_imports_only_celery_knows_the_url_and_imports_asyncworker_on_use() -> None:
    code = (
        "import sys; from celery import Celery; app = Celery(broker='asyncworker://'); "
        "before = 'asyncworker' in sys.modules; print(before, app.connection().transport.__class__.__module__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "asyncworker.celery.transport"]


def test_a_producer_whose_broker_is_away_gets_kombus_error_when_its_policy_gives_up() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and no one listens there
        app = Celery("x", broker=f"asyncworker+redis://127.0.0.1:{taken.getsockname()[1]}/0", set_as_current=False)
        began = time.monotonic()
        with pytest.raises(OperationalError):
            app.send_task("t", retry=True, retry_policy={"max_retries": 1, "interval_start": 0})
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("json:dumps", "no Celery app"),
        ("no_such_module:app", "does not import"),
        ("tests.unit.test_celery_messages:ELSEWHERE", 'broker_url="asyncworker://"'),
    ],
)
def test_an_app_that_cannot_be_served_is_refused_at_the_start(name: str, says: str) -> None:
    settings = load({"ASYNCWORKER_CELERY_APP": name})
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        serve(settings, StubBroker(), [])
