"""One page of the bridge: Juggler's commands for it, done by Chromium."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.standin.bridged_events import UTILITY, Events, Navigation, World
from tests.standin.bridged_input import Input
from tests.standin.bridged_routes import Routes
from tests.standin.chromium import ChromiumError
from tests.standin.pages import NEVER, Refused

if TYPE_CHECKING:
    from tests.standin.bridge import Bridge, BridgedContext

# The client asks Firefox where a frame lies on the screen; only the differences between frames count.
_UTILITY_SCRIPT = """for (const [name, edge, border] of
    [["mozInnerScreenX", "left", "clientLeft"], ["mozInnerScreenY", "top", "clientTop"]])
  Object.defineProperty(globalThis, name, {configurable: true, get() {
    let sum = 0;
    for (let here = window; here.frameElement; here = here.parent)
      sum += here.frameElement.getBoundingClientRect()[edge] + here.frameElement[border];
    return sum;
  }});"""

_CHOOSE = """function (indices) {
  const before = [...this.selectedOptions];
  for (const [index, option] of [...this.options].entries()) option.selected = indices.includes(index);
  return changed(this, before.length !== this.selectedOptions.length
    || before.some((one) => !one.selected));
  function changed(element, whether) {
    if (whether) for (const name of ["input", "change"])
      element.dispatchEvent(new Event(name, {bubbles: true, composed: name === "input"}));
    return whether;
  }
}"""

_GIVE = """function (value) {
  const whether = this.value !== value;
  this.value = value;
  if (whether) for (const name of ["input", "change"])
    this.dispatchEvent(new Event(name, {bubbles: true, composed: name === "input"}));
  return whether;
}"""


class BridgedPage:
    def __init__(self, engine: Bridge, context: BridgedContext, target: dict[str, Any], session: str) -> None:
        self.engine, self.context, self.session = engine, context, session
        self.target: str = target["targetId"]  # and, in Chromium, the main frame
        self.opener: str | None = target.get("openerId")
        self.url = target.get("url") or "about:blank"
        self.answers = True
        self.lock = threading.RLock()
        self.ready, self.gone = threading.Event(), threading.Event()
        self.events, self.routes, self.input = Events(self), Routes(self), Input(self)
        self._routed = False  # by the page itself
        self._held: list[tuple[str, dict[str, Any]]] | None = []  # until it is announced
        self._scripts: list[str] = []  # Chromium's ids of its init scripts
        self._sources: list[str] = []
        self._setting_scripts = threading.Lock()

    # -- life

    def open(self) -> None:
        """Prepare what Chromium holds back until then, and tell the client of it."""
        commands: list[tuple[str, dict[str, Any]]] = [
            ("Page.enable", {}),
            ("Page.setLifecycleEventsEnabled", {"enabled": True}),
            ("Network.enable", {}),
            ("Emulation.setFocusEmulationEnabled", {"enabled": True}),
            *self.context.emulation(),
            ("Page.addScriptToEvaluateOnNewDocument",
             {"source": _UTILITY_SCRIPT, "worldName": UTILITY, "runImmediately": True}),
            ("Runtime.enable", {}),
        ]  # fmt: skip
        for method, params in commands:
            self.engine.chromium.send(method, params, self.session)
        try:
            self.set_init_scripts(None)
            self.set_routes(None)
            self.call("Runtime.runIfWaitingForDebugger")
        except ChromiumError:
            return  # it was closed meanwhile
        self._announce()
        self.ready.set()

    def _announce(self) -> None:
        info = {"type": "page", "targetId": self.target, "browserContextId": self.context.id}
        if self.opener is not None:
            info["openerId"] = self.opener
        with self.lock:
            if self.gone.is_set():
                return
            held, self._held = self._held or [], None
            self.engine.emit("Browser.attachedToTarget", {"sessionId": self.session, "targetInfo": info})
            self.emit("Page.frameAttached", {"frameId": self.target})
            self.emit("Page.ready", {})
            if not any(method == "Page.navigationCommitted" for method, _ in held):
                self.emit("Page.navigationCommitted", {"frameId": self.target, "url": self.url, "name": ""})
                for name in ("DOMContentLoaded", "load"):
                    self.emit("Page.eventFired", {"frameId": self.target, "name": name})
            for method, params in held:
                self.emit(method, params)

    def emit(self, method: str, params: dict[str, Any]) -> None:
        with self.lock:
            if self._held is not None:
                self._held.append((method, params))
            elif not self.gone.is_set():
                self.engine.emit(method, params, self.session)

    def leave(self) -> None:
        """It is gone."""
        with self.lock:
            self.gone.set()
            self._held = []
            self.engine.emit("Browser.detachedFromTarget", {"sessionId": self.session, "targetId": self.target})

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.engine.chromium.call(method, params, self.session)

    def handle(self, message: dict[str, Any]) -> Any:
        method, params = message["method"], message.get("params") or {}
        if method == "Page.close":
            self.engine.close_page(self)
            return {}
        if not self.answers:
            return NEVER
        if method == "Page.navigate":
            return self._navigate(message, params)
        handlers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "Page.reload": lambda p: self.call("Page.reload") and {},
            "Page.goBack": lambda p: self._travel(-1),
            "Page.goForward": lambda p: self._travel(1),
            "Page.setInitScripts": self._set_init_scripts,
            "Page.screenshot": self._screenshot,
            "Page.bringToFront": lambda p: self.call("Page.bringToFront"),
            "Page.title": lambda p: {"title": self._in_main("document.title")},
            "Page.handleDialog": lambda p: self.call(
                "Page.handleJavaScriptDialog", accept=p["accept"], promptText=p.get("promptText") or ""),
            "Page.setViewportSize": lambda p: self._emulate("Browser.setDefaultViewport", {"viewport": p}),
            "Page.setEmulatedMedia": lambda p: self._emulate("Page.setEmulatedMedia", p),
            "Page.adoptNode": self._adopt,
            "Page.describeNode": self._describe,
            "Page.getContentQuads": self._quads,
            "Page.scrollIntoViewIfNeeded": lambda p: self.call("DOM.scrollIntoViewIfNeeded", objectId=p["objectId"]),
            "Page.setFileInputFiles": lambda p: self.call(
                "DOM.setFileInputFiles", objectId=p["objectId"], files=p["files"]),
            "Page.selectOptions": lambda p: {"changed": self.on(p["objectId"], _CHOOSE, p["indices"])},
            "Page.setUserInput": lambda p: {"changed": self.on(p["objectId"], _GIVE, p["value"])},
            "Page.dispatchMouseEvent": self.input.mouse,
            "Page.dispatchWheelEvent": self.input.wheel,
            "Page.dispatchKeyEvent": self.input.key,
            "Page.insertText": lambda p: self.call("Input.insertText", text=p["text"]),
            "Runtime.evaluate": self._evaluate,
            "Runtime.callFunction": self._call_function,
            "Runtime.disposeObject": lambda p: self.call("Runtime.releaseObject", objectId=p["objectId"]),
            "Network.getResponseBody": self._body,
            "Network.setRequestInterception": lambda p: self.set_routes(p["enabled"]),
            "Network.resumeInterceptedRequest": self.routes.resume,
            "Network.abortInterceptedRequest": self.routes.abort,
            "Network.fulfillInterceptedRequest": self.routes.fulfill,
        }  # fmt: skip
        if method not in handlers:
            raise Refused(f"the bridge does not know {method}")
        try:
            return handlers[method](params) or {}
        except ChromiumError as error:
            raise Refused(f"{method}: {error}") from None

    # -- settings

    def _emulate(self, name: str, params: dict[str, Any]) -> None:
        for method, given in self.context.emulation({name: params}):
            self.call(method, **given)

    def _set_init_scripts(self, params: dict[str, Any]) -> None:
        self.set_init_scripts([one["script"] for one in params["scripts"] if not one.get("worldName")])
        self.events.declare({one["worldName"] for one in params["scripts"] if one.get("worldName")})

    def set_init_scripts(self, sources: list[str] | None) -> None:
        """The page's own are replaced by these; None keeps them. Those of its context run before."""
        if sources is not None:
            self._sources = sources
        start = self.engine.chromium.start
        with self._setting_scripts:
            for identifier in self._scripts:
                start("Page.removeScriptToEvaluateOnNewDocument", {"identifier": identifier}, self.session)
            added = [
                start("Page.addScriptToEvaluateOnNewDocument", {"source": source}, self.session)
                for source in [*self.context.init_scripts, *self._sources]
            ]
            self._scripts = [one.result()["identifier"] for one in added]

    def set_routes(self, wanted: bool | None) -> None:
        """Whether the page's own requests are intercepted; None asks its context again."""
        if wanted is not None:
            self._routed = wanted
        self.routes.enable(self._routed or self.context.routed)

    # -- navigation

    def _navigate(self, message: dict[str, Any], params: dict[str, Any]) -> Any:
        url, frame = params["url"], params["frameId"]
        self.engine.log("navigating", context=self.context.id, page=self.target, url=url)
        self.engine.die_if_asked(url)
        if url == "about:hang":
            self.answers = False
            return NEVER
        if url == "about:crashcontent":
            self.engine.chromium.send("Page.navigate", {"url": "chrome://crash"}, self.session)
            return NEVER

        asked = Navigation(url, lambda one: self.engine.answer(message, result={"navigationId": one}))
        self.events.asked[frame] = asked

        def answered(outcome: dict[str, Any]) -> None:
            if self.events.asked.get(frame) is asked:
                del self.events.asked[frame]
            if "error" in outcome:
                if not asked.answered:
                    self.engine.answer(message, error={"message": outcome["error"]["message"]})
                return
            result = outcome["result"]
            text, navigation = result.get("errorText"), asked.id or result.get("loaderId")
            if text:
                navigation = navigation or self.engine.fresh("navigation")
            asked.begin(navigation)
            if text and navigation:
                self.events.abort(frame, navigation, text)

        given = {"url": url, "frameId": frame} | ({"referrer": params["referer"]} if params.get("referer") else {})
        self.engine.chromium.send("Page.navigate", given, self.session, answered)
        return NEVER

    def _travel(self, distance: int) -> dict[str, Any]:
        history = self.call("Page.getNavigationHistory")
        index = history["currentIndex"] + distance
        if not 0 <= index < len(history["entries"]):
            return {"success": False}
        self.call("Page.navigateToHistoryEntry", entryId=history["entries"][index]["id"])
        return {"success": True}

    # -- scripts

    def _world(self, identifier: str) -> World:
        found = self.events.worlds.get(identifier)
        if found is None:
            raise Refused(f"Failed to find execution context with id = {identifier}")
        return found

    def _evaluate(self, params: dict[str, Any]) -> dict[str, Any]:
        world = self._world(params["executionContextId"])
        return self._run(
            world, "Runtime.evaluate", expression=params["expression"], uniqueContextId=world.unique,
            returnByValue=bool(params.get("returnByValue")), awaitPromise=True, userGesture=True,
        )  # fmt: skip

    def _call_function(self, params: dict[str, Any]) -> dict[str, Any]:
        world = self._world(params["executionContextId"])
        return self._run(
            world, "Runtime.callFunctionOn", functionDeclaration=params["functionDeclaration"],
            arguments=params["args"], uniqueContextId=world.unique,
            returnByValue=bool(params.get("returnByValue")), awaitPromise=True, userGesture=True,
        )  # fmt: skip

    def _run(self, world: World, method: str, **params: Any) -> dict[str, Any]:
        try:
            outcome = self.call(method, **params)
        except ChromiumError as error:
            text = str(error)
            if "uniqueContextId not found" in text or "Cannot find context" in text:
                raise Refused(f"Failed to find execution context with id = {world.id}") from None
            if any(one in text for one in ("context was destroyed", "target navigated", "Promise was collected")):
                raise Refused("Execution context was destroyed!") from None
            raise
        if details := outcome.get("exceptionDetails"):
            return {"exceptionDetails": _thrown(details)}
        return {"result": _remote(outcome["result"])}

    def on(self, element: str, declaration: str, *given: Any) -> Any:
        """What a function returns whose `this` is the element."""
        arguments = [{"value": one} for one in given]
        outcome = self.call("Runtime.callFunctionOn", functionDeclaration=declaration, objectId=element,
                            arguments=arguments, returnByValue=True)  # fmt: skip
        if details := outcome.get("exceptionDetails"):
            raise Refused(json.dumps(_thrown(details)))
        return outcome["result"].get("value")

    def _in_main(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    # -- nodes

    def _adopt(self, params: dict[str, Any]) -> dict[str, Any]:
        world = self._world(params["executionContextId"])
        if "objectId" in params:
            node = self.call("DOM.describeNode", objectId=params["objectId"])["node"]["backendNodeId"]
        else:
            node = self.call("DOM.getFrameOwner", frameId=params["frameId"])["backendNodeId"]
        found = self.call("DOM.resolveNode", backendNodeId=node, executionContextId=world.number)
        return {"remoteObject": _remote(found["object"])}

    def _describe(self, params: dict[str, Any]) -> dict[str, Any]:
        told = {}
        node = self.call("DOM.describeNode", objectId=params["objectId"])["node"]
        if node["nodeName"] in ("IFRAME", "FRAME") and "frameId" in node:
            told["contentFrameId"] = node["frameId"]
        owner = self.call(
            "Runtime.callFunctionOn", objectId=params["objectId"],
            functionDeclaration="function () { return (this.ownerDocument ?? this).documentElement }",
        )["result"]  # fmt: skip
        if "objectId" in owner:
            root = self.call("DOM.describeNode", objectId=owner["objectId"])["node"]
            told["ownerFrameId"] = root.get("frameId") or self.target
        return told

    def _quads(self, params: dict[str, Any]) -> dict[str, Any]:
        try:
            quads = self.call("DOM.getContentQuads", objectId=params["objectId"])["quads"]
        except ChromiumError:
            quads = []  # it is not shown
        return {
            "quads": [
                {f"p{point + 1}": {"x": quad[2 * point], "y": quad[2 * point + 1]} for point in range(4)}
                for quad in quads
            ]
        }

    # -- what it shows

    def _screenshot(self, params: dict[str, Any]) -> dict[str, Any]:
        kind = params["mimeType"].removeprefix("image/")
        quality = {"quality": params["quality"]} if kind == "jpeg" and params.get("quality") is not None else {}
        clip = params["clip"] | {"scale": 1}
        return {"data": self.call("Page.captureScreenshot", format=kind, clip=clip, captureBeyondViewport=True,
                                  **quality)["data"]}  # fmt: skip

    def _body(self, params: dict[str, Any]) -> dict[str, Any]:
        body = self.call("Network.getResponseBody", requestId=params["requestId"].partition("#")[0])
        if body["base64Encoded"]:
            return {"base64body": body["body"]}
        return {"base64body": base64.b64encode(body["body"].encode()).decode()}


def _remote(found: dict[str, Any]) -> dict[str, Any]:
    if "objectId" not in found:
        return {key: found[key] for key in ("value", "unserializableValue") if key in found}
    return {key: found[key] for key in ("objectId", "type", "subtype") if key in found}


def _thrown(details: dict[str, Any]) -> dict[str, Any]:
    exception = details.get("exception") or {}
    if "description" not in exception:
        return {"value": exception["value"]} if "value" in exception else {"text": details["text"]}
    lines = exception["description"].split("\n")
    first = next((index for index, line in enumerate(lines) if line.startswith("    at ")), len(lines))
    return {"text": "\n".join(lines[:first]), "stack": "\n".join(lines[first:])}
