"""A deployment for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers import Deployment


@pytest.fixture(scope="module")
def deployment(module_state_dir: Path) -> Iterator[Deployment]:
    deployment = Deployment(module_state_dir, heartbeat_timeout_ms=2_000, cleanup_timeout_ms=2_000)
    yield deployment
    deployment.broker.close()
    deployment.broker.client.close()
