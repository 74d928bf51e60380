"""Settings: what is read, what is refused and with which sentence, and that no secret is shown."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from asyncworker import settings as module
from asyncworker.errors import ConfigurationError
from asyncworker.settings import EngineName, Proxy, SecretUrl, Settings, as_environment, describe, load

SECRET = "hunter2"
BROKER = f"redis://user:{SECRET}@broker:6379/3"


def test_everything_has_a_default() -> None:
    settings = load({})
    assert (settings.engine, settings.headless, settings.broker_url) == (EngineName.invisible, True, None)
    assert settings.state_dir.is_absolute()


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("ASYNCWORKER_HEADLES", "ASYNCWORKER_HEADLESS"),
        ("ASYNCWORKER_BROKER", "ASYNCWORKER_BROKER_URL"),
        ("ASYNCWORKER_CLOSE_TIMEOUT", "ASYNCWORKER_CLOSE_TIMEOUT_MS"),
        ("asyncworker_ingine", "ASYNCWORKER_ENGINE"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(unknown: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{unknown} is no setting; the nearest is {nearest} ") as caught:
        load({unknown: "1"})
    assert caught.value.name == unknown


def test_other_variables_are_none_of_our_business() -> None:
    assert load({"PATH": "/bin", "ASYNCWORKER": "1", "_ASYNCWORKER_TOKEN": "x"}) == load({})


def test_an_empty_variable_is_as_if_it_were_not_set() -> None:
    assert load({"ASYNCWORKER_SEED": "", "ASYNCWORKER_ENGINE": ""}) == load({})


@pytest.mark.parametrize(
    ("variable", "text", "reason"),
    [
        ("ENGINE", "safari", "invisible"),
        ("SEED", "-1", "greater than or equal to 0"),
        ("SEED", str(2**63), "less than or equal to"),
        ("SEED", "abc", "integer"),
        ("SLOTS", "0", "greater than or equal to 1"),
        ("LAUNCH_TIMEOUT_MS", "0", "greater than or equal to 1"),
        ("LAUNCH_TIMEOUT_MS", "1.5", "integer"),
        ("HEADLESS", "perhaps", "boolean"),
        ("BROKER_URL", "kafka://broker", "amqps://"),
        ("BROKER_URL", "amqp://one;redis://other", "amqp://"),
        ("BROKER_URL", "amqp://broker", "ASYNCWORKER_STORE_URL"),
        ("STORE_URL", "amqp://broker", "redis://"),
        ("ENDPOINT", "ftp://browser", "ws://"),
        ("ENGINE", "remote", "ASYNCWORKER_ENDPOINT"),
    ],
)
def test_a_value_that_cannot_be_used_is_an_error_that_names_it(variable: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({f"ASYNCWORKER_{variable}": text})
    assert reason in str(caught.value)
    assert variable in str(caught.value) or reason == "ASYNCWORKER_ENDPOINT"
    assert "`asyncworker settings`" in str(caught.value)


def test_all_wrong_values_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({"ASYNCWORKER_SLOTS": "0", "ASYNCWORKER_SEED": "x"})
    assert "ASYNCWORKER_SLOTS" in str(caught.value)
    assert "ASYNCWORKER_SEED" in str(caught.value)


@pytest.mark.parametrize(
    "proxy",
    [
        f"http://user:{SECRET}@proxy",  # no port
        f"http://user:{SECRET}",  # no host: the password is where a port should be
        f"http://user:{SECRET}@proxy:http",
        f"http://user:{SECRET}@proxy:99999",
        f"http://user:{SECRET}@[::1:8080",
        f"http://user:{SECRET}℀@proxy:8080",  # a character that urllib refuses, quoting all around it
        f"ftp://user:{SECRET}@proxy:21",
        f"user:{SECRET}@proxy:8080",
    ],
)
def test_a_proxy_that_does_not_parse_is_refused_without_showing_its_password(proxy: str) -> None:
    with pytest.raises(ConfigurationError, match="ASYNCWORKER_PROXY") as caught:
        load({"ASYNCWORKER_PROXY": proxy})
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://proxy:8080", Proxy("http://proxy:8080")),
        ("socks5://u:p%40ss@proxy:1080", Proxy("socks5://proxy:1080", "u", "p@ss")),
        ("https://[::1]:3128", Proxy("https://[::1]:3128")),
    ],
)
def test_a_proxy_is_taken_apart_as_playwright_takes_it(url: str, proxy: Proxy) -> None:
    settings = load({"ASYNCWORKER_PROXY": url})
    assert settings.proxy_parts == proxy
    assert "username" in proxy.as_option() or proxy.username is None


SECRETS = {
    "ASYNCWORKER_BROKER_URL": BROKER,
    "ASYNCWORKER_PROXY": f"http://user:{SECRET}@proxy:8080",
    "ASYNCWORKER_ENDPOINT": f"wss://browsers.example/chromium?token={SECRET}&stealth=1",
}


def test_no_secret_is_shown_by_repr_str_or_the_list_of_settings() -> None:
    settings = load(SECRETS)
    shown = [repr(settings), str(settings), repr(settings.proxy_parts), repr(describe(settings, SECRETS))]
    shown += [f"{settings.broker_url} {settings.broker_url!r}", f"{settings.model_dump()}"]
    for text in shown:
        assert SECRET not in text
    assert settings.broker_url is not None
    assert settings.broker_url.value == BROKER


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@broker:6379/3", "redis://user:***@broker:6379/3"),
        ("redis://:pw@broker", "redis://:***@broker"),
        ("amqp://a:pw@one/v;amqps://b:pw@two/v?x=pw", "amqp://a:***@one/v;amqps://b:***@two/v?x=***"),
        ("redis://broker:6379/0?password=pw&db=1", "redis://broker:6379/0?password=***&db=***"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
        ("unix://:pw@/run/valkey.sock?db=1", "unix://:***@/run/valkey.sock?db=***"),
        ("http://user:pw@[broken", "***"),
    ],
)
def test_a_url_is_shown_with_its_secrets_masked_and_the_rest_as_written(url: str, shown: str) -> None:
    assert str(SecretUrl(url)) == shown
    assert repr(SecretUrl(url)) == f"SecretUrl({shown!r})"


def test_no_error_shows_a_secret() -> None:
    for variable, url in SECRETS.items():
        broken = {"ASYNCWORKER_SLOTS": "x", variable: url.replace("://", "x://", 1)}
        with pytest.raises(ConfigurationError) as caught:
            load(broken)
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load({}).seed = 7  # type: ignore[misc]


def test_settings_given_in_code_win_over_the_environment() -> None:
    environ = {"ASYNCWORKER_SEED": "1", "ASYNCWORKER_SLOTS": "2"}
    settings = load(environ, seed=7)
    assert (settings.seed, settings.slots) == (7, 2)


def test_an_unknown_setting_in_code_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="ASYNCWORKER_HEADLES"):
        load({}, headles=True)


def test_the_process_environment_is_read_by_load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCWORKER_SEED", "7")
    monkeypatch.setenv("ASYNCWORKER_BROKER_URL", "redis://elsewhere")
    assert Settings().seed is None
    assert load({}).broker_url is None
    assert load().seed == 7


def test_a_file_called_env_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("ASYNCWORKER_SEED=7\n")
    monkeypatch.chdir(tmp_path)
    assert load({}).seed is None


PARSED: list[tuple[str, str, Any]] = [
    ("ACTORS", "actors, shop.actors ,", ("actors", "shop.actors")),
    ("ACTORS", '["actors", "shop.actors"]', ("actors", "shop.actors")),
    ("ALLOWED_SCHEMES", "https", ("https",)),
    ("LAUNCH_ARGS", "--lang=de --window-size=800,600", ("--lang=de", "--window-size=800,600")),
    ("LAUNCH_ARGS", "--user-agent='a b'", ("--user-agent=a b",)),
    ("LAUNCH_ARGS", '["--window-size=800,600"]', ("--window-size=800,600",)),
    ("PINS", '{"screen.width": 2560, "gpu.vendor": "Intel"}', {"screen.width": 2560, "gpu.vendor": "Intel"}),
    ("HUMANIZE", "true", True),
    ("HUMANIZE", "OFF", False),
    ("HUMANIZE", "1.5", 1.5),
    ("HEADLESS", "0", False),
    ("SEED", str(2**63 - 1), 2**63 - 1),
    ("ENGINE", "chromium", EngineName.chromium),
    ("OUTPUT_DIR", "~/shots", Path.home() / "shots"),
]


@pytest.mark.parametrize(("variable", "text", "value"), PARSED)
def test_a_variable_is_parsed_into_its_value(variable: str, text: str, value: object) -> None:
    parsed = getattr(load({f"ASYNCWORKER_{variable}": text}), variable.lower())
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PINS", "screen.width=2560"),
        ("PINS", "[1]"),
        ("ACTORS", "[actors]"),
        ("ACTORS", '[["a"]]'),
        ("LAUNCH_ARGS", "--lang='de"),
        ("HUMANIZE", "slowly"),
    ],
)
def test_a_list_or_mapping_that_does_not_parse_is_an_error_that_names_it(variable: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ASYNCWORKER_{variable}"):
        load({f"ASYNCWORKER_{variable}": text})


def test_a_child_process_gets_the_same_settings(tmp_path: Path) -> None:
    settings = load(
        SECRETS | {f"ASYNCWORKER_{variable}": text for variable, text, _ in PARSED} | {"ASYNCWORKER_SEED": "7"},
        state_dir=tmp_path,
        headless=False,
        slots=None,
    )
    assert load(as_environment(settings)) == settings


def test_a_child_process_is_told_only_what_was_set() -> None:
    assert as_environment(load({"ASYNCWORKER_SEED": "7"}, warm=True)) == {
        "ASYNCWORKER_SEED": "7",
        "ASYNCWORKER_WARM": "True",
    }


def test_a_browser_is_started_without_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCWORKER_BROKER_URL", BROKER)
    monkeypatch.setenv("asyncworker_proxy", SECRETS["ASYNCWORKER_PROXY"])
    environment = module.child_environment(EXTRA="1")
    assert SECRET not in json.dumps(environment)
    assert environment["EXTRA"] == "1"
    assert environment["PATH"] == os.environ["PATH"]  # noqa: TID251


def test_the_list_of_settings_says_where_each_value_came_from() -> None:
    environ = {"ASYNCWORKER_SEED": "7", "ASYNCWORKER_SLOTS": "2"}
    rows = {row.variable: row for row in describe(load(environ, slots=3, warm=True), environ)}
    assert rows["ASYNCWORKER_SEED"].source == "environment"
    assert rows["ASYNCWORKER_WARM"].source == "code"
    assert (rows["ASYNCWORKER_SLOTS"].value, rows["ASYNCWORKER_SLOTS"].source) == ("3", "code")
    assert (rows["ASYNCWORKER_ENGINE"].source, rows["ASYNCWORKER_ENGINE"].default) == ("default", "invisible")
    assert len(rows) == len(Settings.model_fields)


def test_every_setting_has_a_meaning_and_every_duration_says_its_unit() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert not name.endswith(("timeout", "limit", "backoff", "wait", "ttl")), name


def test_the_table_for_the_readme_has_a_line_for_each_setting() -> None:
    lines = module.markdown_table().splitlines()
    assert len(lines) == len(Settings.model_fields) + 2
    assert all(line.count("|") == 4 for line in lines)
