"""The Chromium behind the bridge: its process, and its DevTools protocol over two pipes. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

#: Chromium reads commands here and writes events there, as Juggler does.
_READ, _WRITE = 3, 4
_PR_SET_PDEATHSIG = 1

_FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-startup-window", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-breakpad",
    "--disable-crash-reporter", "--disable-background-timer-throttling", "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows", "--disable-ipc-flooding-protection", "--disable-popup-blocking",
    "--disable-hang-monitor", "--password-store=basic", "--use-mock-keychain", "--force-color-profile=srgb",
    "--hide-scrollbars",
    # One process, and with it one session, for all frames of a page.
    "--disable-site-isolation-trials", "--disable-features=IsolateOrigins,site-per-process,Translate",
)  # fmt: skip


class ChromiumError(Exception):
    """Chromium's answer is an error, or there will be none: the session or its target is gone."""


class Chromium:
    """A running Chromium.

    It is a group of processes of its own. When this process ends without `end`, the kernel kills the one that was
    started, and Chromium ends with its pipe: on some systems the executable is a script that waits for it. It
    inherits this process's environment, by which it is found, but for what would leave files elsewhere or send it
    over a proxy.

    Parameters:
        command: The executable, and arguments before the bridge's own.
        directory: Is made, for its profile and all its other files; whoever gives it removes it.
        heard: Is called with each event: its method, parameters and session. It must not wait for an answer.
        ended: Is called when it has gone.
    """

    def __init__(
        self,
        command: list[str],
        directory: Path,
        heard: Callable[[str, dict[str, Any], str | None], None],
        ended: Callable[[], None],
    ) -> None:
        self._heard, self._ended = heard, ended
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[str | None, Callable[[dict[str, Any]], None]]] = {}
        directory.mkdir(parents=True)
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        nowhere = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [*command, *_FLAGS, f"--user-data-dir={directory / 'profile'}"],
            stdin=nowhere, stdout=nowhere, stderr=nowhere, pass_fds=(_READ, _WRITE), start_new_session=True,
            env=_environment(directory), preexec_fn=_in_child(theirs, answers),
        )  # fmt: skip
        os.close(theirs)
        os.close(answers)
        threading.Thread(target=self._read, daemon=True).start()

    def pid(self) -> int:
        """Its main process: not always the one that was started."""
        found = self.call("SystemInfo.getProcessInfo")["processInfo"]
        return int(next(one["id"] for one in found if one["type"] == "browser"))

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """The result of a command.

        Raises:
            ChromiumError: When it has none.
        """
        return self.start(method, params, session).result()

    def start(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> Future[dict[str, Any]]:
        """Send a command; several that were sent one after another are done in that order."""
        future: Future[dict[str, Any]] = Future()

        def answered(message: dict[str, Any]) -> None:
            if "error" in message:
                future.set_exception(ChromiumError(message["error"]["message"]))
            else:
                future.set_result(message["result"])

        self.send(method, params, session, answered)
        return future

    def send(
        self,
        method: str,
        params: dict[str, Any] | None = None,
        session: str | None = None,
        answered: Callable[[dict[str, Any]], None] = lambda message: None,
    ) -> None:
        """Send a command; `answered` is called with its answer, in order with the events."""
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = (session, answered)
            message = {"id": number, "method": method, "params": params or {}}
            data = memoryview(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
            try:
                while data:
                    data = data[os.write(self._out, data) :]
            except BrokenPipeError:
                pass  # the reader sees it, too, and says so

    def lose(self, session: str) -> None:
        """Fail the commands of a session that is gone."""
        for number, (whose, _) in list(self._waiting.items()):
            if whose == session:
                self._deliver({"id": number, "error": {"message": "Inspected target navigated or closed"}})

    def end(self) -> None:
        """Kill it with all its processes, and wait until it is dead."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        held = b""
        while chunk := os.read(self._in, 1 << 20):
            *messages, held = (held + chunk).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    self._deliver(message)
                else:
                    self._heard(message["method"], message["params"], message.get("sessionId"))
        self._ended()

    def _deliver(self, message: dict[str, Any]) -> None:
        _, answered = self._waiting.pop(message["id"], (None, None))
        if answered is not None:
            answered(message)


def _environment(directory: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}  # noqa: TID251
    return inherited | {"TMPDIR": str(directory), "HOME": str(directory), "XDG_RUNTIME_DIR": str(directory)}


def _in_child(read: int, write: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def prepare() -> None:
        os.dup2(read, _READ)
        os.dup2(write, _WRITE)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)  # it was gone before that

    return prepare
