"""README is followed from top to bottom, section by section, in a deployment of its own; then the examples."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncworker import embedded
from asyncworker.demo.site import Request, Response, ShopSite
from asyncworker.settings import child_environment
from tests import readme
from tests.conftest import missing
from tests.readme import ROOT, Block
from tests.site import page
from tests.waiting import wait_until
from tests.workers import READY

# A section runs half a dozen commands, each of which starts Python, and often a browser.
pytestmark = [pytest.mark.needs_browser, pytest.mark.timeout(600)]

COMMAND_TIMEOUT_S = 120
READY_TIMEOUT_MS = 60_000

#: What a reader has running in the other terminal when a command needs a worker.
WORKER = "dramatiq asyncworker.actors -p 1 -t 2"

RUNNABLE = [block for block in readme.blocks() if block.language in ("console", "python")]
SECTIONS = list(dict.fromkeys(block.section for block in RUNNABLE))


class Example(ShopSite):
    """What stands for https://example.com."""

    def respond(self, request: Request) -> Response:
        if request.path == "/":
            return Response("<!doctype html><title>Example Domain</title><h1>Example Domain</h1>")
        return super().respond(request) if request.path.startswith("/products/") else page("nothing here", status=404)


class Reader:
    """Someone with two terminals: one for a worker, one for everything else.

    Parameters:
        directory: Where it all happens.
        substitutes: What it types in the place of what README says.
    """

    def __init__(self, directory: Path, substitutes: dict[str, str]) -> None:
        self.directory = directory
        self.log = directory / "worker.log"
        self._substitutes = substitutes
        self._worker: subprocess.Popen[bytes] | None = None

    def put(self, file: str, text: str) -> None:
        """Write a file of the deployment."""
        path = self.directory / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.typed(text))
        if path.parent.name == "actors":
            (path.parent / "__init__.py").touch()

    def type(self, command: str, output: str = "") -> str:
        """Run a command to its end, or leave a worker running; returns what it printed.

        Raises:
            AssertionError: When it fails, or does not print `output`.
        """
        command = self.typed(command)
        if re.search(r"(^| )(dramatiq asyncworker\.actors|asyncworker up)\b", command):
            self.start_worker(command)
            return ""
        if self._worker is None and re.match(r"asyncworker send|python producer", command):
            self.start_worker(WORKER)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}\n{self.worker_said()}"
        if output:
            assert done.stdout.strip() == self.typed(output), f"$ {command}\n{done.stderr}\n{self.worker_said()}"
        return done.stdout

    def start_worker(self, command: str) -> None:
        """Start a worker in the place of the last one, and wait until all its processes are up."""
        self.stop_worker()
        with self.log.open("wb") as log:
            self._worker = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                cwd=self.directory,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        count = int((re.search(r"-p (\d+)", command) or ["", "1"])[1])

        def up() -> bool:
            worker = self._worker
            assert worker is not None
            assert worker.poll() is None, f"$ {command}\n{self.worker_said()}"
            return self.worker_said().count(READY) >= count

        wait_until(up, f"`{command}` is up", timeout_ms=READY_TIMEOUT_MS)

    def stop_worker(self) -> None:
        """Press Ctrl-C in the worker's terminal, and wait."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        code = None
        # Dramatiq lets a reload of a watched directory that comes at the same moment win over Ctrl-C: press it again.
        for _ in range(6):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = worker.wait(COMMAND_TIMEOUT_S / 6)
                break
        else:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        assert code == 0, f"the worker ended with {code}\n{self.worker_said()}"

    def worker_said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for_worker_to_say(self, pattern: str, *, times: int = 1) -> None:
        def said() -> bool:
            return len(re.findall(pattern, self.worker_said())) >= times

        try:
            wait_until(said, f"{times} x {pattern!r} in the worker's log", timeout_ms=READY_TIMEOUT_MS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.worker_said()[-12_000:]}") from None

    def typed(self, text: str) -> str:
        for name, substitute in self._substitutes.items():
            text = text.replace(name, substitute)
        return text


def _environment() -> dict[str, str]:
    """A shell in which this environment's commands are found, with the one setting that a reader exports."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # noqa: TID251 -- tests are no part of the package
    return child_environment(PATH=path, ASYNCWORKER_ENGINE="chromium", PYTEST_ADDOPTS="")


