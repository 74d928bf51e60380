"""README.md and CHANGELOG.md say what the code does; tests/process/test_readme.py runs README's commands."""

from __future__ import annotations

import argparse
import ast
import configparser
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
import typer
from dramatiq.brokers import redis as dramatiq_redis
from dramatiq.cli import make_argument_parser
from dramatiq.middleware import retries as dramatiq_retries

import asyncworker
from asyncworker import cli_pace, consumer, errors, heartbeat, middleware, redis_broker, retries
from asyncworker.engines import invisible
from asyncworker.health_server import SharedPort
from asyncworker.pace import Rules
from asyncworker.session import Session
from asyncworker.settings import (
    DEFAULT_SLOTS,
    PREFIX,
    EngineName,
    Settings,
    child_environment,
    leave_invisible_core_alone,
    load,
    markdown_table,
)
from tests import readme
from tests.readme import ROOT

TEXT = readme.README.read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


# --- nothing in README is left out


def test_every_block_is_run_by_a_test_or_listed_with_the_test_that_looks_at_it() -> None:
    commands: set[str] = set()
    others: set[str] = set()
    for block in readme.blocks():
        where = f"README.md:{block.line}"
        match block.language:
            case "console":
                commands |= {command for command, _ in block.commands()}
                assert block.text.startswith("$ "), f"{where}: a console block starts with a command"
            case "python":
                assert block.file, f"{where}: a Python block starts with a comment that names its file"
            case _:
                others.add(block.first_line)
                assert block.first_line in readme.OTHER_BLOCKS, f"{where}: no test looks at this block"
    files = readme.files()
    assert commands >= set(readme.COMMANDS_NOT_RUN), "listed, but no longer in README"
    assert set(files) >= set(readme.FILES_NOT_RUN), "listed, but no longer in README"
    assert others == set(readme.OTHER_BLOCKS), "listed, but no longer in README"
    for file in set(files) - set(readme.FILES_NOT_RUN):
        run = file.startswith("actors/") or any(file.partition("/")[0] in command for command in commands)
        assert run, f"{file} is neither an actors module, which workers import, nor run by a command"


def test_the_tests_that_look_at_what_is_not_run_exist() -> None:
    not_run = {*readme.COMMANDS_NOT_RUN.values(), *readme.FILES_NOT_RUN.values()}
    named = {test for _, test in not_run} | set(readme.OTHER_BLOCKS.values())
    source = Path(__file__).read_text() + (ROOT / "tests" / "process" / "test_readme.py").read_text()
    defined = set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
    assert named <= defined


def test_the_probes_of_kubernetes_ask_what_a_worker_answers(tmp_path: Path) -> None:
    (block,) = (block for block in readme.blocks() if block.language == "yaml")
    set_there = dict(re.findall(rf"{PREFIX}([A-Z_]+)=(\S+)", block.text))
    settings = load({PREFIX + name: value for name, value in set_there.items()}, state_dir=tmp_path)
    asked = re.findall(r"httpGet: {path: (\S+), port: (\d+)}", block.text)
    assert {int(port) for _, port in asked} == {settings.health_port}
    answers = {path: SharedPort(settings).answer(path) for path, _ in asked}
    assert {path: status for path, (status, _, _) in answers.items()} == {"/ready": 503, "/live": 503}, "no worker"


def test_the_rules_of_paces_can_be_read() -> None:
    (block,) = (block for block in readme.blocks() if block.language == "toml")
    rules = Rules.read(tomllib.loads(block.text))
    assert [str(rules.of(host).rate) for host in ("shop.example", "a.example", "b")] == ["10/m", "30/m", "2/s"]  # type: ignore[union-attr]


def test_the_commands_about_paces_are_as_shown() -> None:
    """tests/process/test_pace_commands.py runs them."""
    (block,) = (block for block in readme.blocks() if block.first_line == "$ asyncworker pace")
    commands = dict(block.commands())
    header = commands["asyncworker pace"].splitlines()[0]
    assert tuple(re.split(r"  +", header)) == tuple(name for name in cli_pace.HEADER if name)
    group = typer.main.get_command(cli_pace.pace)
    assert isinstance(group, typer.core.TyperGroup)
    for command in list(commands)[1:]:
        _, _, name, *words = shlex.split(command)
        group.commands[name].make_context(name, words)


# --- tables that are kept equal


def test_the_table_of_settings_is_that_of_the_code() -> None:
    assert readme.between("settings", "/settings") == markdown_table(), "paste asyncworker.settings.markdown_table()"


def test_the_table_of_hooks_is_that_of_the_middleware() -> None:
    wanted = ["| Celery's signal | hook |", "| --- | --- |"]
    for signal, hook in _hooks():
        wanted.append(f"| `{signal}` | {_as_code(hook)} |")
    assert len(wanted) > 10
    assert readme.between("hooks", "/hooks").splitlines() == wanted


