"""The real command with the engine invisible on the stand-in: a seed is one visitor, in browsers that come and go."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from dramatiq import Message

from asyncworker import embedded, processes
from asyncworker.engines import profile
from asyncworker.engines.invisible import MAX_CONTEXTS
from asyncworker.settings import leave_invisible_core_alone
from tests.site import BehaviourSite
from tests.standin import Standin
from tests.standin.fixtures import standin
from tests.waiting import BUSY_S, wait_until
from tests.workers import Deployment

__all__ = ["standin"]  # a fixture, used by its name

PLACE = {"locale": "de-DE", "timezone": "Europe/Berlin"}

#: With characters that a URL must spell otherwise.
PASSWORD = "s3cret/p@ss"

Deploy = Callable[..., Deployment]


@pytest.fixture(scope="module")
def store(module_state_dir: Path) -> Path:
    """The state directory of a server that runs already: a test must not be the one that starts it."""
    embedded.ensure(module_state_dir)
    return module_state_dir


@pytest.fixture
def deploy(standin: Standin, store: Path, tmp_path: Path) -> Iterator[Deploy]:
    """Makes deployments on an empty store; their workers inherit what they need to launch the stand-in."""
    made: list[Deployment] = []

    def deployed(**settings: Any) -> Deployment:
        directory = tmp_path / f"deployment-{len(made)}"
        directory.mkdir()
        made.append(Deployment(directory, **({"engine": "invisible", "state_dir": store} | PLACE | settings)))
        if len(made) == 1:
            made[0].broker.client.flushall()
        return made[-1]

    yield deployed
    for deployment in made:
        deployment.broker.close()
        deployment.broker.client.close()
    assert carriers(standin) == []


def carriers(standin: Standin) -> list[int]:
    """The processes that carry the token of any launch so far."""
    tokens = {launch["token"] for launch in standin.launches()}
    return [process.pid for process in processes.carriers(lambda token: str(token) in tokens)]


def alive(standin: Standin) -> list[int]:
    """The engines that live now."""
    return [launch["pid"] for launch in standin.launches() if processes.lives(launch["pid"])]


def drawn(seed: int) -> str:
    return profile.drawn(seed, {}, **PLACE).digest


def prefs_of(standin: Standin, seeds: set[int]) -> dict[int, str]:
    """What the plain client has an engine show for each seed: the digest of its profile."""
    leave_invisible_core_alone()
    from invisible_playwright.async_api import InvisiblePlaywright

    async def launch() -> dict[int, str]:
        shown = {}
        for seed in seeds:
            async with InvisiblePlaywright(seed=seed, headless=True, humanize=False, **PLACE):
                shown[seed] = standin.launches()[-1]["prefs"]
        return shown

    return asyncio.run(launch())


def test_a_seed_is_one_visitor_on_two_workers_after_a_crash_and_when_replayed(
    deploy: Deploy, standin: Standin, site: BehaviourSite
) -> None:
    deployment = deploy()
    with deployment.worker("-p", "2", "-t", "1") as worker:
        worker.ready()
        both = [deployment.send("probe.visitor", f"{site.url}/slow?ms=400", seed=7) for _ in range(4)]
        results = [deployment.result(message) for message in both]
        assert {result["pid"] for result in results} == set(worker.workers)

        crashing = deployment.send("probe.visitor", f"{site.url}/slow?ms=800", seed=7)
        wait_until(lambda: sum(site.requests.values()) == 5, "its page is loading")
        killed = alive(standin)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        results.append(deployment.result(crashing))
        assert results[-1]["attempt"] == 2

        replayed: Message[Any] = Message.decode(crashing.encode())
        deployment.broker.enqueue(replayed)
        wait_until(lambda: _outcomes(deployment, crashing) == ["crashed", "succeeded", "succeeded"], "it ran again")
        assert worker.stop() == 0
    assert len(killed) == 2
    assert {launch["prefs"] for launch in standin.launches()} == set(prefs_of(standin, {7}).values())
    assert {result["digest"] for result in results} == {drawn(7)}
    rows = [row for message in (*both, crashing) for row in deployment.rows(message)]
    assert len(rows) == 7
    assert {row.identity for row in rows} == {drawn(7)}
    assert not any(row.identity_changed for row in rows)
    assert worker.log.count(f"seed=7 identity={drawn(7)}") == 7
    assert "another visitor" not in worker.log


def test_two_hundred_messages_of_one_seed_are_one_launch_and_two_hundred_contexts(
    deploy: Deploy, standin: Standin, site: BehaviourSite
) -> None:
    deployment = deploy()
    messages = [deployment.send("probe.visitor", site.product_url(1), seed=7) for _ in range(200)]
    with deployment.worker("-p", "1", "-t", "8") as worker:
        results = [deployment.result(message) for message in messages]
        assert worker.stop() == 0
    assert {result["digest"] for result in results} == {drawn(7)}
    assert len(standin.launches()) == 1
    assert len(standin.log("context opened")) == len(standin.log("context closed")) == 200
    assert deployment.counts() == {"browsers_launched": 1, "contexts_opened": 200, "contexts_closed": 200}
    assert _most_contexts(standin) == MAX_CONTEXTS
    assert "8 threads trimmed to 3 slots (a browser of the engine invisible serves no more at once)" in worker.log


@pytest.mark.long
def test_two_hundred_messages_of_five_seeds_each_run_under_their_own_in_two_browsers_at_most(
    deploy: Deploy, standin: Standin
) -> None:
    home, *guests = seeds = [1, 2, 3, 4, 5]
    of_each = [*[home] * 176, *guests * 6]
    random.Random(0).shuffle(of_each)
    deployment = deploy(seed=home, max_browsers=2)
    messages = [deployment.send("probe.visitor", seed=seed) for seed in of_each]
    lived: list[int] = []

    def all_began() -> bool:
        lived.append(len(alive(standin)))
        return all(deployment.rows(message) for message in messages[-3:])

    with deployment.worker("-p", "1", "-t", "3") as worker:
        wait_until(all_began, "the last messages have begun", timeout_ms=60_000)
        results = [deployment.result(message) for message in messages]
        assert worker.stop() == 0
    launches = standin.launches()
    expected = prefs_of(standin, set(seeds))
    assert len(set(expected.values())) == len(seeds)
    shown = {launch["pid"]: launch["prefs"] for launch in launches}
    assert [result["seed"] for result in results] == of_each
    for result in results:
        assert result["digest"] == drawn(result["seed"])
        assert shown[result["engine"]] == expected[result["seed"]]
    assert max(lived) == _most_engines(standin, set(shown)) == 2
    of_seed = Counter(launch["prefs"] for launch in launches)
    assert of_seed[expected[home]] == 1, "the deployment's own browser was given up for a guest"
    assert len(launches) > len(seeds)


def test_a_wedged_engine_costs_its_messages_their_own_limits_and_a_new_one_serves_the_rest(
    deploy: Deploy, standin: Standin, site: BehaviourSite
) -> None:
    deployment = deploy(close_timeout_ms=1_000, context_timeout_ms=3_000)
    with deployment.worker("-p", "1", "-t", "3") as worker:
        stuck = [deployment.send("probe.stuck", f"{site.url}/never", seed=7) for _ in range(3)]
        rest = [deployment.send("probe.visitor", seed=7) for _ in range(6)]
        wait_until(lambda: sum(site.requests.values()) == 3, "three pages are loading")
        first = stop_engine(standin)
        assert all("TimeLimitExceeded" in deployment.failure(message) for message in stuck)
        second = {deployment.result(message)["engine"] for message in rest}
        assert len(second) == 1
        assert first not in second
        wait_until(lambda: first not in alive(standin), "the wedged engine is killed")

        assert stop_engine(standin) in second  # while it is idle: the next message finds out
        late = deployment.result(deployment.send("probe.visitor", seed=7))
        assert (late["attempt"], late["engine"] in second) == (2, False)
        wait_until(lambda: alive(standin) == [late["engine"]], "only the third engine lives")
        assert worker.stop() == 0
    assert [_outcomes(deployment, message) for message in stuck] == [["timed_out"]] * 3
    assert [_outcomes(deployment, message) for message in rest] == [["succeeded"]] * 6
    # Its limit, which Dramatiq looks at once a second; the close's; and what a busy machine adds.
    took = [deployment.rows(message)[0].took_ms or 0 for message in stuck]
    assert max(took) < 1_500 + 1_000 + 1_000 + BUSY_S * 1000
    assert "did not close in 1000 ms" in worker.log
    assert len(standin.launches()) == 3


def test_a_worker_without_the_engine_says_so_and_fetches_nothing(
    deploy: Deploy, standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVISIBLE_PLAYWRIGHT_ENGINE_DIR", str(standin.directory / "nothing"))
    deployment = deploy()
    with Unanswering() as network, deployment.worker(environment={"HTTPS_PROXY": network.url}) as worker:
        began = time.monotonic()
        worker.wait_for_log("this worker has no browser: the patched Firefox of invisible_playwright is not on")
        failures = [deployment.failure(deployment.send("probe.text", "http://127.0.0.1:9/")) for _ in range(2)]
        assert (time.monotonic() - began) * 1000 < 4_000 + BUSY_S * 1000
        assert worker.stop() == 0
        assert network.heard == b""
    for failure in failures:
        assert "EngineMissing" in failure
        assert "fetch it with `asyncworker doctor --install`" in failure
    assert standin.launches() == []
    assert not (standin.directory / "nothing").exists()


def test_a_killed_workers_engine_ends_and_the_next_worker_sweeps_its_files(deploy: Deploy, standin: Standin) -> None:
    deployment = deploy()
    with deployment.worker("-p", "1", "-t", "1") as worker:
        first = deployment.result(deployment.send("probe.visitor", seed=7))
        assert alive(standin) == [first["engine"]]
        os.kill(first["pid"], signal.SIGKILL)
        wait_until(lambda: alive(standin) == [], "the engine ended with its worker")
        assert worker.command.wait(30) != 0
    assert list(standin.temporary_directory.iterdir()), "nothing was left to sweep"
    with deployment.worker("-p", "1", "-t", "1") as worker:
        second = deployment.result(deployment.send("probe.visitor", seed=7))
        assert second["engine"] != first["engine"]
        assert worker.stop() == 0
    assert list(standin.temporary_directory.iterdir()) == []


def test_a_proxys_credentials_are_used_and_told_by_nothing(
    deploy: Deploy, standin: Standin, site: BehaviourSite
) -> None:
    """With a launch that succeeds, one whose engine ends, and one whose time zone the proxy's exit does not tell."""
    with Unanswering() as proxy:
        url = proxy.url.replace("//", f"//visitor:{quote(PASSWORD, safe='')}@")
        deployment, nowhere = deploy(proxy=url), deploy(proxy=url, timezone=None)
        logs = []
        with deployment.worker("-p", "1", "-t", "1") as worker:
            assert deployment.result(deployment.send("probe.visitor"))["digest"]
            assert "Remote end closed" in deployment.failure(deployment.send("probe.text", site.product_url(1)))
            standin.faults(exit_at_start=9, says_at_start=f"refused: visitor:{PASSWORD}")
            os.kill(alive(standin)[0], signal.SIGKILL)
            assert "LaunchFailed" in deployment.failure(deployment.send("probe.text", site.product_url(1)))
            assert worker.stop() == 0
            logs.append(worker.log)
        with nowhere.worker("-p", "1", "-t", "1") as worker:
            failure = nowhere.failure(nowhere.send("probe.text", site.product_url(1)))
            assert "set ASYNCWORKER_TIMEZONE" in failure
            assert worker.stop() == 0
            logs.append(worker.log)
        assert base64.b64encode(f"visitor:{PASSWORD}".encode()) in proxy.heard
    assert len(deployment.dead_letters()) == 3
    told = b"\n".join([*readable(deployment), *(log.encode() for log in logs)])
    assert told.count(b"LaunchFailed") >= 2
    for form in (PASSWORD, quote(PASSWORD, safe=""), base64.b64encode(f"visitor:{PASSWORD}".encode()).decode()):
        assert form.encode() not in told


