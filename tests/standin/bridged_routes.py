"""The bridge's request interception: one event of Juggler's for two of Chromium's, which come in any order."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.standin.pages import Refused

if TYPE_CHECKING:
    from tests.standin.bridged_page import BridgedPage

_REASONS = (
    "Failed", "Aborted", "TimedOut", "AccessDenied", "ConnectionClosed", "ConnectionReset", "ConnectionRefused",
    "ConnectionAborted", "ConnectionFailed", "NameNotResolved", "InternetDisconnected", "AddressUnreachable",
    "BlockedByClient", "BlockedByResponse",
)  # fmt: skip


class Routes:
    """Of one page. A redirect's further hops are not intercepted, as in Firefox."""

    def __init__(self, page: BridgedPage) -> None:
        self._page = page
        self._enabled = False
        self._untold: dict[str, Callable[[bool], None]] = {}  # by Chromium's id of the request
        self._paused: dict[str, str] = {}  # the pause whose request is not yet told, likewise
        self._open: dict[str, str] = {}  # by the client's id

    def enable(self, wanted: bool) -> None:
        if wanted == self._enabled:
            return
        command = ("Fetch.enable", {"patterns": [{"urlPattern": "http*"}]}) if wanted else ("Fetch.disable", {})
        self._page.call(command[0], **command[1])
        self._enabled = wanted
        if not wanted:
            self._open.clear()
            for request in list(self._untold):
                self.release(request)

    # -- by the thread that reads from Chromium

    def tell(self, request: str, told: str, url: str, emit: Callable[[bool], None]) -> None:
        """Tell of a request, now or when it is paused; `emit` gets whether it is."""
        if (pause := self._paused.pop(request, None)) is not None:
            self._open[told] = pause
            emit(True)
        elif self._enabled and url.startswith("http"):

            def emit_paused(intercepted: bool) -> None:
                if intercepted:
                    self._open[told] = self._paused.pop(request)
                emit(intercepted)

            self._untold[request] = emit_paused
        else:
            emit(False)

    def release(self, request: str) -> None:
        """It was not paused: a cache had it."""
        if (emit := self._untold.pop(request, None)) is not None:
            emit(False)

    def paused(self, pause: str, request: str | None, *, known: bool, redirected: bool) -> None:
        if request in self._untold:
            self._paused[request] = pause
            self._untold.pop(request)(True)
        elif request is None or known or redirected:
            self._page.engine.chromium.send("Fetch.continueRequest", {"requestId": pause}, self._page.session)
        else:
            self._paused[request] = pause

    # -- the client's answers

    def resume(self, params: dict[str, Any]) -> None:
        changes = {key: params[key] for key in ("url", "method", "headers", "postData") if params.get(key) is not None}
        self._page.call("Fetch.continueRequest", requestId=self._take(params), **changes)

    def abort(self, params: dict[str, Any]) -> None:
        reason = next((one for one in _REASONS if one.lower() == params["errorCode"]), "Failed")
        self._page.call("Fetch.failRequest", requestId=self._take(params), errorReason=reason)

    def fulfill(self, params: dict[str, Any]) -> None:
        self._page.call(
            "Fetch.fulfillRequest", requestId=self._take(params), responseCode=params["status"],
            responseHeaders=params["headers"], body=params.get("base64body") or base64.b64encode(b"").decode(),
            **({"responsePhrase": params["statusText"]} if params.get("statusText") else {}),
        )  # fmt: skip

    def _take(self, params: dict[str, Any]) -> str:
        if params["requestId"] not in self._open:
            raise Refused(f"there is no intercepted request {params['requestId']}")
        return self._open.pop(params["requestId"])
