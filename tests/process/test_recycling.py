"""The real command with browsers that are replaced under load: no message notices, and one is replaced at a time."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from asyncworker import processes
from tests import namespaces
from tests.site import BehaviourSite
from tests.waiting import wait_until
from tests.workers import Deployment, Running

pytestmark = pytest.mark.needs_browser

SLOTS = ("-p", "1", "-t", "4")

#: Builds a page of some thousand elements and keeps some MB in its own process.
HEAVY = """<title>heavy</title><p>heavy</p><script>
window.kept = Array.from({length: 10}, () => new Uint8Array(1e6).fill(1));
for (let n = 0; n < 3000; n++) document.body.append(Object.assign(document.createElement("i"), {textContent: n}));
</script>"""

#: Of two browsers and two drivers that are up while one is replaced, with four such pages; 450 MB were measured.
MOST_MB = 1_000


class Sampler(threading.Thread):
    """Looks at the browsers of a command's workers until it is told to stop."""

    def __init__(self, worker: Running) -> None:
        super().__init__()
        self._pids = set(worker.ready().workers)
        self._over = threading.Event()
        self.most_mb = 0.0
        #: How often so many worker processes had more than one browser.
        self.replacing: Counter[int] = Counter()

    def run(self) -> None:
        while not self._over.is_set():
            tokens = processes.tokens(lambda token: token.pid in self._pids)
            owners = Counter(token.pid for token in tokens if token.role == "browser")
            self.replacing[sum(count > 1 for count in owners.values())] += 1
            self.most_mb = max(self.most_mb, processes.memory_mb(tokens.__contains__))

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


@pytest.fixture
def deployment(state_dir: Path) -> Iterator[Deployment]:
    deployment = Deployment(state_dir, close_timeout_ms=8_000, recycle_after=25, slots=4)
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


@pytest.fixture
def own_lock(state_dir: Path) -> dict[str, str]:
    """Other tests may recycle at the same time, and are other machines."""
    return {"TMPDIR": str(state_dir)}


def recycles(worker: Running) -> list[str]:
    return re.findall(r"browser \d+ is recycled \(([^)]*)\)", worker.log)


@pytest.mark.long
def test_two_hundred_messages_to_heavy_pages_notice_no_recycle_and_memory_stays_within_bounds(
    deployment: Deployment, site: BehaviourSite, own_lock: dict[str, str]
) -> None:
    """Reported as scrapy-plugins/scrapy-playwright#126, with 5,000 messages."""
    with deployment.worker(*SLOTS, environment=own_lock) as worker, Sampler(worker) as sampler:
        messages = [
            deployment.send("probe.visit", f"{site.url}/html?body={quote(HEAVY)}", seed=number) for number in range(200)
        ]
        results = [deployment.result(message, timeout_s=90) for message in messages]
        command = psutil.Process(worker.command.pid)
        wait_until(lambda: not namespaces.zombies(command), "no zombie is left")
        assert worker.stop() == 0
    counts = deployment.counts()
    assert {result["attempt"] for result in results} == {1}
    assert counts["contexts_opened"] == counts["contexts_closed"] == 200
    assert counts["browsers_recycled"] >= 3
    assert counts["browsers_launched"] <= 1 + counts["browsers_recycled"]
    assert "browsers_lost" not in counts
    assert all("contexts, ASYNCWORKER_RECYCLE_AFTER is 25" in reason for reason in recycles(worker))
    assert 0 < sampler.most_mb < MOST_MB
    print(f"at most {sampler.most_mb:.0f} MB in {counts}")


@pytest.mark.long
def test_of_two_worker_processes_one_at_a_time_replaces_its_browser_and_both_get_their_turn(
    deployment: Deployment, site: BehaviourSite, own_lock: dict[str, str]
) -> None:
    with deployment.worker("-p", "2", "-t", "2", environment=own_lock) as worker, Sampler(worker) as sampler:
        results: list[dict[str, Any]] = []
        while len({result["pid"] for result in results if result["generation"] > 1}) < 2:
            assert len(results) < 400, "both have recycled"
            messages = [deployment.send("probe.visit", f"{site.url}/slow?ms=200", seed=number) for number in range(40)]
            results += [deployment.result(message, timeout_s=90) for message in messages]
        assert worker.stop() == 0
    assert {result["attempt"] for result in results} == {1}
    assert sampler.replacing[1] > 0, "a replacement was seen"
    assert sampler.replacing[2] == 0


@pytest.mark.long
def test_an_attempt_that_outlasts_the_limit_is_run_again_and_used_up_no_retry(
    state_dir: Path, site: BehaviourSite, own_lock: dict[str, str]
) -> None:
    deployment = Deployment(state_dir, recycle_after=1, recycle_drain_ms=300, stop_timeout_ms=300)
    try:
        message = deployment.send("probe.visit", f"{site.url}/never", seed=7)
        with deployment.worker(*SLOTS, environment=own_lock) as worker:
            wait_until(lambda: len(deployment.rows(message)) > 7, "it is run again, more often than it may be retried")
            assert worker.stop() == 0
        rows = deployment.rows(message)
        assert {row.outcome for row in rows} == {"interrupted"}
        assert {row.seed for row in rows} == {7}
        assert "BrowserRecycled: browser 1 (chromium) was ended under this attempt" in (rows[0].error or "")
        assert "it used up no retry" in worker.log
        assert deployment.dead_letters() == {}
    finally:
        deployment.broker.close()
        deployment.broker.client.close()
