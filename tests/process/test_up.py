"""`asyncworker up`: real workers that are kept, with their pages, browsers and messages."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from asyncworker.processes import VARIABLE, Token, lives
from asyncworker.supervisor import NOT_IN_ORDER
from tests import namespaces
from tests.operating import run
from tests.site import BehaviourSite
from tests.waiting import BUSY_S, wait_until
from tests.workers import HOME, Deployment, Running

pytestmark = [pytest.mark.needs_browser, pytest.mark.timeout(240)]


@pytest.fixture
def hasty(state_dir: Path) -> Deployment:
    """A deployment whose dead workers are found out soon."""
    return Deployment(state_dir, close_timeout_ms=8_000, heartbeat_timeout_ms=2_000)


def below(running: Running) -> list[psutil.Process]:
    return psutil.Process(running.command.pid).children(recursive=True)


def pages_are_loading(site: BehaviourSite, count: int) -> None:
    wait_until(lambda: sum(site.requests.values()) >= count, f"{count} pages are loading")


def test_one_of_four_workers_is_killed_in_mid_flow_and_the_other_three_finish(
    hasty: Deployment, site: BehaviourSite
) -> None:
    with hasty.up("-p", "4", "-t", "1") as up:
        first = up.ready().workers
        messages = [hasty.send("probe.visit", f"{site.url}/slow?ms=6000") for _ in range(4)]
        pages_are_loading(site, 4)
        os.kill(first[2], signal.SIGKILL)
        results = [hasty.result(message, timeout_s=60) for message in messages]
        up.wait_for_log("Worker process is ready for action", times=5)
        replaced = up.workers[4]
        others = {*first} - {first[2]}
        assert all(lives(pid) for pid in others | {replaced})
        unharmed = [result["pid"] for result in results if result["attempt"] == 1 and result["pid"] in others]
        assert len(unharmed) >= 3
        assert {result["pid"] for result in results} <= others | {replaced}
        assert len(re.findall(r"worker \d died", up.log)) == 1
        assert up.stop() == 0
    assert hasty.counts()["contexts_closed"] >= 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_navigations_lets_them_finish_and_leaves_nothing(
    deployment: Deployment, site: BehaviourSite, number: signal.Signals
) -> None:
    messages = [deployment.send("probe.visit", f"{site.url}/slow?ms=3000") for _ in range(4)]
    with deployment.up("-p", "2", "-t", "2") as up:
        up.ready()
        pages_are_loading(site, 4)
        started = below(up)
        assert os.getpgid(up.workers[0]) != os.getpgid(up.command.pid)
        os.killpg(up.command.pid, number)  # SIGINT as a terminal does
        assert up.command.wait(40) == 0
        assert not [one for one in started if lives(one.pid)]
    for message in messages:
        deployment.result(message)
        assert [row.outcome for row in deployment.rows(message)] == ["succeeded"]


def test_a_second_sigterm_ends_a_page_that_never_answers(deployment: Deployment, site: BehaviourSite) -> None:
    deployment.send("probe.visit", f"{site.url}/never")
    with deployment.up("-p", "1", "-t", "1") as up:
        up.ready()
        pages_are_loading(site, 1)
        started = below(up)
        up.command.terminate()
        up.wait_for_log("Stopping worker process")
        up.command.terminate()
        began = time.monotonic()
        assert up.command.wait(60) == NOT_IN_ORDER
        assert time.monotonic() - began < (deployment.settings.stop_timeout_ms + 8_000) / 1000 + BUSY_S
        assert not [one for one in started if lives(one.pid)]


def test_a_killed_supervisor_leaves_nothing_and_the_running_message_finishes(
    deployment: Deployment, site: BehaviourSite
) -> None:
    message = deployment.send("probe.visit", f"{site.url}/slow?ms=3000")
    with deployment.up("-p", "2", "-t", "1") as up:
        up.ready()
        pages_are_loading(site, 1)
        started = below(up)
        up.command.kill()
        up.command.wait()
        wait_until(lambda: not [one for one in started if lives(one.pid)], "nothing is left", timeout_ms=20_000)
    deployment.result(message)
    assert [row.outcome for row in deployment.rows(message)] == ["succeeded"]


def test_a_killed_dramatiq_has_its_worker_finish_its_message_and_is_replaced(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.up("-p", "1", "-t", "1") as up:
        (worker,) = up.ready().workers
        message = deployment.send("probe.visit", f"{site.url}/slow?ms=3000")
        pages_are_loading(site, 1)
        psutil.Process(worker).parent().kill()  # type: ignore[union-attr]
        assert deployment.result(message)["pid"] == worker
        up.wait_for_log("Worker process is ready for action", times=2)
        assert not lives(worker)
        assert deployment.result(deployment.send("probe.visit", site.product_url(1)))["pid"] == up.workers[1]
        assert up.stop() == 0


TALKATIVE = """
import logging, time
from pathlib import Path
import dramatiq

@dramatiq.actor(queue_name="talk", store_results=True, max_retries=0)
def talk(begun: str, go_on: str) -> str:
    Path(begun).touch()
    while not Path(go_on).exists():
        time.sleep(0.01)
    for number in range(3_000):
        logging.getLogger("talk").warning("%d %s", number, "." * 100)
    return "said"
