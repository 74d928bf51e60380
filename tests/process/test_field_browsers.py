"""What people who run browsers behind queues have reported, of browsers and their contexts: each is a claim here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncworker import processes
from tests import namespaces
from tests.hung import browsers, words_of
from tests.site import BehaviourSite
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment

pytestmark = pytest.mark.needs_browser

Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(state_dir: Path) -> Iterator[Deploy]:
    """Makes the test's deployment."""
    made: list[Deployment] = []

    def deployed(**settings: Any) -> Deployment:
        made.append(Deployment(state_dir, **({"close_timeout_ms": 8_000} | settings)))
        return made[0]

    yield deployed
    for deployment in made:
        deployment.broker.close()
        deployment.broker.client.close()


def load(site: BehaviourSite, count: int) -> None:
    wait_until(lambda: sum(site.requests.values()) >= count, f"{count} pages are loading")


def all_slots_work(deployment: Deployment, site: BehaviourSite, slots: int = 4) -> None:
    """As many pages at once as there are slots: each waits until the site has seen all of them."""
    before = site.requests["/slow"]
    messages = [deployment.send("probe.text", f"{site.url}/slow?ms=1500") for _ in range(slots)]
    wait_until(lambda: site.requests["/slow"] >= before + slots, f"{slots} pages load at once")
    for message in messages:
        assert deployment.result(message) == "slow"
    counts = deployment.slots()
    assert counts["slots"] == slots


@pytest.mark.long
def test_a_hundred_screenshots_in_eight_slots_are_one_launch_and_a_hundred_contexts_all_closed(
    deploy: Deploy, site: BehaviourSite
) -> None:
    """Reported as apache/superset#41243.

    What a message costs is looked at in CPU time of the worker process, Playwright's client included: how long it takes
    on a busy machine says more of the machine. benchmarks/overhead.py measures that.
    """
    deployment = deploy(slots=8)
    with deployment.worker("-p", "1", "-t", "10") as worker:
        (pid,) = worker.ready().workers
        before = psutil.Process(pid).cpu_times()
        messages = [deployment.send("field.picture", site.product_url(1)) for _ in range(100)]
        results = [deployment.result(message, timeout_s=60) for message in messages]
        after = psutil.Process(pid).cpu_times()
        assert worker.stop() == 0
    cpu_ms = (after.user + after.system - before.user - before.system) * 1000 / 100
    print(f"{cpu_ms:.1f} ms of CPU for each message")
    assert cpu_ms < 50
    assert "10 threads trimmed to 8 slots" in worker.log
    assert {result["generation"] for result in results} == {1}
    assert all(result["bytes"] > 1_000 for result in results)
    assert deployment.counts() == {"browsers_launched": 1, "contexts_opened": 100, "contexts_closed": 100}


def test_a_browser_killed_under_eight_messages_costs_none_of_a_hundred_that_wait_and_is_launched_once_more(
    deploy: Deploy, site: BehaviourSite
) -> None:
    """Reported as scrapy-plugins/scrapy-playwright#167."""
    deployment = deploy(slots=8)
    running = [deployment.send("probe.visit", f"{site.url}/slow?ms=4000", seed=number) for number in range(8)]
    waiting = [deployment.send("probe.visit", site.product_url(1), seed=100 + number) for number in range(100)]
    with deployment.worker("-p", "1", "-t", "8") as worker:
        load(site, 8)
        worker.kill_browser()
        results = [deployment.result(message, timeout_s=60) for message in running + waiting]
        assert worker.stop() == 0
    assert [(result["seed"], result["attempt"]) for result in results[:8]] == [(number, 2) for number in range(8)]
    for message in running:
        assert [row.outcome for row in deployment.rows(message)] == ["crashed", "succeeded"]
    assert [(result["seed"], result["attempt"]) for result in results[8:]] == [(100 + each, 1) for each in range(100)]
    counts = deployment.counts()
    assert (counts["browsers_launched"], counts["browsers_lost"]) == (2, 1)
    assert counts["contexts_opened"] == counts["contexts_closed"] == 8 + 108


def test_a_retry_after_a_time_limit_begins_when_a_close_of_five_seconds_has_ended(
    deploy: Deploy, site: BehaviourSite
) -> None:
    """Reported as Bogdanp/dramatiq#544."""
    deployment = deploy()
    notes = deployment.directory / "notes"
    with deployment.worker("-p", "1", "-t", "2") as worker:
        message = deployment.send("field.slow_close_and_retry", f"{site.url}/never", str(notes), 5_000)
        assert deployment.result(message) == 2
        assert worker.stop() == 0
    assert notes.read_text().split("\n")[:-1] == ["begun 1", "closed 1", "begun 2"]
    first, _ = deployment.rows(message)
    assert first.outcome == "timed_out"
    assert "TimeLimitExceeded" in (first.error or "")


def test_pages_that_ask_before_they_are_left_and_crashed_renderers_cost_no_slot(
    deploy: Deploy, site: BehaviourSite
) -> None:
    """Reported as apify/crawlee#1829."""
    deployment = deploy()
    with deployment.worker("-p", "1", "-t", "4") as worker:
        trapped = [deployment.send("field.trapped", f"{site.url}/beforeunload") for _ in range(4)]
        assert [deployment.result(message) for message in trapped] == ["beforeunload"] * 4
        crashed = [deployment.send("probe.crash_page", crashes=1) for _ in range(4)]
        assert [deployment.result(message)["attempt"] for message in crashed] == [2] * 4
        all_slots_work(deployment, site)
        assert worker.stop() == 0
    counts = deployment.counts()
    assert (counts["browsers_launched"], counts["contexts_opened"] - counts["contexts_closed"]) == (1, 0)
    assert deployment.slots()["slots_in_use"] == 0
    assert "did not close in" not in worker.log


