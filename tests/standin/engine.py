"""A stand-in for the patched Firefox: what `InvisiblePlaywright` launches in tests. Standard library only.

It speaks enough of the Juggler pipe (JSON and NUL, read on descriptor 3, written on 4) for the real client to launch
it, open contexts and pages, go to http pages, read them, evaluate a little, keep cookies and close. It ends when
descriptor 3 does, as the real one. It announces no disconnection: the client has no event for that.

Its limits. It proves nothing about the real engine, its speed, its memory or what a site sees of it: a result from
it is a "stand-in" result. Its protocol is that of the 53.x engines, and the client's own functions are told apart by
their text. One frame for each page; no layout, no input (click, fill and the like are refused), no subresources, no
JavaScript but what script.py says, no history (back and forward do nothing), no routes, downloads, popups, dialogs.
`content()` is the page's source. A screenshot is one pixel. An init script is run by script.py (what that cannot run
is in the log); the package's own that restores localStorage is applied instead (pages.py, RESTORE). A proxy is used
for `http:` only.

Faults by address: about:crashparent (SIGSEGV), about:exit?N, about:crashcontent (Page.crashed, and that page answers
nothing but its closing), about:hang (the same without the event).

Faults by the control file, standin.json beside the executable; read at the start, `mute` and `exit_on` with each
message:
    start_delay_ms  says that it is ready so much later
    never_ready     never says it, and answers nothing
    exit_at_start   ends with that code instead, after printing `says_at_start`
    linger_ms       a child, which has the environment, outlives the engine by that, however it ends
    mute            these methods are neither done nor answered; "*" is all
    exit_on         {method: code}: ends with that code on that message, a negative one by that signal

What happened is in standin.log beside the executable: a JSON object for each line, with `event` (launched, ready,
lingering, context opened, page opened, navigating, page closed, context closed, init script not run, closing), `pid`
and `at` in each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from tests.standin.fetching import CookieJar
from tests.standin.pages import NEVER, Page, Refused

READY = "Juggler listening to the pipe"
CONTROL = "standin.json"
LOG = "standin.log"
READ, WRITE = 3, 4

#: The variables by which the processes of a launch are found: the worker's own and the client's.
TOKENS = {"token": "_ASYNCWORKER_TOKEN", "client_token": "INVPW_SESSION_TOKEN"}

# A child that waits until its parent is gone, then some more.
_LINGER = "import os, sys, time; os.read(0, 1); time.sleep(float(sys.argv[1]) / 1000)"

_PREF = re.compile(r'^user_pref\("(?P<name>[^"]+)",\s*(?P<value>.*)\);\s*$', re.MULTILINE)


class Context:
    """A browser context; what it keeps is its own."""

    def __init__(self, engine: Engine, identifier: str | None) -> None:
        self.id = identifier
        self.engine = engine
        self.pages: list[Any] = []  # of Page, or of what takes its place in the bridge
        self.cookies = CookieJar()
        self.local_storage: dict[str, dict[str, str]] = {}
        self.init_scripts: list[str] = []
        self.extra_headers: list[tuple[str, str]] = []
        self.proxy: dict[str, Any] | None = None
        self.locale = "en-US"
        self.agent: str | None = None

    def user_agent(self) -> str:
        return self.agent or self.engine.user_agent

    def set(self, method: str, params: dict[str, Any]) -> bool:
        """Whether it is a setting of a context; those that are not kept have no effect."""
        match method:
            case "Browser.setExtraHTTPHeaders":
                self.extra_headers = [(one["name"], one["value"]) for one in params["headers"]]
            case "Browser.setUserAgentOverride":
                self.agent = params.get("userAgent")
            case "Browser.setLocaleOverride":
                self.locale = params.get("locale") or "en-US"
            case "Browser.setContextProxy":
                self.proxy = params
            case "Browser.setInitScripts":
                self.init_scripts = [one["script"] for one in params["scripts"]]
        return method.startswith(("Browser.set", "Browser.grant", "Browser.reset"))


class Replied:
    """Which navigations' replies have been written."""

    def __init__(self) -> None:
        self._done: set[str] = set()
        self._changed = threading.Condition()

    def add(self, navigation: str) -> None:
        with self._changed:
            self._done.add(navigation)
            self._changed.notify_all()

    def wait_for(self, navigation: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: navigation in self._done)
            self._done.discard(navigation)