def _hooks() -> list[tuple[str, str]]:
    """The rows of the table in the docstring of asyncworker/middleware.py."""
    table = re.search(r"=+ +=+\n.*?\n +=+ +=+\n(.*?)\n +=+ +=+\n", middleware.__doc__ or "", re.DOTALL)
    assert table is not None
    rows = [line.split(maxsplit=1) for line in table[1].splitlines()]
    return [(signal, hook.strip()) for signal, hook in rows]


def _as_code(text: str) -> str:
    """`hook(arguments)` and names of hooks as code, the words around them as they are."""
    return re.sub(r"\b(?:before|after)_\w+(?:\([^)]*\))?", lambda found: f"`{found[0]}`", text)


# --- what README names exists


def test_the_variables_in_it_are_settings() -> None:
    named = set(re.findall(rf"{PREFIX}[A-Z_]+", TEXT))
    assert named <= {PREFIX + name.upper() for name in Settings.model_fields}


def test_the_files_and_links_in_it_exist() -> None:
    of_the_reader = set(readme.files()) | {"actors/__init__.py"}
    for path in re.findall(r"`((?:asyncworker|actors|benchmarks|examples|tests)/[\w./-]*)`", TEXT):
        assert (ROOT / path).exists() or path in of_the_reader, path
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", TEXT, re.M)
    }
    for anchor in re.findall(r"\]\(#([^)]*)\)", TEXT):
        assert anchor in anchors, anchor


def test_the_errors_and_the_parts_of_a_session_in_it_exist() -> None:
    mentioned = set(re.findall(r"`([A-Z]\w+(?:Crashed|Failed|Missing|Message|Arguments|Unavailable))`", TEXT))
    assert len(mentioned) >= 6
    assert {name for name in mentioned if not hasattr(errors, name)} == set()
    parts = set(re.findall(r"`session\.(\w+)", TEXT))
    public = {name for name in dir(Session) if not name.startswith("_")} | set(_assigned(Session.__init__))
    assert len(parts) >= 8
    assert parts <= public


def _assigned(method: object) -> list[str]:
    source = inspect.getsource(method)  # type: ignore[arg-type]
    return re.findall(r"self\.(\w+) = ", source)


