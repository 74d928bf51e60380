"""Where the stand-in lies: a tree that invisible_core takes for the engine that it is sealed to.

Production's own path is used, without `binary_path` and without a seal of the tests' own: the tree has the name,
version and build that the package's seal asks for, and its stamp, so that nothing is downloaded or adopted.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# -I and -S: neither the environment nor installed packages cost time or change what it does.
_EXECUTABLE = """#!{python} -IS
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from tests.standin.{module} import main

main(Path(__file__).resolve().parent)
"""


@dataclass(frozen=True)
class Standin:
    """A stand-in engine on disk.

    Parameters:
        directory: What was built, with all that its processes write.
        tree: The engine's own directory in it, with its control file and its log.
    """

    directory: Path
    tree: Path

    @property
    def executable(self) -> Path:
        return self.tree / "firefox"

    @property
    def temporary_directory(self) -> Path:
        return self.directory / "tmp"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to launch it, beside its own environment."""
        return {
            "INVISIBLE_PLAYWRIGHT_ENGINE_DIR": str(self.tree.parent),
            "INVISIBLE_PLAYWRIGHT_CACHE_DIR": str(self.directory / "cache"),
            "INVISIBLE_CORE_AUTOFIX": "off",
            "INVPW_TRUE_HEADLESS": "1",
            # Refuses at once, so that nobody looks for this machine's address on the network.
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "TMPDIR": str(self.temporary_directory),
        }

    def faults(self, **control: Any) -> None:
        """Replace all faults; the names are in engine.py.

        Raises:
            ValueError: When there is no such fault.
        """
        known = {"start_delay_ms", "never_ready", "exit_at_start", "says_at_start", "linger_ms", "mute", "exit_on"}
        if unknown := sorted(set(control) - known):
            raise ValueError(f"no such fault: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        draft = self.tree / "standin.json.new"
        draft.write_text(json.dumps(control))
        draft.replace(self.tree / "standin.json")

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        """What its processes wrote so far, in order; only records of that event when one is given."""
        try:
            lines = (self.tree / "standin.log").read_text().splitlines()
        except FileNotFoundError:
            return []
        records = [json.loads(line) for line in lines]
        return [record for record in records if event in (None, record["event"])]

    def launches(self) -> list[dict[str, Any]]:
        """A record for each launch: `pid`, `argv`, `prefs` (a digest: one for each identity), `hw_seed`, `token`."""
        return self.log("launched")


def build_tree(directory: Path, *, bridged: bool = False) -> Standin:
    """Write a stand-in engine, and the directories that its processes need, into an existing directory.

    Parameters:
        bridged: That of bridge.py, with this machine's Chromium behind.

    Raises:
        FileNotFoundError: When one is to be behind, and there is none.
    """
    from invisible_core.download import BINARY_ENTRY_REL
    from invisible_core.seal import JUGGLER_ENTRIES, active_seal, write_stamp

    seal = active_seal()
    tree = directory / "engines" / f"{seal.tag}_{seal.upstream_version}_{seal.build_id}"
    for made in (tree, directory / "cache", directory / "tmp"):
        made.mkdir(parents=True)
    (tree / "application.ini").write_text(f"[App]\nVersion={seal.upstream_version}\nBuildID={seal.build_id}\n")
    (tree / "platform.ini").write_text(f"[Build]\nMilestone={seal.upstream_version}\nBuildID={seal.build_id}\n")
    for entry in JUGGLER_ENTRIES:
        (tree / entry).parent.mkdir(parents=True, exist_ok=True)
        (tree / entry).write_text("// zoom.stealth: the stand-in engine, which has no such module\n")
    executable = tree / BINARY_ENTRY_REL[sys.platform]
    executable.write_text(
        _EXECUTABLE.format(python=sys.executable, root=str(ROOT), module="bridge" if bridged else "engine")
    )
    executable.chmod(0o755)
    if bridged:
        (tree / "bridge.json").write_text(json.dumps(_chromium()))
    asset = next(one for one in seal.assets.values() if one.platform == sys.platform and one.build_id == seal.build_id)
    write_stamp(tree, seal, asset=asset.name, asset_sha256=None, adopted=True)
    return Standin(directory, tree)


def _chromium() -> list[str]:
    """How the Chromium that the chromium engine would take is started: a headless shell if there is one."""
    from asyncworker.engines.finding import CHROMIUMS, HEADLESS_SHELLS, browsers_path, find
    from asyncworker.settings import load

    found = find(load({"ASYNCWORKER_ENGINE": "chromium"}))
    path = found.executable if found is not None else None
    if path is None and found is not None and (root := browsers_path()) is not None:
        names = HEADLESS_SHELLS if found.headless_shell else (*CHROMIUMS, "chrome")
        path = next((one for one in sorted(root.glob("chromium*/*/*")) if one.name in names), None)
    if path is None:
        raise FileNotFoundError("no Chromium on this machine: `asyncworker doctor --install --engine chromium`")
    return [str(path), *(["--no-sandbox"] if os.geteuid() == 0 else [])]
