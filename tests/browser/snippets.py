"""Pieces of synchronous Playwright code, each a claim of its own: they give the same on any face of a browser.

Each takes a page of a fresh context and the address of a site, and returns what can be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request, Route

Snippet = Callable[["Page", str], Any]

SNIPPETS: dict[str, Snippet] = {}


def snippet(function: Snippet) -> Snippet:
    SNIPPETS[function.__name__] = function
    return function


def shown(site: str, body: str) -> str:
    """The address of a page with this body."""
    return f"{site}/html?body={quote(f'<!doctype html><title>shown</title>{body}')}"


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    """The class of what a call raises, the first of its lines, and nothing of its log's times."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]
    raise AssertionError("nothing was raised")


@snippet
def navigation_gives_a_response_with_its_request(page: Page, site: str) -> Any:
    response = page.goto(f"{site}/status/503")
    assert response is not None
    same = response.request.response()
    return response.status, response.ok, response.text(), same is response, response.request.frame is page.main_frame


@snippet
def methods_and_properties(page: Page, site: str) -> Any:
    page.goto(shown(site, "<p>one</p><p>two</p>"))
    page.set_viewport_size({"width": 640, "height": 480})
    return page.title(), page.url, page.viewport_size, page.is_closed(), page.inner_text("p"), len(page.frames)


@snippet
def locators_chain(page: Page, site: str) -> Any:
    page.goto(shown(site, "<ul><li>a</li><li class=x>b</li><li>c</li></ul>"))
    items = page.locator("ul").locator("li")
    return items.count(), items.all_inner_texts(), items.filter(has_text="b").first.get_attribute("class")


@snippet
def a_list_of_locators_is_a_list(page: Page, site: str) -> Any:
    page.goto(shown(site, "<i>a</i><i>b</i>"))
    return [each.inner_text() for each in page.locator("i").all()]


@snippet
def locators_are_arguments(page: Page, site: str) -> Any:
    page.goto(shown(site, "<div><b>x</b></div><div><i>y</i></div>"))
    return page.locator("div").filter(has=page.locator("i")).inner_text()


@snippet
def keyboard_and_mouse(page: Page, site: str) -> Any:
    page.goto(shown(site, "<input id=i autofocus><button onclick='this.textContent=1'>0</button>"))
    page.focus("#i")
    page.keyboard.type("abc")
    page.keyboard.press("Backspace")
    box = page.locator("button").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 2, box["y"] + 2)
    return page.input_value("#i"), page.inner_text("button"), page.keyboard is page.keyboard


@snippet
def handles_go_there_and_back(page: Page, site: str) -> Any:
    page.goto(shown(site, "<p>x</p>"))
    handle = page.evaluate_handle("() => ({a: [1, {b: 2}]})")
    element = page.query_selector("p")
    both = page.evaluate("([h, {e}]) => [h.a[1].b, e.textContent]", [handle, {"e": element}])
    names = {name: value.json_value() for name, value in handle.get_properties().items()}
    return both, names, handle.as_element(), page.query_selector("q")


@snippet
def a_result_that_holds_itself(page: Page, site: str) -> Any:
    found = page.evaluate("() => { const a = [1]; a.push(a); return a; }")
    return found[0], found[1] is found


@snippet
def a_timeout_is_playwrights(page: Page, site: str) -> Any:
    page.goto(shown(site, ""))
    return raised(lambda: page.click("#none", timeout=50))


@snippet
def a_refused_navigation_is_playwrights(page: Page, site: str) -> Any:
    return raised(lambda: page.goto("http://127.0.0.1:1/"))


@snippet
def an_error_of_the_page_is_playwrights(page: Page, site: str) -> Any:
    return raised(lambda: page.evaluate("() => { throw new TypeError('mine'); }"))


@snippet
def a_wrong_argument_is_pythons(page: Page, site: str) -> Any:
    return raised(lambda: page.goto())[0], raised(lambda: page.nothing)[0]  # type: ignore[call-arg,attr-defined]


@snippet
def expect_response_by_its_address(page: Page, site: str) -> Any:
    page.goto(shown(site, ""))
    with page.expect_response("**/cookie/get") as info:
        page.evaluate("fetch('/cookie/get').then(r => r.text())")
    return info.value.status, info.is_done(), info.value is info.value


@snippet
def expect_response_by_a_predicate_that_asks_the_response(page: Page, site: str) -> Any:
    page.goto(shown(site, ""))
    with page.expect_response(lambda response: "slow" in response.text()) as info:
        page.evaluate("Promise.all(['/cookie/get', '/slow?ms=50'].map(u => fetch(u)))")
    return info.value.url.removeprefix(site)