@pytest.fixture
def site() -> Iterator[Example]:
    with Example() as site:
        yield site


@pytest.fixture
def reader(site: Example) -> Iterator[Reader]:
    if embedded.binary() is None:
        missing("no Valkey or Redis server on this machine")
    directory = Path(tempfile.mkdtemp(prefix="aw-")).resolve()  # short: it will hold a socket
    state_dir = directory / ".asyncworker"
    broker = f"unix://{embedded.socket_path(state_dir)}"
    reader = Reader(directory, {readme.SITE: site.url, readme.BROKER: broker})
    try:
        yield reader
    finally:
        try:
            reader.stop_worker()
        finally:
            embedded.stop(state_dir)
            shutil.rmtree(directory, ignore_errors=True)


# --- what README leaves to the reader to try


def _retried_and_given_up(reader: Reader) -> None:
    reader.type("asyncworker send pages.title no-url")
    reader.wait_for_worker_to_say(r"alerts.*pages\.title failed and is run again: Page\.goto")
    code = "from actors.pages import title; title.send_with_options(args=('no-url',), max_retries=0)"
    reader.type(f'python -c "{code}"')
    reader.wait_for_worker_to_say(r"alerts.*pages\.title is given up: .*no-url")


def _plain_actor_has_a_session(reader: Reader) -> None:
    reader.type(f"asyncworker send heading {readme.SITE} --wait", "Example Domain")
    reader.wait_for_worker_to_say("actor=heading .*outcome=succeeded")


def _plain_worker_has_no_browser(reader: Reader) -> None:
    reader.start_worker("dramatiq asyncworker.actors -p 1 -t 16 -Q mail")
    reader.type('asyncworker send notify "it works"')
    reader.wait_for_worker_to_say("notified: it works")
    assert "engine:" not in reader.worker_said()
    assert "trimmed" not in reader.worker_said()


def _dead_letter_is_retried(reader: Reader) -> None:
    code = "from actors.pages import title; title.send_with_options(args=('no-url',), max_retries=0)"
    reader.type(f'python -c "{code}"')
    wait_until(lambda: "pages.title" in reader.type("asyncworker dead list"), "it is a dead letter")
    reader.type("asyncworker dead retry --actor pages.title --yes", "1 dead letter put back")
    reader.wait_for_worker_to_say(r"actor=pages\.title attempt=2 .*outcome=failed")


