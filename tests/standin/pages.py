"""The stand-in's pages: one target with one frame, its navigations and what is evaluated in it."""

from __future__ import annotations

import base64
import html
import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.standin.dom import Document, Element, SelectorError
from tests.standin.fetching import Exchange, Fetcher
from tests.standin.script import Function, ScriptError, origin, run

if TYPE_CHECKING:
    from tests.standin.engine import Context, Engine

#: What a handler returns when there will be no answer, ever.
NEVER = object()

#: A real PNG of one transparent pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="

#: Marks an init script that restores localStorage (asyncworker.engines.storage_state): the JSON after it is put into
#: the document's storage if that is empty, and the script itself is not run. It is a list as in a storage state,
#: [{"origin": …, "localStorage": [{"name": …, "value": …}]}], or {origin: {name: value}}.
RESTORE = re.compile(r"/\*\s*asyncworker:\s*local-?storage\s*\*/\s*", re.IGNORECASE)

_ERRNO = {"ConnectionRefusedError": "NS_ERROR_CONNECTION_REFUSED", "gaierror": "NS_ERROR_UNKNOWN_HOST"}
_SET_CONTENT = re.compile(
    r"\(\(\) => \{ document\.open\(\); document\.write\((.*)\); document\.close\(\); \}\)\(\)", re.S
)
_BOX = {"x": 0, "y": 0, "width": 1280, "height": 720, "fullWidth": 1280, "fullHeight": 720}


class Refused(Exception):
    """The engine's answer is an error."""


