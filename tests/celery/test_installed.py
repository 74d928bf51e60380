"""`install(app)` in workers of Celery's own, with real processes, a real Valkey and a real Chromium."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import WorkerLostError

from asyncworker import embedded, processes
from asyncworker.settings import child_environment
from tests import readme
from tests.conftest import missing
from tests.servers import Store
from tests.site import BehaviourSite
from tests.waiting import wait_until

pytestmark = pytest.mark.needs_browser

ROOT = Path(__file__).parents[2]
APP = "tests.celery.installed_app"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if embedded.binary() is None:
        missing("no Valkey or Redis server on this machine")
    store = Store(tmp_path_factory.mktemp("store"))
    store.start()
    yield store
    store.close()


@pytest.fixture(scope="module")
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


#: Of the store, each for a worker and its client.
_DATABASES = itertools.count()


class CeleryWorker:
    """`celery worker` in a process, and a client that sends it tasks."""

    def __init__(self, store: Store, directory: Path, *words: str, **more: str) -> None:
        self.log = directory / "celery.log"
        url = f"{store.url.removesuffix('0')}{next(_DATABASES)}"  # another worker may be there
        self.client = Celery("client", broker=url, backend=url)
        command = [sys.executable, "-m", "celery", "-A", APP, "worker", "--without-gossip", "--without-mingle"]
        environment = {
            "ASYNCWORKER_ENGINE": "chromium",
            "ASYNCWORKER_STATE_DIR": str(directory / "state"),
            "TEST_CELERY_URL": url,
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
            "C_FORCE_ROOT": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--loglevel", "INFO", *words],
                env=child_environment(**environment, **more),
                cwd=directory,
                stdout=log,
                stderr=log,
            )

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.text()
            return " ready." in self.text()

        wait_until(is_ready, "the worker is ready", timeout_ms=60_000)

    def send(self, task: str, *args: Any, **kwargs: Any) -> Any:
        return self.client.send_task(f"{APP}.{task}", args, kwargs)

    def run(self, task: str, *args: Any, **kwargs: Any) -> Any:
        sent = self.send(task, *args, **kwargs)
        try:
            return sent.get(timeout=60)
        except TimeoutError:
            raise AssertionError(self.text()) from None

    def text(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.client.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


@contextmanager
def celery_worker(store: Store, directory: Path, *words: str, **more: str) -> Iterator[CeleryWorker]:
    directory.mkdir(exist_ok=True)
    worker = CeleryWorker(store, directory, *words, **more)
    try:
        worker.wait_until_ready()
        yield worker
        pids = [worker.process.pid, worker.run("place")[0]]
        assert worker.stop() == 0, worker.text()
        assert not tokens_of(pids), worker.text()
    finally:
        worker.end()


def tokens_of(pids: list[int]) -> set[processes.Token]:
    """The tokens of these processes that something carries: their drivers and browsers."""
    return processes.tokens(lambda token: token.pid in pids)


PREFORK = ("--pool", "prefork", "--concurrency", "1")
POOLS = {
    "prefork": PREFORK,
    "spawn": (*PREFORK, "--pool-start-method", "spawn"),
    "solo": ("--pool", "solo"),
    "threads": ("--pool", "threads", "--concurrency", "3"),
}


@pytest.fixture(scope="module", params=POOLS)
def worker(request: pytest.FixtureRequest, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with celery_worker(store, tmp_path_factory.mktemp(request.param), *POOLS[request.param]) as worker:
        worker.pool = request.param  # type: ignore[attr-defined]
        worker.run("title", "data:text/html,<p>warm", 1)
        yield worker


def test_the_browser_lives_where_tasks_run_and_never_in_the_parent(worker: Any) -> None:
    pid, parent, has_loop, _ = worker.run("place")
    assert has_loop
    is_child = worker.pool in ("prefork", "spawn")
    assert (parent if is_child else pid) == worker.process.pid
    assert {token.pid for token in tokens_of([pid, worker.process.pid])} == {pid}


def test_a_task_has_a_session_and_its_retry_the_same_seed(worker: Any, site: BehaviourSite) -> None:
    first = worker.run("title", f"{site.url}/cookie/set", 42)
    again = worker.run("title", f"{site.url}/cookie/set", 42, fail=2)
    assert (first["title"], first["seed"], first["attempt"]) == ("set", 42, [True, f"{APP}.title", 1])
    assert again["attempt"] == [True, f"{APP}.title", 3]
    assert (again["seed"], again["random"], again["generation"]) == (42, first["random"], 1)


def test_browser_is_playwrights_for_a_task_which_closes_nothing(worker: Any, site: BehaviourSite) -> None:
    before = worker.run("counts")
    assert worker.run("by_browser", f"{site.url}/cookie/set") == ["set", "mine", True, True]
    after = wait_until(
        lambda: (now := worker.run("counts"))["contexts_opened"] == now["contexts_closed"] and now, "all are closed"
    )
    assert after["contexts_opened"] - before["contexts_opened"] == 3
    assert wait_until(lambda: worker.run("counts")["slots_in_use"] == 0, "the slot is free again")


def test_handlers_run_in_their_own_thread_and_see_the_task(worker: Any, site: BehaviourSite) -> None:
    sent = worker.send("handlers_see_the_task", f"{site.url}/cookie/get")
    assert sent.get(timeout=60) == [f"{APP}.handlers_see_the_task", sent.id, True]


def test_async_tasks_run_on_the_loop_with_their_request(worker: Any, site: BehaviourSite) -> None:
    sent = [worker.send("asynchronous", f"{site.url}/cookie/set", fail=fail) for fail in (0, 1, 0)]
    results = [each.get(timeout=60) for each in sent]
    assert [result["retries"] for result in results] == [0, 1, 0]
    for result in results:
        assert (result["title"], result["same"]) == ("set", True)
        assert result["thread"] == "asyncworker-loop"
        assert result["child"] == f"{APP}.asynchronous"
        assert "wait for itself for ever" in result["session"]
    assert worker.run("by_itself_retried") == 1


def test_limits_end_a_task_in_its_call(worker: Any, site: BehaviourSite) -> None:
    if worker.pool in ("prefork", "spawn"):
        assert worker.run("softly_limited", True) == "caught in the coroutine"
        assert type(worker.send("softly_limited", False).get(timeout=60, propagate=False)).__name__ == (
            "SoftTimeLimitExceeded"
        )
        assert worker.run("limited_in_a_call", f"{site.url}/never") == ["SoftTimeLimitExceeded", "about:blank"]
        return
    over = worker.send("limited_by_us_alone", site.url).get(timeout=60, propagate=False)
    assert type(over).__name__ == "SessionOver"
    assert "TimeLimitExceeded" in str(over)


def test_a_child_that_is_killed_leaves_nothing_and_its_successor_works(
    store: Store, site: BehaviourSite, tmp_path: Path
) -> None:
    with celery_worker(store, tmp_path / "killed", *PREFORK) as worker:
        sent = worker.send("stays", f"{site.url}/cookie/get")
        pid = int(wait_until(lambda: worker.client.backend.client.lpop("stays"), "the task has its page"))
        assert processes.tokens(lambda token: token.pid == pid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            sent.get(timeout=30)
        wait_until(lambda: not processes.tokens(lambda token: token.pid == pid), "its browser is gone")
        assert worker.run("title", f"{site.url}/cookie/set", 1)["pid"] != pid
        assert type(worker.send("by_browser", f"{site.url}/cookie/set", leave=True).get(propagate=False)).__name__ == (
            "WorkerLostError"
        )
        assert worker.run("title", f"{site.url}/cookie/set", 1)["title"] == "set"


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_child_that_is_recycled_and_a_worker_that_is_stopped_cold_leave_nothing(
    pool: str, store: Store, site: BehaviourSite, tmp_path: Path
) -> None:
    worker = CeleryWorker(store, tmp_path, *POOLS[pool], "--max-tasks-per-child", "1")
    pids = [worker.process.pid]
    try:
        worker.wait_until_ready()
        if pool == "prefork":
            pids += [worker.run("title", f"{site.url}/cookie/set", 1)["pid"] for _ in range(2)]
            assert len(set(pids)) == 3
            wait_until(lambda: not tokens_of(pids), "the browsers of children that were recycled are gone")
        sent = worker.send("stays", f"{site.url}/cookie/get")
        pids.append(int(wait_until(lambda: worker.client.backend.client.lpop("stays"), "the task has its page")))
        assert tokens_of(pids)
        worker.process.send_signal(signal.SIGQUIT)
        worker.process.wait(40)
        wait_until(lambda: not tokens_of(pids), "its browser is gone")
        assert sent.state != "SUCCESS"
    finally:
        worker.end()


def test_a_parent_with_a_live_browser_is_not_forked(store: Store, tmp_path: Path) -> None:
    worker = CeleryWorker(store, tmp_path, *PREFORK, TEST_LAUNCHES_IN_PARENT="1")
    try:
        assert worker.process.wait(60) != 0
    finally:
        worker.end()
    assert "has launched Playwright" in worker.text()
    assert "launch none at import" in worker.text()


def test_the_readmes_tasks_run_without_a_worker_each_with_a_browser_of_its_own(
    site: BehaviourSite, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(readme.files()["tasks.py"])
    code = """
import sys, tasks
url = sys.argv[1]
print([task.apply(args).get() for task, args in (
    (tasks.title, (url, 7)), (tasks.two_pages, (url,)), (tasks.without_waiting, (url,)))])
"""
    environment = child_environment(ASYNCWORKER_ENGINE="chromium", ASYNCWORKER_STATE_DIR=str(tmp_path / "state"))
    done = subprocess.run(
        [sys.executable, "-c", code, f"{site.url}/cookie/set"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == "['set', ['set', 'about:blank'], 'set']", done.stderr
