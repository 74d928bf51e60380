"""Lane: the handlers of synchronous code, each in a thread, and only one of them running at a time.

In Playwright's synchronous API a handler runs in a greenlet: begun in the order of the events, alone, until it calls
the page itself; then the next one may begin, and what waits for the page goes on only after the handlers of all
events that came before its answer. A lane gives threads the same order: whoever wants to run takes a turn, in the
order of asking, and gives it up where it waits.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

logger = logging.getLogger("asyncworker.sync")

_Work = SimpleQueue[Callable[[], object] | None]

#: A thread that waits comes up this often: what is raised in it from outside is seen between two bytecodes only.
CHECK_S = 0.1


class Lane:
    """Turns, in the order in which they were asked for.

    Parameters:
        context: What the handlers' threads inherit from whoever opened the session.
    """

    def __init__(self, context: contextvars.Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._asked: deque[Callable[[], None]] = deque()
        self._is_taken = False
        self._is_closed = False
        self._idle: list[_Work] = []
        self._here = threading.local()

    def run(self, handler: Callable[[], object]) -> bool:
        """Have the handler run in a thread when its turn comes; from any thread, also from the loop's.

        Returns:
            False when the lane is closed: it will not run.
        """
        return self._ask(lambda: self._in_thread(handler))

    @contextmanager
    def left(self) -> Iterator[None]:
        """Around what waits for the loop: a handler gives its turn up meanwhile, and then all wait for theirs."""
        is_handler = getattr(self._here, "is_handler", False)
        if is_handler:
            self._pass_on()
        try:
            yield
        except Exception:
            self._come_back(is_handler)
            raise
        except BaseException:  # an interrupt, which must not wait for handlers
            if is_handler:
                self._come_back(is_handler)
            raise
        self._come_back(is_handler)

    def close(self) -> None:
        """No turn is given any more: what has not begun never does, and what waits for its turn goes on at once."""
        with self._lock:
            self._is_closed = True
            self._asked.clear()
            idle, self._idle = self._idle, []
        for work in idle:
            work.put(None)

    def _come_back(self, is_handler: bool) -> None:
        """Wait for the turn: a handler to keep it, what is none only for those that had asked before."""
        come = threading.Lock()
        come.acquire()

        def begin() -> None:
            come.release()
            if not is_handler:
                self._pass_on()

        with self._lock:
            if self._is_closed:
                return
            if not self._is_taken:  # then no one has asked, either
                self._is_taken = is_handler
                return
            self._asked.append(begin)
        while not come.acquire(timeout=CHECK_S) and not self._closed():
            pass

    def _closed(self) -> bool:
        return self._is_closed

    def _ask(self, begin: Callable[[], None]) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            if self._is_taken:
                self._asked.append(begin)
                return True
            self._is_taken = True
        begin()
        return True

    def _pass_on(self) -> None:
        with self._lock:
            begin = self._asked.popleft() if self._asked else None
            self._is_taken = begin is not None
        if begin is not None:
            begin()

    def _in_thread(self, handler: Callable[[], object]) -> None:
        with self._lock:
            work = self._idle.pop() if self._idle else None
        if work is None:
            work = SimpleQueue()
            threading.Thread(target=self._serve, args=(work,), name="asyncworker-handler", daemon=True).start()
        work.put(handler)

    def _serve(self, work: _Work) -> None:
        """The life of a thread: a handler, then idle until the next one."""
        self._here.is_handler = True
        while (handler := work.get()) is not None:
            try:
                self._context.copy().run(handler)
            except BaseException:
                logger.exception("a handler ended with an error")
            del handler  # what it holds must not outlive it in a thread that waits
            with self._lock:
                if not self._is_closed:
                    self._idle.append(work)
                else:
                    work.put(None)
            self._pass_on()
