"""Extras: what has to be installed beside this package for some of its parts."""

from __future__ import annotations

import importlib.util

from asyncworker.errors import ConfigurationError


def need(extra: str, *modules: str) -> None:
    """Look that modules can be imported, without importing them.

    Raises:
        ConfigurationError: When one cannot; it names the extra that has it.
    """
    missing = [name for name in modules if not _is_there(name)]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} cannot be imported here; the extra has it: pip install 'asyncworker[{extra}]'"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # imported, and it has put something in its own place that does not say where it is from
        return True
