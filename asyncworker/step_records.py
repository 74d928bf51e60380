"""Where steps are kept: in memory or in Redis, by the rules that stand in once.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asyncworker.fencing import Claim, local_fence

_SCRIPT = (Path(__file__).parent / "once.lua").read_text()

#: What is drawn where the broker gives no fences.
_FENCE = """
local time, last = redis.call("time"), redis.call("get", KEYS[1])
local fence = math.max(last and last + 1 or 0, time[1] * 1000000 + time[2])
redis.call("set", KEYS[1], string.format("%.0f", fence))
return fence
"""


@dataclass(frozen=True)
class Entry:
    """One entry of one attempt into a step; its token is its own."""

    step: str
    token: str
    fence: int
    message: str
    worker: str
    on_lost: str
    lease_ms: int
    kept_ms: int
    claim: Claim | None = None


@dataclass(frozen=True)
class Undecided:
    """A step that a person may have to decide. `state` is unknown, or held: by someone alive unless `is_over`."""

    step: str
    state: str
    message: str
    worker: str
    since_ms: int
    is_over: bool


class StepRecords(Protocol):
    """What both do; each method is one step of the store, and raises redis.RedisError when that does not answer."""

    def draw_fence(self) -> int:
        """A fence for an attempt whose broker gives none."""

    def enter(self, entry: Entry) -> list[str]:
        """yours; stale; done, value; held, message, worker; or unknown, message, worker, since when in ms."""

    def renew(self, entry: Entry) -> bool: ...

    def confirm(self, entry: Entry) -> bool: ...

    def complete(self, entry: Entry, value: str) -> bool:
        """False: the entry is a stale attempt's. May be repeated."""

    def leave(self, entry: Entry, how: str) -> None:
        """End an entry without completing the step: it is `open`, or `unknown`."""

    def undecided(self) -> list[Undecided]:
        """Those entered with on_lost="unknown" that are not done."""

    def resolve(self, step: str, how: str, value: str, kept_ms: int) -> bool:
        """Have an unknown step be `done` with a value, or `open`; False when there is nothing to decide."""


class RedisStepRecords:
    """Steps in a store that all workers share.

    Keys: a hash `<namespace>:once:<step>` each, the set `<namespace>:once-undecided`, and `<namespace>:fence`.

    Parameters:
        knows_claims: The store is the broker's, and says whose a message is.
    """

    def __init__(self, client: Any, *, namespace: str = "asyncworker", knows_claims: bool = False) -> None:
        self._client = client
        self._namespace = namespace
        self._knows_claims = knows_claims
        self._script = client.register_script(_SCRIPT)
        self._fence = client.register_script(_FENCE)

    def draw_fence(self) -> int:
        return int(self._fence(keys=[f"{self._namespace}:fence"]))

    def enter(self, entry: Entry) -> list[str]:
        answer = self._do(
            "enter",
            entry.step,
            entry.token,
            entry.fence,
            entry.message,
            entry.worker,
            entry.lease_ms,
            entry.kept_ms,
            entry.on_lost,
            *self._claim(entry),
        )
        return [_text(each) for each in answer]

    def renew(self, entry: Entry) -> bool:
        return bool(self._do("renew", entry.step, entry.token, entry.lease_ms))

    def confirm(self, entry: Entry) -> bool:
        return bool(self._do("confirm", entry.step, entry.token, *self._claim(entry)))

    def complete(self, entry: Entry, value: str) -> bool:
        return bool(
            self._do("complete", entry.step, entry.token, entry.fence, value, entry.kept_ms, *self._claim(entry))
        )

    def leave(self, entry: Entry, how: str) -> None:
        self._do("leave", entry.step, entry.token, how, entry.kept_ms)

    def undecided(self) -> list[Undecided]:
        steps = sorted(_text(step) for step in self._client.smembers(self._index))
        fields = ("state", "message", "worker", "at", "until")
        with self._client.pipeline(transaction=False) as pipe:
            for step in steps:
                pipe.hmget(self._key(step), fields)
            pipe.time()
            *records, (now_s, _) = pipe.execute()
        found = []
        for step, record in zip(steps, records, strict=True):
            if record[0] is None:  # someone has deleted it
                continue
            state, message, worker, at, until = (_text(each) for each in record)
            found.append(Undecided(step, state, message, worker, int(at), int(until) <= now_s * 1000))
        return found

    def resolve(self, step: str, how: str, value: str, kept_ms: int) -> bool:
        return bool(self._do("resolve", step, how, value, kept_ms))

    def _do(self, command: str, step: str, *words: Any) -> Any:
        return self._script(keys=[self._key(step), self._index], args=[command, step, *words])

    def _claim(self, entry: Entry) -> tuple[str, str]:
        if entry.claim is None or not self._knows_claims:
            return "", ""
        return entry.claim.acks, entry.claim.identifier

    def _key(self, step: str) -> str:
        return f"{self._namespace}:once:{step}"

    @property
    def _index(self) -> str:
        return f"{self._namespace}:once-undecided"


