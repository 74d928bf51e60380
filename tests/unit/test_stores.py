"""URLs of stores: what each means, and which are refused before anything connects."""

from __future__ import annotations

import re

import pytest

from asyncworker.errors import ConfigurationError
from asyncworker.settings import load
from asyncworker.stores import StoreAddress
from asyncworker.urls import SecretUrl
from asyncworker.vetting import PERMISSIONS
from tests import readme

README = readme.README.read_text()


@pytest.mark.parametrize(
    ("url", "shape", "options"),
    [
        ("redis://h", "single server", {"host": "h"}),
        ("redis://:p%40ss@h:1/2", "single server", {"host": "h", "port": 1, "db": 2, "password": "p@ss"}),
        ("redis://u:p@[::1]:1?db=3", "single server", {"host": "::1", "port": 1, "db": 3, "username": "u"}),
        ("redis://h?socket_timeout=5", "single server", {"socket_timeout": 5.0}),
        ("rediss://h/1?ssl_ca_certs=/ca.pem", "single server, TLS", {"db": 1, "ssl_ca_certs": "/ca.pem"}),
        ("unix:///run/v.sock?db=4", "unix socket", {"path": "/run/v.sock", "db": 4}),
        ("unix://u:p@/run/v.sock", "unix socket", {"path": "/run/v.sock", "username": "u", "password": "p"}),
        ("redis+sentinel://u:p@a:1,b/shop/5", "shop behind 2 sentinels", {"db": 5, "username": "u", "password": "p"}),
        ("rediss+sentinel://a/shop", "shop behind 1 sentinel, TLS", {}),
    ],
)
def test_a_url_says_where_and_how_to_connect(url: str, shape: str, options: dict[str, object]) -> None:
    address = StoreAddress.parse(url)
    assert address.shape == shape
    assert {name: address.options.get(name) for name in options} == options


def test_sentinels_have_hosts_and_passwords_of_their_own() -> None:
    query = "sentinel_username=w&sentinel_password=s&ssl_ca_certs=/ca.pem"
    address = StoreAddress.parse(f"rediss+sentinel://u:p@a:1,[::1]:2,c/my%20shop/0?{query}")
    assert address.sentinels == (("a", 1), ("::1", 2), ("c", 26379))
    assert address.service == "my shop"
    assert address.sentinel_options == {"username": "w", "password": "s", "ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert "host" not in address.options
    assert "s" not in [value for name, value in address.options.items() if "password" in name]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis+cluster://h/0", "the broker is a cluster"),
        ("rediss+cluster://h/0", "the broker is a cluster"),
        ("sentinel://h/shop", r"redis\+sentinel://user:password@host"),
        ("http://h", "starts with redis://"),
        ("h:6379", "starts with redis://"),
        ("redis://h:port/0", "host or port"),
        ("redis://h/zero", "a database is a number"),
        ("redis://h/1/2", "a database is a number"),
        ("redis+sentinel://h", "names each of them and the service"),
        ("redis+sentinel://h,/shop", "names each of them and the service"),
        ("redis+sentinel://h/shop/zero", "a database is a number"),
        ("unix://", "names a socket"),
        ("redis://:hunter2#2@h/0", "%23|host or port"),
        ("redis://h?socket_timout=9", "the nearest is socket_timeout"),
        ("redis://h?socket_timeout=1", "at least 5"),
        ("redis://h?db=hunter2", "not of its kind"),
        ("redis://h?decode_responses=1", "no option of a broker URL"),
        ("redis://h?ssl_ca_certs=/ca.pem", "start with rediss"),
        ("rediss://h?ssl_cert_reqs=maybe", "none, optional or required"),
        ("redis://h?sentinel_password=hunter2", "no option of a broker URL"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_a_sentence_and_without_its_password(url: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as refused:
        load({}, broker_url=url)
    assert "ASYNCWORKER_BROKER_URL" in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["redis://u:hunter2@h/0", "redis+sentinel://u:hunter2@a:1,b:2/shop/0?sentinel_password=hunter2"]
)
def test_no_password_is_shown(url: str) -> None:
    for shown in (str(SecretUrl(url)), repr(StoreAddress.parse(url))):
        assert "hunter2" not in shown
    assert str(SecretUrl(url)).startswith(url.partition("u:")[0])


def test_the_urls_and_the_permissions_of_the_readme_are_these() -> None:
    table = README.partition("<!-- stores:")[2].partition("\n\n")[0]
    urls = [url for url in re.findall(r"`(\w+(?:\+\w+)?://[^`]*)`", table) if "…" not in url]
    shapes = [StoreAddress.parse(url).shape for url in urls]
    assert shapes == [
        "single server",
        "single server, TLS",
        "single server, TLS",
        "unix socket",
        "mymaster behind 3 sentinels",
    ]
    assert f"`{PERMISSIONS}`" in README
