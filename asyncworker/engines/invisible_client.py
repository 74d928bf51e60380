"""The client of invisible_playwright as this package needs it, and the few places of its inside that are touched.

All that is read or written here beside its public interface is in this module. The client is pinned by its own
core's version; a test fails when one of these places has moved.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from asyncworker import processes
from asyncworker.engines.importing import import_quietly
from asyncworker.identity import Identity
from asyncworker.settings import Settings
from asyncworker.urls import Proxy


def create(settings: Settings, identity: Identity, token: processes.Token, executable: Path | None) -> Any:
    """The client of one launch; drawing its identity takes some ms, its import half a second.

    Parameters:
        executable: The engine's. It is always given: without one the client may begin to download its engine, on
            the loop, for half an hour.
    """
    base: Any = import_quietly("invisible_playwright.async_api").InvisiblePlaywright

    class Client(base):  # type: ignore[misc]  # its type is not known here
        """The client, whose browser carries our token beside its own, and whose screen is up before its launch."""

        def prepare(self) -> None:
            """Start the virtual screen; blocks, for up to 30 s. Call it in a thread."""
            self._without_window = super()._resolve_headless()

        def _resolve_headless(self) -> bool:
            return bool(self._without_window)

        def _build_env(self, prefs: Any) -> dict[str, str]:
            environment: dict[str, str] = super()._build_env(prefs)
            return environment | {processes.VARIABLE: str(token)}

    return Client(
        seed=identity.seed,
        pin=dict(identity.pins) or None,
        headless=settings.headless,
        proxy=Proxy.parse(identity.proxy).as_option() if identity.proxy else None,
        extra_args=list(settings.launch_args),
        humanize=settings.humanize,
        locale=identity.locale or "auto",
        timezone=identity.timezone or "",
        binary_path=None if executable is None else str(executable),
    )


#: The calls that the running code waits for now.
_sent: ContextVar[list[Any] | None] = ContextVar("asyncworker_sent", default=None)


def count_abandoned(client: Any) -> None:
    """Let the connection of a launched client mark the calls whose waiter is cancelled; `abandoned` counts them.

    The client itself leaves them pending when `asyncio.timeout` or a cancelled task gives them up. Their answer,
    when it comes, is dropped by it like that of any cancelled call.
    """
    connection = _connection(client)
    wrap_api_call, send = connection.wrap_api_call, connection._send_message_to_server

    async def marking(*args: Any, **kwargs: Any) -> Any:
        calls: list[Any] = []
        token = _sent.set(calls)
        try:
            return await wrap_api_call(*args, **kwargs)
        except asyncio.CancelledError:
            for call in calls:
                call.future.cancel()
            raise
        finally:
            _sent.reset(token)

    def sending(*args: Any, **kwargs: Any) -> Any:
        call = send(*args, **kwargs)
        if (calls := _sent.get()) is not None:
            calls.append(call)
        return call

    connection.wrap_api_call = marking
    connection._send_message_to_server = sending


def abandoned(client: Any) -> int:
    """How many of its calls were cancelled and have not been answered: each holds a thread, or waits for one."""
    connection = _connection(client)
    if connection is None:
        return 0
    return sum(callback.future.cancelled() for callback in list(connection._callbacks.values()))


def make_exit_quick(client: Any) -> None:
    """Let the exit of a client whose browser is gone wait for nothing.

    It would ask the browser to close once more, and then wait, on the loop, up to 5 s for each of its threads: one
    that is in `page.wait_for_timeout` sleeps on. They are told to end, and do so when they can.
    """
    client._browser = None
    connection = _connection(client)
    if connection is None:
        return
    transport = connection._transport
    request_stop = transport.request_stop

    def request_stop_and_forget_threads() -> None:
        request_stop()
        transport._threads.clear()

    transport.request_stop = request_stop_and_forget_threads


def _connection(client: Any) -> Any:
    playwright = client._pw
    return None if playwright is None else playwright._impl_obj._connection
