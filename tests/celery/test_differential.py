"""One task module on Celery's own worker and on ours, side by side: signals, hooks, states and results are the same.

Both workers are started, and stopped, once; what they have done is compared afterwards.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import celery
import pytest

from tests.celery.deployment.scenarios import ALONE, BOTH, ENDINGS
from tests.celery.sides import Side, our_side, real_side
from tests.waiting import wait_until
from tests.workers import Deployment

#: What ends a message in a worker.
END = ("task_postrun", "task_revoked", "task_unknown", "task_rejected")

#: Of the whole process, not of a task.
BOOT = (
    "import_modules",
    "celeryd_init",
    "worker_init",
    "after_setup_logger",
    "after_setup_task_logger",
    "worker_process_init",
    "celeryd_after_setup",
    "worker_ready",
)

Record = dict[str, Any]


class Seen:
    """What one worker has done."""

    def __init__(self, side: Side, results: dict[str, list[Record]]) -> None:
        self.ids, self.results, self.records = dict(side.ids), results, side.records()

    def of(self, scenario: str) -> list[Record]:
        """What happened in the worker, in its order; without ids, which are another worker's."""
        ids = self.ids[scenario]
        found = [each for each in self.records if each["root"] in ids or each["id"] in ids]
        return [{name: value for name, value in each.items() if name not in ("id", "root")} for each in found]

    def told(self, scenario: str) -> Any:
        """What the client sees, without what is another each time."""
        text = json.dumps(self.results[scenario])
        for place, one in enumerate(self.ids[scenario]):
            text = text.replace(one, f"<{place}>")
        text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<id>", text)
        text = re.sub(r"celery(-\d+)?@[^'\"\\]+", "<node>", text)
        text = re.sub(r"gen\d+@", "gen<pid>@", text)
        return json.loads(re.sub(r"20\d\d-\d\d-\d\dT[\d:.]+\+00:00", "<time>", text))

    def names(self, scenario: str) -> list[str]:
        return [f"{each['what']}({each['of']})" if "of" in each else each["what"] for each in self.of(scenario)]


def ended(side: Side, scenarios: list[str]) -> None:
    most = sum(ENDINGS.get(name, len(side.sent()[name])) for name in scenarios)
    wait_until(
        lambda: sum(each["what"] in END for each in side.records()) >= most,
        f"{most} messages of {len(scenarios)} scenarios have ended in {side.record}",
        timeout_ms=60_000,
    )


@pytest.fixture(scope="module")
def both(deployment: Deployment) -> Iterator[tuple[Seen, Seen]]:
    with real_side(deployment) as real, our_side(deployment) as ours, real.client(*BOTH), ours.client(*BOTH, *ALONE):
        ended(real, list(BOTH))
        ended(ours, [*BOTH, *ALONE])
        results = real.results(), ours.results()
        real.worker.send_signal(signal.SIGTERM)
        assert ours.worker.stop() == 0
        assert real.worker.wait(20) == 0
        yield Seen(real, results[0]), Seen(ours, results[1])


def test_a_worker_of_ours_does_what_celerys_does(both: tuple[Seen, Seen]) -> None:
    real, ours = both
    for look in (Seen.names, Seen.of, Seen.told):  # from what is read at a glance to the kinds of all arguments
        differing = {each: (look(real, each), look(ours, each)) for each in BOTH}
        assert {name: seen for name, seen in differing.items() if seen[0] != seen[1]} == {}


def test_what_is_made_at_the_start_of_a_process_is_made_in_the_thread_of_plain_functions(
    both: tuple[Seen, Seen],
) -> None:
    for seen in both:
        assert {each["in_thread_of_init"] for each in seen.records if each["what"] == "BODY"} == {True}


def test_what_cannot_be_read_is_told_in_the_same_words(both: tuple[Seen, Seen]) -> None:
    real, ours = ([each for each in seen.records if each["what"] in ("task_rejected", "task_unknown")] for seen in both)
    assert len(real) == 3
    assert [{**each, "id": None, "root": None} for each in ours] == [
        {**each, "id": None, "root": None} for each in real
    ]


def test_the_process_begins_and_ends_with_the_same_signals(both: tuple[Seen, Seen]) -> None:
    real, ours = ([each for each in seen.records if each["what"] in BOOT] for seen in both)
    assert [each["what"] for each in real] == list(BOOT)
    if celery.VERSION >= (5, 7):  # before, the sender of worker_process_init was None in the solo pool alone
        assert json.loads(json.dumps(ours).replace('"Node"', '"Worker"')) == real
    real_end, our_end = (
        [each["what"] for each in seen.records if each["what"].startswith("worker_") and "shut" in each["what"]]
        for seen in both
    )
    assert real_end == ["worker_shutting_down", "worker_shutdown"]
    # Celery's solo pool sends no worker_process_shutdown; its prefork pool does, before worker_shutdown.
    assert our_end == ["worker_shutting_down", "worker_process_shutdown", "worker_shutdown"]


# --- what Celery's prefork pool was measured to do, and its solo pool cannot

BEGUN = ["task_received", "task_prerun", "Task.before_start", "BODY"]
FAILED = ["task_failure", "Task.after_return(FAILURE)", "task_postrun(FAILURE)"]

PREFORK = {
    "soft_time_limit": (
        [*BEGUN, "Task.on_failure(SoftTimeLimitExceeded)", *FAILED],
        ("FAILURE", "SoftTimeLimitExceeded()"),
    ),
    "soft_time_limit_handled": (
        [*BEGUN, "note", "Task.on_success", "task_success", "Task.after_return(SUCCESS)", "task_postrun(SUCCESS)"],
        ("SUCCESS", "'cleaned'"),
    ),
    # Celery tells task_failure twice, and before the body has ended.
    "hard_time_limit": (
        [*BEGUN, "Task.on_failure(TimeLimitExceeded)", *FAILED],
        ("FAILURE", "TimeLimitExceeded(0.4)"),
    ),
    "sysexit": (
        [*BEGUN, "task_postrun(None)", "task_failure"],
        ("FAILURE", "WorkerLostError('Worker exited prematurely: exitcode 3.')"),
    ),
    "on_failure_handler_raises": (
        ["task_received", "task_prerun", "BODY", "task_postrun(None)", "task_internal_error", "task_failure"],
        ("FAILURE", "RuntimeError('handler broke')"),
    ),
}


def test_the_lowest_number_of_a_priority_runs_first(both: tuple[Seen, Seen]) -> None:
    """As with Redis as Celery's broker, where 5 counts as 3 and 7 as 6; the worker holds one of each but its own."""
    began = [each["number"] for each in both[1].records if each["what"] == "ORDER"]
    assert began.index(0) <= 1
    assert [each for each in began if each] == [3, 5, 7, 9]


def test_what_a_pool_of_processes_does_is_done(both: tuple[Seen, Seen]) -> None:
    ours = both[1]
    assert {each: ours.names(each) for each in PREFORK} == {each: names for each, (names, _) in PREFORK.items()}
    told = {each: (ours.told(each)[0]["state"], ours.told(each)[0]["result"]) for each in PREFORK}
    assert told == {each: ending for each, (_, ending) in PREFORK.items()}
