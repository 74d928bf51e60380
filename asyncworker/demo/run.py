"""`asyncworker demo`: a shop, a broker and a real worker on this machine, with an account of everything.

All of it lives in a temporary directory and below this process; on the way out, also on Ctrl-C, the worker is
stopped, whatever carries its tokens is killed, the server is stopped and the directory removed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import dramatiq
import psutil
from dramatiq import Message
from dramatiq.results.errors import ResultFailure, ResultMissing
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from asyncworker import embedded, installing, processes
from asyncworker.broker import make_redis_broker
from asyncworker.demo.site import ShopSite
from asyncworker.deployment import import_actors, worker_command
from asyncworker.errors import ConfigurationError
from asyncworker.ledger import Ledger
from asyncworker.middleware import ledger_of
from asyncworker.settings import EngineName, Settings, as_environment, child_environment, load

MESSAGES = 40
THREADS = 4
SHOP_FIELDS = {"title": "h1", "price": ".price"}
OWN_FIELDS = {"title": "title"}

#: A page that does not answer is tried once more, soon: someone is watching.
RETRIES: dict[str, Any] = {"max_retries": 1, "min_backoff": 500, "max_backoff": 1_000}

#: Messages that are not done after this are given up: the demo says so and shows the worker's log.
LIMIT_MS = 120_000
STOP_TIMEOUT_MS = 30_000
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.02

#: A browser is killed only in a run long enough to have a middle.
FEWEST_TO_KILL_AT = 4


@dataclass(frozen=True)
class Line:
    """One message as the table shows it; `ms` is its last attempt's duration."""

    url: str
    title: str | None
    price: str | None
    seed: int | None
    attempts: int
    ms: int | None
    error: str | None = None


