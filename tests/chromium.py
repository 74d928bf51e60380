"""Where the Chromium of the tests is, for what starts it without the package."""

from __future__ import annotations

from pathlib import Path

from asyncworker.engines.finding import find
from asyncworker.settings import load


def executable() -> Path:
    """Its file. Not for an event loop's thread: Playwright's own Chromium is asked for synchronously."""
    found = find(load({"ASYNCWORKER_ENGINE": "chromium"}))
    assert found is not None
    if found.executable is not None:
        return found.executable
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return Path(playwright.chromium.executable_path)
