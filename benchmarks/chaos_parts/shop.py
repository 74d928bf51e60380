"""The demo's shop with pages that make trouble; prints its URL, and ends with its stdin."""

from __future__ import annotations

import sys
import threading
import time

from asyncworker.demo.site import Request, Response, ShopSite

#: Whoever waits for the others at `/together` gives up after this.
LONGEST_S = 15.0

#: More than a renderer's heap may hold: it ends as one does that has run out of memory.
BOMB = """<!doctype html><title>bomb</title><p class="price"></p><script>
const kept = []; setTimeout(() => { for (;;) kept.push(new Array(100000).fill().map(() => ({a: Math.random()}))); }, 5);
</script>"""

#: Holds much memory, outside the heap, for as long as the page is open.
HOG = """<!doctype html><title>hog</title><p class="price"></p><script>
const kept = new Uint8Array(%d * 1000000); for (let at = 0; at < kept.length; at += 4096) kept[at] = at;
setTimeout(() => { document.querySelector(".price").textContent = kept.length; }, 700);
</script>"""

TOGETHER = '<!doctype html><title>together %d</title><p class="price">0</p>'


class TroubledShop(ShopSite):
    """A shop whose page `/together?n=4` answers when four ask for it at once, or else after a while."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._inside = 0
        self._most = 0

    def respond(self, request: Request) -> Response:
        match request.path:
            case "/bomb":
                return Response(BOMB)
            case "/hog":
                return Response(HOG % int(request.query["mb"]))
            case "/together":
                return Response(TOGETHER % self._wait_for(int(request.query["n"])))
        return super().respond(request)

    def _wait_for(self, count: int) -> int:
        """How many were here at once."""
        ends = time.monotonic() + LONGEST_S
        with self._changed:
            self._inside += 1
            self._most = max(self._most, self._inside)
            self._changed.notify_all()
            while self._most < count and (left := ends - time.monotonic()) > 0:
                self._changed.wait(left)
            most = self._most
            self._inside -= 1
            if self._inside == 0:
                self._most = 0
            return most


if __name__ == "__main__":
    with TroubledShop() as shop:
        print(shop.url, flush=True)
        sys.stdin.read()
