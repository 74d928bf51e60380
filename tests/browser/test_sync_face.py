"""A synchronous session is what Playwright's synchronous API is: the same code gives the same on both."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from dramatiq.asyncio import get_event_loop_thread, set_event_loop_thread
from dramatiq.middleware import TimeLimitExceeded
from dramatiq.middleware.threading import raise_thread_exception
from playwright.sync_api import Browser, sync_playwright

from asyncworker import processes
from asyncworker import runtime as runtimes
from asyncworker.engines.finding import find
from asyncworker.errors import BrowserCrashed, ForkedBrowser, PageCrashed, SessionOver
from asyncworker.loop import LoopThread
from asyncworker.runtime import Runtime, set_runtime
from asyncworker.session import Attempt
from asyncworker.settings import load
from asyncworker.sync_face import expect
from asyncworker.sync_session import Kept, SyncSession, open_sync_session
from tests.browser.snippets import SNIPPETS
from tests.site import BehaviourSite
from tests.standin import Standin
from tests.standin.fixtures import bridged_standin  # noqa: F401 -- a fixture
from tests.waiting import wait_until

pytestmark = pytest.mark.needs_browser


@pytest.fixture(scope="module")
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


class Real:
    """Playwright's synchronous API with a browser, in a thread of its own, as it wants to be used."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._open = ExitStack()
        self._browser: Browser = self._thread.submit(self._launch).result()

    def _launch(self) -> Browser:
        playwright = self._open.enter_context(sync_playwright())
        found = find(load({}, engine="chromium"))
        assert found is not None
        launched = playwright.chromium.launch(executable_path=found.executable, channel=found.channel)
        browser = self._open.enter_context(launched)
        browser.new_page().close()  # it has all its processes then
        return browser

    def run(self, code: Callable[[Any], Any]) -> Any:
        def run() -> Any:
            with self._browser.new_context() as context:
                return code(context.new_page())

        return self._thread.submit(run).result()

    def close(self) -> None:
        self._thread.submit(self._open.close).result()
        self._thread.shutdown()


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    real = Real()
    yield real
    real.close()


@contextmanager
def worker(runtime: Runtime) -> Iterator[Runtime]:
    """A worker's loop and browser, without its queue; one that was there before is back after it."""
    former = get_event_loop_thread(), runtimes._worker_runtime
    loop_thread = LoopThread(cleanup_timeout_ms=5_000)
    loop_thread.start()
    set_event_loop_thread(loop_thread)  # type: ignore[arg-type]
    set_runtime(runtime, loop_thread.loop)
    try:
        yield runtime
        loop_thread.call(runtime.close(), timeout_ms=20_000)
    finally:
        set_event_loop_thread(former[0])
        set_runtime(*(former[1] or (None, None)))
        loop_thread.stop()
    assert runtime.host.counts["contexts_opened"] == runtime.host.counts["contexts_closed"]
    assert runtime.slots.in_use == 0


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with worker(Runtime(load({}, engine="chromium"))) as runtime:
        with open_sync_session(seed=1):  # what a test leaves behind is found; the browser is no test's
            pass
        yield runtime


@pytest.fixture
def session(runtime: Runtime) -> Iterator[SyncSession]:
    with open_sync_session(seed=1) as session:
        yield session


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_same_code_gives_the_same_on_playwrights_own_and_on_ours(
    name: str, runtime: Runtime, real: Real, site: BehaviourSite
) -> None:
    expected = real.run(lambda page: SNIPPETS[name](page, site.url))
    with open_sync_session(seed=1) as session:
        assert SNIPPETS[name](session.page, site.url) == expected


def test_an_object_has_one_face_which_any_thread_may_call(session: SyncSession) -> None:
    page = session.page
    with ThreadPoolExecutor(4) as threads:
        pages = list(threads.map(lambda _: (session.page, page.context, page.evaluate("1")), range(4)))
    assert all(other is page and context is session.context for other, context, _ in pages)
    assert session.browser is page.context.browser


def test_code_on_the_loop_is_refused_instead_of_waiting_for_itself(runtime: Runtime, session: SyncSession) -> None:
    page = session.page

    async def use() -> None:
        page.title()

    async def open_another() -> None:
        with open_sync_session():
            pass

    for code in (use, open_another):
        with pytest.raises(RuntimeError, match="wait for itself for ever"):
            loop_thread().call(code(), timeout_ms=5_000)

    def matches(url: str) -> bool:
        page.title()  # is asked of a URL on the loop, at once
        return True

    with pytest.raises(RuntimeError, match=r"Page\.title\(\) of a synchronous session was used by code on the"):
        page.frame(url=matches)


