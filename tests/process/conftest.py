"""A deployment with a site, for tests of whole processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.site import BehaviourSite
from tests.stores import Store
from tests.workers import Deployment


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite() as site:
        yield site


@pytest.fixture
def deployment(state_dir: Path) -> Iterator[Deployment]:
    deployment = Deployment(state_dir, close_timeout_ms=8_000)
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()


@pytest.fixture
def store(state_dir: Path) -> Iterator[Store]:
    store = Store(state_dir)
    yield store
    store.close()