"""


def test_a_worker_whose_command_was_killed_ends_however_much_it_logs(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "actors.py").write_text(TALKATIVE)
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    with deployment.up("-p", "1", "-t", "1", cwd=tmp_path) as up:
        (worker,) = up.ready().workers
        message = deployment.send("talk", str(begun), str(go_on), queue="talk")
        wait_until(begun.exists, "the actor runs")
        psutil.Process(worker).parent().kill()  # type: ignore[union-attr]
        up.wait_for_log(f"process {worker}: the command dramatiq has died; stopping in order")
        go_on.touch()
        assert deployment.result(message) == "said"
        up.ready()
        up.wait_for_log("Worker process is ready for action", times=2)
        assert not lives(worker)
        assert up.stop() == 0


def test_a_killed_workers_browser_is_gone_before_its_place_is_taken(
    deployment: Deployment, site: BehaviourSite
) -> None:
    with deployment.up("-p", "1", "-t", "1") as up:
        (worker,) = up.ready().workers
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        tree = psutil.Process(worker).children(recursive=True)
        for member in tree:  # so that they do not end by themselves
            member.suspend()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not [one for one in tree if lives(one.pid)], "its browser is gone")
        up.wait_for_log("worker 1 died: exit code 1")
        assert up.stop() == 0


def test_actors_that_do_not_import_are_reported_at_once(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "actors.py").write_text("import no_such_module_at_all\n")
    ended = run(deployment, "up", "-p", "2", cwd=tmp_path)
    assert ended.returncode == 2
    assert re.search(r"worker \d \| .*no_such_module_at_all", ended.stderr)
    assert "cannot start" in ended.stderr


@pytest.mark.parametrize("option", ["--pid-file", "--log-file"])
def test_options_that_are_for_one_process_are_refused(deployment: Deployment, option: str) -> None:
    ended = run(deployment, "up", "-p", "2", option, "x")
    assert ended.returncode == 2
    assert f"{option} is for one process" in ended.stderr


def test_options_of_dramatiq_reach_every_worker(deployment: Deployment) -> None:
    with deployment.up("-p", "2", "-t", "1", "-Q", "plain") as up:
        up.ready()
        assert deployment.result(deployment.send("add", 1, 2, queue="plain")) == 3
        for worker in up.workers:
            assert psutil.Process(worker).cmdline()[-8:-3] == ["-t", "1", "-Q", "plain", "--processes"]
        assert up.stop() == 0


def test_as_process_1_it_keeps_no_zombie_of_ten_crashed_browsers(deployment: Deployment, site: BehaviourSite) -> None:
    namespaces.needed()
    deployment.send("add", 1, 2, queue="plain")  # the store is up, outside
    with deployment.up("-p", "1", "-t", "2", within=namespaces.UNSHARE) as up:
        up.ready()
        init = namespaces.init_below(up.command.pid)
        for _ in range(10):
            deployment.result(deployment.send("probe.visit", site.product_url(1)))
            _kill_browser(init)
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        wait_until(lambda: not namespaces.zombies(init), "no zombie is left")
        init.terminate()
        assert up.command.wait(40) == 0, up.log
    assert deployment.counts()["browsers_launched"] >= 11


def _kill_browser(init: psutil.Process) -> None:
    """SIGKILL the browser's own process, and the shell that may stand above it: the others of it are orphans then."""
    carriers = [one for one in init.children(recursive=True) if _role(one) == "browser"]
    own = [one for one in carriers if "--remote-debugging-pipe" in one.cmdline()]
    assert own
    for process in own:
        process.kill()
    wait_until(lambda: not [one for one in own if lives(one.pid)], "the browser is dead")


def _role(process: psutil.Process) -> str | None:
    try:
        token = Token.parse(process.environ().get(VARIABLE, ""))
    except psutil.Error:
        return None
    return token.role if token else None


@pytest.mark.parametrize("queue", ["default", "plain"])
def test_dramatiq_as_process_1_is_refused_when_it_launches_browsers_and_else_warned(
    deployment: Deployment, queue: str
) -> None:
    namespaces.needed()
    deployment.send("add", 1, 2, queue="plain")
    with deployment.worker("-p", "1", "-t", "1", "-Q", queue, within=namespaces.UNSHARE) as worker:
        if queue == "plain":
            worker.ready()
            namespaces.init_below(worker.command.pid).terminate()
            assert worker.command.wait(30) == 0
        else:
            assert worker.command.wait(30) != 0
            assert "this worker cannot start" in worker.log
        assert "the command dramatiq is process 1 here and reaps no orphans" in worker.log
        assert "make `asyncworker up -p N` process 1" in worker.log


def test_dramatiq_below_an_init_is_not_refused(deployment: Deployment, site: BehaviourSite) -> None:
    namespaces.needed()
    with (
        namespaces.namespace() as init,
        deployment.worker("-p", "1", "-t", "1", within=namespaces.entering(init, HOME)) as worker,
    ):
        worker.ready()
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        assert "process 1" not in worker.log
        psutil.Process(worker.command.pid).children()[0].terminate()
        assert worker.command.wait(30) == 0
