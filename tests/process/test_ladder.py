"""The real command with the real browser: attempts that do not end by themselves, and what is left when they do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from dramatiq import Message

from asyncworker import processes
from asyncworker.watchdog import EXIT_REPLACED
from tests.hung import browsers, suspend
from tests.site import BehaviourSite
from tests.waiting import wait_until
from tests.workers import Deployment, Running

pytestmark = pytest.mark.needs_browser


@pytest.fixture
def deployment(state_dir) -> Iterator[Deployment]:  # type: ignore[no-untyped-def]
    deployment = Deployment(
        state_dir,
        close_timeout_ms=3_000,
        context_timeout_ms=3_000,
        cleanup_timeout_ms=1_000,
        loop_block_limit_ms=3_000,
        heartbeat_timeout_ms=3_000,
    )
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


def all_slots_work(deployment: Deployment, site: BehaviourSite) -> None:
    """As many pages at once as there are slots: each waits until the site has seen all of them."""
    before = sum(site.requests.values())
    messages = [deployment.send("probe.text", f"{site.url}/slow?ms=1500") for _ in range(4)]
    wait_until(lambda: sum(site.requests.values()) >= before + 4, "four pages load at once")
    for message in messages:
        assert deployment.result(message) == "slow"


def stored_ms_ago(deployment: Deployment, message: Message[Any]) -> int:
    """For how long the store has had a result, by its own clock."""
    backend: Any = deployment.broker.get_results_backend()
    left_ms: int = backend.client.pttl(backend.build_message_key(message))
    assert left_ms > 0
    return deployment.settings.result_ttl_ms - left_ms


def nothing_is_left(deployment: Deployment) -> None:
    counts = deployment.slots()
    assert (counts["slots"], counts["slots_in_use"]) == (4, 0)


def test_code_that_catches_everything_and_calls_again_is_refused_and_all_slots_come_back(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        deployment.result(deployment.send("probe.visit", site.product_url(1)))  # the browser is up
        messages = [deployment.send("ladder.stubborn", f"{site.url}/never") for _ in range(4)]
        for message in messages:
            assert "TimeLimitExceeded" in deployment.failure(message)
        worker.wait_for_log("stubborn: ", times=4)
        all_slots_work(deployment, site)
        assert len(worker.tokens("browser")) == 1
        worker.stop()
    refused = set(re.findall(r"stubborn: (.*?) \[", worker.log))
    assert all("went through" not in line for line in refused)
    assert "browser_type.launch: SessionOver" in worker.log
    assert "kept browser: SessionOver" in worker.log
    counts = deployment.counts()
    assert (counts["browsers_launched"], counts["contexts_opened"]) == (1, counts["contexts_closed"])
    nothing_is_left(deployment)


def test_pages_whose_scripts_loop_for_ever_in_every_slot_cost_their_time_limit_and_no_slot(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        messages = [deployment.send("ladder.spin", f"{site.url}/spin") for _ in range(4)]
        for message in messages:
            assert "TimeLimitExceeded" in deployment.failure(message)
        all_slots_work(deployment, site)
        assert worker.stop() == 0
    nothing_is_left(deployment)


def test_a_browser_that_hangs_while_a_context_opens_is_named_by_the_phase_and_replaced(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        hung = suspend(browsers(worker))
        message = deployment.send("probe.text", site.product_url(1), options={"time_limit": 1_000})
        said = deployment.failure(message)
        assert "PhaseTimeout" in said, said
        assert re.search(r"opened no (context|page) within 3000 ms", said), said
        (row,) = wait_until(
            lambda: [row for row in deployment.rows(message) if row.outcome == "failed"], "its row is closed"
        )
        assert row.phase == "context", "not the actor's code, whose limit is 1 s"
        assert row.phases_ms["context"] >= 3_000
        assert row.phases_ms["code"] == 0
        all_slots_work(deployment, site)
        wait_until(lambda: not any(processes.lives(each.pid) for each in hung), "the hung browser is killed")
        assert worker.stop() == 0
    nothing_is_left(deployment)


@pytest.mark.long
def test_a_browser_that_hangs_under_messages_is_killed_after_their_time_limits_and_all_slots_come_back(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        messages = [
            deployment.send("probe.text", f"{site.url}/slow?ms=9000", options={"time_limit": 2_500}) for _ in range(4)
        ]
        wait_until(lambda: sum(site.requests.values()) >= 4, "four pages are loading")
        hung = suspend(browsers(worker))
        for message in messages:
            assert "TimeLimitExceeded" in deployment.failure(message)
        all_slots_work(deployment, site)
        wait_until(lambda: not any(processes.lives(each.pid) for each in hung), "the hung browser is killed")
        assert worker.stop() == 0
    assert deployment.counts()["browsers_launched"] == 2
    nothing_is_left(deployment)


def test_a_driver_that_hangs_is_killed_with_its_browser_and_costs_the_messages_after_it_nothing(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        messages = [
            deployment.send("probe.text", f"{site.url}/slow?ms=9000", options={"time_limit": 2_500}) for _ in range(4)
        ]
        wait_until(lambda: sum(site.requests.values()) >= 4, "four pages are loading")
        tokens = worker.tokens("driver")
        hung = suspend(processes.carriers(lambda token: token in tokens))
        for message in messages:
            assert "TimeLimitExceeded" in deployment.failure(message)
        all_slots_work(deployment, site)
        assert not any(processes.lives(each.pid) for each in hung)
        assert worker.stop() == 0
    assert "driver does not answer" in worker.log
    nothing_is_left(deployment)


def test_contexts_that_close_slowly_or_not_at_all_keep_no_result_waiting_and_fail_no_message(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        slow = [deployment.send("ladder.slow_close_each_tenth", number) for number in (9, 19)]
        worker.wait_for_log("did not close in 3000 ms", times=2)  # of the 10 s that it takes
        assert [stored_ms_ago(deployment, message) >= 1_000 for message in slow] == [True] * 2, "not after the close"
        assert [deployment.result(message) for message in slow] == [9, 19]
        messages = [deployment.send("ladder.slow_close_each_tenth", number) for number in range(30)]
        assert [deployment.result(message) for message in messages] == list(range(30))
        assert worker.stop() == 0
    for number, message in enumerate(messages):
        (row,) = deployment.rows(message)
        assert row.outcome == "succeeded"
        if number % 10 == 9:
            assert row.phases_ms["close"] >= 2_500
            assert sum(row.phases_ms.values()) - row.phases_ms["close"] <= (row.took_ms or 0) + 10
    nothing_is_left(deployment)


# --- what ends in the end of the process


def replaced(deployment: Deployment, worker: Running, *, code: int = EXIT_REPLACED, within_s: float = 25) -> None:
    assert worker.command.wait(within_s) == code


def test_a_process_whose_loop_stays_blocked_exits_leaves_nothing_and_its_messages_are_run_again(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        (pid,) = worker.workers
        below = psutil.Process(pid).children(recursive=True)
        bystander = deployment.send("probe.text", f"{site.url}/slow?ms=3000", seed=5)
        wait_until(lambda: sum(site.requests.values()) >= 2, "the bystander's page is loading")
        message = deployment.send("ladder.block_loop", 60, attempts=1)
        replaced(deployment, worker)
        wait_until(lambda: not any(processes.lives(each.pid) for each in below), "its browser and driver are gone")
    assert f"by message {message.message_id} (ladder.block_loop)" in worker.log
    assert "in _block" in worker.log
    assert f"exit code {EXIT_REPLACED}" in worker.log
    with deployment.worker() as second:
        assert deployment.result(message) == 2
        assert deployment.result(bystander) == "slow"
        assert second.stop() == 0


def test_a_process_whose_every_thread_is_in_a_call_to_c_says_so_and_exits(deployment: Deployment) -> None:
    with deployment.worker("-p", "1", "-t", "2") as worker:
        messages = [deployment.send("block_thread", 60, queue="blocked") for _ in range(2)]
        replaced(deployment, worker)
    assert "2 of its 2 threads are in calls that no time limit interrupts" in worker.log
    for message in messages:
        assert f"message {message.message_id} (block_thread) does not end" in worker.log


def test_a_call_that_keeps_the_interpreter_to_itself_ends_the_process_too(deployment: Deployment) -> None:
    with deployment.worker("-p", "1", "-t", "2") as worker:
        worker.ready()
        deployment.send("keep_the_interpreter", 60, queue="blocked")
        replaced(deployment, worker, code=1, within_s=40)
    assert "in keep_the_interpreter" in worker.log
