"""A small shop on loopback, for the demo, the examples and the tests: a list page and its products.

A product's price is filled in by a script after some 20 ms, as shops do, so that whoever reads the page too
early finds none. Everything served follows from the product's number: a result can be compared with
`ShopSite.product(n)`.
"""

from __future__ import annotations

import html
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

#: After this many ms a product page's script fills in the price.
PRICE_DELAY_MS = 20


@dataclass(frozen=True)
class Product:
    """A product as the site serves it."""

    number: int
    kind: str
    title: str
    price: str
    maker: str
    hue: int


@dataclass(frozen=True)
class Request:
    """A request, as far as the site looks at it."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Response:
    """What the site answers."""

    body: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class ShopSite:
    """The shop, served on a free port of loopback while the `with` block runs.

    Parameters:
        products: How many there are, numbered from 1.
        host: The loopback address to listen on.

    A subclass adds paths by overriding `respond`.
    """

    def __init__(self, products: int = 40, *, host: str = "127.0.0.1") -> None:
        self.products = products
        self.requests: Counter[str] = Counter()
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server((host, 0), partial(_Handler, self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="shop-site", daemon=True)
        self.url = f"http://{host}:{self._server.server_port}"

    @property
    def list_url(self) -> str:
        return f"{self.url}/"

    def product_url(self, number: int) -> str:
        return f"{self.url}/products/{number}"

    def product(self, number: int) -> Product:
        """The product of that number, as its page shows it.

        Raises:
            ValueError: When there is none.
        """
        if not 1 <= number <= self.products:
            raise ValueError(f"there is no product {number}: they are numbered 1 to {self.products}")
        kind = list(_PICTURES)[number % len(_PICTURES)]
        return Product(
            number=number,
            kind=kind,
            title=f"{_STYLES[number % len(_STYLES)]} {kind} No. {number}",
            price=f"${number * 37 % 180 + 9}.{number * 13 % 10}{'05'[number % 2]}",
            maker=_MAKERS[number % len(_MAKERS)],
            hue=number * 47 % 360,
        )

    def respond(self, request: Request) -> Response:
        """The answer to a request; runs in a thread of the request's connection."""
        if request.path == "/":
            return Response(_list_page([self.product(n) for n in range(1, self.products + 1)]))
        if request.path == "/favicon.ico":
            return Response(status=204)
        head, _, number = request.path.rpartition("/")
        if head == "/products" and number.isdecimal() and 1 <= int(number) <= self.products:
            product = self.product(int(number))
            others = [self.product((product.number + step) % self.products + 1) for step in (2, 6, 12, 20)]
            return Response(_product_page(product, others))
        return Response(_page("Not found", "<main><h1>There is nothing here</h1></main>"), status=404)

    def answer(self, request: Request) -> Response:
        """Count the request and answer it."""
        with self._lock:
            self.requests[request.path] += 1
        return self.respond(request)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening, cut every connection and wait for the threads; may be called twice."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.cut_connections()


class _Server(ThreadingHTTPServer):
    """One thread for each connection, all of them known, so that `cut_connections` can end them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._connections: dict[threading.Thread, socket.socket] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="shop-site-connection",
            daemon=True,
        )
        for ended in [known for known in self._connections if not known.is_alive()]:
            del self._connections[ended]
        thread.start()
        self._connections[thread] = request

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser that leaves early is no news
            super().handle_error(request, client_address)

    def cut_connections(self, *, timeout_ms: int = 5_000) -> None:
        deadline = time.monotonic() + timeout_ms / 1000
        for connection in self._connections.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            except OSError:
                continue  # it was closed already
        for thread in self._connections:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave in one packet

    def __init__(self, site: ShopSite, *args: Any) -> None:
        self._site = site
        super().__init__(*args)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        request = Request(parts.path, dict(parse_qsl(parts.query)), dict(self.headers.items()))
        response = self._site.answer(request)
        body = response.body.encode()
        self.send_response(response.status)
        headers = {"Content-Type": "text/html; charset=utf-8"} | dict(response.headers)
        for name, value in headers.items():
            self.send_header(name, value)
        if response.status in (204, 304):
            body = b""  # these have none, not even an empty one with a length
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: `ShopSite.requests` counts instead."""


_STYLES = ("Oak", "Linen", "Granite", "Copper", "Birch", "Slate", "Amber", "Walnut", "Indigo")
_MAKERS = (
    "Holm & Daughters",
    "Studio Aalto",
    "Vik Works",
    "Petra Lind",
    "Northgate",
    "Ebba Strand",
    "Kiln 9",
)

#: Product kind -> its drawing; `currentColor` is the product's own colour.
_PICTURES = {
    "Lamp": '<path fill="currentColor" d="M74 40h52l26 62H48z"/><path d="M96 102h8v52h-8z"/>'
    '<rect x="66" y="152" width="68" height="10" rx="5"/>',
    "Vase": '<path fill="currentColor" d="M84 40h32v22c0 14 30 28 30 62 0 24-18 38-46 38s-46-14-46-38'
    'c0-34 30-48 30-62z"/><rect x="78" y="34" width="44" height="10" rx="5"/>',
    "Mug": '<rect x="52" y="62" width="80" height="96" rx="12" fill="currentColor"/>'
    '<path d="M132 82h14a24 24 0 0 1 0 48h-14v-12h12a12 12 0 0 0 0-24h-12z"/>',
    "Chair": '<rect x="58" y="38" width="12" height="124" rx="4"/>'
    '<rect x="130" y="98" width="12" height="64" rx="4"/>'
    '<rect x="58" y="94" width="84" height="16" rx="6" fill="currentColor"/>'
    '<rect x="58" y="44" width="60" height="34" rx="8" fill="currentColor"/>',
    "Clock": '<circle cx="100" cy="100" r="62"/><circle cx="100" cy="100" r="52" fill="currentColor"/>'
    '<path d="M97 62h6v36l24 22-5 5-25-23z" fill="#fff"/>',
}

