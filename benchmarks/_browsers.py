"""Which process of a browser is the browser itself."""

from __future__ import annotations

from pathlib import Path

import psutil

#: Debian's browsers are scripts that start the real one and wait for it.
SHELLS = {"sh", "dash", "bash"}


def is_main(process: psutil.Process) -> bool:
    """True for the process that a browser's others belong to: neither one of these, nor a script around it.

    Raises:
        psutil.Error: When it has ended.
    """
    words = process.cmdline()
    return (
        bool(words)
        and not any(word.startswith(("--type=", "--monitor-self")) for word in words)
        and Path(process.exe()).name not in SHELLS
    )
