"""Paced actors whose pages are really asked for, and no browser is: a server's log sees what it would see of them."""

from __future__ import annotations

from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from asyncworker import Pace, Session, actor, get_broker
from asyncworker.fakes import Document, FakeEngine
from asyncworker.middleware import browsers_of


class Fetched(dict[str, Document]):
    """What a site answers, in place of documents that were written down."""

    def __contains__(self, url: object) -> bool:
        return True

    def __getitem__(self, url: str) -> Document:
        try:
            with urlopen(url, timeout=5) as answer:
                return _document(answer)
        except HTTPError as error:
            with error:
                return _document(error)


def _document(answer: Any) -> Document:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return Document(status=answer.status, headers=headers)


engine = FakeEngine()
engine.documents = Fetched()
browsers_of(get_broker())._engine = engine


@actor(actor_name="visit", pace=Pace(rate=10, per_ms=3_000, jitter=0.0), max_retries=0)
async def visit(session: Session, url: str, *, seed: int | None = None) -> None:
    await session.page.goto(f"{url}?seed={seed}")
