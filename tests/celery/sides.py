"""The same task module on two workers at once: Celery's own, and ours; each with a client, and a record of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from celery import Celery
from celery.result import AsyncResult

from asyncworker import embedded
from asyncworker.settings import as_environment, child_environment
from tests.waiting import wait_until
from tests.workers import Deployment, Running

HOME = Path(__file__).parent / "deployment"
APP = "facts_tasks:app"


def records_in(file: Path) -> list[dict[str, Any]]:
    """What was written by now; a last line that is not whole yet is left out."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Side:
    """A broker, and what happened at its worker."""

    environment: dict[str, str]
    record: Path
    worker: Any = None
    _client: subprocess.Popen[str] | None = None
    ids: dict[str, list[str]] = field(default_factory=dict)

    def records(self) -> list[dict[str, Any]]:
        return records_in(self.record)

    @contextlib.contextmanager
    def client(self, *scenarios: str) -> Iterator[None]:
        """A client that has sent these."""
        with subprocess.Popen(
            [sys.executable, "facts_client.py", *scenarios],
            cwd=HOME,
            env=self.environment | {"RECORD": str(self.record.with_suffix(".client"))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client:
            self._client = client
            try:
                yield
            finally:
                client.kill()

    def sent(self) -> dict[str, list[str]]:
        """The ids of what was sent, by scenario."""
        if not self.ids:
            self.ids = json.loads(_pipe(self._client, "stdout").readline())
        return self.ids

    def results(self) -> dict[str, list[dict[str, Any]]]:
        """What the client sees, of all that was sent, when its worker is done."""
        stdin = _pipe(self._client, "stdin")
        stdin.write("\n")
        stdin.flush()
        read: dict[str, list[dict[str, Any]]] = json.loads(_pipe(self._client, "stdout").readline())
        return read

    def wait_for(self, what: str, *, times: int = 1, timeout_ms: int = 40_000) -> None:
        wait_until(
            lambda: sum(each["what"] == what for each in self.records()) >= times,
            f"{times} x {what} in {self.record.name}: {self.sent()}",
            timeout_ms=timeout_ms,
        )


def _pipe(client: subprocess.Popen[str] | None, name: str) -> TextIO:
    assert client is not None
    pipe: TextIO = getattr(client, name)
    return pipe


@contextlib.contextmanager
def real_side(deployment: Deployment) -> Iterator[Side]:
    """Celery's own worker, with its solo pool and its Redis transport, on the same server."""
    socket = f"redis+socket://{embedded.ensure(deployment.settings.state_dir)}?virtual_host="
    record = deployment.directory / "real.jsonl"
    environment = child_environment(BROKER=f"{socket}1", BACKEND=f"{socket}2", RECORD=str(record))
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", APP, "worker", "-P", "solo", "-l", "INFO"]
    log = deployment.directory / "real.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, "-Q", "facts,mail:high", "--without-gossip", "--without-mingle"],
            cwd=HOME,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ) as worker,
    ):
        try:
            yield Side(environment, record, worker)
        except BaseException:
            sys.stderr.write(f"--- Celery's log\n{log.read_text()[-6_000:]}\n")
            raise
        finally:
            worker.kill()


@contextlib.contextmanager
def our_side(deployment: Deployment, *options: str, name: str = "ours", **more: str) -> Iterator[Side]:
    """Our worker, on the deployment's server."""
    record = deployment.directory / f"{name}.jsonl"
    own = {"BROKER": "asyncworker://", "BACKEND": "asyncworker://", "RECORD": str(record), **more}
    own.setdefault("ASYNCWORKER_CELERY_APP", APP)
    with deployment.worker(*(options or ("-p", "1", "-t", "4")), cwd=HOME, environment=own) as worker:
        yield Side(child_environment(**as_environment(deployment.settings)) | own, record, worker)


def up(side: Side) -> None:
    """Wait until its worker takes messages."""
    if isinstance(side.worker, Running):
        side.worker.ready()
    side.wait_for("worker_ready")


def send(app: Celery, task: str, *args: Any, **options: Any) -> AsyncResult:
    return app.send_task(f"facts.{task}", args, **options)


def result(sent: AsyncResult) -> Any:
    return sent.get(timeout=20, propagate=False)


def of(side: Side, sent: AsyncResult) -> list[dict[str, Any]]:
    return [each for each in side.records() if each["id"] == sent.id]


def names(side: Side, sent: AsyncResult) -> list[str]:
    return [f"{each['what']}({each['of']})" if "of" in each else each["what"] for each in of(side, sent)]


def begun(side: Side, sent: AsyncResult) -> AsyncResult:
    wait_until(lambda: "BODY" in names(side, sent), f"{sent.id} runs")
    return sent
