"""A steady load of messages, from a thread; what was sent, and what may have been."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import redis
from _chaos_plan import Deed
from dramatiq import Message

from asyncworker.errors import BrokerUnavailable
from asyncworker.queues import Queues
from asyncworker.redis_broker import WorkerBroker

QUEUE = "default"

#: With so many messages for each slot under way, no more are sent until there are fewer: looked at this often.
MOST_WAITING = 25
LOOK_S = 0.5

HOG_MB = 250


@dataclass
class Sent:
    """What a run has sent, message by id; what may have been sent has at most one outcome."""

    messages: dict[str, int] = field(default_factory=dict)
    maybe: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    held_back_s: float = 0.0


class Load:
    """Sends `per_s` messages a second until it is stopped.

    Parameters:
        folder: Where the actors write.
        shop: The URL of the shop.
        slots: How many messages run at once.
    """

    def __init__(self, broker: WorkerBroker, folder: Path, shop: str, *, slots: int, per_s: float, seed: int) -> None:
        self.sent = Sent()
        self._broker = broker
        self._queues = Queues(broker)
        self._folder = folder
        self._shop = shop
        self._slots = slots
        self._per_s = per_s
        self._random = Random(f"load {seed}")
        self._asked: queue.Queue[dict[str, Any]] = queue.Queue()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-load", daemon=True)
        self._number = 0
        self._look_at = 0.0
        self._is_full = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No message is sent after this."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def trap(self, deed: Deed) -> None:
        """Send a message with a page that needs much memory, soon."""
        if deed is Deed.bomb:
            self._asked.put({"trap": f"{self._shop}/bomb", "traps": 2})
        else:
            self._asked.put({"trap": f"{self._shop}/hog?mb={HOG_MB}", "traps": 1})

    def burst(self) -> None:
        """Send as many messages as there are slots, soon."""
        for _ in range(self._slots):
            self._asked.put({})

    def send(self, *, url: str | None = None, **kwargs: Any) -> Message[Any]:
        """Send one message now.

        Raises:
            BrokerUnavailable: When it was not taken, or no one knows.
        """
        with self._lock:
            self._number += 1
            number = self._number
            url = url or f"{self._shop}/products/{self._random.randint(1, 40)}"
        message: Message[Any] = Message(QUEUE, "visits.visit", (str(self._folder), url, number), kwargs, {})
        try:
            sent = self._broker.enqueue(message)
        except BrokerUnavailable as error:
            if error.sent is None:
                self.sent.maybe[message.message_id] = number
            else:
                self.sent.refused += 1
            raise
        self.sent.messages[sent.message_id] = number
        return sent

    def _run(self) -> None:
        due_at = time.monotonic()
        while not self._stop.is_set():
            due_at = max(due_at + self._random.expovariate(self._per_s), time.monotonic() - 1)
            asked = self._next(due_at)
            if asked is None or self._stop.is_set():
                continue
            try:
                self.send(**asked)
            except BrokerUnavailable:
                continue

    def _next(self, due_at: float) -> dict[str, Any] | None:
        """What to send now: what was asked for, else a usual message when it is due and there are not too many."""
        while not self._stop.is_set():
            try:
                return self._asked.get(timeout=max(0.0, min(due_at - time.monotonic(), 0.1)))
            except queue.Empty:
                if time.monotonic() < due_at:
                    continue
            if not self._too_many():
                return {}
            self.sent.held_back_s += 0.1
            due_at = time.monotonic() + 0.1
        return None

    def _too_many(self) -> bool:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            try:
                stands = self._queues.look(QUEUE)
                self._is_full = stands.waiting + stands.delayed + stands.running >= MOST_WAITING * self._slots
            except (redis.RedisError, BrokerUnavailable):
                self._is_full = False  # the sending itself waits for a store that is away
        return self._is_full
