"""The sites, in a process of their own, with a log: a line with the time, the site and the status for each request.

Prints the URLs of three sites. Told `refuse N S`, it answers the next request to site N with 429 and Retry-After S.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TextIO

SITES = 3
BODY = b"<!doctype html><title>p</title><p>p</p>"


class Sites:
    def __init__(self, log: TextIO) -> None:
        self._log = log
        self._refusals: dict[int, int] = {}

    async def serve(self) -> None:
        servers = [
            await asyncio.start_server(lambda *streams, site=site: self._connected(site, *streams), "127.0.0.1", 0)
            for site in range(SITES)
        ]
        print(*(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/p" for server in servers), flush=True)
        told = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
        while line := await told.readline():
            _, site, seconds = line.split()
            self._refusals[int(site)] = int(seconds)
            print("ok", flush=True)

    async def _connected(self, site: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                writer.write(self._answer(site, head.split(b" ", 2)[1].decode()))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, site: int, path: str) -> bytes:
        status, more = "200 OK", ""
        if path != "/p":
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        if (seconds := self._refusals.pop(site, None)) is not None:
            status, more = "429 Too Many Requests", f"Retry-After: {seconds}\r\n"
        self._log.write(f"{time.monotonic():.6f} {site} {status[:3]}\n")
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\n{more}Content-Length: {len(BODY)}\r\n\r\n"
        return head.encode() + BODY


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", buffering=1) as log:
        asyncio.run(Sites(log).serve())
