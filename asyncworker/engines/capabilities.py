"""What an engine can do beyond pages, and what to do where it cannot.

invisible_playwright implements the core of the automation and refuses the rest, or takes it and does nothing: its
`new_context` accepts `storage_state` and `record_video_dir` without effect, and `storage_state()` returns no
origins. A session must not find that out from an empty file, so options are checked before a context is opened,
and a refusal of the client is told with what to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from asyncworker.errors import Unsupported


class Capability(StrEnum):
    """What only some engines can do."""

    tracing = "tracing"
    har = "har"
    video = "video"
    request = "request"
    cdp = "cdp"
    pdf = "pdf"
    clock = "clock"
    web_socket_routes = "web_socket_routes"
    bindings = "bindings"
    locator_handlers = "locator_handlers"
    cookie_filters = "cookie_filters"  # clear_cookies of some cookies only
    late_headers = "late_headers"  # set_extra_http_headers on a context or page that is open
    late_offline = "late_offline"  # set_offline, likewise
    late_storage_state = "late_storage_state"  # set_storage_state, likewise


#: Of stock Playwright; `cdp` and `pdf` are Chromium's alone.
STOCK = frozenset(Capability) - {Capability.cdp, Capability.pdf}
CHROMIUM = frozenset(Capability)
INVISIBLE: frozenset[Capability] = frozenset()

#: The options of a new context that need one.
_OPTIONS = {
    "record_har_path": Capability.har,
    "record_har_url_filter": Capability.har,
    "record_har_mode": Capability.har,
    "record_har_content": Capability.har,
    "record_har_omit_content": Capability.har,
    "record_video_dir": Capability.video,
    "record_video_size": Capability.video,
}

#: How invisible_playwright's refusals name what they are about; the first that its text holds counts.
_REFUSALS = {
    "set_offline": Capability.late_offline,
    "set_extra_http_headers": Capability.late_headers,
    "set_storage_state": Capability.late_storage_state,
    "expose_binding": Capability.bindings,
    "route_from_har": Capability.har,
    "route_web_socket": Capability.web_socket_routes,
    "clear_cookies": Capability.cookie_filters,
    "LocatorHandler": Capability.locator_handlers,
    "APIRequest": Capability.request,
    "Tracing": Capability.tracing,
    "tracing": Capability.tracing,
    "HAR": Capability.har,
    "CDP": Capability.cdp,
    "pdf": Capability.pdf,
    "clock": Capability.clock,
    "video": Capability.video,
}

_OTHER_ENGINE = "run this actor in a deployment with ASYNCWORKER_ENGINE=chromium"

_INSTEAD = {
    Capability.tracing: f"take page.screenshot() and page.content() where it matters, or {_OTHER_ENGINE}",
    Capability.har: f'listen to page.on("response"), or {_OTHER_ENGINE}',
    Capability.video: f"take page.screenshot() where it matters, or {_OTHER_ENGINE}",
    Capability.request: "call fetch() in page.evaluate(), which goes out as the page does",
    Capability.cdp: _OTHER_ENGINE,
    Capability.pdf: f"take page.screenshot(full_page=True), or {_OTHER_ENGINE}",
    Capability.clock: "replace Date by context.add_init_script()",
    Capability.web_socket_routes: f'listen to page.on("websocket"), or {_OTHER_ENGINE}',
    Capability.bindings: 'print from the page and listen to page.on("console"), or poll page.evaluate()',
    Capability.locator_handlers: "close what is in the way in the actor's own code",
    Capability.cookie_filters: "read context.cookies(), clear all, and add those back that stay",
    Capability.late_headers: 'give context_options={"extra_http_headers": ...}',
    Capability.late_offline: 'give context_options={"offline": True}',
    Capability.late_storage_state: 'give context_options={"storage_state": ...}',
}


def check_options(engine: str, capabilities: frozenset[Capability], options: Mapping[str, Any]) -> None:
    """Raise Unsupported for the first option of a new context that the engine would refuse or ignore."""
    for name, value in options.items():
        needed = _OPTIONS.get(name)
        if needed is not None and needed not in capabilities and value is not None:
            raise _unsupported(engine, needed, f"the option {name}")


def refuse_tracing_stop(engine: str, context: Any) -> None:
    """Stopping a trace that could not be started fails in the client's own code, with a KeyError."""

    async def stop(**_: Any) -> None:
        raise _unsupported(engine, Capability.tracing, "Tracing.stop")

    context.tracing.stop = stop


def refusal(engine: str, error: BaseException) -> Unsupported:
    """A refusal of the browser's client, with what to do instead."""
    said = str(error)
    first = next((line for line in said.splitlines() if line.strip()), type(error).__name__)
    capability = next((_REFUSALS[mark] for mark in _REFUSALS if mark in said), None)
    if capability is None:
        return Unsupported(f"the engine {engine} cannot do this: {first:.200}; {_OTHER_ENGINE}", engine=engine)
    return _unsupported(engine, capability, f"{first.partition(':')[0]:.80}")


def _unsupported(engine: str, capability: Capability, what: str) -> Unsupported:
    return Unsupported(
        f"the engine {engine} has no {capability.replace('_', ' ')} ({what}); {_INSTEAD[capability]}",
        engine=engine,
        capability=capability.value,
    )
