"""The shop with paths that are behaviours: `/slow?ms=500`, `/status/503`, `/never`, …"""

from __future__ import annotations

import html

from asyncworker.demo.site import Request, Response, ShopSite


class BehaviourSite(ShopSite):
    """Beside the shop's own pages:

    /slow?ms=500         answers after that time
    /status/503          answers with that status, with `Retry-After` when `?retry_after=` says so
    /cookie/set          sets the cookie `visitor=seen`
    /cookie/get          shows the Cookie header
    /headers             shows all headers
    /never               answers when the server stops, not before
    /redirect?to=URL     302 to there
    /html?body=…         that body, as HTML
    /beforeunload        a page that asks before it is left, once it was clicked
    /spin                a page whose script loops for ever after it was loaded
    """

    def respond(self, request: Request) -> Response:
        match request.path.strip("/").split("/"):
            case ["slow"]:
                self.stopping.wait(int(request.query["ms"]) / 1000)
                return page("slow")
            case ["status", code]:
                wait = request.query.get("retry_after")
                headers = {"Retry-After": wait} if wait else {}
                return page(f"status {code}", status=int(code), headers=headers)
            case ["cookie", "set"]:
                return page("set", headers={"Set-Cookie": "visitor=seen; Path=/"})
            case ["cookie", "get"]:
                return page(request.headers.get("Cookie", ""))
            case ["headers"]:
                return page("\n".join(f"{name}: {value}" for name, value in request.headers.items()))
            case ["never"]:
                self.stopping.wait()
                return page("too late")
            case ["redirect"]:
                return Response(status=302, headers={"Location": request.query["to"]})
            case ["html"]:
                return Response(request.query["body"])
            case ["beforeunload"]:
                return Response(_BEFORE_UNLOAD)
            case ["spin"]:
                return Response(_SPIN)
        return super().respond(request)


def page(text: str, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A page that shows `text` in its title and in its only paragraph."""
    shown = html.escape(text)
    body = f"<!doctype html><title>{shown}</title><p>{shown}</p>"
    return Response(body, status=status, headers=headers or {})


_BEFORE_UNLOAD = """<!doctype html><title>beforeunload</title><p>stay</p><script>
addEventListener("beforeunload", (event) => { event.preventDefault(); event.returnValue = "stay"; });
</script>"""

# The loop starts after the load event, so that a navigation to it succeeds and the next call hangs.
_SPIN = """<!doctype html><title>spin</title><p>spin</p><script>
addEventListener("load", () => setTimeout(() => { for (;;); }, 50));
</script>"""
