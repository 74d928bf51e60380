"""What only invisible_playwright does to a long-lived worker: its real client, on the stand-in engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncworker import processes
from asyncworker.engines import Fault, invisible_client
from asyncworker.engines.invisible import InvisibleEngine
from asyncworker.engines.lifeline import Lifeline
from asyncworker.errors import EngineMissing, ExitDrifted, InvalidArguments, LaunchFailed, Unsupported
from asyncworker.identity import Identity
from asyncworker.runtime import Runtime
from asyncworker.session import Attempt, Session
from asyncworker.settings import Settings, load
from tests.site import BehaviourSite
from tests.standin import Standin
from tests.standin.fixtures import standin
from tests.waiting import BUSY_S, eventually, loop_watched

__all__ = ["standin"]

PASSWORD = "s3cret/of the proxy"
PROXY = "http://someone:s3cret%2Fof%20the%20proxy@127.0.0.1:9"


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


def settings_of(**settings: Any) -> Settings:
    placed = {"locale": "de-DE", "timezone": "Europe/Berlin"}
    return load(
        {}, engine="invisible", **({"launch_timeout_ms": 20_000, "close_timeout_ms": 3_000} | placed | settings)
    )


@contextlib.asynccontextmanager
async def runtime_of(**settings: Any) -> AsyncIterator[Runtime]:
    runtime = Runtime(settings_of(**settings))
    try:
        yield runtime
    finally:
        await runtime.close()
        assert runtime.host.counts["contexts_opened"] == runtime.host.counts["contexts_closed"]


@pytest.fixture
async def runtime(standin: Standin) -> AsyncIterator[Runtime]:
    async with runtime_of() as runtime:
        yield runtime


def mine() -> set[processes.Token]:
    me = processes.new_token()
    return processes.tokens(lambda token: token.role == "browser" and token.pid == me.pid)


def invisible_timeout() -> type[Exception]:
    from invisible_playwright.async_api import TimeoutError as InvisibleTimeoutError

    found: type[Exception] = InvisibleTimeoutError
    return found


def told(caught: BaseException) -> str:
    """All that a log with a traceback would print of an error."""
    seen: BaseException | None = caught
    texts = []
    while seen is not None:
        texts.append(f"{seen!r} {seen}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n".join(texts)


# --- cancelled calls


async def leave_hanging(runtime: Runtime, url: str, *, timeout_ms: int = 20_000) -> None:
    """A message that is cancelled in a call: the call goes on for its own time limit."""
    with pytest.raises(TimeoutError):
        async with runtime.session(Attempt(seed=1)) as session, asyncio.timeout(0.3):
            await session.page.goto(url, timeout=timeout_ms)


async def test_calls_that_were_cancelled_and_still_hold_a_thread_are_counted(
    runtime: Runtime, site: BehaviourSite
) -> None:
    async with runtime.session(Attempt(seed=1)) as other:
        launched = other._lease.generation.launched
        assert launched.abandoned == 0
        await leave_hanging(runtime, f"{site.url}/never", timeout_ms=5_000)
        assert launched.abandoned == 1
        await eventually(lambda: launched.abandoned == 0, "the call has ended by its own time limit")


async def test_a_browser_in_which_cancelled_calls_pile_up_is_replaced(runtime: Runtime, site: BehaviourSite) -> None:
    generations = []
    for _ in range(3):
        async with runtime.session(Attempt(seed=1)) as session:
            generations.append(session.generation)
        await leave_hanging(runtime, f"{site.url}/never")
    assert generations == [1, 1, 2]
    assert runtime.host.counts["browsers_recycled"] == 1
    assert runtime.host.counts["browsers_launched"] == 2


async def most_at_once(runtime: Runtime, url: str, messages: int) -> int:
    """Run so many messages; the most of them that had a session at the same time."""
    open_now = most = 0

    async def message() -> None:
        nonlocal open_now, most
        async with runtime.session(Attempt(seed=1)) as session:
            open_now += 1
            most = max(most, open_now)
            await session.page.goto(url)
            open_now -= 1

    await asyncio.gather(*(message() for _ in range(messages)))
    return most


async def test_a_cancelled_call_takes_the_place_of_a_context_so_that_closing_never_waits(
    runtime: Runtime, site: BehaviourSite
) -> None:
    async with runtime.session(Attempt(seed=1)):  # while a browser is used, its places count
        await leave_hanging(runtime, f"{site.url}/never")
        assert await most_at_once(runtime, f"{site.url}/slow?ms=100", 6) == 1


async def test_a_worker_serves_no_more_contexts_at_once_than_leave_a_thread_for_closing(
    runtime: Runtime, site: BehaviourSite
) -> None:
    assert await most_at_once(runtime, f"{site.url}/slow?ms=50", 9) == 3
    assert runtime.host.counts["browsers_launched"] == 1


async def test_a_default_time_limit_of_a_page_follows_what_is_left_of_the_message(
    runtime: Runtime, site: BehaviourSite
) -> None:
    deadline = asyncio.get_running_loop().time() + 0.2
    async with runtime.session(Attempt(seed=1, deadline=deadline)) as session:
        began = time.monotonic()
        with pytest.raises(invisible_timeout()):
            await session.page.goto(f"{site.url}/never")
        assert time.monotonic() - began < 0.2 + 1 + BUSY_S  # the default is 30


# --- launch and close


async def test_a_launch_that_never_gets_ready_fails_at_its_limit_and_leaves_nothing(
    standin: Standin,
) -> None:
    standin.faults(never_ready=True)
    async with runtime_of(launch_timeout_ms=1_500) as runtime:
        began = time.monotonic()
        with pytest.raises(LaunchFailed, match="ASYNCWORKER_LAUNCH_TIMEOUT_MS"):
            async with runtime.session(Attempt(seed=1)):
                pass
        assert time.monotonic() - began < 1.5 + BUSY_S  # the default is 30
        await runtime.engine.close()
        assert mine() == set()


async def test_an_engine_that_ends_while_it_starts_is_reported_with_its_exit_code(
    standin: Standin,
) -> None:
    standin.faults(exit_at_start=3, says_at_start="error while loading shared libraries: libgtk-3.so.0")
    async with runtime_of() as runtime:
        with pytest.raises(LaunchFailed, match=r"asyncworker doctor") as caught:
            async with runtime.session(Attempt(seed=1)):
                pass
        # The client meets either the engine's end, with its code and words, or the pipe that it left.
        assert ("libgtk-3.so.0" in str(caught.value)) or ("ended while it started" in str(caught.value))
        assert mine() == set()


async def test_a_missing_engine_is_reported_at_once_and_never_fetched(
    standin: Standin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import invisible_core.download

    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("a worker fetches nothing")

    monkeypatch.setattr(invisible_core.download, "ensure_binary", fetch)
    standin.executable.rename(standin.executable.with_name("away"))
    async with runtime_of() as runtime:
        began = time.monotonic()
        with pytest.raises(EngineMissing, match=r"asyncworker doctor --install"):
            async with runtime.session(Attempt(seed=1)):
                pass
        assert time.monotonic() - began < BUSY_S
    assert standin.launches() == []


async def test_an_engine_that_vanishes_after_it_was_found_is_not_fetched_by_the_launch(
    standin: Standin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = InvisibleEngine._found

    def found_then_gone(engine: InvisibleEngine) -> Any:
        answer = found(engine)
        standin.executable.rename(standin.executable.with_name("away"))
        return answer

    monkeypatch.setattr(InvisibleEngine, "_found", found_then_gone)
    async with runtime_of() as runtime:
        began = time.monotonic()
        with pytest.raises(LaunchFailed, match=r"EngineMismatch.*asyncworker doctor --install"):
            async with runtime.session(Attempt(seed=1)):
                pass
        assert time.monotonic() - began < BUSY_S


async def test_closing_does_not_wait_for_pages_that_sleep_in_the_clients_threads(
    runtime: Runtime,
) -> None:
    before_launch = set(threading.enumerate())
    engine = runtime.engine
    launched: Any = await engine.launch(runtime.identity(1))
    context = await launched.new_context(runtime.identity(1), {})
    pages = [await context.new_page() for _ in range(4)]
    sleeping = [asyncio.create_task(page.wait_for_timeout(10_000)) for page in pages]
    threads = set(threading.enumerate()) - before_launch
    assert len([thread for thread in threads if thread.name.startswith("juggler")]) >= 4
    await eventually(lambda: invisible_client._connection(launched._client)._transport._queue.empty(), "they sleep")
    began = time.monotonic()
    async with loop_watched() as loop:
        await launched.close(500)
    assert time.monotonic() - began < 0.5 + BUSY_S
    assert loop.longest_s < 1
    for task in sleeping:
        task.cancel()
    await asyncio.wait(sleeping)
    await eventually(
        lambda: not any(thread.is_alive() for thread in threads if "juggler" in thread.name), "they end when they wake"
    )


#: A screen that is slow to come up, and slow to go: it has to be killed.
_SLOW_SCREEN = """#!{python} -IS
import os, signal, sys, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1)
ready = int(sys.argv[sys.argv.index("-displayfd") + 1])
os.write(ready, sys.argv[1][1:].encode() + b"\\n")
os.close(ready)
signal.pause()
"""


def screens() -> int:
    return sum(child.name() == "Xvfb" for child in psutil.Process().children(recursive=True))


async def test_a_virtual_screen_comes_and_goes_with_its_browser_and_keeps_no_one_waiting(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (programs := tmp_path / "bin").mkdir()
    (programs / "Xvfb").write_text(_SLOW_SCREEN.format(python=sys.executable))
    (programs / "Xvfb").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv("INVPW_TRUE_HEADLESS")
    async with loop_watched() as loop, runtime_of() as runtime, runtime.session(Attempt(seed=1)):
        assert screens() == 1
    assert screens() == 0
    assert loop.longest_s < 0.9, "its start takes a second, its end three"


async def test_a_machine_without_a_virtual_screen_is_told_what_to_install(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("INVPW_TRUE_HEADLESS")
    async with runtime_of() as runtime:
        with pytest.raises(EngineMissing, match="apt-get install xvfb"):
            async with runtime.session(Attempt(seed=1)):
                pass
    assert standin.launches() == []


async def test_the_end_of_the_process_is_noticed_without_a_pidfd_too(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    async with runtime.session(Attempt(seed=1)):
        pass
    for token in mine():
        await asyncio.to_thread(processes.kill_launch, token)
    await eventually(lambda: runtime.host.counts["browsers_lost"] == 1, "the crash is noticed")


@pytest.mark.parametrize("polled", [False, True])
async def test_a_lifeline_tells_once_of_a_process_that_ended_before_or_while_it_is_watched(
    monkeypatch: pytest.MonkeyPatch, polled: bool
) -> None:
    if polled:
        monkeypatch.delattr(os, "pidfd_open")
    descriptors = psutil.Process().num_fds()
    told: list[str] = []
    process = subprocess.Popen(["sleep", "60"])
    lifeline, cut = Lifeline(process.pid), Lifeline(process.pid)
    cut.on_end(lambda: told.append("cut"))
    cut.cut()
    lifeline.on_end(lambda: told.append("watched"))
    process.kill()
    await asyncio.to_thread(process.wait)
    await eventually(lambda: told, "its end is told")
    Lifeline(process.pid).on_end(lambda: told.append("had ended"))
    Lifeline(None).on_end(lambda: told.append("none"))
    assert told == ["watched", "had ended", "none"]
    assert psutil.Process().num_fds() == descriptors


async def test_a_call_that_meets_the_dying_pipe_is_known_as_a_crash(runtime: Runtime) -> None:
    from invisible_playwright.async_api import Error, TargetClosedError

    for error in (Error("Page.title: [Errno 32] Broken pipe"), TargetClosedError("the pipe is closed: code -9")):
        assert runtime.engine.classify(error) is Fault.gone
    assert runtime.engine.classify(invisible_timeout()("Page.click: Timeout 500ms exceeded")) is None


# --- place and proxies


async def test_a_time_zone_that_cannot_be_found_names_the_setting(standin: Standin) -> None:
    async with runtime_of(timezone=None, locale=None) as runtime:
        with pytest.raises(LaunchFailed, match=r"GeoTimezoneError.*set ASYNCWORKER_TIMEZONE"):
            async with runtime.session(Attempt(seed=1)):
                pass


async def test_the_password_of_a_proxy_is_in_no_error_log_or_repr(
    standin: Standin,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with runtime_of(proxy=PROXY, timezone=None, locale=None) as runtime:
        with pytest.raises(LaunchFailed) as caught:
            async with runtime.session(Attempt(seed=1)):
                pass
        logging.getLogger("test").error("it failed", exc_info=caught.value)
    shown = f"{told(caught.value)}\n{caplog.text}\n{runtime.settings!r}\n{runtime.identity(1)!r}"
    for form in (PASSWORD, "s3cret%2Fof%20the%20proxy", "s3cret"):
        assert form not in shown


@pytest.mark.parametrize(
    "said",
    [
        f"proxy {PROXY} refused",
        f"407 for someone:{PASSWORD}",
        f"Proxy-Authorization: Basic {base64.b64encode(f'someone:{PASSWORD}'.encode()).decode()}",
    ],
)
async def test_a_client_that_tells_the_password_itself_is_told_without_it(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    def create(*_: object) -> None:
        try:
            raise OSError(said)
        except OSError as error:
            raise RuntimeError("no way out") from error

    monkeypatch.setattr(invisible_client, "create", create)
    async with runtime_of(proxy=PROXY) as runtime:
        with pytest.raises(LaunchFailed, match="no way out") as caught:
            async with runtime.session(Attempt(seed=1)):
                pass
        logging.getLogger("test").error("it failed", exc_info=caught.value)
    shown = told(caught.value) + caplog.text
    for form in (PASSWORD, "s3cret", base64.b64encode(f"someone:{PASSWORD}".encode()).decode()):
        assert form not in shown


class Drifting:
    """An exit that the client finds changed, as its own check would raise it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from invisible_playwright import _session
        from invisible_playwright.async_api import InvisiblePlaywright

        self.checks = 0
        self.drift_on: set[int] = set()

        async def check(client: Any) -> None:
            self.checks += 1
            if self.checks in self.drift_on:
                raise _session.ProxyEgressDrifted("the proxy's egress IP changed during the session")

        monkeypatch.setattr(InvisiblePlaywright, "_assert_uscita_invariata", check)


