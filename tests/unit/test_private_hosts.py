from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncworker.private_hosts import Hosts, private_kind, resolved

PUBLIC = "93.184.216.34"


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("127.255.0.3", "loopback"),
        ("::1", "loopback"),
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
        ("0.1.2.3", "reserved"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("fd00::1", "private"),
        ("fec0::1", "private"),
        ("169.254.169.254", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("100.64.0.1", "carrier's NAT"),
        ("100.127.255.255", "carrier's NAT"),
        ("192.0.0.9", "reserved"),
        ("192.0.2.1", "documentation"),
        ("2001:db8::1", "documentation"),
        ("198.19.0.1", "benchmarks"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "reserved"),
        ("::ffff:10.0.0.1", "private"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::127.0.0.1", "reserved"),
        ("64:ff9b::7f00:1", "loopback"),
        ("64:ff9b::a9fe:a9fe", "link-local"),
        ("64:ff9b:1::808:808", "reserved"),
        ("2002:a00:1::1", "reserved"),
        ("2001::1", "reserved"),
        ("100::1", "reserved"),
        ("5f00::1", "reserved"),
    ],
)
def test_an_address_that_is_not_public_is_said_to_be_what_it_is(address: str, kind: str) -> None:
    assert kind in (private_kind(address) or "")


@pytest.mark.parametrize(
    "address",
    [
        PUBLIC,
        "8.8.8.8",
        "100.63.255.255",
        "100.128.0.1",
        "172.15.0.1",
        "172.32.0.1",
        "169.253.0.1",
        "223.255.255.255",
        "2606:4700:4700::1111",
        "2a00:1450:4001::200e",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
    ],
)
def test_a_public_address_is_public(address: str) -> None:
    assert private_kind(address) is None


@given(st.ip_addresses())
def test_nothing_is_public_that_the_standard_library_calls_private(address: IPv4Address | IPv6Address) -> None:
    if private_kind(str(address)) is None:
        inner = getattr(address, "ipv4_mapped", None) or address
        assert inner.is_global
        assert not inner.is_multicast


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0x7f000001",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.1.",
        "%3127.0.0.1",
        "１２７.0.0.1",
        "127。0。0。1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "localhost",
        "LOCALHOST",
        "localhost.",
        "shop.localhost",
        "user:password@localhost",
        "0",
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https", "ws", "wss"])
async def test_every_spelling_of_loopback_is_found_without_asking_for_a_name(scheme: str, host: str) -> None:
    async def unasked(host: str) -> list[str]:
        raise AssertionError(f"{host} was resolved")

    objection = await Hosts(resolve=unasked).objection(f"{scheme}://{host}:8080/path")
    assert objection is not None
    assert "loopback" in objection or "unspecified" in objection


class Names:
    """A resolver that knows some names and counts the questions."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.addresses = addresses
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        return self.addresses.get(host.partition(".")[0], [])


async def test_one_private_address_among_public_ones_is_enough() -> None:
    hosts = Hosts(resolve=Names(mixed=[PUBLIC, "2606:4700::1", "10.0.0.7"], public=[PUBLIC]))
    assert await hosts.objection("https://mixed.example/") == "mixed.example is 10.0.0.7: a private address"
    assert await hosts.objection("https://public.example/") is None


async def test_a_name_is_resolved_once_but_asked_again_while_it_does_not_resolve() -> None:
    names = Names(known=[PUBLIC])
    hosts = Hosts(resolve=names)
    for _ in range(3):
        await hosts.objection("https://known.example/a")
        await hosts.objection("https://unknown.example/")
    assert names.asked.count("known.example") == 1
    assert names.asked.count("unknown.example") == 3


async def test_a_name_that_does_not_resolve_is_left_to_the_browser_to_report() -> None:
    assert await Hosts(resolve=Names()).objection("https://nowhere.example/") is None


@pytest.mark.parametrize("url", ["data:text/html,x", "blob:http://127.0.0.1/x", "about:blank", "file:///etc/hosts"])
async def test_a_url_that_reaches_no_host_has_nothing_against_it(url: str) -> None:
    assert await Hosts(resolve=Names()).objection(url) is None


async def test_the_machines_own_resolver_gives_every_address_or_none() -> None:
    assert await resolved("localhost") == [
        entry[4][0] for entry in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)
    ]
    assert await asyncio.wait_for(resolved("a" * 64 + ".invalid"), 10) == []


async def test_the_address_of_an_answer_is_read_as_browsers_write_it() -> None:
    hosts = Hosts()
    assert hosts.objection_to_answer("[::1]") == "[::1] answered: a loopback address"
    assert hosts.objection_to_answer("::1") == "::1 answered: a loopback address"
    assert hosts.objection_to_answer("[2606:4700:4700::1111]") is None
    assert hosts.objection_to_answer(PUBLIC) is None
    assert hosts.objection_to_answer("somewhere") == "somewhere answered: no address that can be read"