class Engine:
    def __init__(self, tree: Path, arguments: list[str]) -> None:
        self.tree = tree
        self.arguments = arguments
        self.prefs, self.digest = _prefs(arguments)
        self.user_agent = str(self.prefs.get("general.useragent.override") or "Mozilla/5.0 (stand-in)")
        self.proxy: dict[str, Any] | None = None
        self.replied = Replied()
        self._numbers = itertools.count(1)
        self._contexts: dict[str | None, Context] = {None: Context(self, None)}
        self._pages: dict[str, Any] = {}
        self._writing = threading.Lock()
        self._leaving = threading.Lock()

    # -- life

    def run(self) -> NoReturn:
        tokens = {name: os.environ.get(variable) for name, variable in TOKENS.items()}  # noqa: TID251 -- its own
        hw_seed = self.prefs.get("zoom.stealth.fpp.hw_seed")
        self.log("launched", argv=self.arguments, prefs=self.digest, hw_seed=hw_seed, **tokens)
        control = self.control()
        if linger_ms := control.get("linger_ms"):
            self._start_lingering(linger_ms)
        if "exit_at_start" in control:
            print(control.get("says_at_start", "the stand-in engine ends at its start, as it was told"), flush=True)
            self._exit(control["exit_at_start"])
        self._wait(control.get("start_delay_ms", 0))
        if control.get("never_ready"):
            while os.read(READ, 65536):
                pass
            self._exit(0)
        self.prepare()
        print(READY, flush=True)
        self.log("ready")
        self._serve()

    def prepare(self) -> None:
        """What has to be done before it is ready: nothing."""

    def control(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.tree / CONTROL).read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def log(self, event: str, **fields: Any) -> None:
        record = {"event": event, "pid": os.getpid(), "at": time.time(), **fields}
        descriptor = os.open(self.tree / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(record).encode() + b"\n")
        finally:
            os.close(descriptor)

    def die_if_asked(self, url: str) -> None:
        if url == "about:crashparent":
            self._exit(-signal.SIGSEGV)
        if url.startswith("about:exit?"):
            self._exit(int(url.removeprefix("about:exit?")))

    def _exit(self, code: int) -> NoReturn:
        if self._leaving.acquire(blocking=False):  # a thread may find the pipe broken at the same time
            self.log("closing", code=code)
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # leave no file
            if signal.getsignal(-code) not in (signal.SIG_DFL, None):  # which only the main thread may change
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
            time.sleep(10)  # the signal is on its way
        os._exit(code)

    def _wait(self, delay_ms: int) -> None:
        """Be slow, and end at once when nobody waits any more."""
        poller = select.poll()
        poller.register(READ, select.POLLHUP)
        if delay_ms and poller.poll(delay_ms):
            self._exit(0)

    def _start_lingering(self, linger_ms: int) -> None:
        ours, theirs = os.pipe()  # its other end is closed when this process ends, however it does
        command = [sys.executable, "-IS", "-c", _LINGER, str(linger_ms)]
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=ours, stdout=nowhere, stderr=nowhere)
        os.close(ours)
        self.log("lingering", child=process.pid, write_end=theirs)

    def _serve(self) -> NoReturn:
        held = b""
        while chunk := os.read(READ, 1 << 20):
            *messages, held = (held + chunk).split(b"\0")
            for message in messages:
                self._receive(json.loads(message))
        self._exit(0)

    # -- messages

    def fresh(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}"

    def emit(self, method: str, params: dict[str, Any], session: str | None = None) -> None:
        self._write({"method": method, "params": params} | ({"sessionId": session} if session else {}))

    def _write(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\0")
        with self._writing:
            try:
                while data:
                    data = data[os.write(WRITE, data) :]
            except BrokenPipeError:
                self._exit(0)

    def _receive(self, message: dict[str, Any]) -> None:
        method, control = message["method"], self.control()
        if method in control.get("exit_on", {}):
            self._exit(control["exit_on"][method])
        if {method, "*"} & set(control.get("mute", [])):
            return
        self.do(message)

    def do(self, message: dict[str, Any]) -> None:
        method = message["method"]
        try:
            result = self._handle(message.get("sessionId"), method, message.get("params") or {})
        except Refused as error:
            self.answer(message, error={"message": str(error)})
            return
        if result is not NEVER:
            self.answer(message, result=result)
            if method == "Page.navigate":
                self.replied.add(result["navigationId"])

    def answer(self, message: dict[str, Any], **outcome: Any) -> None:
        self._write({key: message[key] for key in ("id", "sessionId") if key in message} | outcome)

    def _handle(self, session: str | None, method: str, params: dict[str, Any]) -> Any:
        if session is not None:
            if session not in self._pages:
                raise Refused(f"cannot find session with id {session!r}")
            return self._pages[session].handle(method, params)
        if method in ("Browser.enable", "Browser.clearCache", "Heap.collectGarbage"):
            return {}
        if method == "Browser.createBrowserContext":
            return self._create_context()
        if method == "Browser.setBrowserProxy":
            self.proxy = params
            return {}
        context = self._contexts.get(params.get("browserContextId"))
        if context is None:
            raise Refused(f"Browser context with id = {params['browserContextId']} does not exist")
        return self._handle_in(context, method, params)

    def _handle_in(self, context: Context, method: str, params: dict[str, Any]) -> Any:
        match method:
            case "Browser.removeBrowserContext":
                for page in list(context.pages):
                    self.close_page(page)
                del self._contexts[context.id]
                self.log("context closed", context=context.id)
            case "Browser.newPage":
                return self._new_page(context)
            case "Browser.setCookies":
                for cookie in params["cookies"]:
                    context.cookies.add(cookie)
            case "Browser.getCookies":
                return {"cookies": context.cookies.all()}
            case "Browser.clearCookies":
                context.cookies.clear()
            case _:
                if not context.set(method, params):
                    raise Refused(f"the stand-in engine does not know {method}")
        return {}

    def _create_context(self) -> dict[str, Any]:
        context = Context(self, self.fresh("context"))
        self._contexts[context.id] = context
        self.log("context opened", context=context.id)
        return {"browserContextId": context.id}

    def _new_page(self, context: Context) -> dict[str, Any]:
        page = Page(self, context, next(self._numbers))
        self._pages[page.session] = page
        context.pages.append(page)
        self.log("page opened", context=context.id, page=page.target)
        page.announce()
        return {"targetId": page.target}

    def close_page(self, page: Any) -> None:
        page.closed = True
        self._pages.pop(page.session, None)
        page.context.pages.remove(page)
        self.log("page closed", context=page.context.id, page=page.target)
        self.emit("Browser.detachedFromTarget", {"sessionId": page.session, "targetId": page.target})


def _prefs(arguments: list[str]) -> tuple[dict[str, Any], str]:
    """The profile's prefs, and a digest of them."""
    profile = Path(arguments[arguments.index("-profile") + 1]) if "-profile" in arguments else Path("/nowhere")
    try:
        text = (profile / "user.js").read_text()
    except FileNotFoundError:
        return {}, ""
    prefs = {match["name"]: json.loads(match["value"]) for match in _PREF.finditer(text)}
    return prefs, hashlib.sha256(json.dumps(prefs, sort_keys=True).encode()).hexdigest()


def main(tree: Path) -> NoReturn:
    main_of(Engine, tree)


def main_of(kind: type[Engine], tree: Path) -> NoReturn:
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    kind(tree, sys.argv[1:]).run()