async def test_an_exit_that_drifted_before_the_code_began_takes_another_browser(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    drifting = Drifting(monkeypatch)
    async with runtime.session(Attempt(seed=1)) as session:
        assert session.generation == 1
    drifting.drift_on = {drifting.checks + 1}
    async with runtime.session(Attempt(seed=1)) as session:
        assert session.generation == 2


async def test_an_exit_that_drifts_under_the_code_ends_the_attempt_and_retires_the_browser(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    drifting = Drifting(monkeypatch)
    with pytest.raises(ExitDrifted, match="same seed") as caught:
        async with runtime.session(Attempt(seed=1)) as session:
            drifting.drift_on = {drifting.checks + 1}
            await session.context.new_page()
    assert caught.value.generation == 1
    async with runtime.session(Attempt(seed=1)) as session:
        assert session.generation == 2


def test_both_errors_of_the_exit_are_known_by_their_names() -> None:
    from invisible_playwright import _session

    engine = InvisibleEngine(settings_of())
    for error in (_session.ProxyEgressDrifted("x"), _session.ProxyEgressNonVerificabile("x")):
        assert engine.classify(error) is Fault.exit_drifted


# --- what the engine refuses, or would ignore


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"record_har_path": "x.har"}, "har"),
        ({"record_video_dir": "videos"}, "video"),
    ],
)
async def test_an_option_that_the_engine_would_ignore_is_refused_before_anything_is_opened(
    runtime: Runtime, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(
        Unsupported, match=f"the engine invisible has no {named}.*ASYNCWORKER_ENGINE=chromium"
    ) as caught:
        async with runtime.session(Attempt(seed=1), context_options=options):
            pass
    assert caught.value.capability == named
    assert runtime.host.counts["contexts_opened"] == 0


async def _trace(session: Session) -> None:
    await session.context.tracing.start()


async def _request(session: Session) -> None:
    await session.context.request.get("http://127.0.0.1:9/")


async def _bind(session: Session) -> None:
    await session.page.expose_function("f", lambda: None)


async def _headers(session: Session) -> None:
    await session.context.set_extra_http_headers({"a": "b"})


async def _offline(session: Session) -> None:
    await session.context.set_offline(True)


async def _cdp(session: Session) -> None:
    await session.context.new_cdp_session(session.page)


async def _pdf(session: Session) -> None:
    await session.page.pdf()


async def _clock(session: Session) -> None:
    await session.page.clock.install()


async def _stop_tracing(session: Session) -> None:
    await session.context.tracing.stop(path="trace.zip")


async def _clear(session: Session) -> None:
    await session.context.clear_cookies(name="x")


async def _handle(session: Session) -> None:
    await session.page.add_locator_handler(session.page.locator("x"), lambda _: None)


async def _route_web_socket(session: Session) -> None:
    await session.page.route_web_socket("**", lambda _: None)


async def _browser_tracing(session: Session) -> None:
    await session.browser.start_tracing()


async def _bind_browser(session: Session) -> None:
    await session.browser.bind("x")  # type: ignore[attr-defined]  # newer than some Playwrights


async def _har(session: Session) -> None:
    await session.context.route_from_har("x.har", update=True)


@pytest.mark.parametrize(
    ("ask", "capability", "instead"),
    [
        (_trace, "tracing", "screenshot"),
        (_request, "request", "fetch"),
        (_bind, "bindings", "console"),
        (_headers, "late_headers", "extra_http_headers"),
        (_offline, "late_offline", "offline"),
        (_cdp, "cdp", "ASYNCWORKER_ENGINE=chromium"),
        (_pdf, "pdf", "screenshot"),
        (_clock, "clock", "add_init_script"),
        (_stop_tracing, "tracing", "screenshot"),
        (_browser_tracing, "tracing", "screenshot"),
        (_clear, "cookie_filters", "cookies()"),
        (_handle, "locator_handlers", "own code"),
        (_route_web_socket, "web_socket_routes", "websocket"),
        (_bind_browser, None, "ASYNCWORKER_ENGINE=chromium"),
        (_har, "har", 'page.on("response")'),
    ],
)
async def test_what_the_engine_refuses_is_said_with_what_to_do_instead(
    runtime: Runtime, ask: Any, capability: str | None, instead: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        async with runtime.session(Attempt(seed=1)) as session:
            await ask(session)
    assert caught.value.capability == capability, str(caught.value)
    assert instead in str(caught.value)
    assert "invisible" in str(caught.value)


STATE = {
    "cookies": [{"name": "visitor", "value": "seen", "domain": "127.0.0.1", "path": "/"}],
    "origins": [{"origin": "SITE", "localStorage": [{"name": "token", "value": 'a"b'}]}],
}


def state_of(site: BehaviourSite) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(STATE).replace("SITE", site.url))
    return state


async def test_a_storage_state_is_brought_in_though_the_client_would_ignore_it(
    runtime: Runtime, site: BehaviourSite, tmp_path: Path
) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state_of(site)))
    for state in (state_of(site), str(path)):
        async with runtime.session(Attempt(seed=1), context_options={"storage_state": state}) as session:
            await session.page.goto(f"{site.url}/cookie/get")
            assert await session.page.title() == "visitor=seen"
            assert await session.page.evaluate("localStorage.getItem('token')") == 'a"b'
    async with runtime.session(Attempt(seed=1)) as session:
        await session.page.goto(f"{site.url}/cookie/get")
        assert await session.page.title() == ""


