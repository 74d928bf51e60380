"""The stand-in's network: cookies of a context, and plain HTTP without any proxy of the environment."""

from __future__ import annotations

import base64
import email.utils
import http.client
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: As many as Firefox follows.
MAX_REDIRECTS = 20


@dataclass
class Exchange:
    """One request and its response."""

    url: str
    sent: dict[str, str]
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


class CookieJar:
    """The cookies of one context, in the protocol's own form."""

    def __init__(self) -> None:
        self._cookies: dict[tuple[str, str, str], dict[str, Any]] = {}

    def add(self, cookie: dict[str, Any]) -> None:
        url = urllib.parse.urlsplit(cookie.get("url") or "")
        domain, path = cookie.get("domain") or url.hostname or "", cookie.get("path") or "/"
        expires = cookie.get("expires", -1)
        key = (domain, path, cookie["name"])
        self._cookies.pop(key, None)
        if expires != -1 and expires <= time.time():
            return
        self._cookies[key] = {
            "name": cookie["name"],
            "value": cookie["value"],
            "domain": domain,
            "path": path,
            "expires": expires,
            "size": len(cookie["name"]) + len(cookie["value"]),
            "httpOnly": bool(cookie.get("httpOnly")),
            "secure": bool(cookie.get("secure")),
            "session": expires == -1,
            "sameSite": cookie.get("sameSite") or "Lax",
        }

    def add_header(self, text: str, url: str, *, from_script: bool = False) -> None:
        """A `Set-Cookie` header, or what a script gave `document.cookie`."""
        first, *rest = (part.strip() for part in text.split(";"))
        name, _, value = first.partition("=")
        said = {key.strip().lower(): value.strip() for key, _, value in (part.partition("=") for part in rest)}
        if from_script and "httponly" in said:
            return
        expires = -1.0
        if "max-age" in said:
            expires = time.time() + float(said["max-age"])
        elif "expires" in said:
            expires = email.utils.parsedate_to_datetime(said["expires"]).timestamp()
        domain = "." + said["domain"].lstrip(".") if said.get("domain") else urllib.parse.urlsplit(url).hostname
        self.add({
            "name": name.strip(), "value": value.strip(), "domain": domain, "path": said.get("path") or "/",
            "expires": expires, "httpOnly": "httponly" in said, "secure": "secure" in said,
            "sameSite": (said.get("samesite") or "Lax").capitalize(),
        })  # fmt: skip

    def all(self) -> list[dict[str, Any]]:
        now = time.time()
        return [dict(one) for one in list(self._cookies.values()) if one["session"] or one["expires"] > now]

    def clear(self) -> None:
        self._cookies.clear()

    def header(self, url: str, *, for_script: bool = False) -> str:
        """What a request to `url` carries."""
        parts = urllib.parse.urlsplit(url)
        host, path = parts.hostname or "", parts.path or "/"
        fitting = [
            one for one in self.all()
            if _covers(one["domain"], host) and _leads(one["path"], path) and not (for_script and one["httpOnly"])
            and (not one["secure"] or parts.scheme == "https" or host in ("127.0.0.1", "localhost"))
        ]  # fmt: skip
        return "; ".join(f"{one['name']}={one['value']}" for one in fitting)


def _covers(domain: str, host: str) -> bool:
    return host == domain.lstrip(".") or (domain.startswith(".") and host.endswith(domain))


def _leads(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(prefix.rstrip("/") + "/")


@dataclass
class Fetcher:
    """Fetches pages for one context.

    Parameters:
        proxy: The protocol's own proxy command, when one was given; only type `http` for `http:` pages is honoured.
    """

    cookies: CookieJar
    user_agent: Callable[[], str]
    extra_headers: list[tuple[str, str]] = field(default_factory=list)
    proxy: dict[str, Any] | None = None

    def hops(self, url: str, told: Callable[[str, dict[str, str]], None]) -> list[Exchange]:
        """The exchanges from `url` to where its redirects lead.

        Parameters:
            told: Is called with address and headers before each request.
        """
        exchanges: list[Exchange] = []
        while len(exchanges) <= MAX_REDIRECTS:
            exchange = self._exchange(url, told)
            exchanges.append(exchange)
            location = exchange.header("location")
            if exchange.status not in (301, 302, 303, 307, 308) or not location:
                return exchanges
            url = urllib.parse.urljoin(url, location)
        raise OSError("NS_ERROR_REDIRECT_LOOP")

    def _exchange(self, url: str, told: Callable[[str, dict[str, str]], None]) -> Exchange:
        parts = urllib.parse.urlsplit(url)
        headers = {"User-Agent": self.user_agent(), "Accept": "text/html,*/*", "Connection": "close"}
        headers.update(dict(self.extra_headers))
        if carried := self.cookies.header(url):
            headers["Cookie"] = carried
        told(url, headers)
        connection = self._connection(parts)
        try:
            target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
            asked, sent = (url, headers | _authorization(self.proxy)) if self.proxy else (target, headers)
            connection.request("GET", asked, headers=sent)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        for value in response.headers.get_all("Set-Cookie") or []:
            self.cookies.add_header(value, url)
        return Exchange(url, headers, response.status, response.reason, response.getheaders(), body)

    def _connection(self, parts: urllib.parse.SplitResult) -> http.client.HTTPConnection:
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.netloc)
        if self.proxy:
            return http.client.HTTPConnection(self.proxy["host"], self.proxy["port"])
        return http.client.HTTPConnection(parts.netloc)


def _authorization(proxy: dict[str, Any] | None) -> dict[str, str]:
    if not proxy or not proxy.get("username"):
        return {}
    pair = f"{proxy['username']}:{proxy.get('password') or ''}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
