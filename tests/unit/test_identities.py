"""`asyncworker identity SEED`, as a shell runs it but in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from asyncworker import cli
from asyncworker.engines.profile import drawn
from asyncworker.settings import child_environment

#: Runs the command and returns its exit code, what it printed, and what it said beside that.
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str, **environment: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patched:
            patched.setattr("os.environ", child_environment(**environment))
            patched.setattr(sys, "argv", ["asyncworker", *words])
            patched.setattr(cli, "console", Console(width=200))
            with pytest.raises(SystemExit) as ended:
                cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_a_seed_is_shown_with_its_digest_and_a_few_values(command: Command) -> None:
    code, out, err = command("identity", "42")
    who = drawn(42, {})
    assert (code, err) == (0, "")
    rows = dict(line.strip().split("  ", 1) for line in out.splitlines())
    shown = {name: value.strip() for name, value in rows.items()}
    assert (shown["seed"], shown["digest"], shown["drawn by"]) == ("42", who.digest, who.drawn_by)
    assert (shown["gpu"], shown["user agent"]) == (who.fields["gpu"], who.fields["user_agent"])
    assert shown["dark theme"] in ("yes", "no")
    assert shown["locale"] == shown["timezone"] == "by the exit address"


def test_pins_locale_and_time_zone_of_the_deployment_are_honoured_and_shown(command: Command) -> None:
    settings = {
        "ASYNCWORKER_PINS": '{"screen.width": 2560}',
        "ASYNCWORKER_LOCALE": "de-DE",
        "ASYNCWORKER_TIMEZONE": "Europe/Berlin",
    }
    _, out, _ = command("identity", "42", "--json", **settings)
    facts = json.loads(out)
    who = drawn(42, {"screen.width": 2560}, locale="de-DE", timezone="Europe/Berlin")
    assert (facts["digest"], facts["seed"], facts["engine"], facts["note"]) == (who.digest, 42, "invisible", None)
    assert (facts["pins"], facts["locale"], facts["timezone"]) == ({"screen.width": 2560}, "de-DE", "Europe/Berlin")
    assert {name: facts[name] for name in who.fields} == dict(who.fields)
    assert who.digest != drawn(42, {}).digest
    _, table, _ = command("identity", "42", **settings)
    for text in (who.digest, "2560x", "pinned screen.width", "de-DE", "Europe/Berlin"):
        assert text in table


def test_no_engine_is_needed(command: Command, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    environment = {"INVISIBLE_PLAYWRIGHT_ENGINE_DIR": nowhere, "INVISIBLE_PLAYWRIGHT_CACHE_DIR": nowhere}
    assert command("identity", "42", **environment)[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["chromium", "firefox", "webkit"])
def test_a_stock_engine_says_that_it_shows_every_seed_the_same_visitor(command: Command, engine: str) -> None:
    code, out, _ = command("identity", "42", ASYNCWORKER_ENGINE=engine)
    note = (
        f"The engine {engine} of this deployment shows every seed the same visitor; this is what the invisible "
        "engine would show."
    )
    assert code == 0
    assert drawn(42, {}).digest in out
    assert out.splitlines()[-1] == note
    assert json.loads(command("identity", "42", "--json", ASYNCWORKER_ENGINE=engine)[1])["note"] == note


@pytest.mark.parametrize("seed", ["-1", "x", "1.0", "", "9223372036854775808", "9" * 5_000, "٤٢", "1_0"])
def test_a_seed_that_is_none_is_the_usual_sentence(command: Command, seed: str) -> None:
    code, out, err = command("identity", seed)
    assert (code, out) == (2, "")
    assert "is no seed: a seed is an integer from 0 to 2**63-1" in err
    assert "Traceback" not in err


def test_a_wrong_pin_is_one_sentence_that_names_the_setting(command: Command) -> None:
    code, out, err = command("identity", "42", ASYNCWORKER_PINS='{"screen.widht": 1}')
    assert (code, out) == (2, "")
    assert err.startswith("asyncworker: ASYNCWORKER_PINS cannot be used: pin key 'screen.widht'")
    assert len(err.splitlines()) == 1
