"""README.md, taken apart: its blocks, the commands in them, and what of it no test can run as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

#: What a test puts in the place of names that only mean something elsewhere.
SITE = "https://example.com"
BROKER = "redis://broker:6379/0"

#: Commands that no test runs as they stand: why not, and which test of tests/unit/test_readme.py looks at them.
COMMANDS_NOT_RUN = {
    "make demo": ("it installs everything anew", "test_the_make_targets_exist"),
    "make test": ("it would run these tests", "test_the_make_targets_exist"),
    "pip install /path/to/asyncworker": ("it downloads all dependencies", "test_pip_installs_the_checkout"),
    "docker build -t worker .": ("there is no Docker daemon in a test", "test_the_dockerfile_starts_a_worker"),
    "docker run --shm-size=1gb --stop-timeout 720 -e ASYNCWORKER_BROKER_URL=redis://broker:6379/0 worker": (
        "there is no Docker daemon in a test",
        "test_the_dockerfile_starts_a_worker",
    ),
    "asyncworker pace": ("its sites were asked by no one", "test_the_commands_about_paces_are_as_shown"),
    "asyncworker pace set shop.example 5/m": ("no worker asks that site", "test_the_commands_about_paces_are_as_shown"),
    'asyncworker pace hold shop.example --for 10m --reason "asked us to"': (
        "no worker asks that site",
        "test_the_commands_about_paces_are_as_shown",
    ),
    "asyncworker pace release shop.example": ("no worker asks that site", "test_the_commands_about_paces_are_as_shown"),
}

#: Python files of README that no test runs, likewise.
FILES_NOT_RUN = {
    "before.py": ("Celery is no dependency", "test_the_celery_task_is_python"),
    "tasks.py": ("its workers are Celery's own", "test_the_tasks_that_stay_are_celerys"),
}

#: Blocks in other languages, by their first line, and the test that looks at them.
OTHER_BLOCKS = {
    "message_id=cc4be2ba-… actor=pages.title attempt=1 seed=42 browser=1 outcome=succeeded ms=725": (
        "test_the_worker_logs_the_line_that_the_readme_shows"
    ),
    "[CRITICAL] this worker has no browser: the patched Firefox of invisible_playwright is not on this machine; "
    "fetch it with `asyncworker doctor --install`": "test_a_worker_without_its_engine_says_what_the_readme_shows",
    "FROM python:3.12-slim-bookworm": "test_the_dockerfile_starts_a_worker",
    "# /etc/systemd/system/worker.service": "test_the_unit_starts_a_worker",
    "# pace.toml": "test_the_rules_of_paces_can_be_read",
    "# Kubernetes; the container's environment has ASYNCWORKER_HEALTH_PORT=8081 and ASYNCWORKER_HEALTH_HOST=0.0.0.0": (
        "test_the_probes_of_kubernetes_ask_what_a_worker_answers"
    ),
}


@dataclass(frozen=True)
class Block:
    """One fenced block; `section` is the heading of level 2 that it stands under."""

    language: str
    text: str
    section: str
    line: int

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def file(self) -> str | None:
        """The file that a reader would put it in: its first line names it in a comment."""
        named = re.fullmatch(r"# (\S+\.\w+)", self.first_line)
        return named[1] if named else None

    def commands(self) -> Iterator[tuple[str, str]]:
        """The commands of a console block, each with the output shown below it."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output.strip()


def blocks() -> list[Block]:
    """All fenced blocks, from top to bottom."""
    found: list[Block] = []
    section, language, lines = "", None, []
    for number, line in enumerate(README.read_text().splitlines(), start=1):
        if language is not None:
            if line == "```":
                found.append(Block(language, "\n".join(lines) + "\n", section, number - len(lines)))
                language = None
            else:
                lines.append(line)
        elif line.startswith("```"):
            language, lines = line[3:].strip(), []
        elif line.startswith("## "):
            section = line[3:]
    if language is not None:
        raise ValueError(f"the last block of {README.name} has no end")
    return found


def files(*, before: Block | None = None) -> dict[str, str]:
    """The files that a reader has written, down to a block: path to text."""
    found: dict[str, str] = {}
    for block in blocks():
        if block == before:
            break
        if block.language == "python" and block.file is not None:
            found[block.file] = block.text
    return found


def between(start: str, end: str) -> str:
    """The text between two HTML comments; `start` is how the first one begins."""
    found = re.search(rf"<!-- {start}[^>]*-->\n(.*?)<!-- {end} -->", README.read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"{README.name} has no part between <!-- {start} --> and <!-- {end} -->")
    return found[1].strip()