def test_the_table_of_engines_has_each_engine_once() -> None:
    table = TEXT.partition("| engine | browser |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(EngineName)


def test_the_errors_of_invisible_are_other_classes_than_those_of_playwright() -> None:
    leave_invisible_core_alone()
    from invisible_playwright.async_api import TimeoutError as theirs
    from playwright.async_api import TimeoutError as stock

    assert "`invisible_playwright.async_api.TimeoutError`" in TEXT
    assert not issubclass(theirs, stock)
    assert not issubclass(stock, theirs)


def test_the_figures_in_it_are_those_of_the_code() -> None:
    arguments = _dramatiq(["asyncworker.actors"])
    settings = load({})
    for sentence, fact in {
        "or 4, or 3 with `invisible`": (DEFAULT_SLOTS, invisible.MAX_CONTEXTS) == (4, 3),
        "one process for each CPU with 8 threads each": arguments.threads == 8,
        "Dramatiq waits ten minutes": arguments.worker_shutdown_timeout == 600_000,
        "at most `ASYNCWORKER_MAX_BROWSERS` (2)": settings.max_browsers == 2,
        "ten minutes unless set otherwise": settings.result_ttl_ms == 600_000,
        "waits 1 s, doubled each time up to a minute": settings.launch_backoff_ms == 1_000,
        "after 250 ms, then 500 ms": retries.CRASH_BACKOFF_MS == 250,
        "The first five of a message use up no retry": retries.MAX_CRASHES == 5,
        "`max_retries` (20), after 15 to 30 s": (
            dramatiq_retries.Retries().max_retries,
            dramatiq_retries.Retries().min_backoff,
        )
        == (20, 15_000),
        "not heard of for 15 s": settings.heartbeat_timeout_ms == 15_000,
        "heard of each second": heartbeat.EVERY_S == 1,
        "found within a second": consumer.POLL_S == 1,
        "taken for dead after 60 s": redis_broker.PLAIN_TIMEOUT_MS
        == dramatiq_redis.DEFAULT_HEARTBEAT_TIMEOUT
        == 60_000,
        "for seven days": dramatiq_redis.DEFAULT_DEAD_MESSAGE_TTL == 7 * 86_400_000,
    }.items():
        assert sentence in TEXT, f"README no longer says {sentence!r}: drop it here"
        assert fact, f"README says {sentence!r}, and the code no longer does so"


# --- what cannot be run as it stands


def _dramatiq(arguments: list[str]) -> argparse.Namespace:
    """The command line as Dramatiq reads it; SystemExit when it cannot."""
    namespace: argparse.Namespace = make_argument_parser().parse_args(arguments)  # type: ignore[no-untyped-call]
    return namespace


def test_the_make_targets_exist() -> None:
    targets = [command.split()[1] for command in readme.COMMANDS_NOT_RUN if command.startswith("make ")]
    environment = child_environment(MAKEFLAGS="")  # these tests may themselves be run by make
    done = subprocess.run(
        ["make", "-n", *targets], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "asyncworker demo" in done.stdout
    assert "pytest" in done.stdout


def test_pip_installs_the_checkout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--quiet", "--target", str(tmp_path), str(ROOT)], check=True, timeout=100)
    assert (tmp_path / "asyncworker" / "py.typed").is_file()
    assert not (tmp_path / "actors").exists(), "it would shadow the actors of every deployment"


def test_the_dockerfile_starts_a_worker(tmp_path: Path) -> None:
    instructions = _dockerfile()
    (command,) = (rest for name, rest in instructions if name == "CMD")
    program, *arguments = json.loads(command)
    assert program == "dramatiq"
    parsed = _dramatiq(arguments)
    assert (parsed.broker, parsed.processes, parsed.threads) == ("asyncworker.actors", 1, 2)
    names = [name for name, _ in instructions]
    install = names.index("RUN", names.index("COPY", names.index("USER")))
    assert instructions[install] == ("RUN", "asyncworker doctor --install"), "as the user who runs the worker"
    run = next(command for command in readme.COMMANDS_NOT_RUN if command.startswith("docker run"))
    variable = shlex.split(run)[shlex.split(run).index("-e") + 1]
    assert load(dict([variable.split("=", 1)])).broker_url is not None


def _dockerfile() -> list[tuple[str, str]]:
    (block,) = (block for block in readme.blocks() if block.language == "dockerfile")
    lines = [line for line in block.text.splitlines() if not line.startswith("#")]
    instructions = [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]
    known = {"FROM", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions} <= known
    assert instructions[0][0] == "FROM"
    return instructions


def test_the_unit_starts_a_worker(tmp_path: Path) -> None:
    (block,) = (block for block in readme.blocks() if block.language == "ini")
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's names are in mixed case
    unit.read_string(block.text)
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/dramatiq")
    assert _dramatiq(arguments).broker == "asyncworker.actors"
    assert load(dict([service["Environment"].split("=", 1)])).broker_url is not None
    assert int(service["TimeoutStopSec"]) * 1000 > 600_000 + load({}).stop_timeout_ms
    if (verify := shutil.which("systemd-analyze")) is not None:
        file = tmp_path / "worker.service"  # with a program and a directory that are on this machine
        text = block.text.replace(program, sys.executable).replace("/srv/worker", str(tmp_path))
        file.write_text(text.replace("User=worker", "User=root"))
        done = subprocess.run([verify, "verify", str(file)], capture_output=True, text=True, timeout=60, check=False)
        complaints = [line for line in done.stderr.splitlines() if "worker.service" in line]
        assert not complaints, complaints


def test_the_celery_task_is_python() -> None:
    tree = ast.parse(readme.files()["before.py"])
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == ["title"]


def test_the_tasks_that_stay_are_celerys(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(readme.files()["tasks.py"])
    code = "import tasks; print(sorted(name for name in tasks.app.tasks if not name.startswith('celery.')))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['tasks.title', 'tasks.two_pages', 'tasks.without_waiting']"


def test_importing_an_actors_module_loads_no_browser_library(tmp_path: Path) -> None:
    for file, text in readme.files().items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "actors" / "__init__.py").touch()
    code = "import actors.pages, actors.plain, sys; print([m for m in sys.modules if 'playwright' in m.split('.')[0]])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --- CHANGELOG.md


def test_the_changelog_keeps_its_form() -> None:
    titles = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
    assert titles
    for title in titles:
        matched = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (unreleased|\d{4}-\d\d-\d\d)", title)
        assert matched, title
        if matched[2] != "unreleased":
            date.fromisoformat(matched[2])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE)) <= kinds


def test_the_version_is_the_newest_of_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## \[([^\]]+)\]", CHANGELOG, re.MULTILINE)
    assert newest is not None
    assert project["version"] == asyncworker.__version__ == newest[1]


# --- examples


@pytest.mark.parametrize("file", ["actors/pages.py", "producer.py"])
def test_the_first_example_is_what_the_readme_shows(file: str) -> None:
    shown = readme.files()[file].partition("\n")[2]
    example = (ROOT / "examples" / "first" / file).read_text()
    assert example.partition('"""\n\n')[2] == shown
