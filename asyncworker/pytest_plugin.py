"""Fixtures for tests of actors; pytest finds them by itself where asyncworker is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from asyncworker.testing import FakeClock, FakeEngine, StubWorker

# asyncworker is imported in the fixtures: a plugin is loaded in every test run, used or not.


@pytest.fixture
def fake_engine() -> FakeEngine:
    """An engine without a browser, which `stub_worker` uses: fill its `documents`, tell it to fail."""
    from asyncworker.testing import FakeEngine

    return FakeEngine()


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock whose time passes only when something sleeps on it."""
    from asyncworker.testing import FakeClock

    return FakeClock()


@pytest.fixture
def stub_worker(fake_engine: FakeEngine) -> Iterator[StubWorker]:
    """A worker on a stub broker and the fake engine, serving all declared actors."""
    from asyncworker import testing

    with testing.stub_worker(engine=fake_engine) as worker:
        yield worker


@pytest.fixture
def browser_worker() -> Iterator[StubWorker]:
    """A worker on a stub broker and the browser that the settings name; skips where that is missing."""
    from asyncworker import engines, testing
    from asyncworker.engines.finding import find
    from asyncworker.settings import load

    settings = load()
    if find(settings) is None:
        pytest.skip(f"no {settings.engine} on this machine: asyncworker doctor --install")
    with testing.stub_worker(engine=engines.create(settings), settings=settings) as worker:
        yield worker
