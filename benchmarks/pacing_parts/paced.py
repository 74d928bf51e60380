"""The actors of pacing.py: they go to a page. Without a browser it is asked for all the same, by the fake engine."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from declared import declare

from asyncworker import get_broker
from asyncworker.fakes import Document, FakeEngine
from asyncworker.middleware import browsers_of

parameters = json.loads(Path("parameters.json").read_text())


class Fetched(dict[str, Document]):
    """What the sites answer, in place of documents that were written down; each has one connection."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: dict[str, HTTPConnection] = {}

    def __contains__(self, url: object) -> bool:
        return True

    def __getitem__(self, url: str) -> Document:
        parts = urlsplit(url)
        connection = self._connections.setdefault(parts.netloc, HTTPConnection(parts.netloc, timeout=10))
        try:
            connection.request("GET", parts.path)
            with connection.getresponse() as answer:
                answer.read()
                return Document(
                    status=answer.status, headers={name.lower(): text for name, text in answer.getheaders()}
                )
        except (OSError, HTTPException):
            connection.close()
            raise


if parameters["engine"] == "fake":
    engine = FakeEngine()
    engine.documents = Fetched()
    browsers_of(get_broker())._engine = engine

declare(get_broker(), parameters["per_minute"])