class Page:
    def __init__(self, engine: Engine, context: Context, number: int) -> None:
        self.engine = engine
        self.context = context
        self.target, self.session, self.frame = f"target-{number}", f"session-{number}", f"frame-{number}"
        self.document = Document("", "about:blank")
        self.init_scripts: list[str] = []
        self.answers = True  # False: no command of this page is answered any more, but its closing
        self.closed = False
        self._session_storage: dict[str, dict[str, str]] = {}
        self._worlds: dict[str, str] = {"": ""}  # declared name -> id in the document that is there now
        self._objects: dict[str, Any] = {}
        self._bodies: dict[str, bytes] = {}
        self._navigation = ""
        self._lock = threading.RLock()

    def announce(self) -> None:
        info: dict[str, Any] = {"type": "page", "targetId": self.target, "browserContextId": self.context.id}
        self.engine.emit("Browser.attachedToTarget", {"sessionId": self.session, "targetInfo": info})
        self._emit("Page.frameAttached", {"frameId": self.frame})
        self._create_worlds()
        self._emit("Page.ready", {})
        self._emit("Page.navigationCommitted", {"frameId": self.frame, "url": "about:blank", "name": ""})
        self._fire_loaded()

    def handle(self, method: str, params: dict[str, Any]) -> Any:
        if method == "Page.close":
            self.engine.close_page(self)
            return {}
        if not self.answers:
            return NEVER
        handlers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "Page.navigate": lambda p: self._navigate(p["url"], p.get("referer")),
            "Page.reload": lambda p: self._navigate(self.document.url, None) and {},
            "Page.goBack": lambda p: {"success": False},
            "Page.goForward": lambda p: {"success": False},
            "Page.setInitScripts": self._set_init_scripts,
            "Page.screenshot": self._screenshot,
            "Page.adoptNode": self._adopt,
            "Page.describeNode": lambda p: {"ownerFrameId": self.frame},
            "Runtime.evaluate": self._evaluate,
            "Runtime.callFunction": self._call,
            "Runtime.disposeObject": lambda p: self._objects.pop(p["objectId"], None) and {},
            "Network.getResponseBody": lambda p: {
                "base64body": base64.b64encode(self._bodies.get(p["requestId"], b"")).decode()
            },
        }
        if method in handlers:
            with self._lock:
                return handlers[method](params) or {}
        if method.startswith(("Page.set", "Page.bringToFront")):  # accepted, without any effect
            return {}
        raise Refused(f"the stand-in engine does not know {method}")

    # -- where scripts run (tests.standin.script.Place)

    def cookie(self) -> str:
        return self.context.cookies.header(self.document.url, for_script=True)

    def set_cookie(self, text: str) -> None:
        self.context.cookies.add_header(text, self.document.url, from_script=True)

    def storage(self, kind: str) -> dict[str, str]:
        kept = self.context.local_storage if kind == "local" else self._session_storage
        return kept.setdefault(origin(self.document.url), {})

    def user_agent(self) -> str:
        return self.context.user_agent()

    def language(self) -> str:
        return self.context.locale.split(",")[0]

    # -- navigation

    def _navigate(self, url: str, referer: str | None) -> Any:
        self.engine.log("navigating", context=self.context.id, page=self.target, url=url)
        if url == "about:crashcontent":
            self.answers = False
            self._emit("Page.crashed", {})
            return NEVER
        if url == "about:hang":
            self.answers = False
            return NEVER
        self.engine.die_if_asked(url)
        navigation = self._navigation = self.engine.fresh("navigation")
        threading.Thread(target=self._go, args=(navigation, url, referer), daemon=True).start()
        return {"navigationId": navigation}

    def _go(self, navigation: str, url: str, referer: str | None) -> None:
        # The client decides by what was committed after the reply, which therefore must be out first.
        self.engine.replied.wait_for(navigation)
        self._emit("Page.navigationStarted", {"frameId": self.frame, "navigationId": navigation})
        scheme = url.partition(":")[0]
        if scheme in ("http", "https"):
            self._fetch(navigation, url, referer)
        elif scheme == "data":
            self._commit(navigation, Document(_data(url), url))
        elif url.partition("#")[0] == "about:blank":
            self._commit(navigation, Document("", url))
        else:
            self._abort(navigation, "NS_ERROR_UNKNOWN_PROTOCOL")

    def _fetch(self, navigation: str, url: str, referer: str | None) -> None:
        asked: list[str] = []

        def told(address: str, headers: dict[str, str]) -> None:
            asked.append(self.engine.fresh("request"))
            self._emit_request(asked, navigation, address, headers)

        extra = self.context.extra_headers + ([("Referer", referer)] if referer else [])
        proxy = self.context.proxy or self.engine.proxy
        fetcher = Fetcher(self.context.cookies, self.user_agent, extra, proxy)
        try:
            hops = fetcher.hops(url, told)
        except (OSError, ValueError) as error:
            text = _ERRNO.get(type(error).__name__) or str(error) or type(error).__name__
        except Exception as error:  # http.client's own: a response that is none
            text = f"NS_ERROR_NET_INTERRUPT ({type(error).__name__}: {error})"
        else:
            for request, hop in zip(asked, hops, strict=True):
                self._emit_response(request, hop)
            self._bodies = {asked[-1]: hops[-1].body}
            self._commit(navigation, _document(hops[-1]), asked[-1])
            return
        if asked:
            self._emit("Network.requestFailed", {"requestId": asked[-1], "errorCode": text})
        self._abort(navigation, text)

    def _abort(self, navigation: str, text: str) -> None:
        told = {"frameId": self.frame, "navigationId": navigation, "errorText": text}
        self._emit("Page.navigationAborted", told)

    def _commit(self, navigation: str, document: Document, request: str | None = None) -> None:
        with self._lock:
            if navigation != self._navigation or self.closed or not self.answers:
                return  # another navigation took its place
            self.document = document
            self._objects.clear()
            for world in filter(None, self._worlds.values()):
                self._emit("Runtime.executionContextDestroyed", {"executionContextId": world})
            committed = {"frameId": self.frame, "navigationId": navigation, "url": document.url, "name": ""}
            self._emit("Page.navigationCommitted", committed)
            self._create_worlds()
            for source in [*self.context.init_scripts, *self.init_scripts]:
                self._run_init_script(source)
            if request is not None:
                self._emit_finished(request, 0)
            self._fire_loaded()

    def _run_init_script(self, source: str) -> None:
        if marker := RESTORE.search(source):
            payload, _ = json.JSONDecoder().raw_decode(source, marker.end())
            if not self.storage("local"):
                self.storage("local").update(_items(payload, origin(self.document.url)))
            return
        try:
            found = run(source, self)
            if isinstance(found, Function):
                raise ScriptError("a function that is not called")
        except (ScriptError, SelectorError) as error:
            self.engine.log("init script not run", reason=str(error))

    def set_content(self, source: str) -> None:
        self.document = Document(source, self.document.url)
        self._fire_loaded()

    def _set_init_scripts(self, params: dict[str, Any]) -> None:
        self.init_scripts = [one["script"] for one in params["scripts"] if not one.get("worldName")]
        names = [one["worldName"] for one in params["scripts"] if one.get("worldName")]
        self._create_worlds([name for name in names if name not in self._worlds])

    def _create_worlds(self, names: list[str] | None = None) -> None:
        for name in list(self._worlds) if names is None else names:
            self._worlds[name] = self.engine.fresh("world")
            told = {"executionContextId": self._worlds[name], "auxData": {"frameId": self.frame, "name": name}}
            self._emit("Runtime.executionContextCreated", told)

    # -- evaluation

    def _evaluate(self, params: dict[str, Any]) -> dict[str, Any]:
        self._check_world(params)
        expression, by_value = params["expression"], bool(params.get("returnByValue"))
        if "module.exports.InjectedScript" in expression:
            return {"result": self._remote({"injected": "script"}, by_value=False)}
        if "getHTML" in expression:
            return {"result": {"value": self.document.source}}
        if "window.scrollX" in expression:
            return {"result": {"value": _BOX}}
        if written := _SET_CONTENT.fullmatch(expression):
            self.set_content(json.loads(written[1]))
            return {"result": {"value": None}}
        return self._outcome(lambda: run(expression, self), by_value)

    def _call(self, params: dict[str, Any]) -> dict[str, Any]:
        self._check_world(params)
        given = [
            self._objects.get(one["objectId"]) if "objectId" in one else one.get("value") for one in params["args"]
        ]
        declaration = params["functionDeclaration"]
        return self._outcome(lambda: self._apply(declaration, given), bool(params.get("returnByValue")))

    def _check_world(self, params: dict[str, Any]) -> None:
        if params["executionContextId"] not in self._worlds.values():
            raise Refused(f"Failed to find execution context with id = {params['executionContextId']}")

    def _outcome(self, work: Callable[[], Any], by_value: bool) -> dict[str, Any]:
        try:
            return {"result": self._remote(work(), by_value=by_value)}
        except (ScriptError, SelectorError) as error:
            return {"exceptionDetails": {"text": str(error), "stack": ""}}
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            return {"exceptionDetails": {"text": f"TypeError: {error} (in the stand-in engine)", "stack": ""}}

    def _remote(self, value: Any, *, by_value: bool) -> dict[str, Any]:
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        if by_value:
            return {"value": json.loads(json.dumps(value, default=lambda _: {}))}
        kind = "function" if isinstance(value, Function) else "object"
        identifier = self.engine.fresh("object")
        self._objects[identifier] = value
        remote = {"objectId": identifier, "type": kind}
        return remote | ({"subtype": "node"} if isinstance(value, Element) else {})

    def _adopt(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"remoteObject": self._remote(self._objects.get(params.get("objectId", "")), by_value=False)}

    def _apply(self, declaration: str, given: list[Any]) -> Any:
        """The client's own functions, told apart by what they say."""
        if declaration == "(f, ...a) => f(...a)":
            return given[0].call(self, given[1:])
        if declaration in ("o => o", "(v) => v"):
            return given[0]
        if declaration == "(...a) => a":
            return given
        if "document).length" in declaration:
            return len(self.document.select(given[1]))
        if "document)[i]" in declaration:
            return self.document.select(given[1])[given[2]]
        if "found: false" in declaration:
            element = self._one(given[1], strict=given[2])
            return {"found": element is not None} | (
                {"value": _read(declaration, element, given[3:])} if element else {}
            )
        if ".map(el =>" in declaration:
            return [_read(declaration, element, given[2:]) for element in self.document.select(given[1])]
        if "injected.querySelector(p, document, strict)" in declaration:
            return self._one(given[1], strict=given[2])
        if "new URL(given, base)" in declaration:
            return urllib.parse.urljoin(given[2], given[1])
        if isinstance(given[1], Element):
            return _read(declaration, given[1], given[2:])
        raise ScriptError(f"the stand-in engine does not know the client's function {declaration[:80]!r}")

    def _one(self, selector: str, *, strict: bool) -> Element | None:
        found = self.document.select(selector)
        if strict and len(found) > 1:
            raise SelectorError(f"strict mode violation: {selector} resolved to {len(found)} elements")
        return found[0] if found else None

    def _screenshot(self, params: dict[str, Any]) -> dict[str, str]:
        if params["mimeType"] != "image/png":
            raise Refused(f"the stand-in engine has PNG screenshots only, not {params['mimeType']}")
        return {"data": PIXEL}

    # -- events

    def _emit(self, method: str, params: dict[str, Any]) -> None:
        if not self.closed:
            self.engine.emit(method, params, self.session)

    def _fire_loaded(self) -> None:
        for name in ("DOMContentLoaded", "load"):
            self._emit("Page.eventFired", {"frameId": self.frame, "name": name})

    def _emit_request(self, asked: list[str], navigation: str, url: str, headers: dict[str, str]) -> None:
        self._emit("Network.requestWillBeSent", {
            "requestId": asked[-1], "navigationId": navigation, "frameId": self.frame, "url": url, "method": "GET",
            "headers": _pairs(headers.items()), "isIntercepted": False, "cause": "TYPE_DOCUMENT",
            "internalCause": "TYPE_DOCUMENT", **({"redirectedFrom": asked[-2]} if len(asked) > 1 else {}),
        })  # fmt: skip

    def _emit_response(self, request: str, hop: Exchange) -> None:
        self._emit("Network.responseReceived", {
            "requestId": request, "status": hop.status, "statusText": hop.reason, "headers": _pairs(hop.headers),
            "fromCache": False, "fromServiceWorker": False, "securityDetails": None, "timing": {},
        })  # fmt: skip
        if hop.status in (301, 302, 303, 307, 308) and hop.header("location"):
            self._emit_finished(request, len(hop.body))

    def _emit_finished(self, request: str, size: int) -> None:
        told = {"requestId": request, "responseEndTime": 0, "transferSize": size, "encodedBodySize": size}
        self._emit("Network.requestFinished", told | {"protocolVersion": "http/1.1"})


