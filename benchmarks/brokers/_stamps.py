"""What a worker writes down of what it ran, the same way in every system: one write of 16 bytes, in the body.

The clock is the machine's (CLOCK_MONOTONIC), so a worker's time may be compared with a producer's. Nothing here needs
more than Python: each system runs by an interpreter of its own.
"""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

#: A message's number, and when its body began, in ns.
STAMP = struct.Struct("<qq")

parameters: dict[str, Any] = json.loads(Path("parameters.json").read_text())

_file = os.open(parameters["stamps"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def stamp(number: int) -> None:
    os.write(_file, STAMP.pack(number, time.monotonic_ns()))


def written() -> int:
    """How many stamps there are, of all who write to this file."""
    return os.fstat(_file).st_size // STAMP.size
