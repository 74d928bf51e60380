"""A real download by Playwright from a server of the test's own, and real launches of what it brought."""

from __future__ import annotations

import io
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from asyncworker.engines.finding import HEADLESS_SHELLS, which
from asyncworker.errors import EngineMissing
from asyncworker.installing import install, why_it_does_not_start
from asyncworker.settings import load

pytestmark = pytest.mark.needs_browser


@pytest.fixture
def shell() -> Path:
    path = which(*HEADLESS_SHELLS)
    if path is None:
        if os.environ.get("CI"):  # noqa: TID251
            pytest.fail("no headless shell on PATH")
        pytest.skip("no headless shell on PATH")
    return path.resolve()


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No browser on PATH, none downloaded, and no apt-get."""
    (tmp_path / "bin").mkdir()
    for name in ("sh", "ls", "cat", "dirname", "readlink", "basename", "uname", "id"):
        if (path := shutil.which(name)) is not None:
            (tmp_path / "bin" / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "browsers"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """What the server of Playwright's downloads gives; "" for every path not listed."""
    contents: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = contents[""]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PLAYWRIGHT_DOWNLOAD_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield contents
    server.shutdown()
    server.server_close()
    thread.join()


def archive(script: str) -> bytes:
    """A download as Playwright expects it, with a script in the browser's place.

    It asks for its ffmpeg, too, and is content with any file of that name.
    """
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        for folder in ("chrome-headless-shell-linux64", "chrome-headless-shell-linux-arm64"):
            file.writestr(f"{folder}/chrome-headless-shell", f"#!/bin/sh\n{script}\n")
        file.writestr("ffmpeg-linux", "")
    return memory.getvalue()


def test_a_browser_that_playwright_downloads_is_tried_out_and_taken(
    shell: Path, empty_machine: Path, downloads: dict[str, bytes]
) -> None:
    downloads[""] = archive(f'exec {shell} "$@"')
    said: list[str] = []
    found = install(load({}, engine="chromium"), said.append)
    assert found.origin == "playwright"
    assert said[-1] == "chromium (Playwright's own download): starts"
    assert not list(empty_machine.glob("asyncworker-install-*"))


def test_a_download_that_does_not_start_is_not_taken(empty_machine: Path, downloads: dict[str, bytes]) -> None:
    downloads[""] = archive("echo 'error while loading shared libraries: libnss3.so' >&2; exit 127")
    said: list[str] = []
    with pytest.raises(EngineMissing, match=r"does not start: .*libnss3\.so"):
        install(load({}, engine="chromium"), said.append)


def test_a_browser_of_the_machine_starts(shell: Path) -> None:
    assert why_it_does_not_start(load({}, engine="chromium")) is None


def test_an_executable_that_is_no_browser_does_not_start(tmp_path: Path) -> None:
    script = tmp_path / "browser"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    reason = why_it_does_not_start(load({}, engine="chromium", executable_path=script))
    assert reason is not None
    assert "chromium did not start" in reason