def test_playwrights_assertions_are_made_of_what_a_session_gives(session: SyncSession, site: BehaviourSite) -> None:
    session.page.goto(f"{site.url}/cookie/set")
    expect(session.page).to_have_title("set")
    with pytest.raises(AssertionError, match="mine"):
        expect(session.page.locator("p"), "mine").to_have_text("other", timeout=50)
    with pytest.raises(TypeError, match="synchronous session"):
        expect("set")


def test_a_session_that_is_over_refuses_every_use(runtime: Runtime, site: BehaviourSite) -> None:
    with open_sync_session(attempt=Attempt(seed=1, message_id="m", actor="tasks.title")) as session:
        page, browser, locator = session.page, session.browser, session.page.locator("p")
        second = browser.new_page()
        second.goto(f"{site.url}/cookie/get")
    for call in (
        page.title,
        locator.inner_text,
        second.title,
        browser.new_page,
        lambda: session.page,
        lambda: page.url,
    ):
        with pytest.raises(SessionOver, match=r"message m \(tasks\.title\) is over"):
            call()
    page.close()
    wait_until(lambda: in_use(runtime) == 0, "the contexts are closed")


def test_what_the_code_raises_comes_out_as_it_is(runtime: Runtime) -> None:
    for error in (LookupError("mine"), StopIteration("mine"), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, open_sync_session(seed=1):
            raise error
        assert caught.value is error
    assert in_use(runtime) == 0


def test_a_browser_that_dies_is_told_as_what_it_is_in_a_call_and_outside_of_any(site: BehaviourSite) -> None:
    others = processes.tokens(lambda token: True)

    def kill() -> None:
        assert processes.kill(lambda token: token.role == "browser" and token not in others)

    with worker(Runtime(load({}, engine="chromium"))) as runtime:
        with pytest.raises(BrowserCrashed), open_sync_session(seed=1) as session:
            session.page.on("request", lambda request: kill() if request.url.endswith("/never") else None)
            session.page.goto(f"{site.url}/never")
        with pytest.raises(BrowserCrashed, match="browser 2"), open_sync_session(seed=1) as session:
            page = session.page
            kill()
            wait_until(lambda: in_use(runtime) == 0, "the session has ended under the code")
            page.title()
        with open_sync_session(seed=1) as session:
            assert session.generation == 3


def test_a_page_that_crashes_ends_a_call_that_would_wait(runtime: Runtime) -> None:
    with pytest.raises(PageCrashed), open_sync_session(seed=1) as session:
        session.page.goto("chrome://crash")


def test_a_time_limit_that_meets_a_call_ends_the_session(runtime: Runtime, site: BehaviourSite) -> None:
    seen: list[BaseException] = []

    def code(session: SyncSession) -> None:
        page = session.page
        threading.Timer(0.2, raise_thread_exception, (threading.get_ident(), TimeLimitExceeded)).start()
        try:
            page.goto(f"{site.url}/never")
        finally:
            try:
                page.title()
            except SessionOver as over:
                seen.append(over)

    with pytest.raises(TimeLimitExceeded), open_sync_session(seed=1) as session:
        code(session)
    assert "TimeLimitExceeded" in str(seen[0])
    assert in_use(runtime) == 0


def test_a_session_is_over_at_its_deadline_wherever_its_thread_is(runtime: Runtime, site: BehaviourSite) -> None:
    deadline = time.monotonic() + 1
    attempt = Attempt(seed=1, deadline=deadline)
    with pytest.raises(SessionOver, match="TimeLimitExceeded"), open_sync_session(attempt=attempt) as session:
        page = session.page
        wait_until(lambda: in_use(runtime) == 0, "its context is closed, although its thread is elsewhere")
        assert time.monotonic() >= deadline
        page.title()


class Signal(Exception):
    """As Celery raises SoftTimeLimitExceeded."""


@contextmanager
def signal_after(seconds: float) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise Signal

    former = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_a_signal_that_raises_in_a_call_ends_the_call_and_leaves_the_session(
    session: SyncSession, site: BehaviourSite
) -> None:
    page = session.page
    with pytest.raises(Signal), signal_after(0.2):
        page.goto(f"{site.url}/never")
    wait_until(lambda: not loop_thread()._running, "the call has ended on the loop, too")
    page.goto(f"{site.url}/cookie/get")


def test_a_signal_that_raises_while_a_session_is_opened_leaves_none() -> None:
    class Never:
        entered = left = False

        async def __aenter__(self) -> None:
            self.entered = True
            try:
                await asyncio.Event().wait()
            finally:
                self.left = True

        async def __aexit__(self, *raised: object) -> None: ...

    never, loop_thread = Never(), LoopThread(cleanup_timeout_ms=5_000)
    loop_thread.start()
    try:
        with pytest.raises(Signal), signal_after(0.2), Kept(loop_thread, never).open(lambda value: value):
            pass
        assert (never.entered, never.left) == (True, True)
    finally:
        loop_thread.stop()


def test_an_error_of_a_handler_fails_the_next_call_of_its_session_once_and_no_other_sessions(
    session: SyncSession, site: BehaviourSite
) -> None:
    raising = threading.Event()

    def fails(request: object) -> None:
        raising.set()
        raise LookupError("mine")

    with open_sync_session(seed=1) as other:
        page, others = session.page, other.page
        page.goto(f"{site.url}/cookie/get")
        page.once("request", fails)
        page.evaluate("void setTimeout(() => fetch('/cookie/get'), 100)")
        assert raising.wait(30)
        assert [others.evaluate("1") for _ in range(20)] == [1] * 20
        with pytest.raises(LookupError, match="mine"):
            page.evaluate("2")
        assert page.evaluate("2") == 2


def test_a_handler_that_is_in_a_call_when_its_session_ends_ends_too(runtime: Runtime, site: BehaviourSite) -> None:
    ended: list[BaseException] = []
    began = threading.Event()

    def waits(request: object) -> None:
        began.set()
        try:
            page.wait_for_event("popup", timeout=60_000)
        except BaseException as error:
            ended.append(error)
            raise

    with open_sync_session(seed=1) as session:
        page = session.page
        page.on("request", waits)
        page.goto(f"{site.url}/cookie/get")
        assert began.wait(30)
    wait_until(lambda: ended, "the handler's call has ended")
    assert isinstance(ended[0], SessionOver)
    wait_until(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "asyncworker-handler"],
        "the threads of handlers have ended",
    )


