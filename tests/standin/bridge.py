"""A stand-in for the patched Firefox with a real browser behind: a headless Chromium. Standard library only.

Its front is that of engine.py: the Juggler pipe, the start line, the faults and the log. What comes through the pipe
is done by a Chromium over `--remote-debugging-pipe`; the client's own injected script runs in one of Chromium's
isolated worlds. So selectors, actionability, input, waiting, evaluation, frames, screenshots, cookies, storage, routes
and init scripts work through the real client, on real pages.

What it does not prove. Nothing about the real engine: not its speed, memory, crashes, rendering, nor what a site sees
of it; a page meets Chromium's DOM, JavaScript and network under the name of a Firefox. Of the seed's identity it has
the user agent, viewport, locale and time zone only. Where Firefox gives the caller's code a world of its own, it
runs in the page's world here, and sees what the page has replaced. That the order of Juggler's events is the real
engine's rests on reading the client.

Not bridged: downloads, file choosers (set_input_files works), touch, permissions, geolocation, HTTP credentials,
blocking of service workers, passwords of proxies, web sockets, workers, screencasts, `Page.elementAtom`, frames in
other processes (site isolation is off). Of requests and responses the cookie headers are missing. The log says what
was set without an effect (`not bridged`), and what the bridge itself did wrong (`bridge failed`). A popup is announced
and can be driven, but its first navigation often escapes the client: its `url` then stays about:blank.

Faults are those of engine.py; about:crashcontent crashes a real renderer. When Chromium dies the bridge ends with
code 7. When the bridge ends, however it does, Chromium does; its files are in the profile directory that the client
gives, and removes. Beside engine.py's, the log has `chromium`, with its pid as `child`.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.standin.bridged_page import BridgedPage
from tests.standin.chromium import Chromium
from tests.standin.engine import Context, Engine, main_of
from tests.standin.pages import NEVER, Refused

#: Beside the executable: how to start Chromium, a JSON list.
COMMAND = "bridge.json"

#: One of Chromium's, with its parameters.
Command = tuple[str, dict[str, Any]]

#: What the bridge ends with when Chromium is dead.
CHROMIUM_DIED = 7

#: How long a page may take to open or to close.
PAGE_TIMEOUT_S = 30.0

_MEDIA = {
    "colorScheme": "prefers-color-scheme",
    "reducedMotion": "prefers-reduced-motion",
    "forcedColors": "forced-colors",
    "contrast": "prefers-contrast",
}
_WITHOUT_EFFECT = (
    "Browser.setDownloadOptions", "Browser.setTouchOverride", "Browser.setServiceWorkersBlocked",
    "Browser.setGeolocationOverride", "Browser.setHTTPCredentials", "Browser.grantPermissions",
    "Browser.resetPermissions",
)  # fmt: skip


def _metrics(params: dict[str, Any]) -> Command:
    viewport = params.get("viewport")
    if viewport is None:
        return "Emulation.clearDeviceMetricsOverride", {}
    size, screen = viewport["viewportSize"], viewport.get("screenSize") or viewport["viewportSize"]
    return "Emulation.setDeviceMetricsOverride", {
        "width": size["width"], "height": size["height"], "deviceScaleFactor": viewport.get("deviceScaleFactor") or 0,
        "mobile": bool(viewport.get("isMobile")), "screenWidth": screen["width"], "screenHeight": screen["height"],
    }  # fmt: skip


def _network(params: dict[str, Any]) -> Command:
    offline = params.get("override") == "offline"
    return "Network.emulateNetworkConditions", {
        "offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1,
    }  # fmt: skip


_COMMANDS: dict[str, Callable[[dict[str, Any]], Command]] = {
    "setLocaleOverride": lambda p: ("Emulation.setLocaleOverride", {"locale": (p["locale"] or "").split(",")[0]}),
    "setTimezoneOverride": lambda p: ("Emulation.setTimezoneOverride", {"timezoneId": p["timezoneId"] or ""}),
    "setDefaultViewport": _metrics,
    "setOnlineOverride": _network,
    "setExtraHTTPHeaders": lambda p: (
        "Network.setExtraHTTPHeaders", {"headers": {one["name"]: one["value"] for one in p["headers"]}}),
    "setJavaScriptDisabled": lambda p: (
        "Emulation.setScriptExecutionDisabled", {"value": bool(p["javaScriptDisabled"])}),
    "setIgnoreHTTPSErrors": lambda p: (
        "Security.setIgnoreCertificateErrors", {"ignore": bool(p["ignoreHTTPSErrors"])}),
    "setBypassCSP": lambda p: ("Page.setBypassCSP", {"enabled": bool(p["bypassCSP"])}),
    "setCacheDisabled": lambda p: ("Network.setCacheDisabled", {"cacheDisabled": bool(p["cacheDisabled"])}),
}  # fmt: skip


class BridgedContext(Context):
    """A context of Chromium's, made when it is first used: only then its proxy is known."""

    engine: Bridge

    def __init__(self, engine: Bridge, identifier: str | None) -> None:
        super().__init__(engine, identifier)
        self.settings: dict[str, dict[str, Any]] = {}
        self.routed = False
        self._remote: str | None = None
        self._lock = threading.Lock()

    def remote(self) -> dict[str, str]:
        """What says to Chromium which it is."""
        with self._lock:
            if self._remote is None:
                proxy = self.proxy or self.engine.proxy
                server = {"proxyServer": f"{proxy['type']}://{proxy['host']}:{proxy['port']}"} if proxy else {}
                bypass = {"proxyBypassList": ",".join(["<-loopback>", *proxy.get("bypass", [])])} if proxy else {}
                made = self.engine.chromium.call("Target.createBrowserContext", server | bypass)
                self._remote = str(made["browserContextId"])
                self.engine.contexts_of_chromium[self._remote] = self
        return {"browserContextId": self._remote}

    def dispose(self) -> None:
        if self._remote is not None:
            self.engine.chromium.call("Target.disposeBrowserContext", self.remote())

    def keep(self, method: str, params: dict[str, Any]) -> None:
        """Set it here and in each open page."""
        if method in _WITHOUT_EFFECT:
            self.engine.log("not bridged", method=method)
        elif not self.set(method, params):
            raise Refused(f"the bridge does not know {method}")
        elif method == "Browser.setInitScripts":
            for page in list(self.pages):
                page.set_init_scripts(None)
        elif method == "Browser.setRequestInterception":
            self.routed = params["enabled"]
            for page in list(self.pages):
                page.set_routes(None)
        else:
            self.settings[method] = params
            for page in list(self.pages):
                for command, given in self.emulation({method: params}):
                    page.call(command, **given)

    def emulation(self, settings: dict[str, dict[str, Any]] | None = None) -> list[Command]:
        """Chromium's commands for these settings; without any, for all that the context has."""
        commands: list[Command] = []
        media: dict[str, str | None] = {}
        for method, params in (self.settings if settings is None else settings).items():
            name = method.rpartition(".")[2]
            if name in _COMMANDS:
                commands.append(_COMMANDS[name](params))
            media |= {key: value for key, value in params.items() if key in _MEDIA or key == "type"}
        if settings is None or settings.keys() & {"Browser.setUserAgentOverride", "Browser.setLocaleOverride"}:
            commands.append(("Emulation.setUserAgentOverride", self._agent()))
        if media:
            features = [{"name": _MEDIA[key], "value": value or ""} for key, value in media.items() if key in _MEDIA]
            commands.append(("Emulation.setEmulatedMedia", {"media": media.get("type") or "", "features": features}))
        return commands

    def _agent(self) -> dict[str, str]:
        return {"userAgent": self.user_agent(), "acceptLanguage": self.locale}


