"""The error tree: as drawn, with a remedy in every default message, and whole after a journey between processes."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys

import pytest

from asyncworker import errors
from asyncworker.errors import AsyncworkerError

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, AsyncworkerError) and value.__module__ == errors.__name__
]

#: The builtin classes that existing `except` clauses catch.
BUILTIN = {
    "DeclarationError": TypeError,
    "InvalidArguments": TypeError,
    "InvalidSeed": ValueError,
    "NotThere": LookupError,
    "UrlRefused": ValueError,
    "PathRefused": ValueError,
    "PhaseTimeout": TimeoutError,
}

#: A remedy tells someone to do something, or that the retry does it.
REMEDY = re.compile(
    r"\b(correct|run `|see [A-Z]|set |give |Start it|launch after|return values|shows all|retried|catch it)",
    re.IGNORECASE,
)


def drawn() -> dict[str, str]:
    """class -> the class above it, as the module's docstring draws them."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.fullmatch(r"    ((?:│   |    )*)(├── |└── )?([A-Z]\w+)(?:  +\S.*)?", line)
        if match is None:
            continue
        depth = len(match[1]) // 4 + (match[2] is not None)
        del above[depth:]
        if depth:
            parents[match[3]] = above[depth - 1]
        above.append(match[3])
    return parents


def test_the_tree_is_as_it_is_drawn() -> None:
    real = {cls.__name__: cls.__bases__[0].__name__ for cls in CLASSES if cls is not AsyncworkerError}
    assert len(real) > 10
    assert drawn() == real


def test_every_line_of_the_drawing_says_whose_fault_it_is() -> None:
    assert errors.__doc__ is not None
    lines = [line for line in errors.__doc__.splitlines() if "── " in line]
    assert len(lines) == len(CLASSES) - 1
    assert [line for line in lines if not re.search(r"\w  +\w.{10,}$", line)] == []


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_of_one_library_is_one_of_ours_and_of_pythons_own(cls: type[AsyncworkerError]) -> None:
    assert issubclass(cls, AsyncworkerError)
    assert issubclass(cls, BUILTIN.get(cls.__name__, Exception))


@pytest.mark.parametrize("cls", CLASSES)
def test_the_default_message_is_the_first_line_of_the_docstring_and_holds_a_remedy(cls: type[AsyncworkerError]) -> None:
    assert cls.__doc__ is not None
    message = str(cls())
    assert message == cls.__doc__.splitlines()[0]
    assert message.endswith((".", "`"))
    assert REMEDY.search(message), f"{cls.__name__}() does not say what to do: {message}"


@pytest.mark.parametrize("cls", CLASSES)
def test_fields_are_attributes_and_nothing_when_not_given(cls: type[AsyncworkerError]) -> None:
    assert all(getattr(cls("said"), name) is None for name in cls.fields)
    error = cls("said", **{name: f"a {name}" for name in cls.fields})
    assert str(error) == "said"
    assert {name: getattr(error, name) for name in cls.fields} == {name: f"a {name}" for name in cls.fields}


@pytest.mark.parametrize("cls", CLASSES)
def test_a_field_that_an_error_does_not_have_is_refused(cls: type[AsyncworkerError]) -> None:
    with pytest.raises(TypeError, match=f"{cls.__name__} has no field 'colour'"):
        cls("said", colour="red")


@pytest.mark.parametrize("cls", CLASSES)
def test_every_declared_field_is_annotated(cls: type[AsyncworkerError]) -> None:
    annotated = {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
    assert set(cls.fields) <= annotated


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_is_whole_after_a_journey_between_processes(cls: type[AsyncworkerError], protocol: int) -> None:
    error = cls("said", **{name: [name, 7] for name in cls.fields})
    error.add_note("by the way")
    for travelled in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(travelled) is cls
        assert str(travelled) == "said"
        assert travelled.args == error.args
        assert vars(travelled) == vars(error)
        assert travelled.__notes__ == ["by the way"]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_default_message_travels_too(cls: type[AsyncworkerError]) -> None:
    assert str(pickle.loads(pickle.dumps(cls()))) == str(cls())


def test_without_docstrings_an_error_still_has_a_message() -> None:
    code = "from asyncworker.errors import EngineMissing; print(EngineMissing())"
    run = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "EngineMissing"