def test_a_step_is_done_once(runtime: Runtime) -> None:
    with open_sync_session(seed=1) as session:
        for done in (False, True):
            with session.once("insert", "key") as step:
                assert step.done is done
                if not done:
                    step.value = 3
        assert step.value == 3


def test_without_a_worker_a_browser_is_launched_for_the_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCWORKER_ENGINE", "chromium")
    with open_sync_session(seed=5) as session:
        assert (session.seed, session.page.evaluate("1 + 1")) == (5, 2)


def test_in_a_fork_the_session_is_refused_with_the_remedy(runtime: Runtime, session: SyncSession) -> None:
    page = session.page
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"nothing was raised"
        try:
            page.title()
        except ForkedBrowser as error:
            said = str(error).encode()
        finally:
            os.write(writing, said)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert "`spawn`" in pipe.read()
    os.waitpid(pid, 0)


#: What the stand-in's bridge has; it keeps no order among events.
BRIDGED = [
    "navigation_gives_a_response_with_its_request",
    "methods_and_properties",
    "locators_chain",
    "locators_are_arguments",
    "keyboard_and_mouse",
    "an_error_of_the_page_is_playwrights",
    "expect_response_by_a_predicate_that_asks_the_response",
    "what_an_event_brought_before_the_answer_is_there_after_it",
    "a_listener_that_is_removed_hears_nothing",
    "routes_fulfill_continue_and_fall_back",
    "a_route_waits_for_another_call_of_the_same_route",
    "a_page_is_closed_by_its_block",
    "frames",
    "wait_for_an_address",
    "text_of_an_object",
]


@pytest.mark.long
def test_the_other_engines_classes_are_served_too(
    bridged_standin: Standin,  # noqa: F811 -- the fixture
    real: Real,
    site: BehaviourSite,
    tmp_path: Path,
) -> None:
    settings = load({}, engine="invisible", output_dir=tmp_path, humanize=False, locale="en-US", timezone="UTC")
    with worker(Runtime(settings)):
        for name in BRIDGED:
            with open_sync_session(seed=7) as session:
                assert type(session.page).__module__.startswith("asyncworker.")
                found = SNIPPETS[name](session.page, site.url)
            assert found == real.run(lambda page, snippet=SNIPPETS[name]: snippet(page, site.url)), name


def in_use(runtime: Runtime) -> int:
    return runtime.slots.in_use


def loop_thread() -> LoopThread:
    there = get_event_loop_thread()
    assert isinstance(there, LoopThread)
    return there
