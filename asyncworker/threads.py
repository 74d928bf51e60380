"""Threads for the runtime's own blocking calls, beside those of the loop, which the actors' code may keep all busy.

A browser is found, launched and killed in them: `asyncio.to_thread` in a few actors must not be able to prevent that.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: Its calls are short or wait for something else; they end by themselves.
MOST_THREADS = 16

#: The pool and the process that it belongs to: a fork has none of its threads.
_pool: tuple[int, ThreadPoolExecutor] | None = None


async def in_thread(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`asyncio.to_thread`, in a thread that no actor's code can have."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():
        _pool = os.getpid(), ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="asyncworker-aside")
    return await asyncio.get_running_loop().run_in_executor(_pool[1], partial(call, *args, **kwargs))