def stop_engine(standin: Standin) -> int:
    """Have the only engine answer nothing any more, though it lives; returns its pid."""
    (pid,) = alive(standin)
    os.kill(pid, signal.SIGSTOP)
    return pid


def readable(deployment: Deployment) -> Iterator[bytes]:
    """Everything in the store: results, rows, dead letters and whatever else there is."""
    client: Any = deployment.broker.client
    reads = {
        b"string": lambda key: [client.get(key)],
        b"list": lambda key: client.lrange(key, 0, -1),
        b"hash": lambda key: [part for pair in client.hgetall(key).items() for part in pair],
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1),
    }
    for key in client.scan_iter():
        yield from (key, *reads[client.type(key)](key))


class Unanswering:
    """A proxy that hears what it is sent, answers nothing, and hangs up.

    Attributes:
        heard: All that it was sent.
    """

    def __init__(self) -> None:
        self.heard = b""
        self._server = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> Unanswering:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        self._server.close()

    def _hear(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(2)
                with contextlib.suppress(OSError):
                    self.heard += connection.recv(65536)


def _outcomes(deployment: Deployment, message: Message[Any]) -> list[str]:
    return [row.outcome for row in deployment.rows(message)]


def _most_contexts(standin: Standin) -> int:
    """How many contexts were open at once, at most."""
    return _most(standin, {"context opened": 1, "context closed": -1})


def _most_engines(standin: Standin, pids: set[int]) -> int:
    """How many of these engines were up at once, at most; each must have said that it ends."""
    assert {record["pid"] for record in standin.log("closing")} >= pids
    return _most(standin, {"launched": 1, "closing": -1})


def _most(standin: Standin, steps: dict[str, int]) -> int:
    now = most = 0
    for record in standin.log():
        now += steps.get(record["event"], 0)
        most = max(most, now)
    return most
