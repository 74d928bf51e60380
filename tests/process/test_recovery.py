"""Workers that die or stop: what they held is run by others, in time and once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.site import BehaviourSite
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment

pytestmark = pytest.mark.needs_browser

TIMEOUT_MS = 3_000


@pytest.fixture
def deployment(state_dir: Path) -> Iterator[Deployment]:
    deployment = Deployment(state_dir, close_timeout_ms=8_000, heartbeat_timeout_ms=TIMEOUT_MS)
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


def test_what_a_killed_worker_ran_and_held_is_run_by_the_next_in_time_and_nothing_more_is_sent(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker("-p", "1", "-t", "3") as worker:
        messages = [deployment.send("probe.text", f"{site.url}/slow?ms=5000") for _ in range(3)]
        wait_until(lambda: site.requests["/slow"] == 3, "three are in their pages")
        messages += [deployment.send("probe.text", f"{site.url}/cookie/get") for _ in range(6)]
        for pid in worker.workers:
            os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
    with deployment.worker("-p", "1", "-t", "3"):
        wait_until(lambda: site.requests["/slow"] == 6, "the three are run again")
        assert time.monotonic() - killed_at < TIMEOUT_MS / 1000 + 10 + BUSY_S, "by chance it would take minutes"
        for message in messages:
            deployment.result(message)
    rows = [deployment.rows(message) for message in messages]
    assert [len(each) for each in rows] == [2, 2, 2, 1, 1, 1, 1, 1, 1], "what had not begun is no attempt"


@pytest.mark.long
def test_a_worker_that_was_stopped_for_long_goes_on_and_cannot_acknowledge_what_another_has_run(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.worker("-p", "1", "-t", "1") as stopped:
        message = deployment.send("probe.text", f"{site.url}/slow?ms=1500")
        wait_until(lambda: site.requests["/slow"] == 1, "it is in its page")
        (pid,) = stopped.workers
        os.kill(pid, signal.SIGSTOP)
        try:
            with deployment.worker("-p", "1", "-t", "1") as other:
                deployment.result(message)
                assert "messages of dead workers that are run again: 1" in other.log
                os.kill(pid, signal.SIGCONT)
                stopped.wait_for_log("was no longer this worker's when it was done")
                assert other.stop() == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        again = deployment.send("probe.text", f"{site.url}/cookie/get")
        assert deployment.result(again) == ""
        assert stopped.stop() == 0
    assert site.requests["/slow"] == 2
