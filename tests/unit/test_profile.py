"""What the invisible engine draws for a seed: real invisible_core, no engine."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from asyncworker.engines import profile
from asyncworker.engines.profile import drawn
from asyncworker.errors import ConfigurationError, EngineMissing
from asyncworker.identity import MAX_SEED
from asyncworker.settings import child_environment, leave_invisible_core_alone

PROGRAM = """
import json, os, sys
from asyncworker.engines.profile import drawn
assert "invisible_core" not in sys.modules
who = drawn(42, {"screen.width": 2560, "dark_theme": True}, locale="de-DE", timezone="Europe/Berlin")
print(json.dumps([who.digest, who.drawn_by, dict(who.fields), os.environ["INVISIBLE_CORE_AUTOFIX"]]))
"""


@pytest.fixture
def core() -> Any:
    leave_invisible_core_alone()
    import invisible_core

    return invisible_core


@pytest.fixture
def nothing_remembered() -> Iterator[None]:
    profile._drawn.cache_clear()
    yield
    profile._drawn.cache_clear()


def in_a_process(hash_seed: str) -> Any:
    environment = child_environment(PYTHONHASHSEED=hash_seed)
    environment.pop("INVISIBLE_CORE_AUTOFIX", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_any_process_draws_the_same_visitor_and_leaves_invisible_core_as_it_is() -> None:
    here = drawn(42, {"dark_theme": True, "screen.width": 2560}, locale="de-DE", timezone="Europe/Berlin")
    expected = [here.digest, here.drawn_by, dict(here.fields), "off"]
    assert in_a_process("0") == in_a_process("4242") == expected


def test_a_digest_is_12_hex_digits_and_says_which_version_drew_it(core: Any) -> None:
    who = drawn(42, {})
    assert re.fullmatch("[0-9a-f]{12}", who.digest)
    assert who.drawn_by == f"invisible_core {core.__version__}"


def test_seeds_are_different_visitors_though_few_values_tell_them_apart() -> None:
    visitors = [drawn(seed, {}) for seed in [*range(200), MAX_SEED]]
    assert len({who.digest for who in visitors}) == 201
    assert len({(who.fields["gpu"], who.fields["screen"]) for who in visitors}) < 100


def test_pins_locale_and_time_zone_each_make_another_visitor() -> None:
    digests = [
        drawn(42, {}).digest,
        drawn(42, {"screen.width": 2560}).digest,
        drawn(42, {}, locale="de-DE").digest,
        drawn(42, {}, timezone="de-DE").digest,
    ]
    assert len(set(digests)) == len(digests)


def test_another_version_of_the_core_is_another_visitor(
    core: Any, nothing_remembered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn(42, {})
    profile._drawn.cache_clear()
    monkeypatch.setattr(core, "__version__", "54.0.0")
    now = drawn(42, {})
    assert (now.drawn_by, now.fields) == ("invisible_core 54.0.0", before.fields)
    assert now.digest != before.digest


def test_the_digest_is_of_the_whole_profile(
    core: Any, nothing_remembered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn(42, {})
    whole = core.generate_profile(42)
    for field in dataclasses.fields(whole):
        if field.name in ("seed", "dark_theme", "branding"):
            continue  # what is not nested
        value = getattr(whole, field.name)
        other = value[:-1] if isinstance(value, list) else value | {"new": 1} if isinstance(value, dict) else None
        if other is None:
            inner = dataclasses.fields(value)[0].name
            other = dataclasses.replace(value, **{inner: f"another {inner}"})
        changed = dataclasses.replace(whole, **{field.name: other})
        profile._drawn.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(core, "generate_profile", lambda seed, pin=None, changed=changed: changed)
            patched.setattr(core, "context_geometry", lambda _: {"viewport": {"width": 1, "height": 1}})
            assert drawn(42, {}).digest != before.digest, field.name


def test_what_a_person_sees_is_what_the_client_launches_with(core: Any) -> None:
    from invisible_playwright.async_api import InvisiblePlaywright

    pins = {"screen.width": 2560, "hardware.concurrency": 16}
    launched = InvisiblePlaywright(seed=42, pin=pins)._profile
    assert launched == core.generate_profile(42, pin=pins)
    fields = drawn(42, pins).fields
    assert list(fields) == [
        "gpu",
        "gpu_class",
        "screen",
        "dpr",
        "viewport",
        "hardware_concurrency",
        "audio_sample_rate",
        "dark_theme",
        "branding",
        "ui_font",
        "user_agent",
    ]
    assert fields["gpu"] == launched.gpu.renderer
    assert fields["screen"] == f"2560x{launched.screen.height}"
    assert fields["hardware_concurrency"] == 16
    assert str(fields["viewport"]).startswith("2560x")
    assert str(fields["user_agent"]).startswith("Mozilla/5.0 (Windows NT 10.0; Win64; x64; rv:")


@pytest.mark.parametrize(
    "pins",
    [
        {"screen.widht": 1},
        {"screen": {"width": 1}},
        {"seed": 7},
        {"gpu.renderer": "none of theirs"},
        {"screen.width": "wide"},
        {"screen.width": None},
        {"screen.width": [1]},
        {5: 3},
        pytest.param({"dark_theme": object()}, id="an object"),  # whose own text is another in each process
        {"screen.width": 1, 5: 3},
    ],
    ids=str,
)
def test_a_wrong_pin_is_a_short_error_about_the_setting(pins: dict[Any, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"^ASYNCWORKER_PINS cannot be used: .+; correct or unset it$") as one:
        drawn(42, pins)
    assert one.value.name == "ASYNCWORKER_PINS"
    assert len(str(one.value)) < 400
    assert "\n" not in str(one.value)


def test_a_core_that_does_not_import_is_a_missing_engine(
    nothing_remembered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "invisible_core", None)
    with pytest.raises(EngineMissing, match="pip install invisible-playwright") as missing:
        drawn(42, {})
    assert missing.value.engine == "invisible"


def test_what_is_remembered_is_bounded_and_cannot_be_changed_by_who_got_it() -> None:
    who = drawn(42, {})
    assert drawn(42, {}) is who
    with pytest.raises(TypeError):
        who.fields["gpu"] = "another"  # type: ignore[index]
    assert profile._drawn.cache_info().maxsize == profile.REMEMBERED


def test_a_set_in_a_later_profile_is_digested_in_one_order_and_what_has_none_is_refused() -> None:
    assert profile._in_order(frozenset({"b", "a"})) == ["'a'", "'b'"]
    with pytest.raises(TypeError, match="holds a object"):
        profile._in_order(object())
