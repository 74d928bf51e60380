"""Steps that are done once: the rules, in memory and in a real store; and what the code sees of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from asyncworker import embedded
from asyncworker.errors import StaleAttempt, StepHeld, UnknownOutcome
from asyncworker.fencing import Claim, Fence, local_fence
from asyncworker.once import Holder, Steps
from asyncworker.step_records import Entry, MemoryStepRecords, RedisStepRecords, StepRecords
from tests.waiting import wait_until

LEASE_MS = 300

numbers = itertools.count(1)


@pytest.fixture
def client(state_dir: Path) -> Iterator[redis.Redis]:
    client = redis.Redis(unix_socket_path=str(embedded.ensure(state_dir)), socket_timeout=10)
    yield client
    client.close()


@pytest.fixture(params=["memory", "redis"])
def records(request: pytest.FixtureRequest) -> StepRecords:
    if request.param == "memory":
        return MemoryStepRecords()
    return RedisStepRecords(request.getfixturevalue("client"), knows_claims=True)


@pytest.fixture
def in_store(client: redis.Redis) -> RedisStepRecords:
    return RedisStepRecords(client, knows_claims=True)


def entry(message: str = "m1", *, fence: int = 1, **changes: Any) -> Entry:
    token = f"{fence}.{next(numbers)}"
    return replace(Entry("a:insert:k", token, fence, message, "host:1", "open", LEASE_MS, 60_000), **changes)


def test_a_step_is_done_for_everyone_with_its_value_once_its_holder_has_completed_it(records: StepRecords) -> None:
    first = entry()
    assert records.enter(first) == ["yours"]
    assert records.confirm(first)
    assert records.complete(first, '"v"')
    assert records.complete(first, '"v"'), "an answer that got lost is asked for again"
    assert records.enter(entry(fence=2)) == ["done", '"v"']
    assert records.enter(entry("m2", fence=3)) == ["done", '"v"']


def test_another_message_finds_it_held_while_its_holder_lives(records: StepRecords) -> None:
    for message in ("m1", "m3", "m5", "m7"):
        first = replace(entry(message), step=f"a:insert:{message}")
        if _is_held_for_long(records, first):
            break
    assert records.complete(first, "1")


def _is_held_for_long(records: StepRecords, first: Entry) -> bool:
    """Hold a step for three leases; False when this process was so late that one has ended."""
    renewed = time.monotonic()
    records.enter(first)
    deadline = time.monotonic() + 3 * LEASE_MS / 1000
    while time.monotonic() < deadline:
        answer = records.enter(replace(entry("other", fence=2), step=first.step))
        kept = records.renew(first)
        if time.monotonic() - renewed > LEASE_MS / 1000:
            return False
        assert (answer, kept) == (["held", first.message, "host:1"], True)
        renewed = time.monotonic()
        time.sleep(LEASE_MS / 10_000)
    return True


def test_a_holder_that_gives_no_sign_of_life_loses_it_to_another_message_and_cannot_complete_it(
    records: StepRecords,
) -> None:
    first, second = entry(), entry("m2", fence=2)
    records.enter(first)
    began = time.monotonic()
    wait_until(lambda: records.enter(second) == ["yours"], "it is taken over")
    assert time.monotonic() - began >= LEASE_MS / 1000 * 4 / 3 - 0.05, "a lease that is over is looked at twice"
    assert not records.renew(first)
    assert not records.confirm(first)
    assert not records.complete(first, "1")
    assert records.complete(second, "2")
    assert records.enter(entry("m3", fence=3)) == ["done", "2"]


def test_a_holder_that_could_not_renew_while_the_store_was_away_keeps_it_when_it_can(records: StepRecords) -> None:
    first = entry()
    records.enter(first)
    time.sleep(1.1 * LEASE_MS / 1000)  # the fact tested: no one renews
    assert records.enter(entry("m2", fence=2))[0] == "held", "it finds the lease over, first"
    assert records.renew(first)
    time.sleep(0.5 * LEASE_MS / 1000)
    assert records.enter(entry("m2", fence=2))[0] == "held"


def test_a_later_attempt_of_the_same_message_takes_it_over_at_once(records: StepRecords) -> None:
    first, second = entry(), entry(fence=2)
    records.enter(first)
    assert records.enter(second) == ["yours"]
    assert not records.complete(first, "1")
    assert records.enter(entry(fence=1)) == ["stale"]
    assert records.complete(second, "2")


def test_what_an_entry_leaves_is_open_for_the_next_and_not_for_an_earlier_attempt(records: StepRecords) -> None:
    second = entry(fence=2)
    records.enter(second)
    records.leave(second, "open")
    assert not records.complete(second, "1")
    assert records.enter(entry(fence=1)) == ["stale"]
    assert records.enter(entry("m2", fence=3)) == ["yours"]


@pytest.mark.parametrize("who", ["a later attempt", "another message"])
def test_a_lost_holder_leaves_it_to_a_person_if_it_has_said_so(records: StepRecords, who: str) -> None:
    first = entry(on_lost="unknown")
    records.enter(first)
    assert [(each.state, each.message, each.is_over) for each in records.undecided()] == [("held", "m1", False)]
    assert not records.resolve(first.step, "open", "null", 60_000), "its holder lives"
    second = entry(fence=2) if who == "a later attempt" else entry("m2", fence=2)
    answer = wait_until(lambda: (said := records.enter(second))[0] == "unknown" and said, "it is unknown")
    assert answer[1:3] == ["m1", "host:1"]
    assert [each.state for each in records.undecided()] == ["unknown"]
    assert records.resolve(first.step, "done", '"seen"', 60_000)
    assert not records.resolve(first.step, "open", "null", 60_000), "it is decided"
    assert records.enter(second) == ["done", '"seen"']
    assert records.undecided() == []


def test_a_person_may_open_it_again(records: StepRecords) -> None:
    first = entry(on_lost="unknown")
    records.enter(first)
    records.leave(first, "unknown")
    assert records.enter(entry(fence=2))[0] == "unknown"
    assert records.resolve(first.step, "open", "null", 60_000)
    assert records.enter(entry(fence=3)) == ["yours"]


def test_a_holder_that_another_message_gave_up_for_lost_may_still_say_that_it_is_done(records: StepRecords) -> None:
    first = entry(on_lost="unknown")
    records.enter(first)
    wait_until(lambda: records.enter(entry("m2", fence=2))[0] == "unknown", "it is unknown")
    assert records.complete(first, "1")
    assert records.undecided() == []


def test_a_stale_holder_cannot_decide_what_is_unknown(records: StepRecords) -> None:
    first = entry(on_lost="unknown")
    records.enter(first)
    assert records.enter(entry(fence=2))[0] == "unknown"
    assert not records.complete(first, "1")


# What the broker's store knows of whose a message is.


def test_an_attempt_whose_message_was_taken_neither_enters_nor_completes(
    client: redis.Redis, in_store: RedisStepRecords
) -> None:
    claim = Claim("acks", "id")
    client.sadd("acks", "id")
    first = entry(claim=claim)
    assert in_store.enter(first) == ["yours"]
    client.srem("acks", "id")
    assert not in_store.confirm(first)
    assert not in_store.complete(first, "1")
    assert in_store.enter(entry(fence=2, step="a:other:k", claim=claim)) == ["stale"]
    assert in_store.enter(entry("m2", fence=3)) == ["yours"], "at once: whoever held it has its message no more"


def test_what_may_have_to_be_decided_is_kept_without_limit_and_the_rest_is_not(
    client: redis.Redis, in_store: RedisStepRecords
) -> None:
    def kept(step: str) -> int:
        return int(client.pttl(f"asyncworker:once:{step}"))  # type: ignore[arg-type]  # not awaitable

    careful, other = entry(on_lost="unknown"), entry("m2", step="a:b:c")
    in_store.enter(careful)
    in_store.enter(other)
    assert kept(careful.step) == -1
    assert 0 < kept(other.step) <= 60_000
    in_store.complete(careful, "1")
    assert 0 < kept(careful.step) <= 60_000


def test_fences_grow_also_when_the_store_has_lost_them(client: redis.Redis, in_store: RedisStepRecords) -> None:
    first = in_store.draw_fence()
    assert in_store.draw_fence() > first
    client.flushall()
    assert in_store.draw_fence() > first


# What the code sees.


@dataclass
class Entering:
    """Attempts that enter the step `insert` of one actor."""

    steps: Steps

    def once(self, message: str = "m1", *, key: Any = "k", name: str = "insert", **options: Any) -> Any:
        holder = Holder(message, "a", "host:1", Fence(local_fence()))
        return self.steps.once(holder, name, key, **({"on_lost": "open", "wait_ms": 200} | options))


@pytest.fixture
def entering(records: StepRecords) -> Entering:
    return Entering(Steps(records, lease_ms=LEASE_MS))


def test_the_body_runs_for_the_first_and_the_others_see_the_value(entering: Entering) -> None:
    async def attempt(message: str) -> Any:
        async with entering.once(message) as step:
            if not step.done:
                step.value = {"by": message, "unique": step.id}
            return step.value

    async def main() -> list[Any]:
        return [await attempt("m1"), await attempt("m1"), await attempt("m2")]

    assert asyncio.run(main()) == [{"by": "m1", "unique": "a:insert:k"}] * 3


def test_twenty_at_once_run_it_once(records: StepRecords) -> None:
    lease_ms = 5 * LEASE_MS  # which a busy machine may not renew in time if it is short
    entering, ran = Entering(Steps(records, lease_ms=lease_ms)), []

    async def attempt(number: int) -> Any:
        async with entering.once(f"m{number}", wait_ms=30_000) as step:
            if not step.done:
                ran.append(number)
                await asyncio.sleep(2 * lease_ms / 1000)  # the fact tested: longer than a lease
                step.value = number
            return step.value

    async def main() -> list[Any]:
        return await asyncio.gather(*(attempt(number) for number in range(20)))

    assert set(asyncio.run(main())) == set(ran)
    assert len(ran) == 1


def test_who_waits_too_long_is_told_who_holds_it(entering: Entering) -> None:
    async def main() -> None:
        async with entering.once():
            with pytest.raises(StepHeld, match="held by message m1 on host:1"):
                async with entering.once("m2"):
                    pytest.fail("it is held")

    asyncio.run(main())


def test_an_exception_leaves_it_open(entering: Entering) -> None:
    async def main() -> None:
        with pytest.raises(KeyError):
            async with entering.once():
                raise KeyError
        async with entering.once("m2") as step:
            assert not step.done

    asyncio.run(main())


@pytest.mark.parametrize("harmless", [False, True])
def test_an_exception_leaves_it_to_a_person_unless_the_code_knows_better(entering: Entering, harmless: bool) -> None:
    async def main() -> None:
        with pytest.raises(KeyError):
            async with entering.once(on_lost="unknown") as step:
                if harmless:
                    step.leave_open()
                raise KeyError
        if harmless:
            async with entering.once() as step:
                assert not step.done
            return
        with pytest.raises(UnknownOutcome, match="asyncworker once resolve 'a:insert:k' done"):
            async with entering.once():
                pytest.fail("no one knows")

    asyncio.run(main())


def test_who_was_superseded_is_told_where_the_block_ends(entering: Entering) -> None:
    async def main() -> None:
        with pytest.raises(StaleAttempt, match="the other attempt goes on"):
            async with entering.once() as first:
                async with entering.once() as second:
                    second.value = 2
                with pytest.raises(StaleAttempt):
                    await first.confirm()
                first.value = 1
        async with entering.once() as step:
            assert (step.done, step.value) == (True, 2)

    asyncio.run(main())


def test_a_cancelled_wait_holds_nothing(entering: Entering, monkeypatch: pytest.MonkeyPatch) -> None:
    enter, began, cancelled = entering.steps.records.enter, asyncio.Event(), threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def slowly(one: Entry) -> list[str]:
            answer = enter(one)
            loop.call_soon_threadsafe(began.set)
            assert cancelled.wait(30), "the cancellation comes before the answer"
            return answer

        async def attempt() -> None:
            async with entering.once(on_lost="unknown"):
                pytest.fail("it was cancelled")

        monkeypatch.setattr(entering.steps.records, "enter", slowly)
        waiting = asyncio.create_task(attempt())
        await began.wait()
        waiting.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        monkeypatch.undo()
        async with entering.once("m2") as step:
            assert not step.done

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "a:b"}, "a step's name is letters"),
        ({"key": ""}, "the key of step insert"),
        ({"key": True}, "the key of step insert"),
        ({"on_lost": "close"}, "neither 'open' nor 'unknown'"),
    ],
)
def test_what_cannot_be_a_step_is_refused(wrong: dict[str, Any], said: str) -> None:
    async def main() -> None:
        async with Entering(Steps(MemoryStepRecords())).once(**wrong):
            pytest.fail("it was entered")

    with pytest.raises(ValueError, match=said):
        asyncio.run(main())


def test_values_are_what_json_has_and_are_not_set_when_it_is_done(entering: Entering) -> None:
    async def main() -> None:
        with pytest.raises(TypeError, match="must be what JSON has"):
            async with entering.once() as step:
                step.value = object()
        async with entering.once() as step:
            step.value = [1, None]
        async with entering.once() as step:
            assert step.value == [1, None]
            with pytest.raises(RuntimeError, match=r"if not step.done"):
                step.value = 2

    asyncio.run(main())


def test_a_message_has_steps_of_its_own_where_no_key_is_given(entering: Entering) -> None:
    async def main() -> list[bool]:
        done = []
        for message in ("m1", "m2", "m1"):
            async with entering.once(message, key=None) as step:
                done.append(step.done)
        return done

    assert asyncio.run(main()) == [False, False, True]
