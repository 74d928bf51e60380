"""A real Dramatiq worker on the stub broker and the fake engine, and no other broker beside it."""

from __future__ import annotations

from collections.abc import Iterator

import dramatiq
import pytest

from asyncworker.testing import FakeEngine, StubWorker, stub_worker


@pytest.fixture(autouse=True)
def fresh_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dramatiq.broker, "global_broker", None)


@pytest.fixture
def worker(fake_engine: FakeEngine) -> Iterator[StubWorker]:
    with stub_worker(engine=fake_engine) as worker:
        yield worker
