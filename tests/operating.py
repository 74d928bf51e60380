"""Someone who operates a deployment by the command, and what lies in its store."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import redis
from dramatiq import Message
from dramatiq.common import current_millis

from asyncworker import embedded
from asyncworker.settings import as_environment, child_environment
from tests.workers import Deployment

QUEUE = "held"

PARTS = ("waiting", "delayed", "running", "lost", "dead")

COMMAND = [sys.executable, "-m", "asyncworker"]


def environment(deployment: Deployment, **more: str) -> dict[str, str]:
    return child_environment(**(as_environment(deployment.settings) | {"COLUMNS": "120"} | more))


def run(deployment: Deployment, *words: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command where no actors are, unless told: most need none."""
    return subprocess.run(
        [*COMMAND, *words],
        cwd=cwd or deployment.directory,
        env=environment(deployment, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def facts(deployment: Deployment, *words: str, code: int = 0) -> dict[str, Any]:
    ended = run(deployment, *words, "--json")
    assert ended.returncode == code, ended.stdout + ended.stderr
    read: dict[str, Any] = json.loads(ended.stdout)
    return read


def in_terminal(deployment: Deployment, *words: str, answer: str) -> tuple[int, str]:
    """Run the command in a terminal and answer its question; returns the exit code and what stood there."""
    ours, its = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *words], cwd=deployment.directory, env=environment(deployment), stdin=its, stdout=its, stderr=its
    ) as process:
        os.close(its)
        said, answered = "", False
        with contextlib.suppress(OSError):  # how a terminal says that no one is at its other end
            while chunk := os.read(ours, 4096):
                said += chunk.decode()
                if not answered and "[y/N]" in said:
                    os.write(ours, f"{answer}\n".encode())
                    answered = True
        os.close(ours)
        return process.wait(30), said.replace("\r\n", "\n")


def stands(deployment: Deployment, queue: str = QUEUE) -> dict[str, Any]:
    """How a queue stands, by the command."""
    return next(each for each in facts(deployment, "queues")["queues"] if each["queue"] == queue)


def dead_letter(
    deployment: Deployment, identifier: str, body: bytes | Message[Any], *, queue: str = QUEUE, age_ms: int = 0
) -> None:
    """Put a dead letter into the store, as a worker that rejects it does."""
    client: Any = deployment.broker.client
    client.zadd(f"dramatiq:{queue}.XQ", {identifier: current_millis() - age_ms})
    client.hset(f"dramatiq:{queue}.XQ.msgs", identifier, body if isinstance(body, bytes) else body.encode())


def message(
    *args: Any, actor: str = "need", queue: str = QUEUE, options: dict[str, Any] | None = None, **kwargs: Any
) -> Message[Any]:
    return Message(queue, actor, args, kwargs, options or {})


def everything(deployment: Deployment) -> dict[bytes, bytes]:
    """The store's contents."""
    client: Any = deployment.broker.client
    return {key: client.dump(key) for key in client.keys("*")}


def blocked(deployment: Deployment) -> int:
    """How many consumers have looked, found nothing to fetch, and wait."""
    client: Any = deployment.broker.client
    return int(client.info("clients")["blocked_clients"])


def connect(deployment: Deployment) -> redis.Redis:
    """A connection of its own, as another process has it."""
    return redis.Redis(unix_socket_path=str(embedded.ensure(deployment.settings.state_dir)), socket_timeout=10)
