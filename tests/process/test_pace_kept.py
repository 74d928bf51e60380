"""Paces that real workers keep together, judged by the log of the site."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncworker import Pace, Session, actor
from tests.site import BehaviourSite, Request, Response, page
from tests.waiting import wait_until
from tests.workers import Deployment

#: The pace of `visit`, in tests/deployment/paced.py: so many in so many seconds.
MOST, PER_S = 10, 3.0

#: What the way of a request to the site may take longer, or shorter, than that of another.
WAY_S = 0.3


class LoggingSite(BehaviourSite):
    """Notes when it was asked for pages, and by whom; `/p` says to slow down when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[float, str]] = []
        self.refused_at: float | None = None
        self.retry_after_s = 0

    def respond(self, request: Request) -> Response:
        if request.path != "/p":
            return super().respond(request)
        self.log.append((time.monotonic(), request.query["seed"]))
        if self.retry_after_s:
            headers, self.retry_after_s, self.refused_at = {"Retry-After": str(self.retry_after_s)}, 0, time.monotonic()
            return page("busy", status=429, headers=headers)
        return page("p")

    @property
    def page_url(self) -> str:
        return f"{self.url}/p"


@pytest.fixture
def deployment(state_dir: Path) -> Iterator[Deployment]:
    deployment = Deployment(state_dir, actors=("paced",))
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


@pytest.fixture
def sites() -> Iterator[list[LoggingSite]]:
    with LoggingSite() as one, LoggingSite() as other:
        yield [one, other]


def send(deployment: Deployment, site: LoggingSite, count: int) -> Callable[[], bool]:
    """Send so many messages that have to wait; returns whether all have asked."""

    async def visit(session: Session, url: str, *, seed: int | None = None) -> None: ...

    pace = Pace(rate=MOST, per_ms=round(PER_S * 1000), jitter=0.0)
    visits = actor(actor_name="visit", pace=pace, broker=deployment.broker)(visit)
    deployment.broker.send_many([visits.message(site.page_url, seed=seed) for seed in range(1, count + 1)])
    deployment.broker.actors.clear()
    return lambda: len(site.log) >= count


def test_a_host_is_asked_no_more_than_its_pace_says_whatever_the_number_of_workers(
    deployment: Deployment, sites: list[LoggingSite]
) -> None:
    """10 in 3 s instead of a minute, by 2 worker processes and then 4 instead of 4 and then 8."""
    shop, _ = sites
    with deployment.worker("-p", "2", "-t", "4") as first:
        first.ready()
        have_asked = send(deployment, shop, 45)
        wait_until(lambda: len(shop.log) >= 15, "the first workers ask")
        with deployment.worker("-p", "2", "-t", "4") as second:
            second.ready()
            wait_until(have_asked, "all have asked")
            assert (first.stop(), second.stop()) == (0, 0)
    times = [at for at, _ in shop.log]
    assert len(times) == 45
    for start, one_too_many in zip(times, times[MOST:], strict=False):
        assert one_too_many - start > PER_S - WAY_S, "a window has one more"
    assert times[-1] - times[0] < 44 * PER_S / MOST * 1.25, "while work waits slots are used"


def test_after_a_429_no_worker_asks_that_host_before_its_time_and_others_go_on(
    deployment: Deployment, sites: list[LoggingSite]
) -> None:
    """A Retry-After of 3 s instead of 20."""
    shop, other = sites
    with deployment.worker("-p", "2", "-t", "4") as workers:
        workers.ready()
        have_asked = send(deployment, shop, 12)
        wait_until(lambda: len(shop.log) >= 4, "they ask")
        shop.retry_after_s = 3
        wait_until(lambda: shop.refused_at is not None, "one is refused")
        have_asked_the_other = send(deployment, other, 8)
        wait_until(lambda: have_asked() and len(shop.log) >= 13, "all are served in the end")
        assert have_asked_the_other()
        wait_until(lambda: workers.log.count("outcome=succeeded") == 20, "all have ended")
        assert workers.stop() == 0
        log = workers.log
    assert shop.refused_at is not None
    times = [at for at, _ in shop.log]
    assert [at for at in times if shop.refused_at + WAY_S / 3 < at < shop.refused_at + 3] == []
    before_end = [at for at, _ in other.log if shop.refused_at < at < shop.refused_at + 3]
    assert len(before_end) == 8, "another host's go on"
    asked_by = [seed for _, seed in shop.log]
    (twice,) = (seed for seed in set(asked_by) if asked_by.count(seed) == 2)
    assert asked_by.index(twice) < 6, "the refused one asks again, as the same visitor"
    assert log.count("outcome=deferred") == 1
    assert "outcome=failed" not in log
    assert log.count("says to slow down") == 1
    after = [at for at in times if at >= shop.refused_at + 3]
    gaps = [late - early for early, late in itertools.pairwise(after)]
    assert min(gaps) > 2 * PER_S / MOST - WAY_S, "and then at half the rate"
