"""`asyncworker health` and the deployment's port, asked about the real command under real signals."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncworker import processes
from asyncworker.engines.finding import find
from asyncworker.health_sockets import ANSWER_TIMEOUT_S, ask_all, members, together
from asyncworker.settings import load
from tests.hung import browsers, network_processes, suspend
from tests.operating import facts, run, stands
from tests.site import BehaviourSite
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment, Running

pytestmark = pytest.mark.needs_browser

Make = Callable[..., Deployment]


@pytest.fixture
def make(state_dir: Path) -> Iterator[Make]:
    made: list[Deployment] = []

    def make(**settings: Any) -> Deployment:
        made.append(Deployment(state_dir, close_timeout_ms=8_000, **settings))
        return made[-1]

    yield make
    for deployment in made:
        deployment.broker.close()
        deployment.broker.client.close()
    assert list((state_dir / "health").glob("*")) == [], "a socket was left"


@pytest.fixture
def port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def answers(deployment: Deployment) -> list[dict[str, Any]]:
    return ask_all(members(deployment.settings))


def state(deployment: Deployment) -> str | None:
    return together(answers(deployment))


def comes(deployment: Deployment, wanted: str, *, timeout_ms: int = 30_000) -> dict[str, Any]:
    """What the only worker says once it is that."""
    wait_until(lambda: state(deployment) == wanted, f"it is {wanted}", timeout_ms=timeout_ms)
    (answer,) = answers(deployment)
    return answer


def get(port: int, path: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body) if answer.status != 404 else {}


def statuses(port: int) -> tuple[int, int] | None:
    """Of /live and /ready; None: no one answers."""
    try:
        return get(port, "/live")[0], get(port, "/ready")[0]
    except OSError:
        return None


def worker_of(running: Running) -> int:
    (pid,) = running.ready().workers
    return pid


# --- the command


def test_a_worker_is_ready_and_the_command_says_who_it_is_and_what_it_does(make: Make, site: BehaviourSite) -> None:
    deployment = make()
    with deployment.worker("-p", "1", "-t", "2") as running:
        pid = worker_of(running)
        cold = facts(deployment, "health")
        assert (cold["state"], cold["live"]) == ("ready", True)
        assert "the next message launches one" in cold["workers"][0]["reason"]
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        message = deployment.send("probe.text", f"{site.url}/slow?ms=4000")
        wait_until(lambda: answers(deployment)[0]["slots_in_use"] == 1, "a slot is in use")
        answer = comes(deployment, "ready")
        assert (answer["pid"], answer["browser"], answer["slots_in_use"]) == (pid, 1, 1)
        assert answer["worker"] == f"{socket.gethostname()}:{pid}"
        assert answer["slots"] == 4
        assert answer["since_ms"] >= cold["workers"][0]["since_ms"]
        said = run(deployment, "health")
        assert said.returncode == 0
        assert str(pid) in said.stdout
        assert "finishes navigations" in said.stdout
        assert facts(deployment, "health", "--pid", str(pid))["state"] == "ready"
        assert facts(deployment, "health", "--pid", str(os.getpid()), code=3)["workers"] == []
        assert deployment.result(message) == "slow"
        assert running.stop() == 0
    assert deployment.counts()["contexts_opened"] == 2, "no probe is counted as a message's"


def test_without_a_worker_the_command_says_so_and_whose_it_looked_for(make: Make) -> None:
    deployment = make()
    said = run(deployment, "health")
    assert said.returncode == 3
    assert f"of the deployment in {deployment.settings.state_dir}" in said.stdout


def test_a_worker_that_is_told_to_stop_during_a_long_message_is_draining_and_live(
    make: Make, site: BehaviourSite
) -> None:
    deployment = make()
    with deployment.worker() as running:
        message = deployment.send("probe.text", f"{site.url}/slow?ms=6000")
        wait_until(lambda: sum(site.requests.values()), "its page is loading")
        running.command.send_signal(signal.SIGTERM)
        comes(deployment, "draining")
        said = facts(deployment, "health", code=5)
        assert said["live"]
        assert run(deployment, "health", "--live").returncode == 0
        assert deployment.result(message) == "slow"
        assert running.command.wait(40) == 0
    assert run(deployment, "health").returncode == 3


def test_a_stopped_worker_is_sick_within_a_bounded_time_and_ready_when_it_goes_on(make: Make) -> None:
    deployment = make(heartbeat_timeout_ms=60_000)
    with deployment.worker() as running:
        pid = worker_of(running)
        comes(deployment, "ready")
        os.kill(pid, signal.SIGSTOP)
        try:
            said = facts(deployment, "health", code=1)
            assert not said["live"]
            assert f"does not answer within {ANSWER_TIMEOUT_S * 1000:.0f} ms" in said["workers"][0]["reason"]
            assert "SIGSTOP" in said["workers"][0]["reason"]
            assert run(deployment, "health", "--live").returncode == 1
        finally:
            os.kill(pid, signal.SIGCONT)
        comes(deployment, "ready")
        assert running.stop() == 0


def test_a_killed_worker_is_not_told_of_and_what_it_left_is_removed(make: Make) -> None:
    deployment = make()
    with deployment.worker() as running:
        pid = worker_of(running)
        comes(deployment, "ready")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not processes.lives(pid), "it is dead")
        assert len(list((deployment.directory / "health").iterdir())) == 1
        assert run(deployment, "health").returncode == 3
        assert list((deployment.directory / "health").iterdir()) == []
        running.command.wait(40)


# --- launches


def test_while_a_browser_takes_15_s_to_launch_its_worker_is_starting_and_leaves_messages_to_the_other(
    make: Make, site: BehaviourSite, tmp_path: Path
) -> None:
    found = find(load({"ASYNCWORKER_ENGINE": "chromium"}))
    assert found is not None
    slow = tmp_path / "chromium"
    slow.write_text(f'#!/bin/sh\nmkdir "{tmp_path}/first" 2>/dev/null && sleep 15\nexec "{found.executable}" "$@"\n')
    slow.chmod(0o700)
    deployment = make(executable_path=slow)
    with deployment.worker("-p", "2", "-t", "4") as running:
        running.ready()
        first = deployment.send("probe.text", f"{site.url}/slow?ms=0")
        wait_until(lambda: state(deployment) == "starting", "a browser is being launched")
        said = facts(deployment, "health", code=4)
        (starting,) = (each for each in said["workers"] if each["state"] == "starting")
        assert starting["live"]
        assert "is being launched" in starting["reason"]
        others = [deployment.send("probe.visit", site.product_url(number)) for number in range(1, 13)]
        served_by = {deployment.result(each)["pid"] for each in others}
        assert [row.outcome for row in deployment.rows(first)] == ["running"], "the others did not wait for the launch"
        assert served_by == set(running.workers) - {starting["pid"]}
        assert deployment.result(first) == "slow"
        wait_until(lambda: state(deployment) == "ready", "both are ready")
        assert {each["pid"] for each in answers(deployment)} == set(running.workers), "no one was replaced"
        assert running.stop() == 0
    rows = deployment.rows(first)
    assert [(row.worker, row.outcome) for row in rows] == [(starting["worker"], "succeeded")]
    assert not any(len(deployment.rows(each)) > 1 for each in others)


def test_with_warm_a_worker_takes_its_first_message_when_its_browser_is_up(
    make: Make, site: BehaviourSite, tmp_path: Path
) -> None:
    found = find(load({"ASYNCWORKER_ENGINE": "chromium"}))
    assert found is not None
    held = tmp_path / "chromium"
    held.write_text(f'#!/bin/sh\nwhile [ ! -e "{tmp_path}/go" ]; do sleep 0.1; done\nexec "{found.executable}" "$@"\n')
    held.chmod(0o700)
    deployment = make(executable_path=held, warm=True)
    message = deployment.send("probe.text", f"{site.url}/slow?ms=0")
    with deployment.worker() as running:
        worker_of(running)
        comes(deployment, "starting")
        plain = deployment.send("note_and_answer", str(tmp_path / "notes"), 7, queue="noted")
        assert deployment.result(plain) == 7, "no browser is needed for it"
        assert stands(deployment, "default")["waiting"] == 1
        (tmp_path / "go").touch()
        assert deployment.result(message) == "slow"
        comes(deployment, "ready")
        assert running.stop() == 0


def test_a_browser_that_does_not_launch_makes_the_worker_sick_until_a_later_launch_succeeds(
    make: Make, site: BehaviourSite, tmp_path: Path
) -> None:
    found = find(load({"ASYNCWORKER_ENGINE": "chromium"}))
    assert found is not None
    broken = tmp_path / "broken-chromium"
    broken.write_text("#!/bin/sh\necho 'no such display' >&2\nexit 1\n")
    broken.chmod(0o700)
    deployment = make(executable_path=broken, launch_backoff_ms=3_000)
    with deployment.worker() as running:
        worker_of(running)
        deployment.send("probe.text", "http://127.0.0.1:9/")
        answer = comes(deployment, "sick")
        assert "launch 1 in a row failed: chromium did not start" in answer["reason"]
        assert answer["live"], "a restart would not help"
        broken.write_text(f'#!/bin/sh\nexec "{found.executable}" "$@"\n')
        assert deployment.result(deployment.send("probe.text", f"{site.url}/slow?ms=0")) == "slow"
        assert "ms before chromium is launched again" in running.log, "the second launch came after a pause"
        assert comes(deployment, "ready")["pid"] == answer["pid"]
        assert running.stop() == 0


def test_a_browser_that_answers_and_loads_nothing_is_not_ready_within_two_probes_and_replaced(
    make: Make, site: BehaviourSite
) -> None:
    deployment = make(probe_interval_ms=1_000, probe_timeout_ms=2_000)
    with deployment.worker() as running:
        worker_of(running)
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        wait_until(lambda: (answers(deployment)[0]["probe"] or {}).get("failure", "") is None, "a probe has passed")
        frozen = suspend(network_processes(browsers(running)))
        assert frozen
        answer = comes(deployment, "sick", timeout_ms=10_000)
        assert "finished no navigation within 2000 ms" in answer["reason"]
        comes(deployment, "ready")
        assert deployment.result(deployment.send("probe.visit", site.product_url(2)))["generation"] == 2
        wait_until(lambda: not any(processes.lives(one.pid) for one in frozen), "the first one is gone")
        assert running.stop() == 0
    counts = deployment.counts()
    assert (counts["browsers_launched"], counts["browsers_recycled"]) == (2, 1)


# --- the port


@pytest.mark.long
def test_the_port_answers_while_the_loop_is_blocked_and_says_by_what(
    make: Make, site: BehaviourSite, port: int
) -> None:
    deployment = make(health_port=port, loop_block_limit_ms=30_000)
    with deployment.worker() as running:
        worker_of(running)
        deployment.result(deployment.send("probe.visit", site.product_url(1)))
        wait_until(lambda: statuses(port) == (200, 200), "it is ready")
        message = deployment.send("ladder.block_loop", 2 * BUSY_S)
        wait_until(lambda: statuses(port) == (503, 503), "it is sick")
        _, body = get(port, "/live")
        assert body["state"] == "sick"
        assert f"by message {message.message_id} (ladder.block_loop)" in body["workers"][0]["reason"]
        deployment.result(message)
        wait_until(lambda: statuses(port) == (200, 200), "it is ready again")
        assert get(port, "/")[0] == 404
        assert running.stop() == 0
    assert statuses(port) is None


def test_several_worker_processes_share_the_port_and_another_takes_over_when_one_is_killed(
    make: Make, port: int
) -> None:
    deployment = make(health_port=port)
    with deployment.up("-p", "2", "-t", "1") as running:
        running.ready()
        wait_until(lambda: statuses(port) == (200, 200), "they are ready")
        wait_until(lambda: len(get(port, "/ready")[1]["workers"]) == 2, "both are told of")
        (holder,) = {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr[1] == port and each.pid is not None
        }
        assert holder in running.workers
        os.kill(holder, signal.SIGKILL)
        wait_until(lambda: not processes.lives(holder), "it is dead")
        wait_until(lambda: statuses(port) is not None, "another one answers")
        wait_until(
            lambda: {each["pid"] for each in get(port, "/ready")[1]["workers"]} >= set(running.workers) - {holder},
            "the next one is told of, too",
        )
        wait_until(lambda: len(get(port, "/ready")[1]["workers"]) == 2, "there are two again")
        assert "is in use by another program" not in running.log
        running.stop()
    assert statuses(port) is None


@pytest.mark.long
def test_one_stopped_worker_of_two_makes_the_port_say_so(make: Make, port: int) -> None:
    deployment = make(health_port=port, heartbeat_timeout_ms=60_000)
    with deployment.up("-p", "2", "-t", "1") as running:
        running.ready()
        wait_until(lambda: statuses(port) == (200, 200), "they are ready")
        holders = {each.pid for each in psutil.net_connections("tcp") if each.laddr and each.laddr[1] == port}
        (other,) = set(running.workers) - holders
        os.kill(other, signal.SIGSTOP)
        try:
            status, body = get(port, "/ready")
            assert (status, body["state"]) == (503, "sick")
            assert {each["pid"]: each["state"] for each in body["workers"]}[other] == "sick"
        finally:
            os.kill(other, signal.SIGCONT)
        wait_until(lambda: statuses(port) == (200, 200), "it is ready again")
        running.stop()


def test_a_port_that_another_program_has_is_named_in_the_log_and_the_worker_runs(
    make: Make, site: BehaviourSite
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        deployment = make(health_port=port)
        with deployment.worker() as running:
            worker_of(running)
            running.wait_for_log(f"http://127.0.0.1:{port} is in use by another program")
            assert deployment.result(deployment.send("probe.visit", site.product_url(1)))["attempt"] == 1
            taken.close()
            wait_until(lambda: statuses(port) == (200, 200), "it is taken over when it is free")
            assert running.stop() == 0


def test_an_address_that_is_none_of_this_hosts_is_refused_at_the_start(make: Make, port: int) -> None:
    deployment = make(health_port=port, health_host="192.0.2.1")
    with deployment.worker("-p", "1", "-t", "1") as running:
        assert running.command.wait(40) != 0
        assert f"http://192.0.2.1:{port} cannot be listened at" in running.log
        assert "ASYNCWORKER_HEALTH_HOST" in running.log