@dataclass
class Report:
    """What the demo found."""

    lines: list[Line] = field(default_factory=list)
    counts: Mapping[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    home: str = ""  # what all URLs begin with and the table leaves out

    def facts(self) -> dict[str, Any]:
        """As `--json` prints it."""
        times = [line.ms for line in self.lines if line.ms is not None and line.error is None]
        failed = sum(line.error is not None for line in self.lines)
        return {
            "messages": len(self.lines),
            "succeeded": len(self.lines) - failed,
            "failed": failed,
            "browsers_launched": self.counts.get("browsers_launched", 0),
            "contexts_opened": self.counts.get("contexts_opened", 0),
            "contexts_closed": self.counts.get("contexts_closed", 0),
            "seeds": sorted({line.seed for line in self.lines if line.seed is not None}),
            "median_ms": round(statistics.median(times)) if times else None,
            "results": [vars(line) for line in self.lines],
        }


def run_demo(engine: str, *, urls: list[str], as_json: bool, console: Console) -> int:
    """Run the demo; returns the exit code: 0 only when everything adds up.

    Parameters:
        engine: `auto`, or the name of an engine.
        urls: The user's own addresses; empty: the shop's products.
        console: For everything but the JSON, which goes to stdout.

    Raises:
        ConfigurationError: When no engine works, or there is no such engine.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.ExitStack() as exits:
        try:
            report = _Demo(exits, engine, urls, console).run()
        except KeyboardInterrupt:
            console.print("interrupted; stopping the worker and the server")
            exits.close()
            return 130
    if as_json:
        sys.stdout.write(json.dumps(report.facts(), ensure_ascii=False) + "\n")
    else:
        _show(report, console)
    for complaint in report.complaints:
        console.print(f"not as it should be: {complaint}", style="red", highlight=False, soft_wrap=True)
    return 1 if report.complaints else 0


class _Demo:
    """One run; `exits` undoes what it starts, in reverse."""

    def __init__(self, exits: contextlib.ExitStack, engine: str, urls: list[str], console: Console) -> None:
        self._exits = exits
        self._console = console
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="asyncworker-demo-")))
        self._settings = _settings(directory, engine, self._say)
        self._log = directory / "worker.log"
        self._site = None if urls else exits.enter_context(ShopSite(MESSAGES))
        self._urls = urls or [self._site.product_url(number) for number in range(1, MESSAGES + 1) if self._site]

    def run(self) -> Report:
        with _interrupted_later():
            self._exits.callback(embedded.stop, self._settings.state_dir)
            embedded.ensure(self._settings.state_dir)
            worker = self._start_worker()
        broker = make_redis_broker(self._settings)
        dramatiq.set_broker(broker)
        sys.path.insert(0, str(_deployment()))
        import_actors(self._settings)
        messages = self._send(broker)
        results = self._collect(broker, messages, worker)
        self._stop(worker)
        return self._report(ledger_of(broker), messages, results)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def _start_worker(self) -> subprocess.Popen[bytes]:
        """The real command, in a session of its own: a Ctrl-C comes to this process, which then stops it in order."""
        options = ("-p", "1", "-t", str(THREADS))
        self._say(f"worker: dramatiq asyncworker.actors {' '.join(options)}")
        with self._log.open("wb") as log:
            worker = subprocess.Popen(
                worker_command(*options),
                cwd=_deployment(),
                env=child_environment(**as_environment(self._settings)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._exits.callback(self._stop, worker)
        return worker

    def _send(self, broker: dramatiq.Broker) -> list[Message[Any]]:
        scrape = broker.get_actor("pages.scrape")
        fields = SHOP_FIELDS if self._site else OWN_FIELDS
        return [scrape.send_with_options(args=(url, fields), **RETRIES) for url in self._urls]

    def _collect(
        self, broker: dramatiq.Broker, messages: list[Message[Any]], worker: subprocess.Popen[bytes]
    ) -> dict[str, Any]:
        """Results by message id, an exception for a message that failed; kills one browser half way."""
        results: dict[str, Any] = {}
        backend = broker.get_results_backend()
        kill_at = len(messages) // 2 if len(messages) >= FEWEST_TO_KILL_AT else None
        deadline = time.monotonic() + LIMIT_MS / 1000
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task("messages", total=len(messages))
            while len(results) < len(messages) and worker.poll() is None and time.monotonic() < deadline:
                for message in messages:
                    if message.message_id not in results:
                        with contextlib.suppress(ResultMissing):
                            results[message.message_id] = _result(backend, message)
                progress.update(bar, completed=len(results))
                if kill_at is not None and len(results) >= kill_at:
                    kill_at = None
                    progress.console.print(_kill_browser(worker.pid), highlight=False)
                time.sleep(POLL_S)
        return results

    def _stop(self, worker: subprocess.Popen[bytes]) -> None:
        """Stop the worker as a supervisor would; kill what does not end, and whatever carries its tokens."""
        below = _pids_below(worker.pid)
        if worker.poll() is None:
            worker.terminate()
        try:
            worker.wait(STOP_TIMEOUT_MS / 1000)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        processes.kill(lambda token: token.pid in below)

    def _report(self, ledger: Ledger, messages: list[Message[Any]], results: dict[str, Any]) -> Report:
        report = Report(home=self._site.url if self._site else "")
        for counts in ledger.counts().values():
            report.counts = counts  # one worker process: one row of counts
        for number, (url, message) in enumerate(zip(self._urls, messages, strict=True), start=1):
            result = results.get(message.message_id, TimeoutError("not done in time"))
            report.lines.append(_line(url, message, ledger, result))
            report.complaints += self._wrong(number, report.lines[-1])
        opened, closed = report.counts.get("contexts_opened", 0), report.counts.get("contexts_closed", 0)
        if opened != closed or opened < len(messages):
            report.complaints.append(f"{opened} contexts opened, {closed} closed")
        if len(results) < len(messages):
            report.complaints.append(f"the worker's log ends with:\n{_tail(self._log)}")
        return report

    def _wrong(self, number: int, line: Line) -> list[str]:
        if line.error is not None:
            return [f"{line.url}: {line.error}"]
        if self._site is not None:
            product = self._site.product(number)
            if (line.title, line.price) != (product.title, product.price):
                return [f"{line.url} served {product.title}, {product.price}; read {line.title}, {line.price}"]
        return []


def _settings(directory: Path, engine: str, say: Any) -> Settings:
    """The user's settings, on a broker and in directories of the demo's own."""
    base = load()
    given = {name: getattr(base, name) for name in base.model_fields_set - {"broker_url", "actors", "slots"}}
    given |= {"state_dir": directory / "state", "output_dir": directory / "output"}
    if engine == "auto":
        chosen, _ = installing.install_any(load({}, **given), say)
        return load({}, **(given | {"engine": chosen}))
    if engine not in set(EngineName):
        raise ConfigurationError(f"there is no engine {engine!r}; there are auto, {', '.join(EngineName)}")
    settings = load({}, **(given | {"engine": EngineName(engine)}))
    say(f"taking {installing.install(settings, say).describe()}")
    return settings


def _deployment() -> Path:
    """The directory whose `actors` package is the shipped one: in an installed wheel, or in a checkout."""
    shipped = Path(__file__).parent / "deployment"
    return shipped if shipped.is_dir() else Path(__file__).parents[2]


def _result(backend: Any, message: Message[Any]) -> Any:
    try:
        return backend.get_result(message)
    except ResultFailure as error:
        return error


def _line(url: str, message: Message[Any], ledger: Ledger, result: Any) -> Line:
    rows = ledger.rows(message.message_id)
    read: Mapping[str, str] = {} if isinstance(result, Exception) else result
    return Line(
        url=url,
        title=read.get("title"),
        price=read.get("price"),
        seed=message.kwargs.get("seed"),
        attempts=len(rows),
        ms=rows[-1].took_ms if rows else None,
        error=str(result) if isinstance(result, Exception) else None,
    )


def _kill_browser(worker_pid: int) -> str:
    """SIGKILL a browser of the worker, as the kernel does when memory runs out."""
    below = _pids_below(worker_pid)
    up = processes.tokens(lambda token: token.role == "browser" and token.pid in below)
    killed = sum(processes.kill_launch(token) for token in up)
    return f"killed the browser on purpose ({killed} processes); its messages are run again with their seeds"


def _pids_below(pid: int) -> set[int]:
    try:
        return {pid} | {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return {pid}


def _show(report: Report, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("url", "title"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("price", "seed", "attempts", "ms"):
        table.add_column(name, no_wrap=True, justify="right")
    for line in report.lines:
        attempts = Text(str(line.attempts), style="bold yellow" if line.attempts > 1 else "")
        title = Text(line.title or "") if line.error is None else Text(line.error, style="red")
        url = line.url.removeprefix(report.home)
        table.add_row(Text(url), title, line.price, str(line.seed), attempts, str(line.ms))
    if report.home:
        console.print(f"the shop was at {report.home}", highlight=False)
    console.print(table)
    facts = report.facts()
    console.print(
        f"{facts['messages']} messages, {facts['succeeded']} succeeded, {facts['browsers_launched']} browsers "
        f"launched, {facts['contexts_opened']} contexts opened, {facts['contexts_closed']} closed; "
        f"median {facts['median_ms']} ms a message",
        soft_wrap=True,
    )


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Hold Ctrl-C back while something is started that must be known before it can be stopped.

    By handlers, not by blocking the signals: a child would inherit the blocked ones and never hear them.
    """
    held: list[int] = []
    before = {number: signal.signal(number, lambda received, _: held.append(received)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        raise KeyboardInterrupt
