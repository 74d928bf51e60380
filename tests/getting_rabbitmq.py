"""`make rabbitmq`: find or install the RabbitMQ server of the tests, which no service of the machine shall run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncworker.commands import DOWNLOAD, UNPACK, Step, run
from tests.rabbitmq import why_missing

#: Asked by Debian's packages before they start a service.
POLICY = Path("/usr/sbin/policy-rc.d")
NO = "#!/bin/sh\nexit 101\n"

APT = ("apt-get", "-q", "-y", "-o", "Acquire::Retries=1", "-o", "DPkg::Lock::Timeout=60")
INSTALL = (*APT, "install", "--no-install-recommends", "rabbitmq-server")
QUIET = {"DEBIAN_FRONTEND": "noninteractive"}

STEPS = (
    Step((*APT, "update"), DOWNLOAD, QUIET, optional=True),
    Step((*INSTALL, "--download-only"), DOWNLOAD, QUIET),
    Step(INSTALL, UNPACK, QUIET),
)

#: What the packages would have the machine start when it boots.
UNITS = ("rabbitmq-server.service", "epmd.service", "epmd.socket")


def main() -> None:
    """Say what there is; where the server cannot be had, its tests say so, too, and are skipped or fail."""
    reason, can_be_had = why_missing()
    if reason is None:
        print("RabbitMQ: present")
    elif not can_be_had or os.geteuid() != 0:
        print(f"{reason}; its tests cannot run")
    else:
        print(f"RabbitMQ: {_install() or 'installed, and not started'}")


def _install() -> str | None:
    """Why it is not installed, if so."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the policy is removed
    had_erlang = shutil.which("epmd") is not None
    with no_service_starts(POLICY):
        for step in STEPS:
            reason = run(step, on_news=lambda text: print(f"RabbitMQ: {text}", flush=True))
            if reason is not None and not step.optional:
                return f"{' '.join(step.command)}: {reason}"
    if shutil.which("systemctl") is not None:
        for unit in UNITS[:1] if had_erlang else UNITS:
            run(Step(("systemctl", "disable", unit), UNPACK))
    return None


@contextlib.contextmanager
def no_service_starts(policy: Path) -> Iterator[None]:
    """Packages that are installed within the block start no service; a policy that is there already stays."""
    try:
        policy.touch(mode=0o755, exist_ok=False)
    except FileExistsError:
        yield
        return
    try:
        policy.write_text(NO)
        yield
    finally:
        policy.unlink()


if __name__ == "__main__":
    main()
