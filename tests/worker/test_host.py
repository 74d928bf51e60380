"""BrowserHost on the fake engine and a clock without time: launch once, lend, notice death, back off, retire."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

import pytest

from asyncworker.browser import BrowserHost
from asyncworker.engines.capabilities import Capability
from asyncworker.errors import BrowserCrashed, ForkedBrowser, LaunchFailed, PhaseTimeout, Unsupported
from asyncworker.identity import Identity
from asyncworker.settings import load
from asyncworker.shielding import shielded
from asyncworker.testing import FakeBrowserError, FakeClock, FakeEngine
from tests.waiting import BUSY_S, eventually

SEED = Identity(seed=1)


def host_of(engine: FakeEngine, *, clock: FakeClock | None = None, **settings: Any) -> BrowserHost:
    return BrowserHost(engine, load({}, **settings), clock=clock or FakeClock())


async def use(host: BrowserHost, identity: Identity = SEED, work_s: float = 0.0) -> int:
    async with host.context(identity) as lease:
        await asyncio.sleep(work_s)
        return lease.generation.number


async def test_many_messages_at_a_cold_host_are_one_launch() -> None:
    engine = FakeEngine()
    engine.delays["launch"] = 0.05
    host = host_of(engine)
    assert set(await asyncio.gather(*(use(host) for _ in range(50)))) == {1}
    assert host.counts == {"browsers_launched": 1, "contexts_opened": 50, "contexts_closed": 50}
    assert all(context.closed for context in engine.contexts)
    await host.close()


async def test_each_message_gets_a_context_of_its_own_with_a_page() -> None:
    engine = FakeEngine()
    host = host_of(engine)
    async with host.context(SEED) as first, host.context(SEED) as second:
        assert first.context is not second.context
        assert first.browser is second.browser
        assert first.page in first.context.pages
    await host.close()


async def test_a_launch_goes_on_for_the_others_when_the_message_that_began_it_gives_up() -> None:
    engine = FakeEngine()
    engine.delays["launch"] = 0.1
    host = host_of(engine)
    first = asyncio.create_task(use(host))
    await asyncio.sleep(0)
    second = asyncio.create_task(use(host))
    await eventually(lambda: engine.begun["launch"], "the launch has begun")
    first.cancel()
    assert await second == 1
    assert len(engine.browsers) == 1
    await host.close()


async def test_failed_launches_back_off_twice_as_long_each_time_up_to_a_minute() -> None:
    engine, clock = FakeEngine(), FakeClock()
    host = host_of(engine, clock=clock, launch_backoff_ms=1_000)
    engine.fail_launches = 9
    for _ in range(9):
        with pytest.raises(LaunchFailed):
            await use(host)
    assert await use(host) == 1
    assert [round(pause) for pause in clock.sleeps] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    await host.close()


async def test_a_launch_that_fails_fails_all_that_wait_for_it_once() -> None:
    engine = FakeEngine()
    engine.fail_launches, engine.delays["launch"] = 1, 0.05
    host = host_of(engine)
    outcomes = await asyncio.gather(*(use(host) for _ in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [LaunchFailed] * 5
    assert await use(host) == 1
    await host.close()


async def test_an_error_of_the_engine_itself_is_a_launch_that_failed() -> None:
    class Broken(FakeEngine):
        async def launch(self, identity: Identity) -> Any:
            raise OSError("no such file")

    host = host_of(Broken())
    with pytest.raises(LaunchFailed, match="OSError: no such file"):
        await use(host)
    await host.close()


async def test_a_browser_that_dies_idle_is_replaced_for_the_next_message() -> None:
    engine = FakeEngine()
    host = host_of(engine)
    assert await use(host) == 1
    engine.browsers[0].crash()
    assert await use(host) == 2
    assert host.counts["browsers_lost"] == 1
    await host.close()


@pytest.mark.parametrize("step", ["new_context", "new_page"])
async def test_a_browser_that_dies_before_the_context_is_open_costs_the_message_nothing(step: str) -> None:
    engine = FakeEngine()
    host = host_of(engine)
    engine.delays[step] = math.inf  # a call that meets a dying browser may never end
    waiting = asyncio.create_task(use(host))
    await eventually(lambda: engine.begun[step], "it is under way")
    engine.delays.clear()
    engine.browsers[0].crash()
    assert await asyncio.wait_for(waiting, BUSY_S) == 2
    assert host.counts["contexts_opened"] == host.counts["contexts_closed"]
    await host.close()


async def test_browsers_that_keep_dying_fail_the_message_in_the_end() -> None:
    class Dying(FakeEngine):
        async def pass_time(self, step: str) -> None:
            if step == "new_context":
                self.browsers[-1].crash()
            await super().pass_time(step)

    engine = Dying()
    host = host_of(engine)
    with pytest.raises(BrowserCrashed):
        await use(host)
    assert len(engine.browsers) == 4
    await host.close()


@pytest.mark.parametrize(("step", "phase"), [("new_context", "context"), ("new_page", "context")])
async def test_a_context_that_does_not_open_names_its_phase_and_costs_the_browser(step: str, phase: str) -> None:
    engine = FakeEngine()
    engine.delays[step] = math.inf
    host = host_of(engine, context_timeout_ms=500)
    with pytest.raises(PhaseTimeout) as caught:
        await use(host)
    assert caught.value.phase == phase
    engine.delays.clear()
    assert await use(host) == 2
    assert host.counts["contexts_opened"] == host.counts["contexts_closed"]
    await host.close()


async def test_a_context_that_opens_too_late_is_closed_all_the_same() -> None:
    engine = FakeEngine()
    engine.delays["new_context"] = 0.1
    host = host_of(engine)
    message = asyncio.create_task(use(host))
    await eventually(lambda: engine.begun["new_context"], "the context is being opened")
    message.cancel()
    await asyncio.wait({message})
    await eventually(lambda: engine.contexts and engine.contexts[0].closed, "the late context is closed")
    assert host.counts["contexts_opened"] == host.counts["contexts_closed"] == 1
    await host.close()


async def test_a_close_that_does_not_end_is_bounded_and_costs_the_browser() -> None:
    engine = FakeEngine()
    host = host_of(engine, close_timeout_ms=500)
    engine.delays["close_context"] = math.inf
    assert await asyncio.wait_for(use(host), BUSY_S) == 1
    engine.delays.clear()
    assert await use(host) == 2
    await eventually(lambda: not engine.browsers[0].alive, "the first browser is closed")
    await host.close()


async def test_a_cancelled_message_has_its_context_closed_to_the_end() -> None:
    engine = FakeEngine()
    engine.delays["close_context"] = 0.1
    host = host_of(engine)
    message = asyncio.create_task(use(host, work_s=60))
    await eventually(lambda: engine.contexts and engine.contexts[0].pages, "the context is lent")
    message.cancel()
    await eventually(lambda: engine.begun["close_context"], "it is being closed")
    message.cancel()  # again, while it closes
    with pytest.raises(asyncio.CancelledError):
        await message
    assert engine.contexts[0].closed
    await host.close()


async def test_an_error_of_opening_that_is_not_the_browsers_passes_as_it_is() -> None:
    class Refusing(FakeEngine):
        async def pass_time(self, step: str) -> None:
            if step == "new_context":
                raise ValueError("locale")

    host = host_of(Refusing())
    with pytest.raises(ValueError, match="locale"):
        await use(host)
    await host.close()


async def test_identities_that_need_a_browser_each_share_no_browser_and_the_idle_one_used_longest_ago_goes() -> None:
    engine, clock = FakeEngine(one_identity_each=True), FakeClock()
    host = host_of(engine, clock=clock, max_browsers=2)
    for seed in (1, 2, 1, 3, 1):
        clock.advance(1)
        await use(host, Identity(seed=seed))
    assert [browser.identity.seed for browser in engine.browsers] == [1, 2, 3]
    await eventually(lambda: not engine.browsers[1].alive, "the browser of seed 2 is closed")
    await host.close()


async def test_there_are_never_more_browsers_up_than_allowed_also_while_one_closes() -> None:
    engine = FakeEngine(one_identity_each=True)
    engine.delays["close"] = 0.05
    host = host_of(engine, max_browsers=1)
    for seed in range(4):
        async with host.context(Identity(seed=seed)):
            assert sum(browser.alive for browser in engine.browsers) == 1
    await host.close()


async def test_a_message_of_another_identity_waits_while_all_browsers_are_busy_and_its_wait_is_bounded() -> None:
    engine = FakeEngine(one_identity_each=True)
    host = host_of(engine, max_browsers=1, browser_wait_ms=100)
    async with host.context(Identity(seed=1)):
        with pytest.raises(PhaseTimeout) as caught:
            await use(host, Identity(seed=2))
        assert caught.value.phase == "wait"
        waiting = asyncio.create_task(use(host, Identity(seed=2)))
        await asyncio.sleep(0)  # it has asked, and waits
        assert not waiting.done()
    assert await waiting == 2
    await host.close()


async def test_the_deployments_own_browser_makes_room_for_no_guest() -> None:
    engine, clock = FakeEngine(one_identity_each=True), FakeClock()
    host = host_of(engine, clock=clock, max_browsers=2)
    host.home = engine.launch_key(SEED)
    for seed in (1, 2, 3, 4, 1, 5, 1):
        clock.advance(1)
        await use(host, Identity(seed=seed))
    assert [browser.identity.seed for browser in engine.browsers] == [1, 2, 3, 4, 5]
    assert engine.browsers[0].alive
    await host.close()


async def test_where_one_browser_is_all_that_may_be_up_the_deployments_own_makes_room() -> None:
    engine = FakeEngine(one_identity_each=True)
    host = host_of(engine, max_browsers=1)
    host.home = engine.launch_key(SEED)
    for seed in (1, 2, 1):
        await use(host, Identity(seed=seed))
    assert [browser.identity.seed for browser in engine.browsers] == [1, 2, 1]
    await host.close()


async def test_a_browser_that_is_retired_but_still_used_counts_as_one_that_is_up() -> None:
    engine = FakeEngine(one_identity_each=True)
    host = host_of(engine, max_browsers=1)
    async with host.context(SEED) as lease:
        host.retire(lease.generation)
        waiting = asyncio.create_task(use(host))
        await asyncio.sleep(0)
        assert engine.begun["launch"] == 1
    assert await waiting == 2
    assert [browser.alive for browser in engine.browsers] == [False, True]
    await host.close()


async def test_identities_get_their_browsers_in_the_order_in_which_they_asked() -> None:
    engine = FakeEngine(one_identity_each=True)
    host = host_of(engine, max_browsers=1)
    served: list[int] = []

    async def message(seed: int) -> None:
        async with host.context(Identity(seed=seed)):
            served.append(seed)

    async with host.context(SEED):
        messages = []
        for seed in (5, 3, 9, 2):
            messages.append(asyncio.create_task(message(seed)))
            await asyncio.sleep(0)
    await asyncio.gather(*messages)
    assert served == [5, 3, 9, 2]
    await host.close()


async def test_a_guest_is_not_starved_by_one_whose_messages_never_end() -> None:
    engine = FakeEngine(one_identity_each=True)
    host = BrowserHost(engine, load({}, max_browsers=1, browser_wait_ms=2_000))
    ended = asyncio.Event()

    async def endless() -> None:
        while not ended.is_set():
            await use(host, SEED, 0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):  # there is always one of them that runs
            group.create_task(endless())
        await eventually(lambda: engine.browsers, "the busy browser is up")
        async with asyncio.timeout(10):
            assert await use(host, Identity(seed=2)) == 2
        ended.set()
    await host.close()


async def test_a_browser_in_which_cancelled_calls_pile_up_ends_with_its_last_context() -> None:
    engine = FakeEngine()
    host = host_of(engine)
    async with host.context(SEED):
        await use(host)
        engine.browsers[0].abandoned = 2
        await use(host)
        assert engine.browsers[0].alive
    assert await use(host) == 2
    await eventually(lambda: not engine.browsers[0].alive, "the first one is closed")
    assert host.counts["browsers_recycled"] == 1
    await host.close()


async def test_a_call_that_still_holds_its_browser_takes_the_place_of_a_context() -> None:
    engine = FakeEngine(max_contexts=3)
    host = host_of(engine)
    async with host.context(SEED), host.context(SEED):
        engine.browsers[0].abandoned = 1
        third = asyncio.create_task(use(host))
        await asyncio.sleep(0)
        assert engine.begun["new_context"] == 2
        engine.browsers[0].abandoned = 0
        host._announce()
        assert await third == 1
    await host.close()


async def test_a_wedged_browser_is_not_waited_for_a_second_time() -> None:
    engine = FakeEngine()
    host = BrowserHost(engine, load({}, context_timeout_ms=500, close_timeout_ms=60_000))
    async with host.context(SEED):
        engine.delays["new_context"] = math.inf
        engine.delays["close_context"] = math.inf
        with pytest.raises(PhaseTimeout):
            await use(host)
    engine.delays.clear()
    assert await use(host) == 2
    await host.close()


async def test_options_reach_the_context_and_win_over_the_identitys() -> None:
    engine = FakeEngine()
    host = host_of(engine)
    identity = Identity(seed=1, locale="de-DE", timezone="Europe/Berlin")
    async with host.context(identity, {"locale": "fr-FR", "viewport": {"width": 1, "height": 2}}) as lease:
        await lease.browser.new_context(color_scheme="dark")
    lent, opened = engine.contexts
    assert lent.options == {"locale": "fr-FR", "timezone_id": "Europe/Berlin", "viewport": {"width": 1, "height": 2}}
    assert opened.options == {"locale": "de-DE", "timezone_id": "Europe/Berlin", "color_scheme": "dark"}
    await host.close()


async def test_an_option_that_the_engine_cannot_honour_is_refused_also_in_a_context_that_code_opens() -> None:
    engine = FakeEngine()
    engine.capabilities = engine.capabilities - {Capability.video}
    host = host_of(engine)
    with pytest.raises(Unsupported, match="the engine fake has no video"):
        async with host.context(SEED, {"record_video_dir": "videos"}):
            pass
    async with host.context(SEED) as lease:
        with pytest.raises(Unsupported):
            await lease.browser.new_page(record_video_dir="videos")
    await host.close()


async def test_a_context_that_was_opened_with_its_page_is_closed_with_it() -> None:
    engine = FakeEngine()
    host = host_of(engine)
    async with host.context(SEED) as lease:
        page = await lease.browser.new_page()
        await page.close()
        await eventually(lambda: page.context.closed, "its context is closed")  # type: ignore[attr-defined]
    assert host.counts["contexts_opened"] == host.counts["contexts_closed"] == 2
    await host.close()


async def test_a_browser_lends_no_more_contexts_than_its_engine_can_serve() -> None:
    engine = FakeEngine(max_contexts=3)
    host = host_of(engine)
    running = [asyncio.create_task(use(host, work_s=0.02)) for _ in range(12)]
    most = 0
    while not all(task.done() for task in running):
        most = max(most, sum(not context.closed for context in engine.contexts))
        await asyncio.sleep(0)
    await asyncio.gather(*running)
    assert most == 3
    assert len(engine.browsers) == 1
    await host.close()


async def test_contexts_that_code_opens_on_the_browser_are_closed_with_its_session_and_no_other() -> None:
    engine = FakeEngine()
    host = host_of(engine)
    async with host.context(SEED) as other:
        await other.browser.new_context()
        async with host.context(SEED) as lease:
            context = await lease.browser.new_context()
            page = await lease.browser.new_page()
        assert context.closed
        assert page.context.closed
        assert sum(not context.closed for context in engine.contexts) == 2
    assert host.counts["contexts_opened"] == host.counts["contexts_closed"] == 5
    await host.close()


async def test_a_fork_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_of(FakeEngine())
    await use(host)
    parent = os.getpid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(ForkedBrowser, match="spawn"):
            await use(host)
    await host.close()


async def test_a_closed_host_launches_nothing_more() -> None:
    engine = FakeEngine()
    host = host_of(engine)
    await use(host)
    await host.close()
    assert not engine.browsers[0].alive
    with pytest.raises(LaunchFailed, match="shutting down"):
        await use(host)
    assert len(engine.browsers) == 1


async def test_closing_waits_for_a_launch_and_closes_what_it_brought() -> None:
    engine = FakeEngine()
    engine.delays["launch"] = 0.1
    host = host_of(engine)
    message = asyncio.create_task(use(host))
    await eventually(lambda: engine.begun["launch"], "the launch has begun")
    await host.close()
    assert [browser.alive for browser in engine.browsers] == [False]
    await asyncio.wait({message})


async def test_shielded_work_ends_before_the_cancellation_goes_on() -> None:
    ended = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        ended.append(True)

    task = asyncio.create_task(shielded(work()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_call_on_a_browser_that_is_gone_is_told_from_an_error_of_the_page() -> None:
    engine = FakeEngine()
    assert engine.classify(FakeBrowserError("x")) == "gone"
    assert engine.classify(ValueError("x")) is None
