"""What Chromium tells about a page, told as Juggler tells it."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.standin.bridged_page import BridgedPage

#: The client's worlds. Its own is one of Chromium's isolated worlds; its caller's is the page's own here.
UTILITY, CALLER = "__ctx_aux__", "__ctx_caller__"

_CAUSES = {
    "Stylesheet": "TYPE_STYLESHEET", "Image": "TYPE_IMAGE", "Media": "TYPE_MEDIA", "Font": "TYPE_FONT",
    "Script": "TYPE_SCRIPT", "XHR": "TYPE_XMLHTTPREQUEST", "Fetch": "TYPE_FETCH",
}  # fmt: skip

_ERRORS = {
    "net::ERR_ABORTED": "NS_BINDING_ABORTED",
    "net::ERR_CONNECTION_REFUSED": "NS_ERROR_CONNECTION_REFUSED",
    "net::ERR_NAME_NOT_RESOLVED": "NS_ERROR_UNKNOWN_HOST",
    "net::ERR_CONNECTION_RESET": "NS_ERROR_NET_RESET",
    "net::ERR_EMPTY_RESPONSE": "NS_ERROR_NET_EMPTY_RESPONSE",
    "net::ERR_TOO_MANY_REDIRECTS": "NS_ERROR_REDIRECT_LOOP",
    "net::ERR_UNSAFE_PORT": "NS_ERROR_PORT_ACCESS_NOT_ALLOWED",
    "net::ERR_UNKNOWN_URL_SCHEME": "NS_ERROR_UNKNOWN_PROTOCOL",
}


def error_text(text: str) -> str:
    return _ERRORS.get(text, f"NS_ERROR_FAILURE ({text})")


@dataclass(frozen=True)
class World:
    """A document's place for scripts, under one of the client's names."""

    id: str
    frame: str
    name: str
    unique: str
    number: int


@dataclass
class Navigation:
    """One that the client has asked for, and that has no answer yet."""

    url: str
    answer: Callable[[str | None], None]
    id: str | None = None
    answered: bool = False

    def begin(self, navigation: str | None) -> None:
        if not self.answered:
            self.answered, self.id = True, navigation
            self.answer(navigation)


@dataclass
class Events:
    """Called by the thread that reads from Chromium only, but for `declare`; nothing here waits for Chromium."""

    page: BridgedPage
    worlds: dict[str, World] = field(default_factory=dict)
    asked: dict[str, Navigation] = field(default_factory=dict)  # by frame
    _declared: set[str] = field(default_factory=lambda: {""})
    _started: set[str] = field(default_factory=set)
    _failures: dict[str, str] = field(default_factory=dict)
    _requests: dict[str, tuple[str, int]] = field(default_factory=dict)  # Chromium's id: the client's, and the hop
    _dialogs: Any = field(default_factory=lambda: itertools.count(1))

    def hear(self, method: str, params: dict[str, Any]) -> None:
        handler = getattr(self, "on_" + method.replace(".", "_"), None)
        if handler is not None:
            handler(**params)

    def emit(self, event: str, /, **params: Any) -> None:
        self.page.emit(event, {key: value for key, value in params.items() if value is not None})

    # -- worlds

    def declare(self, names: set[str]) -> None:
        with self.page.lock:
            new, self._declared = names - self._declared, self._declared | names
            for world in list(self.worlds.values()):
                if world.name in new:
                    self._tell_world(world)

    def _tell_world(self, world: World) -> None:
        told = {"frameId": world.frame, "name": world.name}
        self.emit("Runtime.executionContextCreated", executionContextId=world.id, auxData=told)

    def on_Runtime_executionContextCreated(self, context: dict[str, Any]) -> None:
        about, unique = context.get("auxData") or {}, context["uniqueId"]
        named = {"": unique, CALLER: f"{unique}/caller"} if about.get("isDefault") else {context["name"]: unique}
        with self.page.lock:
            for name, identifier in named.items():
                if name in ("", CALLER, UTILITY) and "frameId" in about:
                    world = World(identifier, about["frameId"], name, unique, context["id"])
                    self.worlds[identifier] = world
                    if name in self._declared:
                        self._tell_world(world)

    def on_Runtime_executionContextDestroyed(self, executionContextUniqueId: str, **_: Any) -> None:
        with self.page.lock:
            for world in [one for one in self.worlds.values() if one.unique == executionContextUniqueId]:
                del self.worlds[world.id]
                self.emit("Runtime.executionContextDestroyed", executionContextId=world.id)

    def on_Runtime_executionContextsCleared(self) -> None:
        with self.page.lock:
            self.worlds.clear()
            self.emit("Runtime.executionContextsCleared")

    # -- frames and navigations

    def on_Page_frameAttached(self, frameId: str, parentFrameId: str, **_: Any) -> None:
        self.emit("Page.frameAttached", frameId=frameId, parentFrameId=parentFrameId)

    def on_Page_frameDetached(self, frameId: str, reason: str = "remove", **_: Any) -> None:
        if reason != "swap":
            self.emit("Page.frameDetached", frameId=frameId)

    def on_Page_frameStartedNavigating(
        self, frameId: str, url: str, loaderId: str, navigationType: str = "", **_: Any
    ) -> None:
        if "ameDocument" in navigationType:
            return  # the answer to the command is not far
        asked = self.asked.get(frameId)
        if asked is not None and asked.url.rstrip("/") == url.rstrip("/"):
            asked.begin(loaderId)
        self.begin(frameId, loaderId)

    def begin(self, frame: str, navigation: str) -> None:
        if navigation not in self._started:
            self._started.add(navigation)
            self.emit("Page.navigationStarted", frameId=frame, navigationId=navigation)

    def abort(self, frame: str, navigation: str, text: str) -> None:
        self.begin(frame, navigation)
        self.emit("Page.navigationAborted", frameId=frame, navigationId=navigation, errorText=error_text(text))

    def on_Page_frameNavigated(self, frame: dict[str, Any], **_: Any) -> None:
        identifier, navigation = frame["id"], frame["loaderId"]
        if frame.get("unreachableUrl"):
            self.abort(identifier, navigation, self._failures.get(navigation, "net::ERR_FAILED"))
            return
        self.begin(identifier, navigation)
        url = frame["url"] + frame.get("urlFragment", "")
        if "parentId" not in frame:
            self.page.url = url
        self.emit("Page.navigationCommitted", frameId=identifier, navigationId=navigation, url=url,
                  name=frame.get("name", ""))  # fmt: skip

    def on_Page_navigatedWithinDocument(self, frameId: str, url: str, **_: Any) -> None:
        self.emit("Page.sameDocumentNavigation", frameId=frameId, url=url)

    def on_Page_lifecycleEvent(self, frameId: str, name: str, **_: Any) -> None:
        if name in ("DOMContentLoaded", "load"):
            self.emit("Page.eventFired", frameId=frameId, name=name)

    # -- requests

    def on_Network_requestWillBeSent(
        self, requestId: str, loaderId: str, request: dict[str, Any], type: str = "Other", frameId: str | None = None,
        redirectResponse: dict[str, Any] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        if request["url"].startswith("data:"):
            return
        before, hop = self._requests.get(requestId, (None, -1))
        if redirectResponse is not None and before is not None:
            self._tell_response(before, redirectResponse)
            self._tell_finished(before, 0)
        told = requestId if hop < 0 else f"{requestId}#{hop + 1}"
        self._requests[requestId] = (told, hop + 1)
        document = "TYPE_DOCUMENT" if frameId == self.page.target else "TYPE_SUBDOCUMENT"
        cause = document if type == "Document" else _CAUSES.get(type, "TYPE_OTHER")
        navigation = loaderId if type == "Document" and requestId == loaderId else None
        if navigation is not None and frameId is not None:
            self.begin(frameId, navigation)

        def emit(intercepted: bool) -> None:
            self.emit(
                "Network.requestWillBeSent", requestId=told, navigationId=navigation, frameId=frameId,
                url=request["url"], method=request["method"], headers=_pairs(request["headers"]),
                postData=_posted(request), isIntercepted=intercepted, cause=cause, internalCause=cause,
                redirectedFrom=before,
            )  # fmt: skip

        if redirectResponse is None and type != "Preflight":
            self.page.routes.tell(requestId, told, request["url"], emit)
        else:
            emit(False)

    def on_Fetch_requestPaused(
        self, requestId: str, networkId: str | None = None, redirectedRequestId: str | None = None, **_: Any
    ) -> None:
        known, redirected = networkId in self._requests, redirectedRequestId is not None
        self.page.routes.paused(requestId, networkId, known=known, redirected=redirected)

    def on_Network_requestServedFromCache(self, requestId: str) -> None:
        self.page.routes.release(requestId)

    def on_Network_responseReceived(self, requestId: str, response: dict[str, Any], **_: Any) -> None:
        self.page.routes.release(requestId)
        if requestId in self._requests:
            self._tell_response(self._requests[requestId][0], response)

    def on_Network_loadingFinished(self, requestId: str, encodedDataLength: float = 0, **_: Any) -> None:
        if requestId in self._requests:
            self._tell_finished(self._requests.pop(requestId)[0], round(encodedDataLength))

    def on_Network_loadingFailed(self, requestId: str, errorText: str = "", **_: Any) -> None:
        self.page.routes.release(requestId)
        self._failures[requestId] = errorText  # a document's request has its navigation's id
        if requestId in self._requests:
            told = self._requests.pop(requestId)[0]
            self.emit("Network.requestFailed", requestId=told, errorCode=error_text(errorText))

    def _tell_response(self, request: str, response: dict[str, Any]) -> None:
        told: dict[str, Any] = {
            "requestId": request, "status": response["status"], "statusText": response["statusText"],
            "headers": _pairs(response["headers"]), "fromCache": bool(response.get("fromDiskCache")),
            "fromServiceWorker": bool(response.get("fromServiceWorker")), "securityDetails": None, "timing": {},
            "remoteIPAddress": response.get("remoteIPAddress"), "remotePort": response.get("remotePort"),
        }  # fmt: skip
        self.page.emit("Network.responseReceived", told)

    def _tell_finished(self, request: str, size: int) -> None:
        self.emit("Network.requestFinished", requestId=request, responseEndTime=0, transferSize=size,
                  encodedBodySize=size, protocolVersion="http/1.1")  # fmt: skip

    # -- what scripts do

    def on_Runtime_consoleAPICalled(
        self, type: str, args: list[dict[str, Any]], executionContextId: int, stackTrace: Any = None, **_: Any
    ) -> None:
        world = next((one for one in self.worlds.values() if one.number == executionContextId), None)
        frames = (stackTrace or {}).get("callFrames") or [{}]
        told = [{key: arg[key] for key in ("value", "unserializableValue", "type") if key in arg} for arg in args]
        if world is not None:
            self.emit("Runtime.console", executionContextId=world.id, args=told, type=type, location=_place(frames[0]))

    def on_Runtime_exceptionThrown(self, exceptionDetails: dict[str, Any], **_: Any) -> None:
        described = (exceptionDetails.get("exception") or {}).get("description") or exceptionDetails["text"]
        message, _separator, stack = described.partition("\n")
        self.emit("Page.uncaughtError", frameId=self.page.target, message=message, stack=stack,
                  location=_place(exceptionDetails))  # fmt: skip

    def on_Page_javascriptDialogOpening(self, message: str, type: str, defaultPrompt: str = "", **_: Any) -> None:
        self.emit("Page.dialogOpened", dialogId=f"dialog-{next(self._dialogs)}", message=message, type=type,
                  defaultValue=defaultPrompt)  # fmt: skip

    def on_Inspector_targetCrashed(self) -> None:
        self.page.answers = False
        self.emit("Page.crashed")


def _posted(request: dict[str, Any]) -> str | None:
    text = request.get("postData")
    return None if text is None else base64.b64encode(text.encode()).decode()


def _pairs(headers: dict[str, str]) -> list[dict[str, str]]:
    """Chromium joins those of one name by a newline."""
    return [{"name": name, "value": one} for name, value in headers.items() for one in value.split("\n")]


def _place(about: dict[str, Any]) -> dict[str, Any]:
    return {
        "url": about.get("url", ""),
        "lineNumber": about.get("lineNumber", 0),
        "columnNumber": about.get("columnNumber", 0),
    }