class Bridge(Engine):
    def __init__(self, tree: Path, arguments: list[str]) -> None:
        super().__init__(tree, arguments)
        self.chromium: Chromium
        self.contexts_of_chromium: dict[str, BridgedContext] = {}
        self._contexts = {None: BridgedContext(self, None)}
        self._opened = threading.Condition()
        self._ending = threading.Lock()

    # -- life

    def prepare(self) -> None:
        if "-profile" not in self.arguments:
            raise SystemExit("the bridge puts its files into the profile's directory; give -profile DIRECTORY")
        directory = Path(self.arguments[self.arguments.index("-profile") + 1])
        command = json.loads((self.tree / COMMAND).read_bytes())
        self.chromium = Chromium(command, directory / "chromium", self._hear, lambda: self._exit(CHROMIUM_DIED))
        self.log("chromium", child=self.chromium.pid())
        watch = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
        self.chromium.call("Target.setAutoAttach", watch)

    def _exit(self, code: int) -> NoReturn:
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the first decides with what it ends
        if code >= 0 and hasattr(self, "chromium"):  # a signal leaves no time for that: the kernel ends Chromium
            self.chromium.end()
        super()._exit(code)

    # -- the client

    def do(self, message: dict[str, Any]) -> None:
        """Each in a thread of its own: what it waits for may depend on the next."""
        threading.Thread(target=self._do, args=(message,), daemon=True).start()

    def _do(self, message: dict[str, Any]) -> None:
        session, method = message.get("sessionId"), message["method"]
        try:
            if session in self._pages:
                result = self._pages[session].handle(message)
            else:
                result = self._handle(session, method, message.get("params") or {})
        except Refused as error:
            self.answer(message, error={"message": str(error)})
        except Exception as error:  # also what is wrong with the bridge itself: no answer would be a riddle
            self.answer(message, error={"message": f"{method}: {type(error).__name__}: {error}"})
        else:
            if result is not NEVER:
                self.answer(message, result=result)

    def _handle_in(self, context: Context, method: str, params: dict[str, Any]) -> Any:
        assert isinstance(context, BridgedContext)
        match method:
            case "Browser.removeBrowserContext":
                super()._handle_in(context, method, params)
                context.dispose()
            case "Browser.newPage":
                return self._new_page(context)
            case "Browser.setCookies":
                cookies = [_cookie(one) for one in params["cookies"]]
                self.chromium.call("Storage.setCookies", {"cookies": cookies} | context.remote())
            case "Browser.getCookies":
                found = self.chromium.call("Storage.getCookies", context.remote())["cookies"]
                return {"cookies": [_told_cookie(one) for one in found]}
            case "Browser.clearCookies":
                self.chromium.call("Storage.clearCookies", context.remote())
            case _:
                context.keep(method, params)
        return {}

    def _create_context(self) -> dict[str, Any]:
        context = BridgedContext(self, self.fresh("context"))
        self._contexts[context.id] = context
        self.log("context opened", context=context.id)
        return {"browserContextId": context.id}

    def _new_page(self, context: Context) -> dict[str, Any]:
        assert isinstance(context, BridgedContext)
        asked = {"url": "about:blank"} | context.remote()
        target = self.chromium.call("Target.createTarget", asked)["targetId"]
        with self._opened:
            there = self._opened.wait_for(lambda: self._page_of(target), PAGE_TIMEOUT_S)
        if there is None or not there.ready.wait(PAGE_TIMEOUT_S):
            raise Refused(f"Chromium did not open the page in {PAGE_TIMEOUT_S:.0f} s")
        return {"targetId": target}

    def _page_of(self, target: str) -> BridgedPage | None:
        return next((page for page in list(self._pages.values()) if page.target == target), None)

    def close_page(self, page: Any) -> None:
        self.chromium.call("Target.closeTarget", {"targetId": page.target})
        page.gone.wait(PAGE_TIMEOUT_S)

    # -- Chromium; by the thread that reads from it

    def _hear(self, method: str, params: dict[str, Any], session: str | None) -> None:
        if method == "Target.attachedToTarget":
            self._attached(params["sessionId"], params["targetInfo"])
        elif method == "Target.detachedFromTarget":
            self._detached(params["sessionId"])
        elif session in self._pages:
            try:
                self._pages[session].events.hear(method, params)
            except Exception:  # the next event is to be heard, too
                self.log("bridge failed", method=method, reason=traceback.format_exc())

    def _attached(self, session: str, target: dict[str, Any]) -> None:
        context = self.contexts_of_chromium.get(target.get("browserContextId", ""))
        if target["type"] != "page" or context is None:
            self.chromium.send("Runtime.runIfWaitingForDebugger", {}, session)
            self.chromium.send("Target.detachFromTarget", {"sessionId": session})
            return
        page = BridgedPage(self, context, target, session)
        context.pages.append(page)
        self.log("page opened", context=context.id, page=page.target)
        with self._opened:
            self._pages[session] = page
            self._opened.notify_all()
        threading.Thread(target=page.open, daemon=True).start()

    def _detached(self, session: str) -> None:
        page = self._pages.pop(session, None)
        self.chromium.lose(session)
        if page is not None:
            page.context.pages.remove(page)
            self.log("page closed", context=page.context.id, page=page.target)
            page.leave()


def _cookie(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != "expires" or value != -1}


def _told_cookie(found: dict[str, Any]) -> dict[str, Any]:
    names = ("name", "value", "domain", "path", "expires", "size", "httpOnly", "secure", "session")
    return {name: found[name] for name in names} | {"sameSite": found.get("sameSite", "Lax")}


def main(tree: Path) -> NoReturn:
    main_of(Bridge, tree)
