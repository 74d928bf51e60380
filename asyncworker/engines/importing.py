"""The import of invisible_playwright and its core, as a worker needs it: late, without pip, and without a stall."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from types import ModuleType

from asyncworker.settings import leave_invisible_core_alone

_importing = threading.Lock()


def import_quietly(name: str) -> ModuleType:
    """Import a module of theirs; in a worker, in a thread.

    The import makes so many objects that Python looks through all it has for garbage meanwhile, which stopped every
    thread, the loop's too, for up to 74 ms; without the collector the longest stop was 10 ms.

    Raises:
        ImportError: When it is not installed, or does not fit what is.
    """
    leave_invisible_core_alone()
    with _importing:
        if name in sys.modules or not gc.isenabled():
            return importlib.import_module(name)
        gc.disable()
        try:
            return importlib.import_module(name)
        finally:
            gc.enable()
