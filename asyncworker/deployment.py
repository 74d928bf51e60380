"""The deployment's actors: found from the settings, imported in sorted order, their errors shown whole."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import traceback
from pathlib import Path
from types import ModuleType

from dramatiq import Broker

from asyncworker import embedded
from asyncworker.broker import get_broker
from asyncworker.errors import AsyncworkerError
from asyncworker.last_words import LastWords
from asyncworker.settings import Settings, load


def start() -> Broker:
    """What a worker process does first.

    Raises:
        ImportError: For whatever stands in the way, with its cause whole: Dramatiq shows it and ends the worker
            with its exit code for imports.
    """
    last_words = LastWords()
    try:
        settings = load()
        broker = get_broker(settings)
        broker.add_middleware(last_words)
        if settings.broker_url is None:
            embedded.ensure(settings.state_dir)
    except AsyncworkerError as error:
        raise ImportError(f"this worker cannot start: {error}") from error
    modules = import_actors(settings)
    _serve_celery(settings, broker, modules)
    return broker


def _serve_celery(settings: Settings, broker: Broker, modules: list[str]) -> None:
    """Have the worker run the tasks of Celery apps, where there are any; without them Celery is not imported."""
    if not settings.celery_app and "celery" not in sys.modules:
        return
    try:
        from asyncworker.celery.serving import serve

        serve(settings, broker, modules)
    except (AsyncworkerError, ModuleNotFoundError) as error:
        raise ImportError(f"this worker cannot start: {error}") from error


def worker_command(*options: str) -> list[str]:
    """The command line `dramatiq asyncworker.actors` of this interpreter's environment.

    The script, where there is one: on a reload `python -m dramatiq` may start another environment's interpreter.
    """
    script = Path(sys.executable).with_name("dramatiq")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "dramatiq"]
    return [*command, "asyncworker.actors", *options]


def import_actors(settings: Settings) -> list[str]:
    """Import the deployment's actors; returns the names of the modules.

    Raises:
        ImportError: When a package is not there, or a module does not import; with the whole traceback.
    """
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    packages = settings.actors
    if settings.celery_app and "actors" not in settings.model_fields_set and not _is_there(packages[0]):
        return []  # a deployment of Celery tasks alone
    return [name for package in packages for name in _import_with_submodules(package)]


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _import_with_submodules(package: str) -> list[str]:
    module = _import(package)
    _check_place(package, module)
    names = [package]
    for found in sorted(pkgutil.walk_packages(getattr(module, "__path__", []), f"{package}."), key=lambda m: m.name):
        _import(found.name)
        names.append(found.name)
    return names


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise _failed(name) from error
        raise ImportError(
            f"there is no module {name!r} with actors here ({Path.cwd()}); make a file {name.replace('.', '/')}.py "
            "or a package of that name, or set ASYNCWORKER_ACTORS"
        ) from None
    except Exception as error:
        raise _failed(name) from error


def _check_place(package: str, module: ModuleType) -> None:
    """Refuse actors from elsewhere while this directory has some of that name.

    A folder without `__init__.py` yields to any real package of its name, such as another project's that is
    installed: its actors would be served, and nobody would know why.
    """
    here = Path.cwd().joinpath(*package.split("."))
    places = [*getattr(module, "__path__", []), getattr(module, "__file__", None) or ""]
    if here.is_dir() and any(here.glob("*.py")) and not any(Path(place) == here for place in places):
        raise ImportError(
            f"{here} is not what `import {package}` finds: that is {places[0]}; add an empty __init__.py to {here}"
        )


def _failed(name: str) -> ImportError:
    return ImportError(f"the actors in {name} do not import:\n{traceback.format_exc()}")
