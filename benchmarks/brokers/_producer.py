"""The producer of a system: `python _producer.py MODULE`, told by lines of JSON on stdin, answering on stdout.

  {"do": "send", "first": 0, "count": 9}    send that many messages, one after the other; answers its seconds
  {"do": "later", …, "delay_ms": 60000}     the same, delayed
  {"do": "hold", …}                         the same, to the actor that does not end in a worker that holds
  {"do": "pickup", "first": 0, "gaps_s": […]}   send one at a time, each so long after the one before has begun;
                                            answers when each was about to be sent, in ns of the machine's clock

A module has `send(number)`, where its system can delay `later(number, delay_ms)`, where recovery is measured
`hold(number)`, and `opened()`, an asynchronous context, where its client needs one. They are coroutine functions
where the client is asynchronous: each is awaited before the next, as one thread sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from _stamps import written

#: A message that has not begun by then is lost.
BEGIN_TIMEOUT_S = 30.0
LOOK_S = 0.005


def sender(module: Any, order: dict[str, Any]) -> Callable[[int], Any]:
    if order["do"] == "later":
        later, delay_ms = module.later, order["delay_ms"]
        return lambda number: later(number, delay_ms)
    send: Callable[[int], Any] = module.hold if order["do"] == "hold" else module.send
    return send


def has_begun(expected: int, deadline: float) -> bool:
    if written() >= expected:
        return True
    if time.monotonic() > deadline:
        raise SystemExit(f"a message did not begin within {BEGIN_TIMEOUT_S:.0f} s of its sending")
    return False


def serve(module: Any) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        send = sender(module, order)
        if order["do"] == "pickup":
            say(pickup(send, order))
            continue
        started = time.perf_counter()
        for number in range(order["first"], order["first"] + order["count"]):
            send(number)
        say(time.perf_counter() - started)


def pickup(send: Callable[[int], Any], order: dict[str, Any]) -> list[int]:
    sent, before = [], written()
    for place, gap_s in enumerate(order["gaps_s"]):
        deadline = time.monotonic() + BEGIN_TIMEOUT_S
        while not has_begun(before + place, deadline):
            time.sleep(LOOK_S)
        time.sleep(gap_s)
        sent.append(time.monotonic_ns())
        send(order["first"] + place)
    return sent


async def serve_async(module: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if hasattr(module, "opened"):
            await stack.enter_async_context(module.opened())
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            send = sender(module, order)
            if order["do"] == "pickup":
                say(await pickup_async(send, order))
                continue
            started = time.perf_counter()
            for number in range(order["first"], order["first"] + order["count"]):
                await send(number)
            say(time.perf_counter() - started)


async def pickup_async(send: Callable[[int], Any], order: dict[str, Any]) -> list[int]:
    sent, before = [], written()
    for place, gap_s in enumerate(order["gaps_s"]):
        deadline = time.monotonic() + BEGIN_TIMEOUT_S
        while not has_begun(before + place, deadline):
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(gap_s)
        sent.append(time.monotonic_ns())
        await send(order["first"] + place)
    return sent


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    if inspect.iscoroutinefunction(module.send):
        asyncio.run(serve_async(module))
    else:
        serve(module)