@snippet
def expect_request_by_a_pattern(page: Page, site: str) -> Any:
    page.goto(shown(site, ""))
    with page.expect_request(re.compile(r"/status/\d+")) as info:
        page.evaluate("fetch('/status/404', {method: 'POST', body: 'x'})")
    return info.value.method, info.value.post_data


@snippet
def expect_popup_gives_a_page(page: Page, site: str) -> Any:
    page.goto(shown(site, "<a target=_blank href='/cookie/get'>x</a>"))
    with page.expect_popup() as info:
        page.click("a")
    popup = info.value
    popup.wait_for_load_state()
    assert popup.opener() is page
    return popup.url.removeprefix(site), len(page.context.pages), page.context.pages[1] is popup


@snippet
def expect_that_times_out_and_expect_whose_block_raises(page: Page, site: str) -> Any:
    def too_late() -> None:
        with page.expect_event("popup", timeout=50):
            pass

    def fails() -> None:
        with page.expect_event("popup", timeout=5_000):
            raise LookupError("mine")

    return raised(too_late), raised(fails)


@snippet
def a_predicate_that_raises_ends_the_wait(page: Page, site: str) -> Any:
    def predicate(response: Any) -> bool:
        raise LookupError(response.url.removeprefix(site))

    def wait() -> None:
        with page.expect_response(predicate):
            page.evaluate("fetch('/cookie/get').then(r => r.text())")

    page.goto(shown(site, ""))
    return raised(wait)[0]


@snippet
def wait_for_event_with_a_predicate(page: Page, site: str) -> Any:
    page.goto(shown(site, ""))
    page.evaluate("setInterval(() => { console.log('a'); console.log('b', {c: 1}); }, 20)")  # before and after the wait
    message = page.wait_for_event("console", lambda message: message.args[0].json_value() == "b")
    return message.text, [each.json_value() for each in message.args], message.page is page


@snippet
def events_come_in_their_order(page: Page, site: str) -> Any:
    seen: list[str] = []
    page.goto(f"{site}/cookie/get")  # what there was of the first page has been told
    page.on("request", lambda request: seen.append("> " + request.url.removeprefix(site)))
    page.on("response", lambda response: seen.append(f"< {response.status}"))
    once: list[bool] = []
    page.once("domcontentloaded", lambda of: once.append(of is page))
    page.goto(f"{site}/cookie/get")
    page.goto(f"{site}/status/404")
    page.wait_for_load_state()
    return [each for each in seen if "favicon" not in each], once


@snippet
def what_an_event_brought_before_the_answer_is_there_after_it(page: Page, site: str) -> Any:
    dialogs: list[tuple[str, str]] = []

    def answer(dialog: Any) -> None:
        dialogs.append((dialog.type, dialog.message))
        dialog.accept("yes")

    page.on("dialog", answer)
    page.goto(shown(site, ""))
    return page.evaluate("prompt('sure?')"), dialogs


@snippet
def a_listener_that_is_removed_hears_nothing(page: Page, site: str) -> Any:
    class Listener:
        heard = 0

        def hear(self, request: Request) -> None:
            self.heard += 1

    listener = Listener()
    page.on("request", listener.hear)
    page.goto(f"{site}/cookie/get")
    page.remove_listener("request", listener.hear)
    page.goto(f"{site}/cookie/get")
    return listener.heard


@snippet
def routes_fulfill_continue_and_fall_back(page: Page, site: str) -> Any:
    def twice(route: Route, request: Request) -> None:
        assert route.request is request
        route.fallback(headers={**request.headers, "x-seen": "1"})

    page.goto(shown(site, ""))
    page.route("**/made", lambda route: route.fulfill(status=201, body="made", headers={"x-by": "me"}))
    page.route("**/headers", lambda route: route.continue_())
    page.route("**/headers", twice)
    page.route(re.compile("gone"), lambda route: route.abort())
    made = page.evaluate("fetch('/made').then(async r => [r.status, await r.text(), r.headers.get('x-by')])")
    headers = page.evaluate("fetch('/headers').then(r => r.text())")
    gone = page.evaluate("fetch('/gone').catch(e => e.name)")
    page.unroute("**/made")
    return made, "x-seen: 1" in headers.lower(), gone, page.evaluate("fetch('/made').then(r => r.status)")


@snippet
def a_route_calls_the_page_and_fetches(page: Page, site: str) -> Any:
    seen = []

    def handle(route: Route) -> None:
        response = route.fetch(url=f"{site}/cookie/get")
        seen.append((page.evaluate("document.title"), response.status, page.url == shown(site, "<p>x</p>")))
        route.fulfill(response=response, body=response.text() + page.inner_text("p"))

    page.goto(shown(site, "<p>x</p>"))
    page.route(lambda url: url.endswith("/called"), handle)
    return "</p>x" in page.evaluate("fetch('/called').then(r => r.text())"), seen


