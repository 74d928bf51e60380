"""Which messages were cancelled: their ids lie in the store, and each worker process keeps a copy.

The ids are written before anyone looks for the messages. So whoever takes one from then on knows, whatever brings it:
a worker that takes back what a dead one held, a retry that was being sent at that moment, a delay that is over. What
already runs hears of it from the thread that looks for changes (interrupts.py).

What is compared is a serial number that changes with each cancellation. A worker gets it with what it fetches, in the
same round trip, and reads the ids anew when it is another one than before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Protocol

from dramatiq import MessageProxy
from dramatiq.middleware import Interrupt

from asyncworker.ledger import text

#: The ids are known for so long: a retry waits for seven days at the most.
KEPT_MS = 8 * 86_400_000

#: Of so many; the oldest are forgotten first.
MOST = 10_000

#: What a cancelled attempt raises, where nothing more is known.
SENTENCE = "it was cancelled, and is not run again"


class Cancelled(Interrupt):
    """This message was cancelled (`asyncworker cancel`): it is not run again, and is no failure.

    Not raised where its code had ended in order before its worker heard of it: then it has succeeded.
    """

    def __init__(self, text: str = SENTENCE) -> None:
        super().__init__(text)


class CancelRecords(Protocol):
    """Where the ids of cancelled messages lie."""

    def add(self, message_ids: Iterable[str]) -> None:
        """Note that these are cancelled."""

    def remove(self, message_ids: Iterable[str]) -> None:
        """Note that these are not."""

    def serial(self) -> str:
        """Another one than before when an id was added or removed; empty: none ever was."""

    def all(self) -> frozenset[str]:
        """The ids of all."""

    def has(self, message_id: str) -> bool:
        """Whether this one is cancelled."""


class MemoryCancelRecords:
    """Those of one process: for tests."""

    def __init__(self) -> None:
        self._ids: frozenset[str] = frozenset()
        self._serial = 0

    def add(self, message_ids: Iterable[str]) -> None:
        self._ids, self._serial = self._ids | set(message_ids), self._serial + 1

    def remove(self, message_ids: Iterable[str]) -> None:
        self._ids, self._serial = self._ids - set(message_ids), self._serial + 1

    def serial(self) -> str:
        return str(self._serial)

    def all(self) -> frozenset[str]:
        return self._ids

    def has(self, message_id: str) -> bool:
        return message_id in self._ids


#: KEYS = {ids by when they are forgotten, serial}, ARGV = {kept for so many ms, most, command, id, ...}
#:
#: Keys that are not there cost nothing, so the first write may need memory: it is preceded by one that needs none, and
#: a full store takes the rest of the script.
_SCRIPT = """
redis.call("del", KEYS[2] .. ".none")
local time = redis.call("time")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call("zremrangebyscore", KEYS[1], "-inf", now)
local changed = 0
for i = 4, #ARGV do
    if ARGV[3] == "add" then
        changed = changed + redis.call("zadd", KEYS[1], "CH", now + ARGV[1], ARGV[i])
    else
        changed = changed + redis.call("zrem", KEYS[1], ARGV[i])
    end
end
if changed == 0 then return end
redis.call("zremrangebyrank", KEYS[1], 0, -ARGV[2] - 1)
redis.call("incr", KEYS[2])
redis.call("pexpire", KEYS[1], ARGV[1])
redis.call("pexpire", KEYS[2], 2 * ARGV[1])
"""


class RedisCancelRecords:
    """Those of a deployment, in its store; all methods raise redis.RedisError.

    Keys: a sorted set `<prefix>__cancelled__` of ids by when they are forgotten, and `<prefix>__cancelled__.serial`.
    """

    def __init__(self, client: Any, *, prefix: str) -> None:
        self._client = client
        self._script = client.register_script(_SCRIPT)
        self.key = f"{prefix}__cancelled__"
        self.serial_key = f"{self.key}.serial"

    def add(self, message_ids: Iterable[str]) -> None:
        self._change("add", message_ids)

    def remove(self, message_ids: Iterable[str]) -> None:
        self._change("remove", message_ids)

    def serial(self) -> str:
        return serial_of(self._client.get(self.serial_key))

    def all(self) -> frozenset[str]:
        return frozenset(text(each) for each in self._client.zrange(self.key, 0, -1))

    def has(self, message_id: str) -> bool:
        return self._client.zscore(self.key, message_id) is not None

    def _change(self, how: str, message_ids: Iterable[str]) -> None:
        self._script(keys=[self.key, self.serial_key], args=[KEPT_MS, MOST, how, *message_ids])


def serial_of(answer: bytes | str | None) -> str:
    """The serial number as it is compared, from what the store says."""
    return text(answer or "")


class Cancellations:
    """What this process knows of the cancelled messages.

    Parameters:
        records: Where their ids lie.
        told_by_fetch: True where what is fetched brings the serial number; else each message is asked for.
    """

    def __init__(self, records: CancelRecords, *, told_by_fetch: bool = False) -> None:
        self.records = records
        self.told_by_fetch = told_by_fetch
        self._serial = ""
        self._known: frozenset[str] = frozenset()
        self._reading = threading.Lock()

    def hear(self, serial: str) -> None:
        """Read the ids anew when this is another serial number than before."""
        if serial == self._serial:
            return
        with self._reading:
            if serial != self._serial:
                self._known = self.records.all()  # at least as new as the number: what is read twice does no harm
                self._serial = serial

    def look(self) -> None:
        """Ask the store whether there are others."""
        self.hear(self.records.serial())

    def forget(self) -> None:
        """Read all anew next time."""
        self._serial = "forgotten"

    def all(self) -> frozenset[str]:
        """The ids that this process knows of."""
        return self._known

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._known


def is_cancelled(broker: Any, message: MessageProxy) -> bool:
    """True when this process knows that a message was cancelled."""
    cancellations: Cancellations | None = getattr(broker, "cancellations", None)
    return cancellations is not None and message.message_id in cancellations


def as_cancelled(broker: Any, message: MessageProxy, exception: BaseException | None) -> BaseException | None:
    """What an attempt has come to: whatever the code of a cancelled message raises, it was cancelled."""
    if exception is None or isinstance(exception, Cancelled) or not is_cancelled(broker, message):
        return exception
    return Cancelled(f"{SENTENCE}; its code ended with {type(exception).__name__}: {exception}"[:500])