def test_a_message_that_outlasts_its_browsers_age_goes_on_and_the_next_ones_have_another(
    deploy: Deploy, site: BehaviourSite
) -> None:
    """Reported as browserless/browserless#329."""
    deployment = deploy(recycle_age_ms=1_000, recycle_check_ms=200)
    own_lock = {"TMPDIR": str(deployment.directory)}  # other tests may recycle at the same time
    with deployment.worker("-p", "1", "-t", "2", environment=own_lock) as worker:
        long = deployment.send("probe.visit", f"{site.url}/slow?ms=6000")
        load(site, 1)
        old = browsers(worker)
        worker.wait_for_log("browser 1 is recycled")
        worker.wait_for_log("browser 2: chromium is up")
        other = deployment.result(deployment.send("probe.visit", site.product_url(1)))
        assert (other["generation"] > 1, other["attempt"]) == (True, 1)
        assert any(processes.lives(each.pid) for each in old), "it is still at the long message"
        result = deployment.result(long)
        assert (result["generation"], result["attempt"]) == (1, 1)
        wait_until(lambda: not any(processes.lives(each.pid) for each in old), "the old browser ends with it")
        assert worker.stop() == 0


def test_four_worker_processes_that_start_at_once_have_four_browsers_that_share_nothing(
    deploy: Deploy, site: BehaviourSite
) -> None:
    """Reported as g1879/DrissionPage#621."""
    deployment = deploy(warm=True)
    with deployment.up("-p", "4", "-t", "1") as up:
        pids = up.ready().workers
        up.wait_for_log("chromium is up", times=4)
        tokens = up.tokens("browser")
        assert Counter(token.pid for token in tokens) == Counter(pids)
        profiles = [
            word.partition("=")[2]
            for process in browsers(up)
            for word in " ".join(words_of(process)).split()  # a helper writes its own as one word
            if word.startswith("--user-data-dir=")
        ]
        assert len(set(profiles)) == 4
        messages = [deployment.send("probe.visit", f"{site.url}/slow?ms=1500") for _ in range(4)]
        results = [deployment.result(message) for message in messages]
        assert {result["pid"] for result in results} <= set(pids)
        assert up.stop() == 0
    assert deployment.counts()["browsers_launched"] == 4


def test_five_attempts_of_a_message_show_a_site_one_seed_exit_language_and_time_zone(
    deploy: Deploy, site: BehaviourSite
) -> None:
    """Reported as apify/crawlee#2503. The exit is the deployment's: the site is its proxy, and answers for any name."""
    deployment = deploy(locale="de-DE", timezone="Pacific/Auckland", proxy=site.url)
    notes = deployment.directory / "notes"
    with deployment.worker("-p", "2", "-t", "1") as worker:
        message = deployment.send("field.seen", "http://shop.test/headers", str(notes), seed=42)
        assert deployment.result(message) == 5
        assert worker.ready().stop() == 0
    shown = f"42 42 de-DE Pacific/Auckland {site.url} ['de-DE', 'Pacific/Auckland']"
    assert notes.read_text().splitlines() == [shown] * 5
    assert site.requests["/headers"] == 5, "no attempt went past the proxy"
    assert {row.seed for row in deployment.rows(message)} == {42}


@pytest.mark.long
def test_as_process_1_it_keeps_no_zombie_of_browsers_that_are_recycled(deploy: Deploy, site: BehaviourSite) -> None:
    """Reported as microsoft/playwright-python#984. 5 recycles here, and 50 there."""
    namespaces.needed()
    deployment = deploy(recycle_after=2, recycle_check_ms=100)
    deployment.send("add", 1, 2, queue="plain")  # the store is up, outside
    own_lock = {"TMPDIR": str(deployment.directory)}
    with deployment.up("-p", "1", "-t", "1", within=namespaces.UNSHARE, environment=own_lock) as up:
        init = namespaces.init_below(up.ready().command.pid)
        generation = 0
        while generation <= 5:
            generation = deployment.result(deployment.send("probe.visit", site.product_url(1)))["generation"]
        wait_until(lambda: not namespaces.zombies(init), "no zombie is left")
        init.terminate()
        assert up.command.wait(40) == 0, up.log
    assert deployment.counts()["browsers_recycled"] >= 5


def test_a_driver_that_writes_lines_does_not_delay_the_end_of_its_worker(deploy: Deploy, site: BehaviourSite) -> None:
    """Reported as Bogdanp/dramatiq#666."""
    deployment = deploy()
    script = deployment.directory / "talk.js"
    script.write_text("if (process.argv.includes('run-driver')) setInterval(() => console.error('moo'), 5);\n")
    with deployment.worker("-p", "1", "-t", "1", environment={"NODE_OPTIONS": f"--require {script}"}) as worker:
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        worker.wait_for_log("driver: moo", times=20)
        began = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - began < 4 + BUSY_S
    assert "Worker has been shut down" in worker.log