def _read(declaration: str, element: Element, given: list[Any]) -> Any:
    if "elementState" in declaration:
        return _state(element, given[0])
    if "getAttribute" in declaration:
        return element.attributes.get(given[0])
    if "innerText" in declaration:
        return element.inner_text()
    if "innerHTML" in declaration:
        return element.inner_html()
    if "textContent" in declaration:
        return element.text_content()
    if "e.value" in declaration:
        return element.attributes.get("value", element.text_content())
    raise ScriptError(f"the stand-in engine does not know the client's function {declaration[:80]!r}")


def _state(element: Element, wanted: str) -> dict[str, Any]:
    opposites = {"hidden": "visible", "disabled": "enabled", "unchecked": "checked"}
    states = {
        "visible": element.is_shown(),
        "enabled": "disabled" not in element.attributes,
        "editable": "disabled" not in element.attributes and "readonly" not in element.attributes,
        "checked": "checked" in element.attributes,
    }
    matches = not states[opposites[wanted]] if wanted in opposites else states[wanted]
    return {"matches": matches, "received": wanted if matches else f"not {wanted}"}


def _document(exchange: Exchange) -> Document:
    kind = exchange.header("content-type") or "text/html"
    charset = re.search(r"charset=([\w-]+)", kind)
    text = exchange.body.decode(charset[1] if charset else "utf-8", "replace")
    if "html" not in kind:
        text = f"<html><head></head><body><pre>{html.escape(text)}</pre></body></html>"
    return Document(text, exchange.url)


def _data(url: str) -> str:
    kind, _, rest = url.removeprefix("data:").partition(",")
    raw = urllib.parse.unquote_to_bytes(rest)
    return (base64.b64decode(raw) if kind.endswith(";base64") else raw).decode("utf-8", "replace")


def _items(payload: Any, here: str) -> dict[str, str]:
    if isinstance(payload, dict) and "origins" not in payload:
        return dict(payload.get(here, {}))
    origins = payload["origins"] if isinstance(payload, dict) else payload
    return {item["name"]: item["value"] for one in origins if one["origin"] == here for item in one["localStorage"]}


def _pairs(items: Any) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in items]
