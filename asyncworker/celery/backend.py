"""The result backend `asyncworker://`: Celery's own for Redis, in the deployment's store."""

from __future__ import annotations

from typing import Any

from celery.backends.redis import RedisBackend

from asyncworker.celery.stores import SCHEME, store_of


class Backend(RedisBackend):
    """Celery's Redis backend over the connections of this package; keys and their contents are Celery's."""

    def __init__(self, *args: Any, url: str | None = None, **kwargs: Any) -> None:
        self._where = url
        super().__init__(*args, **kwargs)
        self.url = url or f"{SCHEME}://"

    def _get_pool(self, **params: Any) -> Any:
        return store_of(self._where).connection_pool

    def as_uri(self, include_password: bool = False) -> str:
        return f"{SCHEME}://"
