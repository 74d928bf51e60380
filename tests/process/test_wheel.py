"""What `pip install asyncworker` would install: types, the shipped actors where the demo finds them, kombu's alias."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_carries_types_and_the_shipped_actors_and_no_package_of_a_deployments_name(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=90,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "asyncworker/py.typed" in names
    assert "asyncworker/demo/deployment/actors/pages.py" in names
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"asyncworker", "asyncworker_kombu.py"}
