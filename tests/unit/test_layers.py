"""Who may import whom, what an import does, and who reads the environment."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncworker

PACKAGE = Path(asyncworker.__file__).parent

#: Each line may import from itself and from the lines above it.
LAYERS = """
errors
ending
identity urls stores settings shielding threads phases pace retry_after
fencing step_records
once
ledger guard visitor
limiter
memory_limiter pacer
private_hosts
lineage processes scratch siblings
engines.capabilities engines.importing engines.profile engines.lifeline engines.storage_state engines.invisible_client
engines engines.finding engines.driver engines.playwright engines.remote engines.invisible
generation launching contexts turn recycling browser probing lending watch heeding loop session runtime
lane sync_face
state_dirs embedded vetting connecting patience settling riding alarm heartbeat
unique paced at_most_once cancellations attempt_log backlog accounting middleware time_limit watchdog interrupts hurry
redelivery losses retries health_sockets health_server health fitness supervised
sync_session
prefetch precedence consumer exchange delivery result_watch results producing redis_broker
speaking rabbitmq_consumer rabbitmq broker cancelling actor last_words
asyncworker
celery.names celery.envelope celery.delivery celery.stores celery.channel celery.transport celery.backend
celery.async_tasks
celery.bodies celery.limits celery.rates celery.pool celery.control celery.native celery.node
celery.process_signals celery.sparing celery.serving
celery.sources celery.source_redis celery.source_amqp celery.bridge
deployment actors kept_worker supervisor
extras celery.process celery.places celery.sessions celery.installation
celery
broker_checks commands installing doctor sending queues paces dead_letters identities demo demo.site demo.run
celery.findings
celery.check_settings celery.check_signals celery.check_sources
celery.check
celery.port_options celery.port_types
celery.port_body celery.port_imports celery.port_sends
celery.port_task
celery.port
terminal cli_once cli_dead_letters cli_queues cli_pace cli_reap cli_health cli_cancel cli_bridge cli_celery cli __main__
fakes testing pytest_plugin
"""

LAYER = {name: number for number, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}

#: No queue below this line, but for the loop thread, which speaks Dramatiq's interrupts.
EDGES = LAYER["patience"]

BROWSER_LIBRARIES = {"playwright", "invisible_playwright", "invisible_core"}


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name within it; the package itself is `asyncworker`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"]
        found[".".join(parts) or "asyncworker"] = ast.parse(path.read_text(), str(path))
    return found


MODULES = modules()


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Everything imported anywhere in a module, and whether at its import."""
    on_import = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in on_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                inner = name.removeprefix("asyncworker.")
                yield (name if inner in MODULES else str(node.module)), id(node) in on_import


def test_every_module_has_its_layer() -> None:
    assert set(LAYER) == set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_from_a_layer_below_its_own(name: str) -> None:
    ours = {one.removeprefix("asyncworker.") for one, _ in imports(MODULES[name]) if one.startswith("asyncworker")}
    assert {one for one in ours if LAYER[one] > LAYER[name]} == set()


def test_core_and_browser_know_no_queue() -> None:
    users = {name for name, tree in MODULES.items() for one, _ in imports(tree) if one.partition(".")[0] == "dramatiq"}
    assert {name for name in users if LAYER[name] < EDGES} == {"loop"}
    assert {"broker", "middleware", "actor"} <= users, "so this test sees what it looks for"


def test_browser_libraries_are_imported_on_use_and_by_engines_only() -> None:
    users = {
        (name, on_import)
        for name, tree in MODULES.items()
        for one, on_import in imports(_without_type_checking(tree))
        if one.partition(".")[0] in BROWSER_LIBRARIES
    }
    assert {name for name, on_import in users if on_import} == set()
    assert "engines.driver" in {name for name, _ in users}
    assert [name for name, _ in users if not name.startswith("engines.")] == []


def _without_type_checking(tree: ast.Module) -> ast.Module:
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return ast.Module(kept, [])


def test_only_the_settings_touch_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    users = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {one.name for one in node.names} & names)
    }
    assert users == {"settings"}


def test_the_map_is_right() -> None:
    """It says that each file imports only what stands above it, in its group or in an earlier one."""
    assert asyncworker.__doc__ is not None
    lines = [line for line in asyncworker.__doc__.splitlines() if line.startswith("    ")]
    named = [name for line in lines for name in re.match(r" +((?:\S+, )*\S+)", line)[1].replace("/", "").split(", ")]  # type: ignore[index]
    place = {name: number for number, name in enumerate(named)}
    assert {"errors", "engines", "broker", "cli"} <= set(place) <= set(MODULES)
    wrong = {
        (name, other)
        for name, tree in MODULES.items()
        for other in (one.removeprefix("asyncworker.").partition(".")[0] for one, _ in imports(tree))
        if name.partition(".")[0] in place and place.get(other, -1) > place[name.partition(".")[0]]
    }
    assert wrong == set()


#: Runs an import under an audit hook and tells what else it did.
WATCH = """
import json, os, sys, threading
name, done = sys.argv[1], []
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        done.append(f"open {arguments[0]!r} for writing")
    elif event.startswith(("socket.", "subprocess.", "os.mkdir", "os.remove", "os.rename", "os.fork", "os.putenv",
                           "os.posix_spawn", "os.system", "shutil.", "tempfile.")):
        done.append(f"{event} {arguments!r}")

import dramatiq, redis.asyncio, pydantic_settings, psutil  # what others do when imported is theirs
sys.addaudithook(watch)
__import__(name)
print(json.dumps({"done": done, "modules": sorted(sys.modules), "threads": threading.active_count()}))
"""


@pytest.mark.parametrize(
    "name",
    ["asyncworker", "asyncworker.actor", "asyncworker.testing", "asyncworker.pytest_plugin", "asyncworker.celery"],
)
def test_importing_does_nothing_and_costs_no_browser_library(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-B", "-c", WATCH, name]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    seen = json.loads(run.stdout)
    assert seen["done"] == []
    assert seen["threads"] == 1
    assert name in seen["modules"]
    assert (BROWSER_LIBRARIES | {"rich", "typer", "celery", "kombu"}) & set(seen["modules"]) == set()
    assert list(tmp_path.iterdir()) == []
    assert run.stderr == ""
