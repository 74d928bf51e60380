from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request as Query
from urllib.request import urlopen

import pytest

from asyncworker.demo.site import ShopSite
from tests.site import BehaviourSite
from tests.waiting import BUSY_S


@pytest.fixture
def site() -> Iterator[BehaviourSite]:
    with BehaviourSite(products=12) as site:
        yield site


def read(url: str, **headers: str) -> str:
    with urlopen(Query(url, headers=headers), timeout=10) as response:
        return str(response.read(), "utf-8")


def shop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shop-site")]


def test_the_list_page_links_every_product(site: ShopSite) -> None:
    numbers = re.findall(r'href="/products/(\d+)"', read(site.list_url))
    assert [int(number) for number in numbers] == list(range(1, 13))


def test_a_product_page_shows_its_title_and_has_its_price_in_the_scripts_data_only(site: ShopSite) -> None:
    product = site.product(3)
    text = read(site.product_url(3))
    assert f"<h1>{product.title}</h1>" in text
    assert text.count(product.price) == 1
    assert f'<p class="price" data-price="{product.price}"></p>' in text


def test_products_differ_and_are_the_same_in_every_run() -> None:
    with ShopSite(products=40) as one, ShopSite(products=40) as another:
        products = [one.product(number) for number in range(1, 41)]
        assert products == [another.product(number) for number in range(1, 41)]
        assert one.url != another.url
    assert len({product.title for product in products}) == 40
    assert len({product.price for product in products}) == 40
    assert all(re.fullmatch(r"\$\d{1,3}\.\d\d", product.price) for product in products)


@pytest.mark.parametrize("number", [0, 13, -1])
def test_there_is_no_other_product(site: ShopSite, number: int) -> None:
    with pytest.raises(ValueError, match=f"no product {number}: they are numbered 1 to 12"):
        site.product(number)
    with pytest.raises(HTTPError, match="404"):
        read(site.product_url(number))


def test_requests_are_counted_by_path(site: ShopSite) -> None:
    for _ in range(3):
        read(site.product_url(1) + "?again")
    read(site.list_url)
    assert site.requests == {"/products/1": 3, "/": 1}


def test_the_favicon_is_answered_without_a_body(site: ShopSite) -> None:
    with urlopen(f"{site.url}/favicon.ico", timeout=10) as response:
        assert (response.status, response.read()) == (204, b"")


def test_a_connection_is_kept_alive_over_requests_and_answers_without_a_body(site: ShopSite) -> None:
    connection = http.client.HTTPConnection(urlsplit(site.url).netloc, timeout=10)
    try:
        sockets = set()
        for path in ("/", "/favicon.ico", "/products/1", "/nowhere", "/status/204", "/products/2"):
            connection.request("GET", path)
            connection.getresponse().read()
            sockets.add(id(connection.sock))
        assert len(sockets) == 1
        assert connection.sock is not None
    finally:
        connection.close()


def test_stopping_is_prompt_and_leaves_no_thread_whatever_the_connections_wait_for() -> None:
    before = shop_threads()
    with BehaviourSite() as site:
        host, port = site.url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(3)]
        held = [socket.create_connection((host, int(port))) for _ in range(3)]
        for path, waiting in zip(("/never", "/slow?ms=60000", "/never"), held, strict=True):
            waiting.sendall(f"GET {path} HTTP/1.1\r\nHost: shop\r\n\r\n".encode())
        deadline = time.monotonic() + 30
        while site.requests.total() < 3 or len(shop_threads()) < len(before) + 7:
            assert time.monotonic() < deadline, "the connections were not taken"
            time.sleep(0.005)
        started = time.monotonic()
    stopping = time.monotonic() - started
    for connection in idle + held:
        connection.close()
    assert stopping < BUSY_S
    assert shop_threads() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_stopping_twice_or_before_the_start_is_harmless() -> None:
    never_started = ShopSite()
    never_started.stop()
    never_started.stop()
    with ShopSite() as site:
        site.stop()
    assert shop_threads() == []


def test_an_error_in_a_page_is_shown_and_the_site_goes_on(
    site: BehaviourSite, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(http.client.RemoteDisconnected):
        read(f"{site.url}/slow?ms=soon")
    assert "invalid literal" in capsys.readouterr().err
    assert "Everything" in read(site.list_url)


def test_cookies_are_set_and_shown(site: BehaviourSite) -> None:
    with urlopen(f"{site.url}/cookie/set", timeout=10) as response:
        assert response.headers["Set-Cookie"] == "visitor=seen; Path=/"
    assert "visitor=seen" in read(f"{site.url}/cookie/get", Cookie="visitor=seen")
    assert "visitor" not in read(f"{site.url}/cookie/get")


def test_a_status_comes_with_its_retry_after(site: BehaviourSite) -> None:
    with pytest.raises(HTTPError) as caught:
        read(f"{site.url}/status/429?retry_after=20")
    assert (caught.value.code, caught.value.headers["Retry-After"]) == (429, "20")
    caught.value.close()


def test_a_redirect_leads_where_it_is_told_to(site: BehaviourSite) -> None:
    assert "No. 2" in read(f"{site.url}/redirect?to={site.product_url(2)}")
