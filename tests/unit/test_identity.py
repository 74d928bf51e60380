"""Seeds, identities and the streams of randomness that are drawn from them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncworker.errors import InvalidSeed
from asyncworker.identity import MAX_SEED, Identity, checked_seed, new_seed, stream

seeds = st.integers(0, MAX_SEED)

NO_SEEDS: list[Any] = [
    True,
    False,
    None,
    7.0,
    float("nan"),
    "7",
    b"7",
    "",
    [],
    [7],
    {},
    -1,
    MAX_SEED + 1,
    10**5_000,
    -(10**5_000),
    "x" * 1_000_000,
]


def short(value: object) -> str:
    return type(value).__name__ + ("" if isinstance(value, float | str | int) else repr(value))


class NumberOfSomeLibrary(int):
    pass


@given(seeds)
@example(0)
@example(MAX_SEED)
def test_every_integer_of_63_bits_is_a_seed(seed: int) -> None:
    assert checked_seed(seed) == seed
    assert Identity(seed=seed).seed == seed


@pytest.mark.parametrize("seed", [*NO_SEEDS, NumberOfSomeLibrary(7)], ids=short)
def test_anything_else_is_refused_in_one_short_sentence(seed: Any) -> None:
    for use in (checked_seed, lambda seed: Identity(seed=seed)):
        with pytest.raises(InvalidSeed, match=r"is no seed: a seed is an integer from 0 to 2\*\*63-1") as refused:
            use(seed)
        assert refused.value.seed is seed
        assert len(str(refused.value)) < 200
        assert "\n" not in str(refused.value)


@given(st.integers() | st.floats() | st.text() | st.booleans() | st.none())
def test_a_value_is_a_seed_or_refused_as_one(value: object) -> None:
    if type(value) is int and 0 <= value <= MAX_SEED:
        assert checked_seed(value) == value
        return
    with pytest.raises(InvalidSeed) as refused:
        checked_seed(value)
    assert refused.value.seed is value


def test_a_refused_seed_is_a_value_error_and_the_messages_fault() -> None:
    with pytest.raises(ValueError, match="True is no seed"):
        checked_seed(True)


def test_new_seeds_are_seeds_and_never_the_same() -> None:
    drawn = {checked_seed(new_seed()) for _ in range(1_000)}
    assert len(drawn) == 1_000
    assert max(drawn) > MAX_SEED // 2, "they use the whole range"


# streams


@given(seeds, st.text())
def test_a_stream_is_the_same_each_time_it_is_asked_for(seed: int, name: str) -> None:
    first, second = stream(seed, name), stream(seed, name)
    assert [first.random() for _ in range(5)] == [second.random() for _ in range(5)]


@given(seeds, st.text(), st.text())
def test_streams_of_other_names_draw_other_numbers(seed: int, name: str, other: str) -> None:
    same = stream(seed, name).getrandbits(256) == stream(seed, other).getrandbits(256)
    assert same == (name == other)


@given(seeds, seeds, st.text())
def test_streams_of_other_seeds_draw_other_numbers(seed: int, other: int, name: str) -> None:
    same = stream(seed, name).getrandbits(256) == stream(other, name).getrandbits(256)
    assert same == (seed == other)


def test_the_seed_and_the_name_do_not_run_into_each_other() -> None:
    assert stream(1, "2/pace").random() != stream(12, "/pace").random() != stream(1, "/2/pace").random()


@given(seeds, st.integers(0, 50))
def test_drawing_more_of_one_stream_shifts_nothing_in_another(seed: int, more: int) -> None:
    pace, session = stream(seed, "pace"), stream(seed, "session")
    for _ in range(more):
        pace.random()
    assert session.random() == stream(seed, "session").random()


#: Written down once: a message of last year is replayed with the numbers of last year.
KNOWN = {
    (0, "session"): [884127404, 228593518, 317334364],
    (42, "session"): [745824887, 955134534, 655842311],
    (MAX_SEED, "pâce/✓"): [342020631, 692180380, 128434688],
}


def test_streams_are_the_same_in_another_process_and_another_year() -> None:
    code = """
import json, sys
from asyncworker.identity import stream
for seed, name in json.loads(sys.argv[1]):
    generator = stream(seed, name)
    print(json.dumps([generator.randrange(10**9) for _ in range(3)]))
"""
    asked = json.dumps(list(KNOWN))
    command = [sys.executable, "-c", code, asked]
    for hash_seed in ("0", "7"):
        run = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": hash_seed})
        assert [json.loads(line) for line in run.stdout.splitlines()] == list(KNOWN.values())


# identities


@given(seeds)
def test_equal_seeds_are_equal_identities(seed: int) -> None:
    assert Identity(seed) == Identity(seed)
    assert hash(Identity(seed)) == hash(Identity(seed))
    assert len({Identity(seed), Identity(seed, locale="de-DE"), Identity(seed, pins={"screen.width": 2560})}) == 3


def test_an_identity_with_pins_has_a_hash() -> None:
    assert hash(Identity(7, pins={"screen.width": 2560})) == hash(Identity(7, pins={"screen.width": 2560}))


def test_an_identity_does_not_show_the_password_of_its_proxy() -> None:
    assert "hunter2" not in repr(Identity(7, proxy="http://user:hunter2@proxy:8080"))


def test_an_identity_is_what_it_is() -> None:
    with pytest.raises(AttributeError):
        Identity(7).seed = 8  # type: ignore[misc]


def test_a_digest_follows_from_the_rest_so_identities_are_equal_with_and_without() -> None:
    bare, drawn = Identity(7), Identity(7, digest="8472c6ff5bfe", drawn_by="invisible_core 53.48.0")
    assert (bare.digest, bare.drawn_by) == (None, None)
    assert bare == drawn
    assert hash(bare) == hash(drawn)