@snippet
def a_route_waits_for_another_call_of_the_same_route(page: Page, site: str) -> Any:
    order = []

    def handle(route: Route) -> None:
        name = route.request.url.rpartition("/")[2]
        order.append(f"begin {name}")
        if name == "outer":
            order.append(page.evaluate("fetch('/nested/inner').then(r => r.text())"))
        route.fulfill(body=f"{name} body")  # what comes after it is not ordered with what its answer sets going

    page.goto(shown(site, ""))
    page.route("**/nested/*", handle)
    return page.evaluate("fetch('/nested/outer').then(r => r.text())"), order


@snippet
def functions_are_exposed(page: Page, site: str) -> Any:
    def fails() -> None:
        raise LookupError("mine")

    page.goto(shown(site, ""))
    page.expose_function("add", lambda a, b: a + b + page.evaluate("3"))
    page.expose_function("fails", fails)
    page.expose_binding("where", lambda source, x: [source["page"] is page, source["frame"] is page.main_frame, x])
    failed = page.evaluate("fails().catch(e => e.message)")
    return page.evaluate("add(1, 2)"), failed, page.evaluate("where({a: [1]})")


@snippet
def a_locator_handler_runs(page: Page, site: str) -> Any:
    page.goto(
        shown(site, "<div id=o style='position:fixed;inset:0'><b onclick='o.remove()'>x</b></div><button>y</button>")
    )
    handled = []

    def handle(overlay: Any) -> None:
        handled.append(overlay.count())
        overlay.locator("b").click()

    page.add_locator_handler(page.locator("#o"), handle)
    page.click("button")
    return handled, page.locator("#o").count()


@snippet
def a_download_is_saved(page: Page, site: str) -> Any:
    page.goto(shown(site, "<a download='a.txt' href='data:text/plain,hello'>x</a>"))
    with page.expect_download() as info:
        page.click("a")
    return info.value.suggested_filename, info.value.path().read_text(), info.value.failure()


@snippet
def a_file_is_chosen(page: Page, site: str) -> Any:
    page.goto(shown(site, "<input type=file>"))
    with page.expect_file_chooser() as info:
        page.click("input")
    info.value.set_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"})
    return page.evaluate("document.querySelector('input').files[0].text()"), info.value.is_multiple()


@snippet
def cookies_and_storage_of_the_context(page: Page, site: str) -> Any:
    page.context.add_cookies([{"name": "a", "value": "b", "url": site}])
    page.goto(f"{site}/cookie/set")
    state = page.context.storage_state()
    names = sorted(cookie["name"] for cookie in state["cookies"])
    return names, page.context.request.get(f"{site}/cookie/get").text().count("visitor=seen")


@snippet
def a_page_is_closed_by_its_block(page: Page, site: str) -> Any:
    closed = []
    with page.context.new_page() as second:
        second.on("close", lambda page: closed.append(page is second))
        second.goto(f"{site}/cookie/get")
    return second.is_closed(), closed, raised(second.title)[0], len(page.context.pages)


@snippet
def frames(page: Page, site: str) -> Any:
    page.goto(shown(site, "<iframe name=f src='/cookie/get'></iframe>"))
    frame = page.frame(url=lambda url: url.endswith("/cookie/get"))
    assert frame is not None
    inside = page.frame_locator("iframe").locator("p").count()
    return frame.name, frame.parent_frame is page.main_frame, frame in page.frames, inside, frame.page is page


@snippet
def a_web_socket_is_routed(page: Page, site: str) -> Any:
    def serve(socket: Any) -> None:
        socket.on_message(lambda text: socket.send(f"{text} {page.evaluate('2')}"))

    page.route_web_socket(re.compile("/ws$"), serve)
    page.goto(shown(site, ""))
    with page.expect_console_message() as info:
        page.evaluate(
            """() => { const s = new WebSocket(location.origin.replace('http', 'ws') + '/ws');
            s.onopen = () => s.send('hi'); s.onmessage = e => console.log(e.data); }"""
        )
    return info.value.text


@snippet
def wait_for_an_address(page: Page, site: str) -> Any:
    page.goto(shown(site, ""))
    page.evaluate("setTimeout(() => location.href = '/cookie/get', 20)")
    page.wait_for_url(lambda url: url.endswith("/cookie/get"))
    page.wait_for_function("document.title !== 'x'")
    return page.url.removeprefix(site)


@snippet
def text_of_an_object(page: Page, site: str) -> Any:
    page.goto(f"{site}/cookie/get")
    texts = repr(page), str(page.locator("p")), json.dumps(page.evaluate("({a: 1})")), type(page).__name__
    return [text.replace(site, "") for text in texts]