_STYLE_SHEET = """
*{box-sizing:border-box}body{margin:0;font:16px/1.5 system-ui,sans-serif;color:#23272b;background:#f6f4f0}
a{color:inherit;text-decoration:none}header{display:flex;justify-content:space-between;align-items:center;
padding:18px 40px;background:#fff;border-bottom:1px solid #e5e1d9}header b{font-size:20px;letter-spacing:.02em}
nav{display:flex;gap:22px;color:#6b7075}main{max-width:1080px;margin:32px auto;padding:0 24px}
h1{font-size:32px;line-height:1.2;margin:0 0 8px}h2{font-size:18px;margin:40px 0 14px}.quiet{color:#6b7075}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:18px;list-style:none;margin:0;
padding:0}.card{display:block;height:100%;background:#fff;border:1px solid #e5e1d9;border-radius:12px;
overflow:hidden}.card:hover{border-color:#9aa0a6}.card span{display:block;padding:12px 14px 0;font-size:15px;
font-weight:600;white-space:nowrap}.card small{display:block;padding:0 14px 14px;color:#6b7075}
svg{display:block;width:100%}.product{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:48px}
.product svg{border-radius:16px}.price{font-size:28px;font-weight:700;min-height:42px;margin:16px 0}
button{font:inherit;font-weight:600;color:#fff;background:#23272b;border:0;border-radius:10px;
padding:14px 26px}table{border-collapse:collapse;width:100%;margin-top:28px}td,th{padding:9px 0;
border-top:1px solid #e5e1d9;text-align:left;font-weight:400}th{color:#6b7075;width:40%}
footer{padding:32px 40px;color:#6b7075;font-size:14px}
@media(max-width:640px){.product{grid-template-columns:1fr}header{padding:16px 20px}nav{display:none}}
"""

_PRICE_SCRIPT = f"""<script>
setTimeout(() => {{
  const price = document.querySelector(".price");
  price.textContent = price.dataset.price;
}}, {PRICE_DELAY_MS});
</script>"""


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)} – Holm Goods</title><style>{_STYLE_SHEET}</style></head><body>"
        '<header><a href="/"><b>Holm Goods</b></a><nav><a href="/">Shop</a><span>Journal</span>'
        f"<span>Stores</span><span>Basket (0)</span></nav></header>{body}"
        "<footer>Holm Goods is a shop of this machine only: nothing in it is for sale.</footer></body></html>"
    )


def _picture(product: Product) -> str:
    return (
        f'<svg viewBox="0 0 200 200" role="img" aria-label="{html.escape(product.title)}" '
        f'style="color:hsl({product.hue} 45% 52%)"><rect width="200" height="200" '
        f'fill="hsl({product.hue} 40% 92%)"/><ellipse cx="100" cy="166" rx="62" ry="8" fill="#0001"/>'
        f'<g fill="#3a3f44">{_PICTURES[product.kind]}</g></svg>'
    )


def _cards(products: list[Product]) -> str:
    cards = (
        f'<li><a class="card" href="/products/{product.number}">{_picture(product)}'
        f"<span>{html.escape(product.title)}</span><small>{html.escape(product.maker)}</small></a></li>"
        for product in products
    )
    return f'<ul class="grid">{"".join(cards)}</ul>'


def _list_page(products: list[Product]) -> str:
    heading = f'<h1>Everything we make</h1><p class="quiet">{len(products)} things for the house.</p>'
    return _page("Shop", f"<main>{heading}{_cards(products)}</main>")


def _product_page(product: Product, others: list[Product]) -> str:
    title, maker = html.escape(product.title), html.escape(product.maker)
    facts = {
        "Article": f"HG-{product.number:04}",
        "Made by": maker,
        "Weight": f"{0.4 + product.number % 17 * 0.3:.1f} kg",
        "Leaves us in": f"{product.number % 4 + 1} days",
        "Warranty": "5 years",
    }
    rows = "".join(f"<tr><th>{name}</th><td>{fact}</td></tr>" for name, fact in facts.items())
    return _page(
        product.title,
        f'<main><p class="quiet"><a href="/">Shop</a> / {product.kind}s / {title}</p><div class="product">'
        f'<div>{_picture(product)}</div><div><h1>{title}</h1><p class="maker quiet">by {maker}</p>'
        f'<p class="price" data-price="{html.escape(product.price)}"></p>'
        f"<p>Made in small numbers, finished by hand, and meant to be used every day.</p>"
        f"<button>Add to basket</button><table>{rows}</table></div></div>"
        f"<h2>Goes well with it</h2>{_cards(others)}</main>{_PRICE_SCRIPT}",
    )
