"""The bridge's mouse and keyboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.standin.chromium import ChromiumError

if TYPE_CHECKING:
    from tests.standin.bridged_page import BridgedPage

# In the client's own world, so that the page sees no listener.
_WATCH = """function (type) {
  const told = globalThis.landing = {landed: false, on: "nothing", seen: 0, type};
  this.ownerDocument.defaultView.addEventListener(type, (event) => {
    const path = event.composedPath();
    told.seen = 1;
    told.landed = path.includes(this) || (this.control !== undefined && path.includes(this.control));
    told.on = path[0].nodeName ? `<${path[0].nodeName.toLowerCase()}>` : "the window";
  }, {capture: true, once: true});
}"""

_BUTTONS = ("left", "middle", "right")
_MICE = {"mousedown": "mousePressed", "mouseup": "mouseReleased", "mousemove": "mouseMoved"}
_MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


class Input:
    """Of one page."""

    def __init__(self, page: BridgedPage) -> None:
        self._page = page
        self._held: set[str] = set()  # the keys that are down

    def mouse(self, params: dict[str, Any]) -> dict[str, Any]:
        kind, target = params["type"], (params.get("landsOn") or {}).get("objectId")
        if target is not None:
            self._page.on(target, _WATCH, kind)
        self._page.call(
            "Input.dispatchMouseEvent", type=_MICE[kind], x=params["x"], y=params["y"], buttons=params["buttons"],
            button="none" if kind == "mousemove" else _BUTTONS[params["button"]],
            clickCount=params.get("clickCount") or 0, modifiers=_mask(params["modifiers"]),
        )  # fmt: skip
        if target is None:
            return {}
        try:
            return {"landing": self._page.on(target, "function () { return globalThis.landing }")}
        except ChromiumError:
            return {}  # what was hit has led elsewhere

    def wheel(self, params: dict[str, Any]) -> None:
        self._page.call("Input.dispatchMouseEvent", type="mouseWheel", x=params["x"], y=params["y"],
                  deltaX=params["deltaX"], deltaY=params["deltaY"], modifiers=_mask(params["modifiers"]))  # fmt: skip

    def key(self, params: dict[str, Any]) -> None:
        key, down = params["key"], params["type"] == "keydown"
        (self._held.add if down else self._held.discard)(key)
        text = "\r" if key == "Enter" else params.get("text") or ""
        self._page.call(
            "Input.dispatchKeyEvent", type=("keyDown" if text else "rawKeyDown") if down else "keyUp", key=key,
            code=params["code"], windowsVirtualKeyCode=params["keyCode"], location=params["location"],
            autoRepeat=params["repeat"], modifiers=sum(_MODIFIERS[one] for one in self._held & set(_MODIFIERS)),
            **({"text": text, "unmodifiedText": text} if down and text else {}),
        )  # fmt: skip


def _mask(modifiers: int) -> int:
    """Shift and Meta change places."""
    return modifiers & 3 | (modifiers & 4) << 1 | (modifiers & 8) >> 1
