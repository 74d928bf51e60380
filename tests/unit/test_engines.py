"""How errors of a browser library are read."""

from __future__ import annotations

import pytest
from playwright.async_api import Error, TimeoutError

from asyncworker.engines import Fault, classify_by_name


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (Error("Page.goto: Target crashed \nCall log:\n - x"), Fault.page_crashed),
        (Error("Page.title: Page crashed"), Fault.page_crashed),
        (Error("Page.click: Target page, context or browser has been closed\nBrowser logs:"), Fault.gone),
        (Error("Page.title: [Errno 32] Broken pipe"), Fault.gone),
        (Error("Page.goto: net::ERR_ABORTED at chrome://crash\nCall log:"), Fault.unclear),
        (Error("Page.goto: net::ERR_CONNECTION_REFUSED at http://127.0.0.1:9/"), None),
        (TimeoutError("Page.click: Timeout 500ms exceeded.\nCall log:\n - waiting for text=Page crashed"), None),
        (Error("Page.evaluate: Error: Page crashed\n    at <anonymous>"), None),
        (ValueError("Target crashed"), None),
        (ExceptionGroup("two", [ValueError("x"), Error("Page.goto: Target crashed")]), Fault.page_crashed),
    ],
)
def test_an_error_is_read_by_its_class_and_its_first_line(error: Exception, fault: Fault | None) -> None:
    assert classify_by_name(error) == fault


def read_a_price() -> None:
    try:
        raise Error("Page.goto: Target crashed")
    except Error as cause:
        raise RuntimeError("the price could not be read") from cause


def test_what_an_error_was_raised_from_counts() -> None:
    with pytest.raises(RuntimeError) as caught:
        read_a_price()
    assert classify_by_name(caught.value) == Fault.page_crashed
