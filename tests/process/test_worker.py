"""The real command with the real browser: what becomes of messages when things die."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.site import BehaviourSite
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment

pytestmark = pytest.mark.needs_browser


def test_a_cookie_set_by_one_message_is_not_seen_by_the_next(deployment: Deployment, site: BehaviourSite) -> None:
    with deployment.worker("-p", "1", "-t", "1") as worker:
        assert deployment.result(deployment.send("probe.text", f"{site.url}/cookie/set")) == "set"
        assert deployment.result(deployment.send("probe.text", f"{site.url}/cookie/get")) == ""
        assert worker.stop() == 0
    assert deployment.counts()["browsers_launched"] == 1


def test_a_killed_driver_is_replaced_with_its_browser_and_the_messages_are_run_again(
    deployment: Deployment, site: BehaviourSite
) -> None:
    stuck = [deployment.send("probe.visit", f"{site.url}/slow?ms=3000", seed=number) for number in range(3)]
    with deployment.worker() as worker:
        wait_until(lambda: sum(site.requests.values()) >= 3, "three pages are loading")
        before = worker.tokens("browser")
        worker.kill_driver()
        results = [deployment.result(message) for message in stuck]
        assert not before & worker.tokens("browser"), "the browser outlived its driver"
        assert worker.stop() == 0
    assert [(result["seed"], result["attempt"]) for result in results] == [(0, 2), (1, 2), (2, 2)]
    assert deployment.counts()["browsers_launched"] == 2


def test_a_browser_killed_while_idle_is_noticed_before_the_next_message(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        worker.kill_browser()
        worker.wait_for_log("browser 1 is gone")
        message = deployment.send("probe.visit", site.product_url(2))
        assert deployment.result(message)["generation"] == 2
        assert worker.stop() == 0
    assert [row.outcome for row in deployment.rows(message)] == ["succeeded"]


def test_a_crashed_page_fails_its_message_which_is_run_again_in_the_same_browser(deployment: Deployment) -> None:
    with deployment.worker() as worker:
        result = deployment.result(deployment.send("probe.crash_page", seed=9))
        waiting_elsewhere = deployment.send("probe.name_crash")
        assert "PageCrashed" in deployment.failure(waiting_elsewhere)
        assert worker.stop() == 0
    assert result == {"seed": 9, "attempt": 2, "generation": 1}
    assert deployment.counts()["browsers_launched"] == 1


def test_a_page_that_never_answers_ends_with_the_time_limit_after_its_own_cleanup(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        deployment.result(deployment.send("probe.visit", site.product_url(1)))  # the browser is up
        message = deployment.send("probe.stuck", f"{site.url}/never", cleanup_ms=2_500)
        assert "TimeLimitExceeded" in deployment.failure(message)
        assert worker.stop() == 0
    assert worker.log.index("cleanup ended") < worker.log.index("outcome=timed_out")
    assert [row.outcome for row in deployment.rows(message)] == ["timed_out"]
    assert deployment.counts()["contexts_closed"] == deployment.counts()["contexts_opened"] == 2


def test_a_close_of_five_seconds_completes_after_a_time_limit_too(deployment: Deployment, site: BehaviourSite) -> None:
    with deployment.worker() as worker:
        calm = deployment.send("probe.slow_close", site.product_url(1), 5_000)
        worker.wait_for_log("close began")
        late = deployment.send("probe.slow_close_over_limit", site.product_url(2), 5_000)
        assert site.product(1).title in deployment.result(calm)
        assert "TimeLimitExceeded" in deployment.failure(late)
        assert worker.stop() == 0
    assert worker.log.count("close ended") == 2
    assert "did not close in" not in worker.log
    assert deployment.counts()["contexts_closed"] == 2


def test_a_close_of_five_seconds_completes_during_a_shutdown(deployment: Deployment, site: BehaviourSite) -> None:
    message = deployment.send("probe.slow_close", site.product_url(1), 5_000)
    with deployment.worker() as worker:
        worker.wait_for_log("close began")
        assert worker.stop() == 0
    assert "close ended" in worker.log
    assert site.product(1).title in deployment.result(message)


@pytest.mark.long
def test_a_close_that_does_not_end_costs_its_browser_and_not_the_result(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        first = deployment.send("probe.slow_close", site.product_url(1), 60_000)
        assert site.product(1).title in deployment.result(first)
        worker.wait_for_log("did not close in 8000 ms")
        assert deployment.result(deployment.send("probe.visit", site.product_url(1)))["generation"] == 2
        assert worker.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_with_messages_in_flight_lets_them_finish(
    deployment: Deployment, site: BehaviourSite, number: signal.Signals
) -> None:
    messages = [deployment.send("probe.visit", f"{site.url}/slow?ms=2000") for _ in range(4)]
    with deployment.worker() as worker:
        wait_until(lambda: sum(site.requests.values()) >= 4, "four pages are loading")
        worker.ready()
        if number is signal.SIGINT:  # as a terminal does: to the whole group
            os.killpg(worker.command.pid, number)
            assert worker.command.wait(30) == 0
        else:
            assert worker.stop(number) == 0
    for message in messages:
        deployment.result(message)
        assert [row.outcome for row in deployment.rows(message)] == ["succeeded"]
    counts = deployment.counts()
    assert counts == {"browsers_launched": 1, "contexts_opened": 4, "contexts_closed": 4}


def test_an_actor_that_asks_for_it_is_interrupted_by_a_stop_and_run_by_the_next_worker(
    deployment: Deployment, site: BehaviourSite
) -> None:
    message = deployment.send("probe.visit", f"{site.url}/slow?ms=60000", options={"notify_shutdown": True}, seed=3)
    with deployment.worker() as worker:
        wait_until(lambda: sum(site.requests.values()) >= 1, "the page is loading")
        began = time.monotonic()
        assert worker.ready().stop() == 0
        assert time.monotonic() - began < 15 + BUSY_S
    assert [row.outcome for row in deployment.rows(message)] == ["interrupted"]
    with deployment.worker():
        wait_until(lambda: sum(site.requests.values()) >= 2, "the page is loading again")
        wait_until(lambda: len(deployment.rows(message)) == 2, "it has a row")
    assert {row.seed for row in deployment.rows(message)} == {3}


def test_retries_keep_the_seed_that_the_message_or_the_deployment_gave(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker() as worker:
        own = deployment.result(deployment.send("probe.visit", site.product_url(1), fail=2, seed=77))
        assert (own["seed"], own["attempt"]) == (77, 3)
        given = deployment.send("probe.visit", site.product_url(1), fail=1)
        first = deployment.result(given)
        second = deployment.result(deployment.send("probe.visit", site.product_url(1)))
        assert worker.stop() == 0
    assert first["seed"] == second["seed"] == int(deployment.broker.client.get("asyncworker:seed"))  # type: ignore[arg-type]
    assert first["random"] == second["random"] != own["random"]
    assert {row.seed for row in deployment.rows(given)} == {first["seed"]}


def test_what_code_opens_on_the_browser_itself_is_closed_with_its_session(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker("-p", "1", "-t", "1") as worker:
        assert deployment.result(deployment.send("probe.leave_open", site.product_url(1))) == 4
        wait_until(lambda: deployment.counts().get("contexts_closed") == 4, "they are closed, soon after the result")
        assert deployment.result(deployment.send("probe.contexts")) == 1
        assert worker.stop() == 0
    assert deployment.counts()["contexts_opened"] == deployment.counts()["contexts_closed"] == 5


def test_a_plain_actor_opens_a_session_of_the_workers_browser(deployment: Deployment, site: BehaviourSite) -> None:
    with deployment.worker() as worker:
        messages = [deployment.send("open_own", site.product_url(1), queue="opened") for _ in range(3)]
        results = [deployment.result(message) for message in messages]
        assert worker.stop() == 0
    assert {(result["seed"], result["generation"]) for result in results} == {(7, 1)}
    assert all(site.product(1).title in result["title"] for result in results)
    assert deployment.counts()["contexts_closed"] == 3


def test_two_processes_have_a_browser_each(deployment: Deployment, site: BehaviourSite) -> None:
    messages = [deployment.send("probe.visit", f"{site.url}/slow?ms=300") for _ in range(16)]
    with deployment.worker("-p", "2", "-t", "2") as worker:
        pids = {deployment.result(message)["pid"] for message in messages}
        worker.ready()
        assert len(worker.tokens("browser")) == 2
        assert worker.stop() == 0
    assert pids == set(worker.workers)
    assert deployment.counts()["browsers_launched"] == 2


def test_a_killed_worker_process_leaves_no_browser_and_the_rest_stops(
    deployment: Deployment, site: BehaviourSite
) -> None:
    deployment.send("probe.visit", f"{site.url}/slow?ms=5000")
    with deployment.worker() as worker:
        wait_until(lambda: sum(site.requests.values()) >= 1, "the page is loading")
        pid = worker.ready().workers[0]
        below = psutil.Process(pid).children(recursive=True)
        assert below
        os.kill(pid, signal.SIGKILL)
        assert worker.command.wait(30) != 0
        gone, alive = psutil.wait_procs(below, timeout=5)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], gone


def test_workers_start_by_spawn_too(deployment: Deployment, site: BehaviourSite) -> None:
    message = deployment.send("probe.visit", site.product_url(1))
    with deployment.worker("-p", "1", "-t", "2", "--use-spawn") as worker:
        assert deployment.result(message)["generation"] == 1
        assert worker.ready().stop() == 0


def test_a_warm_worker_has_its_browser_up_before_the_first_message(state_dir, site: BehaviourSite) -> None:  # type: ignore[no-untyped-def]
    deployment = Deployment(state_dir, warm=True)
    with deployment.worker() as worker:
        worker.wait_for_log("browser 1: chromium is up")
        assert deployment.result(deployment.send("probe.visit", site.product_url(1)))["generation"] == 1
        assert worker.stop() == 0
    assert deployment.counts()["browsers_launched"] == 1


def test_what_the_driver_writes_to_stderr_is_in_the_log_and_silences_nothing(
    deployment: Deployment, site: BehaviourSite
) -> None:
    script = deployment.directory / "talk.js"
    script.write_text("if (process.argv.includes('run-driver')) setInterval(() => console.error('moo'), 50);\n")
    with deployment.worker(environment={"NODE_OPTIONS": f"--require {script}"}) as worker:
        for number in range(1, 4):
            deployment.result(deployment.send("probe.visit", site.product_url(number)))
        worker.wait_for_log("driver: moo", times=3)
        assert worker.stop() == 0
    assert worker.log.count("outcome=succeeded") == 3
    assert "Worker has been shut down" in worker.log


def test_a_watched_worker_reloads_its_actors_and_its_browser(deployment: Deployment, tmp_path: Path) -> None:
    source = "from asyncworker import actor\n\n@actor(store_results=True)\nasync def version(session):\n    return {}\n"
    module = tmp_path / "actors.py"
    module.write_text(source.format(1))
    with deployment.worker("-p", "1", "-t", "1", "--watch", str(tmp_path), cwd=tmp_path) as worker:
        assert deployment.result(deployment.send("version")) == 1
        module.write_text(source.format(2))
        worker.wait_for_log("Worker process is ready for action", times=2)
        assert deployment.result(deployment.send("version")) == 2
        assert worker.stop() == 0
    counts = deployment.counts()
    assert (counts["browsers_launched"], counts["contexts_opened"], counts["contexts_closed"]) == (2, 2, 2)
