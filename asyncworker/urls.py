"""URLs that may hold secrets: shown masked, taken apart without telling."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


def taken_apart(url: str) -> SplitResult:
    """urlsplit, without its own errors: they quote what they stumble over, which may be the password.

    A URL of sentinels names more than one host; its parts have no port.
    """
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2].split(",") if parts.scheme.endswith("+sentinel") else [parts.netloc]
        for host in hosts:
            _ = urlsplit(f"//{host}").port
    except ValueError:
        raise ValueError("that is no URL: its host or port cannot be read") from None
    return parts


#: How URLs of RabbitMQ begin.
RABBITMQ_SCHEMES = ("amqp", "amqps")


class SecretUrl:
    """A URL whose password, and whose query (a token, mostly), is shown by nothing but `.value`.

    `str()` and `repr()` give it with `***` in their place, so that no log line can leak it.
    """

    def __init__(self, value: str) -> None:
        self.value = value

    @property
    def is_rabbitmq(self) -> bool:
        """True when it names RabbitMQ."""
        return self.value.partition("://")[0].lower() in RABBITMQ_SCHEMES

    @property
    def parts(self) -> list[str]:
        """The URLs in it: RabbitMQ's hosts are given as several, separated by `;`."""
        if not self.is_rabbitmq:
            return [self.value]
        return [part.strip() for part in self.value.split(";") if part.strip()]

    @property
    def masked(self) -> str:
        return ";".join(_masked(part) for part in self.parts)

    def __str__(self) -> str:
        return self.masked

    def __repr__(self) -> str:
        return f"SecretUrl({self.masked!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretUrl) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from_text = core_schema.no_info_after_validator_function(cls, core_schema.str_schema())
        return core_schema.union_schema([core_schema.is_instance_schema(cls), from_text])


def _masked(url: str) -> str:
    try:
        parts = taken_apart(url)
    except ValueError:
        return "***"
    text = url
    if parts.password is not None:
        host = parts.netloc.rpartition("@")[2]
        text = text.replace(parts.netloc, f"{parts.username or ''}:***@{host}", 1)
    address, mark, query = text.partition("?")
    return address + mark + re.sub("=[^&]*", "=***", query)


@dataclass(frozen=True)
class Proxy:
    """A proxy in the parts that Playwright takes: `server` without credentials, then these."""

    server: str
    username: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        who = f"{self.username}:***@" if self.username else ""
        scheme, _, address = self.server.partition("://")
        return f"Proxy({scheme}://{who}{address})"

    def as_option(self) -> dict[str, str]:
        """As the `proxy` option of Playwright and invisible_playwright."""
        option = {"server": self.server}
        if self.username is not None:
            option |= {"username": self.username, "password": self.password or ""}
        return option

    def scrubbed(self, text: str) -> str:
        """`text` with `***` for the password, in whatever form another library may have written it."""
        if not self.password:
            return text
        pair = f"{self.username or ''}:{self.password}"
        forms = (base64.b64encode(pair.encode()).decode(), quote(self.password, safe=""), self.password)
        for form in forms:
            text = text.replace(form, "***")
        return text

    @classmethod
    def parse(cls, url: str) -> Proxy:
        """Take a proxy URL apart.

        Raises:
            ValueError: When the scheme is not http, https, socks4 or socks5, or host or port are missing.
        """
        parts = taken_apart(url)
        if parts.scheme not in {"http", "https", "socks4", "socks5"}:
            raise ValueError(f"a proxy URL starts with http, https, socks4 or socks5, not {parts.scheme!r}")
        if not parts.hostname or parts.port is None:
            raise ValueError("a proxy URL names a host and a port, as in http://user:password@proxy:8080")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        username = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password else None
        return cls(f"{parts.scheme}://{host}:{parts.port}", username, password)
