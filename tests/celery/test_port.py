"""`asyncworker celery port`: what it makes of tasks, and what it leaves, with its reasons.

That what it prints runs is test_examples.py's: examples/celery_after is what it prints of examples/celery_before.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from asyncworker.celery.port import port
from asyncworker.errors import ConfigurationError
from asyncworker.settings import child_environment
from tests.readme import ROOT

BEFORE = ROOT / "examples" / "celery_before" / "tasks.py"
AFTER = ROOT / "examples" / "celery_after" / "actors" / "tasks.py"

HEAD = """
from celery import Celery, chain, shared_task
from celery.utils.log import get_task_logger
from playwright.sync_api import Page, TimeoutError, sync_playwright
import time
import requests

app = Celery("tasks")
OPTIONS = {"width": 1, "height": 2}
logger = get_task_logger(__name__)
"""


def ported(task: str) -> str:
    """What becomes of the last statements of a module that begins with HEAD."""
    result = port(HEAD + dedent(task))
    compile(result.code, "ported.py", "exec")
    return result.code.partition("getLogger(__name__)\n")[2].strip()


def body(task: str) -> str:
    """The same, without its decorator."""
    return "async def" + ported(task).partition("async def")[2]


def decorator(options: str, code: str = "pass") -> str:
    """The decorator of a task with these options, that opens a page."""
    source = f"""
        @app.task({options})
        def visit(self, url):
            with sync_playwright() as p:
                page = p.chromium.launch().new_page()
                page.goto(url)
                {code}
    """
    return ported(source).partition("async def")[0].strip()


def formatted(code: str) -> str:
    """As the code of this repository is."""
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        words = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(AFTER), "-"]
        code = subprocess.run(words, cwd=ROOT, input=code, capture_output=True, text=True, check=True).stdout
    return code


def test_the_command_prints_the_example_and_leaves_the_file_alone() -> None:
    before = BEFORE.read_text()
    done = subprocess.run(
        [sys.executable, "-m", "asyncworker", "celery", "port", str(BEFORE)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert formatted(done.stdout) == AFTER.read_text()
    assert BEFORE.read_text() == before
    assert "ASYNCWORKER_EXECUTABLE_PATH" in done.stderr or "_EXECUTABLE_PATH" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        ("", "", "@actor(store_results=True, max_retries=0)"),
        ("ignore_result=True", "", "@actor(max_retries=0)"),
        (
            'name="shop.visit", queue="slow", expires=90, throws=(KeyError,), acks_late=True',
            "",
            '@actor(\n    store_results=True,\n    actor_name="shop.visit",\n    queue_name="slow",\n'
            "    throws=(KeyError,),\n    max_age=90_000,\n    max_retries=0,\n)",
        ),
        ("soft_time_limit=30, time_limit=60", "", "@actor(store_results=True, time_limit=30_000, max_retries=0)"),
        ("time_limit=LIMIT_S", "", "@actor(store_results=True, time_limit=int(1_000 * LIMIT_S), max_retries=0)"),
        (
            "autoretry_for=(Exception,), max_retries=5",
            "",
            "@actor(store_results=True, max_retries=5, min_backoff=180_000, max_backoff=180_000)",
        ),
        (
            'autoretry_for=(Exception,), retry_backoff=2, retry_backoff_max=60, retry_kwargs={"max_retries": 7}',
            "",
            "@actor(store_results=True, max_retries=7, min_backoff=2_000, max_backoff=60_000)",
        ),
        (
            "bind=True, ignore_result=True, max_retries=None, autoretry_for=(KeyError,), retry_jitter=False",
            "raise self.retry()",
            "@actor(\n    retry_when=lambda retries, error: isinstance(error, (Retry, KeyError)),\n"
            "    min_backoff=180_000,\n    max_backoff=180_000,\n)",
        ),
    ],
)
def test_options_become_those_that_do_the_same(options: str, code: str, expected: str) -> None:
    assert decorator(options, code) == expected


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        ("raise self.retry()", "raise Retry(delay=180_000)"),
        ("self.retry(exc=error)", "raise Retry(str(error), delay=180_000) from error"),
        ("return self.retry(exc=error, countdown=1.5)", "raise Retry(str(error), delay=1_500) from error"),
        (
            "raise self.retry(exc=KeyError(url), countdown=60 * (self.request.retries + 1))",
            "raise Retry(str(KeyError(url)), delay=1_000 * (60 * ((session.attempt.number - 1) + 1)))",
        ),
        ("raise self.retry(countdown=wait(url))", "raise Retry(delay=int(1_000 * wait(url)))"),
    ],
)
def test_a_retry_is_raised_with_its_delay(retry: str, expected: str) -> None:
    source = f"""
        @app.task(bind=True)
        def visit(self, url, seed):
            try:
                browse(url, self.request.id)
            except ValueError as error:
                {retry}
    """
    assert body(source) == dedent(
        f"""\
        async def visit(session: Session, url, *, seed):
            try:
                browse(url, session.attempt.message_id)
            except ValueError as error:
                {expected}"""
    )


def test_a_browser_of_the_tasks_own_goes_and_its_context_is_the_sessions_and_comments_stay() -> None:
    code = ported(
        """
        # the shop
        @shared_task
        def visit(url, seed=None, *rest):
            # a browser for each task
            with sync_playwright() as p:
                browser = p.chromium.launch(headless=True)
                context = browser.new_context(viewport=OPTIONS, locale="en-US")
                page = context.new_page()
                # go
                page.goto(url)
                time.sleep(1)
                texts = ", ".join(each.inner_text() for each in page.query_selector_all("a"))
                with page.expect_popup() as popup:
                    page.click("a")  # opens another
                other = popup.value
                logger.info(other.title().upper(), page.query_selector_all("a")[0].inner_text())
                page.route("**/*", lambda route: route.abort())
                context.clear_cookies()
                browser.close()
            return texts
        """
    )
    assert code == dedent(
        """\
        # the shop
        @actor(store_results=True, max_retries=0, context_options={"viewport": OPTIONS, "locale": "en-US"})
        async def visit(session: Session, url, *rest, seed=None):
            # a browser for each task
            context = session.context
            page = session.page
            # go
            await page.goto(url)
            await asyncio.sleep(1)
            texts = ", ".join([await each.inner_text() for each in await page.query_selector_all("a")])
            async with page.expect_popup() as popup:
                await page.click("a")  # opens another
            other = await popup.value
            logger.info((await other.title()).upper(), await (await page.query_selector_all("a"))[0].inner_text())
            await page.route("**/*", lambda route: route.abort())
            await context.clear_cookies()
            return texts"""
    )


def test_further_pages_and_contexts_are_opened_on_the_sessions_browser() -> None:
    code = body(
        """
        @shared_task
        def visit(urls, width):
            with sync_playwright() as p, p.firefox.launch() as browser:
                with browser.new_page() as page:
                    page.goto(urls[0])
                for url in urls:
                    other = browser.new_page(viewport={"width": width, "height": 1})
                    other.goto(url)
                    other.close()
        """
    )
    assert code == dedent(
        """\
        async def visit(session: Session, urls, width):
            page = session.page
            await page.goto(urls[0])
            for url in urls:
                other = await session.browser.new_page(viewport={"width": width, "height": 1})
                await other.goto(url)
                await other.close()"""
    )


def test_tasks_are_sent_as_actors_and_what_has_no_browser_has_no_session() -> None:
    code = ported(
        """
        @shared_task
        def visit(url, seed=None):
            mail.apply_async(args=[url], countdown=3)
            visit.delay(url, seed=seed)
            requests.get(url)
            chain(visit.s(url), mail.s())()


        @shared_task(queue="mail")
        def mail(to):
            visit.delay(to)
        """
    )
    assert code == dedent(
        """\
        @actor(store_results=True, max_retries=0)
        async def visit(session: Session, url, *, seed=None):
            await asyncio.to_thread(mail.send_with_options, args=[url], delay=3_000)
            await visit.asend(url, seed=seed)
            # TODO port: requests.get() blocks the loop: await asyncio.to_thread(...)
            requests.get(url)
            # TODO port: an actor has no counterpart of visit.s(url)
            # TODO port: an actor has no counterpart of mail.s()
            chain(visit.s(url), mail.s())()


        @dramatiq.actor(broker=get_broker(), store_results=True, queue_name="mail", max_retries=0)
        def mail(to):
            visit.send(to)"""
    )


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ('@app.task(rate_limit="1/s")\ndef visit(url):\n    pass', "an actor has no option rate_limit"),
        ("@app.task(base=Base)\ndef visit(url):\n    pass", "an actor has no option base"),
        ("@app.task(bind=flag)\ndef visit(url):\n    pass", "flag stands where True or False does"),
        ("@app.task\n@timed\ndef visit(url):\n    pass", "it has another decorator"),
        ("@app.task\nasync def visit(url):\n    pass", "it is async, or a generator"),
        (
            "@app.task(bind=True)\ndef visit(self, url):\n    self.update_state(state='SEEN')",
            "an actor has no self.update_state",
        ),
        (
            "@app.task(bind=True)\ndef visit(self, url):\n    raise self.retry(eta=later())",
            "`self.retry(eta=later())` says more than exc and countdown",
        ),
        (
            "@app.task\ndef visit(page: Page):\n    def read():\n        return page.title()\n    return read()",
            "page.title() stands in a function within the task, which would have to be awaited, too",
        ),
        (
            "@app.task\ndef visit(page: Page):\n    return read(page)",
            "read() is handed a thing of Playwright: make it async first",
        ),
        ("class Visit(app.Task):\n    def run(self, url):\n        pass", "it is a class"),
    ],
)
def test_what_cannot_be_ported_is_as_it_was_below_its_reason(task: str, reason: str) -> None:
    result = port(HEAD + task)
    assert result.is_unfinished
    assert result.code.endswith(f"\n# TODO port: {reason}\n{task}")
    assert 'app = Celery("tasks")' in result.code or "app" not in task
    assert list(result.left.values()) == [[reason]]


def test_the_browser_of_the_process_stays_while_a_task_that_is_left_uses_it() -> None:
    source = BEFORE.read_text().replace("default_retry_delay=1,", 'rate_limit="1/s",')
    result = port(source)
    compile(result.code, "ported.py", "exec")
    assert result.ported == ["title", "wander"]
    for kept in ("browser = None", "app = Celery(", "from playwright.sync_api import", "def price(self, url"):
        assert kept in result.code
    assert "# TODO port: what is left uses this browser\n@worker_process_init.connect" in result.code


def test_settings_of_celery_are_left_and_marked() -> None:
    result = port('from celery import Celery\n\napp = Celery("tasks")\napp.conf.timezone = "UTC"\n')
    assert result.code == (
        'from celery import Celery\n\napp = Celery("tasks")\n# TODO port: this is about the Celery app\n'
        'app.conf.timezone = "UTC"\n'
    )


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tasks\.py is no Python"):
        port("def :", "tasks.py")