AFTER: dict[str, Callable[[Reader], None]] = {
    "Queues and dead letters": _dead_letter_is_retried,
    "Hooks": _retried_and_given_up,
    "A session anywhere": _plain_actor_has_a_session,
    "Running workers": _plain_worker_has_no_browser,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_reader_who_does_what_the_section_says_sees_what_it_says(reader: Reader, section: str) -> None:
    first = next(block for block in RUNNABLE if block.section == section)
    for file, text in readme.files(before=first).items():
        reader.put(file, text)
    for block in RUNNABLE:
        if block.section == section:
            _follow(reader, block)
    if section in AFTER:
        AFTER[section](reader)
    else:
        assert any(_does_something(block) for block in RUNNABLE if block.section == section)


def _follow(reader: Reader, block: Block) -> None:
    if block.language == "python":
        assert block.file is not None
        reader.put(block.file, block.text)
        if block.file.startswith("actors/"):  # a worker imports it, and would not start if it did not import
            reader.start_worker(WORKER)
        return
    for command, output in block.commands():
        if command not in readme.COMMANDS_NOT_RUN:
            reader.type(command, output)


def _does_something(block: Block) -> bool:
    """True for a block with commands, and for one that is listed as not run."""
    return block.language == "console" or block.file in readme.FILES_NOT_RUN


def test_each_section_that_is_looked_at_further_is_there() -> None:
    assert set(AFTER) <= set(SECTIONS)


def test_the_tests_of_the_reader_are_run_and_none_is_skipped(reader: Reader) -> None:
    wanted = 0
    for file, text in readme.files().items():
        reader.put(file, text)
        wanted += text.count("\ndef test_")
    assert wanted >= 3
    assert f"{wanted} passed" in reader.type("python -m pytest tests")


def test_the_worker_logs_the_line_that_the_readme_shows(reader: Reader) -> None:
    shown = next(block for block in readme.blocks() if block.first_line.startswith("message_id="))
    for file, text in readme.files().items():
        reader.put(file, text)
    reader.type(f"asyncworker send pages.title {readme.SITE} --seed 42 --wait")
    pattern = re.sub(r"message_id=\S+", r"message_id=\\S+", shown.first_line)
    reader.wait_for_worker_to_say(re.sub(r"ms=\d+", r"ms=\\d+", pattern))


def test_a_worker_without_its_engine_says_what_the_readme_shows(reader: Reader) -> None:
    (shown,) = (block for block in readme.blocks() if block.first_line.startswith("[CRITICAL]"))
    reader.put("actors/pages.py", readme.files()["actors/pages.py"])
    nowhere = reader.directory / "nowhere"
    reader.start_worker(
        f"INVISIBLE_PLAYWRIGHT_ENGINE_DIR={nowhere} INVISIBLE_PLAYWRIGHT_CACHE_DIR={nowhere} "
        f"ASYNCWORKER_ENGINE=invisible {WORKER}"
    )
    reader.wait_for_worker_to_say(re.escape(shown.first_line))


# --- examples/


@pytest.fixture
def copied(reader: Reader) -> Callable[[str], None]:
    """Copies an example into the reader's directory, with the substitutes in it."""

    def copy(name: str) -> None:
        folder = ROOT / "examples" / name
        for path in sorted(folder.rglob("*.py")):
            if path.parent != folder or path.name != "__init__.py":
                reader.put(str(path.relative_to(folder)), path.read_text())

    return copy


def test_the_first_example_prints_the_title(reader: Reader, copied: Callable[[str], None]) -> None:
    copied("first")
    reader.type("python producer.py", "Example Domain")
    reader.wait_for_worker_to_say(r"actor=pages\.title attempt=1 seed=42 .* outcome=succeeded", times=2)
    reader.wait_for_worker_to_say(r"actor=pages\.title attempt=1 seed=\d+ .* outcome=succeeded", times=3)


def test_the_plain_example_uses_the_browser_of_its_worker_and_a_queue_without_one(
    reader: Reader, copied: Callable[[str], None], site: Example
) -> None:
    copied("plain_dramatiq")
    reader.start_worker("dramatiq asyncworker.actors -p 1 -t 2 -Q browser")
    reader.type(f"asyncworker send heading {readme.SITE} --wait", "Example Domain")
    assert "browser 1: chromium is up" in reader.worker_said()
    reader.start_worker("dramatiq asyncworker.actors -p 1 -t 1 -Q files")
    reader.wait_for_worker_to_say("actor=note .*outcome=succeeded")
    assert "chromium" not in reader.worker_said()
    assert (reader.directory / "headings.txt").read_text() == f"{site.url} Example Domain\n"


def test_each_example_has_a_test() -> None:
    examples = {path.parent.name for path in (ROOT / "examples").glob("*/__init__.py")}
    source = Path(__file__).read_text() + (ROOT / "tests" / "celery" / "test_examples.py").read_text()
    assert {name for name in examples if f'copied("{name}")' not in source and f'"{name}"' not in source} == set()
