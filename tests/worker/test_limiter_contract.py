"""What every limiter does: the one in memory, and the one in a real Valkey, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncworker import embedded
from asyncworker.limiter import WITHOUT_END_MS, Limiter, RedisLimiter, Verdict
from asyncworker.memory_limiter import MemoryLimiter
from asyncworker.pace import Pace, Rate, Terms, key_of

KEY = key_of("shop.example")
OTHER = key_of("other.example")
HOLD_MS = 250

#: So long before its slot the head of a line is let go.
NEAR_MS = 30

#: Ten a second, without the jitter: one slot is 100.5 ms.
TEN = Terms.of(Pace("600/m", jitter=0.0))
SLOW = Terms.of(Pace("1/10s", jitter=0.0))

#: 2026-01-01 12:00 UTC.
NOON_US = 1_767_268_800_000_000


class Clock:
    def __init__(self) -> None:
        self.us = NOON_US

    def __call__(self) -> int:
        return self.us

    def advance(self, ms: float) -> None:
        self.us += round(ms * 1000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(module_state_dir: Path) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(embedded.ensure(module_state_dir))) as client:
        yield client
        client.flushall()


@pytest.fixture(params=["memory", "redis"])
def limiter(request: pytest.FixtureRequest, clock: Clock) -> Limiter:
    if request.param == "memory":
        return MemoryLimiter(clock)
    return RedisLimiter(request.getfixturevalue("store"), prefix="pace", clock_us=clock)


def arrive(limiter: Limiter, *members: str, key: str = KEY) -> list[bool]:
    return limiter.arrive([(key, member) for member in members], hold_ms=HOLD_MS)


def commit(limiter: Limiter, member: str, terms: Terms = TEN, key: str = KEY) -> Verdict:
    return limiter.commit(key, terms, member=member, hold_ms=HOLD_MS).verdict


# slots


def test_slots_follow_each_other_at_the_rate(limiter: Limiter, clock: Clock) -> None:
    waits = [limiter.commit(KEY, TEN, hold_ms=HOLD_MS).wait_ms for _ in range(3)]
    assert waits == [0, 100.5, 201]
    clock.advance(201)
    assert limiter.commit(KEY, TEN, hold_ms=HOLD_MS).wait_ms == 100.5


def test_who_is_a_little_late_moves_no_slot_after_its_own(limiter: Limiter, clock: Clock) -> None:
    """A message takes now longer, now shorter to come to its slot; the rate is not to suffer by that."""
    limiter.commit(KEY, TEN, hold_ms=HOLD_MS)
    clock.advance(100.5 + 40)
    assert [limiter.commit(KEY, TEN, hold_ms=HOLD_MS).wait_ms for _ in range(2)] == [0, 60.5]
    clock.advance(60.5 + 100.5 + 80)
    assert [limiter.commit(KEY, TEN, hold_ms=HOLD_MS).wait_ms for _ in range(2)] == [0, 100.5], (
        "more than 3/4 of a slot"
    )
    limiter.commit(OTHER, SLOW, hold_ms=HOLD_MS)
    clock.advance(10_050 + 99)
    waits = [limiter.commit(OTHER, SLOW, hold_ms=HOLD_MS, most_ms=WITHOUT_END_MS).wait_ms for _ in range(2)]
    assert waits == [0, 10_050 - 99]
    clock.advance(10_050 - 99 + 10_050 + 101)
    waits = [limiter.commit(OTHER, SLOW, hold_ms=HOLD_MS, most_ms=WITHOUT_END_MS).wait_ms for _ in range(2)]
    assert waits == [0, 10_050], "more than a tenth of a second"


def test_a_slot_that_is_too_far_off_is_not_taken(limiter: Limiter) -> None:
    assert limiter.commit(KEY, SLOW, hold_ms=HOLD_MS).verdict is Verdict.go
    for _ in range(3):
        late = limiter.commit(KEY, SLOW, hold_ms=HOLD_MS)
        assert (late.verdict, late.wait_ms) == (Verdict.later, 10_050)
    patient = limiter.commit(KEY, SLOW, hold_ms=HOLD_MS, most_ms=WITHOUT_END_MS)
    assert (patient.verdict, patient.wait_ms) == (Verdict.go, 10_050)


def test_a_burst_follows_an_idle_time_only(limiter: Limiter, clock: Clock) -> None:
    terms = Terms.of(Pace("1/10s", burst=3, jitter=0.0))
    assert [limiter.commit(KEY, terms, hold_ms=0).verdict for _ in range(4)] == ["go", "go", "go", "later"]
    clock.advance(10_050)
    assert [limiter.commit(KEY, terms, hold_ms=0).verdict for _ in range(2)] == ["go", "later"]


def test_another_key_has_slots_of_its_own(limiter: Limiter) -> None:
    assert commit(limiter, "a", SLOW) is Verdict.go
    assert commit(limiter, "b", SLOW, key=OTHER) is Verdict.go


@pytest.mark.parametrize("text", ["600/m", "2/s", "1/10s", "6/m", "10/h"])
def test_no_minute_has_more_slots_than_the_rate_says_and_none_is_left_out(
    limiter: Limiter, clock: Clock, text: str
) -> None:
    rate = Rate.parse(text)
    terms, starts = Terms.of(Pace(rate, jitter=0.3), seed=7), []
    window_ms = max(60_000, rate.per_ms)
    allowed = rate.count * max(1, 60_000 // rate.per_ms)
    for _ in range(min(1_300, 3 * allowed + 3)):
        wait_ms = limiter.commit(KEY, terms, hold_ms=HOLD_MS, most_ms=WITHOUT_END_MS).wait_ms
        clock.advance(wait_ms)
        starts.append(clock.us / 1000)
    assert all(later - one >= window_ms for one, later in zip(starts, starts[allowed:], strict=False))
    mean_ms = (starts[-1] - starts[0]) / (len(starts) - 1)
    assert mean_ms <= 1.02 * rate.per_ms / rate.count


def test_the_jitter_is_the_same_for_a_seed_and_another_for_another(clock: Clock) -> None:
    def waits(seed: int) -> list[float]:
        limiter, terms = MemoryLimiter(clock), Terms.of(Pace("600/m"), seed=seed)
        return [limiter.commit(KEY, terms, hold_ms=0, most_ms=WITHOUT_END_MS).wait_ms for _ in range(20)]

    assert waits(2**63 - 1) == waits(2**63 - 1) != waits(2**63 - 2)
    assert len({round(later - one) for one, later in zip(waits(1), waits(1)[1:], strict=False)}) > 5


# lines


def test_who_comes_while_others_wait_waits_behind_them(limiter: Limiter, clock: Clock) -> None:
    assert arrive(limiter, "a") == [True]
    assert commit(limiter, "a", SLOW) is Verdict.go
    assert arrive(limiter, "b", "c") == [False, False]
    assert arrive(limiter, "b") == [False], "said again"
    assert limiter.admit() == []
    assert limiter.next_due_ms() == 10_050 - NEAR_MS
    clock.advance(10_050 - NEAR_MS)
    assert arrive(limiter, "d") == [False]
    assert limiter.admit() == ["b"]
    assert limiter.admit() == []
    assert commit(limiter, "b", SLOW) is Verdict.go
    clock.advance(10_050)
    assert limiter.admit() == ["c"]
    assert commit(limiter, "c", SLOW) is Verdict.go
    clock.advance(10_050)
    assert limiter.admit() == ["d"]


def test_of_a_key_that_was_never_used_one_goes_until_its_pace_is_known(limiter: Limiter, clock: Clock) -> None:
    assert arrive(limiter, "a", "b", "c") == [True, False, False]
    assert limiter.admit() == []
    assert commit(limiter, "a") is Verdict.go
    assert limiter.next_due_ms() == 100.5 - NEAR_MS
    clock.advance(100.5 - NEAR_MS)
    assert limiter.admit() == ["b"]


def test_who_is_put_off_waits_where_it_was(limiter: Limiter, clock: Clock) -> None:
    assert arrive(limiter, "a") == [True]
    assert commit(limiter, "a", SLOW) is Verdict.go
    assert arrive(limiter, "b", "c") == [False, False]
    clock.advance(10_050)
    assert limiter.admit() == ["b"]
    limiter.hold(KEY, for_ms=5_000, reason="429")
    assert commit(limiter, "b", SLOW) is Verdict.later
    limiter.back(KEY, "b", hold_ms=HOLD_MS)
    clock.advance(5_000)
    assert limiter.admit() == ["b"]


def test_an_unknown_message_jumps_no_line(limiter: Limiter, clock: Clock) -> None:
    """Such as one that a plain producer has sent, which says nothing of its key."""
    assert commit(limiter, "a", SLOW) is Verdict.go
    assert arrive(limiter, "b") == [False]
    clock.advance(60_000)
    assert commit(limiter, "stranger", SLOW) is Verdict.later
    limiter.back(KEY, "stranger", hold_ms=HOLD_MS)
    assert limiter.admit() == ["b"]


def test_who_is_let_go_and_never_comes_is_waited_for_a_minute(limiter: Limiter, clock: Clock) -> None:
    assert commit(limiter, "a", SLOW) is Verdict.go
    assert arrive(limiter, "b", "c") == [False, False]
    clock.advance(10_050)
    assert limiter.admit() == ["b"]
    clock.advance(9_000)
    assert limiter.admit() == [], "the next slot is the one after b's"
    clock.advance(51_100)
    assert limiter.admit() == ["c"]
    assert commit(limiter, "b", SLOW) is Verdict.go
    assert commit(limiter, "c", SLOW) is Verdict.later, "so no rate is exceeded when b comes after all"


def test_a_message_of_a_dead_worker_keeps_its_place(limiter: Limiter, clock: Clock) -> None:
    assert arrive(limiter, "a") == [True]
    assert commit(limiter, "a", SLOW) is Verdict.go
    assert arrive(limiter, "b", "c") == [False, False]
    clock.advance(10_050)
    assert limiter.admit() == ["b"]
    limiter.lost("b")
    assert arrive(limiter, "b") == [True]
    limiter.lost("a")
    assert arrive(limiter, "a") == [True]
    assert commit(limiter, "a", SLOW) is Verdict.go
    clock.advance(1)
    assert commit(limiter, "b", SLOW) is Verdict.later


def test_what_is_done_is_forgotten_wherever_it_was(limiter: Limiter) -> None:
    assert arrive(limiter, "a", "b") == [True, False]
    for member in ("a", "b", "b", "never"):
        limiter.done(member)
    assert limiter.next_due_ms() is None
    (state,) = limiter.states()
    assert (state.waiting, state.out, state.running) == (0, 0, 0)


# at once


def test_as_many_run_at_once_as_may(limiter: Limiter, clock: Clock) -> None:
    terms = Terms.of(Pace(max_concurrent=2))
    assert arrive(limiter, "a") == [True]
    assert commit(limiter, "a", terms) is Verdict.go
    assert arrive(limiter, "b", "c", "d") == [True, False, False]
    assert commit(limiter, "b", terms) is Verdict.go
    assert commit(limiter, "c", terms) is Verdict.later
    limiter.back(KEY, "c", hold_ms=HOLD_MS)
    assert limiter.admit() == []
    limiter.done("a")
    assert limiter.next_due_ms() == 0
    assert limiter.admit() == ["c"]
    limiter.lost("b")
    assert limiter.admit() == [], "a dead worker's place is that of its message"
    assert arrive(limiter, "b") == [True]
    clock.advance(60_001)
    assert limiter.admit() == ["d"], "unless that never comes"


# holds


def test_a_held_key_lets_no_one_go_until_its_time(limiter: Limiter, clock: Clock) -> None:
    until_ms = limiter.hold(KEY, for_ms=20_000, reason="429")
    assert until_ms == NOON_US / 1000 + 20_000
    assert limiter.hold(KEY, for_ms=1_000) == until_ms, "none is shortened"
    assert arrive(limiter, "a") == [False]
    assert limiter.commit(KEY, TEN, hold_ms=HOLD_MS).verdict is Verdict.later
    assert limiter.held_ms(KEY) == 20_000
    assert arrive(limiter, "b", key=OTHER) == [True]
    assert limiter.next_due_ms() == 20_000 - NEAR_MS
    clock.advance(20_000)
    assert limiter.held_ms(KEY) == 0
    assert limiter.admit() == ["a"]


def test_who_was_let_go_before_a_hold_waits_again(limiter: Limiter) -> None:
    assert arrive(limiter, "a") == [True]
    limiter.hold(KEY, for_ms=20_000)
    assert arrive(limiter, "a") == [False]


def test_of_those_who_are_refused_together_the_first_one_counts(limiter: Limiter, clock: Clock) -> None:
    assert limiter.slow_down(KEY, for_ms=20_000, reason="429") == 20_000
    assert limiter.slow_down(KEY, for_ms=5_000, reason="429") is None
    assert limiter.slow_down(KEY, reason="429") is None
    (state,) = limiter.states()
    assert (state.slowed, state.reason, limiter.held_ms(KEY)) == (1, "429", 20_000)
    assert limiter.slow_down(KEY, for_ms=30_000, reason="503") is None
    assert limiter.held_ms(KEY) == 30_000, "a later one makes it longer"
    clock.advance(30_000)
    assert limiter.slow_down(KEY) == 5_000, "a back-off"
    clock.advance(5_000)
    assert limiter.slow_down(KEY) == 10_000
    assert limiter.states()[0].slowed == 3


def test_a_hold_can_be_ended_by_hand(limiter: Limiter) -> None:
    limiter.hold(KEY, until_ms=NOON_US / 1000 + 3_600_000, reason="by hand", slows=True)
    assert arrive(limiter, "a") == [False]
    (state,) = limiter.states()
    assert (state.held_until_ms, state.reason) == (NOON_US / 1000 + 3_600_000, "by hand")
    assert (state.waiting, state.slowed) == (1, 1)
    limiter.release(KEY)
    assert limiter.admit() == ["a"]
    (state,) = limiter.states()
    assert (state.held_until_ms, state.reason, state.slowed) == (None, "", 0)


def test_a_back_off_doubles_up_to_ten_minutes(limiter: Limiter, clock: Clock) -> None:
    lengths_s = []
    for _ in range(9):
        lengths_s.append((limiter.hold(KEY) - clock.us / 1000) / 1000)
        clock.advance(lengths_s[-1] * 1000)
    assert lengths_s == [5, 10, 20, 40, 80, 160, 320, 600, 600]


def test_a_rate_that_was_halved_recovers_step_by_step(limiter: Limiter, clock: Clock) -> None:
    limiter.commit(KEY, TEN, hold_ms=HOLD_MS)
    for _ in range(2):
        limiter.hold(KEY, for_ms=1_000, slows=True)
    assert [limiter.succeeded(KEY) for _ in range(10)] == [2] * 10, "what began before says nothing"
    clock.advance(1_000)

    def gap_ms() -> float:
        limiter.commit(KEY, TEN, hold_ms=HOLD_MS, most_ms=WITHOUT_END_MS)
        one, other = (limiter.commit(KEY, TEN, hold_ms=HOLD_MS, most_ms=WITHOUT_END_MS).wait_ms for _ in range(2))
        return other - one

    assert gap_ms() == 402
    assert [limiter.succeeded(KEY) for _ in range(10)] == [2] * 9 + [1]
    assert gap_ms() == 201
    assert [limiter.succeeded(KEY) for _ in range(10)] == [1] * 9 + [0]
    assert gap_ms() == 100.5


# budgets, rates, listings


def test_a_budget_ends_with_the_day(limiter: Limiter, clock: Clock) -> None:
    terms = Terms.of(Pace(budget="2/day"))
    assert [limiter.commit(KEY, terms, hold_ms=0).verdict for _ in range(3)] == ["go", "go", "later"]
    assert arrive(limiter, "a") == [False]
    assert limiter.next_due_ms() == 12 * 3_600_000 - NEAR_MS
    (state,) = limiter.states()
    assert (state.spent, state.budget) == (2, 2)
    clock.advance(12 * 3_600_000)
    assert limiter.admit() == ["a"]
    assert commit(limiter, "a", terms) is Verdict.go


def test_beyond_a_budget_messages_are_rejected_where_the_pace_says_so(limiter: Limiter) -> None:
    terms = Terms.of(Pace(budget="1/day", over_budget="reject"))
    assert commit(limiter, "a", terms) is Verdict.go
    assert arrive(limiter, "b") == [True], "to be told so"
    assert commit(limiter, "b", terms) is Verdict.spent


def test_a_rate_that_is_set_holds_at_once_also_for_those_who_wait(limiter: Limiter, clock: Clock) -> None:
    hourly = Terms.of(Pace("1/h", jitter=0.0))
    assert commit(limiter, "a", hourly) is Verdict.go
    assert arrive(limiter, "b") == [False]
    limiter.set_rate("shop.example", Rate.parse("1/s"))
    assert limiter.rates() == {"shop.example": "1/s"}
    assert limiter.next_due_ms() == 1_005 - NEAR_MS
    clock.advance(1_005)
    assert limiter.admit() == ["b"]
    assert commit(limiter, "b", hourly) is Verdict.go
    assert limiter.states()[0].rate == "1/s"
    limiter.set_rate("shop.example", None)
    assert limiter.states()[0].rate == "1/h"
    assert commit(limiter, "c", hourly) is Verdict.later


@pytest.mark.parametrize("name", [KEY, "shop.example", "*.example", "default"])
def test_a_rate_is_set_for_a_key_a_host_a_domain_or_all(limiter: Limiter, name: str) -> None:
    limiter.set_rate("elsewhere.example", Rate.parse("1/day"))
    limiter.set_rate(name, Rate.parse("1/h"))
    assert commit(limiter, "a") is Verdict.go
    assert commit(limiter, "b") is Verdict.later


def test_the_listing_says_how_much_of_each_key_was_used(limiter: Limiter, clock: Clock) -> None:
    for _ in range(3):
        limiter.commit(KEY, TEN, hold_ms=HOLD_MS)
        clock.advance(1_000)
    limiter.commit(OTHER, SLOW, hold_ms=HOLD_MS)
    assert [(state.key, state.used, state.rate) for state in limiter.states()] == [
        (OTHER, 1, "1/10s"),
        (KEY, 3, "600/m"),
    ]
    assert (limiter.states()[0].subject, limiter.states()[0].exit) == ("other.example", "direct")
    clock.advance(58_500)
    assert [state.used for state in limiter.states()] == [1, 1]


# both are one


def operations() -> st.SearchStrategy[list[tuple[str, str, int]]]:
    names = ["advance", "arrive", "admit", "commit", "commit", "done", "lost", "back", "hold", "succeeded", "release"]
    one = st.tuples(st.sampled_from(names), st.sampled_from("abcdef"), st.integers(0, 30_000))
    return st.lists(one, max_size=60)


def play(
    limiter: Limiter, clock: Clock, terms: Terms, played: list[tuple[str, str, int]]
) -> tuple[list[object], list[float]]:
    """What a limiter says to a sequence of calls, and when its slots are."""
    said: list[object] = []
    slots: list[float] = []
    calls: dict[str, Callable[[str, int], object]] = {
        "advance": lambda member, ms: clock.advance(ms),
        "arrive": lambda member, ms: limiter.arrive([(KEY, member)], hold_ms=HOLD_MS),
        "admit": lambda member, ms: limiter.admit(),
        "done": lambda member, ms: limiter.done(member),
        "lost": lambda member, ms: limiter.lost(member),
        "back": lambda member, ms: limiter.back(KEY, member, hold_ms=HOLD_MS),
        "hold": lambda member, ms: limiter.hold(KEY, for_ms=ms // 3, slows=ms % 2 == 0),
        "succeeded": lambda member, ms: limiter.succeeded(KEY),
        "release": lambda member, ms: limiter.release(KEY),
    }
    for name, member, ms in played:
        if name == "commit":
            answer = limiter.commit(KEY, terms, member=member, hold_ms=HOLD_MS, most_ms=ms)
            if answer.verdict is Verdict.go:
                slots.append(clock.us / 1000 + answer.wait_ms)
            said.append(answer)
        else:
            said.append(calls[name](member, ms))
        said.append((limiter.next_due_ms(), limiter.states()))
    return said, slots


PACES = st.sampled_from(["600/m", "2/s", "6/m", "1/10s"])


@given(played=operations(), rate=PACES, jitter=st.sampled_from([0.0, 0.3]), most=st.sampled_from([0, 1, 2]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_limiters_say_the_same_and_keep_the_rate(
    store: redis.Redis, played: list[tuple[str, str, int]], rate: str, jitter: float, most: int
) -> None:
    """Against the plain reference: no time as long as the rate's has more slots than it says."""
    store.flushall()
    terms = Terms.of(Pace(rate, jitter=jitter, max_concurrent=most or None), seed=3)
    in_memory, in_store = Clock(), Clock()
    said, slots = play(MemoryLimiter(in_memory), in_memory, terms, played)
    assert play(RedisLimiter(store, prefix="p", clock_us=in_store), in_store, terms, played) == (said, slots)
    read = Rate.parse(rate)
    allowed, window_ms = read.count * max(1, 60_000 // read.per_ms), max(60_000, read.per_ms)
    assert slots == sorted(slots)
    assert all(later - one >= window_ms for one, later in zip(slots, slots[allowed:], strict=False))