@dataclass
class _Record:
    state: str
    token: str
    fence: int
    message: str
    worker: str
    on_lost: str
    at_ms: int
    until_ms: int
    suspected_ms: int | None = None
    value: str = "null"


class MemoryStepRecords:
    """Steps that end with their process: for tests and scripts. They are kept for as long.

    Parameters:
        clock_ms: Gives ms.
    """

    def __init__(self, *, clock_ms: Callable[[], int] = lambda: int(time.time() * 1000)) -> None:
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}

    def draw_fence(self) -> int:
        return local_fence()

    def enter(self, entry: Entry) -> list[str]:
        with self._lock:
            record, now = self._records.get(entry.step), self._clock_ms()
            if record is not None:
                if record.state == "done":
                    return ["done", record.value]
                if record.message == entry.message and record.fence > entry.fence:
                    return ["stale"]
                if record.state == "held" and record.token != entry.token:
                    if not self._is_lost(record, entry):
                        return ["held", record.message, record.worker]
                    if "unknown" in (record.on_lost, entry.on_lost):
                        record.state, record.at_ms = "unknown", now
                if record.state == "unknown":
                    if record.message == entry.message:
                        record.fence = entry.fence
                    return ["unknown", record.message, record.worker, str(record.at_ms)]
            self._records[entry.step] = _Record(
                "held", entry.token, entry.fence, entry.message, entry.worker, entry.on_lost, now, now + entry.lease_ms
            )
            return ["yours"]

    def _is_lost(self, record: _Record, entry: Entry) -> bool:
        now = self._clock_ms()
        if record.message == entry.message and record.fence < entry.fence:
            return True
        if record.until_ms > now:
            return False
        if record.suspected_ms is None:
            record.suspected_ms = now
        return now - record.suspected_ms >= entry.lease_ms / 3

    def renew(self, entry: Entry) -> bool:
        with self._lock:
            if not self._holds(entry):
                return False
            record = self._records[entry.step]
            record.until_ms, record.suspected_ms = self._clock_ms() + entry.lease_ms, None
            return True

    def confirm(self, entry: Entry) -> bool:
        with self._lock:
            return self._holds(entry)

    def complete(self, entry: Entry, value: str) -> bool:
        with self._lock:
            record = self._records.get(entry.step)
            if record is None or (record.token, record.fence) != (entry.token, entry.fence):
                return False
            if record.state == "open":
                return False
            if record.state != "done":
                record.state, record.value, record.at_ms = "done", value, self._clock_ms()
            return True

    def leave(self, entry: Entry, how: str) -> None:
        with self._lock:
            if self._holds(entry):
                record = self._records[entry.step]
                record.state, record.at_ms = how, self._clock_ms()

    def undecided(self) -> list[Undecided]:
        with self._lock:
            return [
                Undecided(step, each.state, each.message, each.worker, each.at_ms, each.until_ms <= self._clock_ms())
                for step, each in sorted(self._records.items())
                if each.state == "unknown" or (each.state == "held" and each.on_lost == "unknown")
            ]

    def resolve(self, step: str, how: str, value: str, kept_ms: int) -> bool:
        with self._lock:
            record = self._records.get(step)
            if record is None:
                return False
            is_over = record.on_lost == "unknown" and record.until_ms <= self._clock_ms()
            if record.state != "unknown" and not (record.state == "held" and is_over):
                return False
            record.state, record.token, record.at_ms = how, "", self._clock_ms()
            if how == "done":
                record.value = value
            return True

    def _holds(self, entry: Entry) -> bool:
        record = self._records.get(entry.step)
        return record is not None and record.state == "held" and record.token == entry.token


def _text(value: bytes | str | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
