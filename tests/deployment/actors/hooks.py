"""A middleware that writes down which hook fired when, for the test of their order."""

import os
from pathlib import Path
from typing import Any

import asyncworker
from asyncworker import Session, actor, get_broker


class Witness(asyncworker.Middleware):
    """Appends a line for each hook to the file that the test names."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _saw(self, hook: str, message: Any = None) -> None:
        subject = getattr(message, "actor_name", "")
        with self._path.open("a") as file:
            file.write(f"{hook} {subject}".strip() + "\n")

    def after_process_boot(self, broker: Any) -> None:
        self._saw("after_process_boot")

    def after_worker_boot(self, broker: Any, worker: Any) -> None:
        self._saw("after_worker_boot")

    def before_enqueue(self, broker: Any, message: Any, delay: int) -> None:
        self._saw("before_enqueue", message)

    def after_enqueue(self, broker: Any, message: Any, delay: int) -> None:
        self._saw("after_enqueue", message)

    def after_receive_message(self, broker: Any, message: Any) -> None:
        self._saw("after_receive_message", message)

    def before_process_message(self, broker: Any, message: Any) -> None:
        self._saw("before_process_message", message)

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._saw(f"after_process_message({type(exception).__name__})", message)

    def after_retry_message(self, broker: Any, message: Any, *, exception: BaseException) -> None:
        self._saw(f"after_retry_message({type(exception).__name__})", message)

    def after_skip_message(self, broker: Any, message: Any) -> None:
        self._saw("after_skip_message", message)

    def after_nack(self, broker: Any, message: Any) -> None:
        self._saw("after_nack", message)

    def before_worker_shutdown(self, broker: Any, worker: Any) -> None:
        self._saw("before_worker_shutdown")

    def after_worker_shutdown(self, broker: Any, worker: Any) -> None:
        self._saw("after_worker_shutdown")


if path := os.environ.get("HOOKS_FILE"):  # noqa: TID251 -- set by the test
    get_broker().add_middleware(Witness(Path(path)))


@actor(max_retries=1, min_backoff=20, max_backoff=40, store_results=True, max_age=60_000)
async def once_failing(session: Session, how: str) -> str:
    """Fails on its first attempt, or always."""
    if how == "always" or session.attempt.number == 1:
        raise RuntimeError(how)
    return how


@actor(store_results=True)
async def publishing(session: Session) -> str:
    """Sends another message."""
    once_failing.send("once")
    return "sent"
