"""Raw Playwright beside a chaos run: how soon its next page is done after its browser was killed."""

from __future__ import annotations

import queue
import threading

from _harness import say
from _workshop import Child

#: So long after a browser of the workers was killed it is raw Playwright's turn: both meet the same load.
AFTER_S = 1.8

#: A measurement that is going on when the run ends is waited for so long.
JOIN_S = 35.0


class Raw:
    """Has a process of raw Playwright kill its browser, once for each call of `soon`, in a thread of its own."""

    def __init__(self, child: Child) -> None:
        self.took_ms: list[float] = []
        self._child = child
        self._asked: queue.Queue[bool] = queue.Queue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-raw", daemon=True)

    def start(self) -> None:
        """Wait until its browser is up."""
        self._child.answer()
        self._thread.start()

    def soon(self) -> None:
        self._asked.put(True)

    def stop(self) -> None:
        self._stop.set()
        self._asked.put(False)
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while self._asked.get() and not self._stop.wait(AFTER_S):
            try:
                self._child.tell("kill")
                self.took_ms.append(float(self._child.answer()))
            except (OSError, RuntimeError) as error:
                if not self._stop.is_set():
                    say(f"raw Playwright is measured no more: {error}")
                return