async def test_a_context_that_code_opens_itself_gets_its_storage_state_too(
    runtime: Runtime, site: BehaviourSite
) -> None:
    async with runtime.session(Attempt(seed=1)) as session:
        context = await session.browser.new_context(storage_state=state_of(site))
        page = await context.new_page()
        await page.goto(f"{site.url}/cookie/get")
        assert await page.title() == "visitor=seen"


@pytest.mark.parametrize("state", ["no/such/file.json", {"cookies": 3}, 7, {"origins": "x"}])
async def test_a_storage_state_that_is_none_refuses_the_message(runtime: Runtime, state: Any) -> None:
    with pytest.raises(InvalidArguments, match="storage state"):
        async with runtime.session(Attempt(seed=1), context_options={"storage_state": state}):
            pass


# --- the client's own inside


async def test_the_places_of_the_clients_inside_that_are_touched_are_where_they_were(runtime: Runtime) -> None:
    launched: Any = await runtime.engine.launch(runtime.identity(1))
    try:
        connection = invisible_client._connection(launched._client)
        assert isinstance(connection._callbacks, dict)
        assert len(connection._transport._threads) == 4
        assert callable(connection._transport.request_stop)
        assert launched.pid in {process.pid for process in processes.carriers(lambda t: t == launched._token)}
    finally:
        await launched.close(1_000)


async def test_a_launch_draws_the_same_identity_each_time_and_another_for_another_seed(
    standin: Standin,
) -> None:
    for seed in (5, 6, 5):
        async with runtime_of() as runtime, runtime.session(Attempt(seed=seed)):
            pass
    first, second, third = [launch["prefs"] for launch in standin.launches()]
    assert first == third
    assert first != second


async def test_pins_are_part_of_what_may_share_a_browser() -> None:
    engine = InvisibleEngine(settings_of())
    plain = Identity(seed=1)
    assert engine.launch_key(plain) == engine.launch_key(Identity(seed=1))
    for other in (
        Identity(seed=2),
        Identity(seed=1, pins={"screen.width": 2560}),
        Identity(seed=1, proxy=PROXY),
        Identity(seed=1, timezone="Asia/Tokyo"),
        Identity(seed=1, locale="ja-JP"),
    ):
        assert engine.launch_key(other) != engine.launch_key(plain)
