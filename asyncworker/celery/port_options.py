"""A task's decorator as an actor's: which options become which, and which have no counterpart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import libcst as cst

#: Celery's own: how often, and after how many seconds, a task is retried that does not say it.
MAX_RETRIES = 3
RETRY_DELAY_S = 180
BACKOFF_MAX_S = 600

#: Options that mean nothing to an actor, since what they ask for is always so, or never.
_DROPPED = {"acks_late", "track_started", "typing", "trail", "send_events", "store_errors_even_if_ignored", "shared"}

#: Longer than this, the decorator has a line for each option.
WIDTH = 110


class NotPortable(Exception):
    """Why a task, or an option, stays as it is."""


@dataclass
class Options:
    """What the decorator of a task says.

    Attributes:
        actor: The actor's options, each as code.
        retry_delay: What `self.retry()` waits without a countdown, in ms, as code.
        autoretry: The errors that retry by themselves, as code.
        max_retries: As code; `None` is for ever.
    """

    is_bound: bool = False
    actor: dict[str, str] = field(default_factory=dict)
    retry_delay: str = f"{RETRY_DELAY_S * 1000:_}"
    autoretry: list[str] = field(default_factory=list)
    max_retries: str = str(MAX_RETRIES)

    def retries(self, *, asks: bool) -> dict[str, str]:
        """The options of retries; `asks`: its code has a `self.retry`."""
        if not asks and not self.autoretry:
            return {"max_retries": "0"}
        if "Exception" in self.autoretry:
            return {"max_retries": self.max_retries}
        errors = [*(["Retry"] if asks else []), *self.autoretry]
        kind = errors[0] if len(errors) == 1 else f"({', '.join(errors)})"
        limit = "" if self.max_retries == "None" else f"retries < {self.max_retries} and "
        return {"retry_when": f"lambda retries, error: {limit}isinstance(error, {kind})"}


def code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def milliseconds(seconds: cst.BaseExpression, text: str | None = None) -> str:
    """Seconds, as Celery has them, in ms, as code; `text`: how the expression is written by now."""
    written = text or code(seconds)
    if isinstance(seconds, cst.Integer):
        return f"{int(seconds.value) * 1000:_}"
    if isinstance(seconds, cst.Float):
        return f"{round(float(seconds.value) * 1000):_}"
    atom = isinstance(seconds, cst.Name | cst.Call | cst.Attribute) or _is_power(seconds)
    product = f"1_000 * {written if atom else f'({written})'}"
    return product if _is_whole(seconds) else f"int({product})"


def _is_power(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Power)


def _is_whole(node: cst.BaseExpression) -> bool:
    """True for what is an integer as surely as it can be seen: a delay that is none is refused."""
    match node:
        case cst.Integer():
            return True
        case cst.Attribute(attr=cst.Name(value="retries")):
            return True
        case cst.BinaryOperation(operator=cst.Add() | cst.Multiply() | cst.Power() | cst.FloorDivide()):
            return _is_whole(node.left) and _is_whole(node.right)
    return False


def read(decorator: cst.BaseExpression) -> Options:
    """Read `@app.task(...)`, or one that is not called.

    Raises:
        NotPortable: For an option without a counterpart; it says which.
    """
    options = Options()
    if not isinstance(decorator, cst.Call):
        return _finished(options, {})
    given: dict[str, cst.BaseExpression] = {}
    for argument in decorator.args:
        if argument.keyword is None or argument.star:
            raise NotPortable(f"its decorator has an argument without a name: {code(argument.value)}")
        given[argument.keyword.value] = argument.value
    return _finished(options, given)


def _finished(options: Options, given: Mapping[str, cst.BaseExpression]) -> Options:
    left = dict(given)
    options.is_bound = _true(left.pop("bind", None))
    if not _true(left.pop("ignore_result", None)):
        options.actor["store_results"] = "True"
    for name, (ours, written) in _RENAMED.items():
        if name in left:
            options.actor[ours] = written(left.pop(name))
    soft, hard = left.pop("soft_time_limit", None), left.pop("time_limit", None)
    limit = soft if soft is not None else hard
    if limit is not None:
        options.actor["time_limit"] = milliseconds(limit)
    _read_retries(options, left)
    for name in left:
        if name not in _DROPPED:
            raise NotPortable(f"an actor has no option {name}")
    return options


_RENAMED: dict[str, tuple[str, Callable[[cst.BaseExpression], str]]] = {
    "name": ("actor_name", code),
    "queue": ("queue_name", code),
    "throws": ("throws", code),
    "expires": ("max_age", milliseconds),
}


def _read_retries(options: Options, left: dict[str, cst.BaseExpression]) -> None:
    keywords = _dictionary(left.pop("retry_kwargs", None))
    most = keywords.pop("max_retries", None) or left.pop("max_retries", None)
    left.pop("max_retries", None)
    if most is not None:
        options.max_retries = code(most)
    delay = left.pop("default_retry_delay", None)
    if delay is not None:
        options.retry_delay = milliseconds(delay)
    errors = left.pop("autoretry_for", None)
    backoff, longest = left.pop("retry_backoff", None), left.pop("retry_backoff_max", None)
    left.pop("retry_jitter", None)  # Dramatiq's delays always vary
    if errors is None:
        return
    if not isinstance(errors, cst.Tuple | cst.List):
        raise NotPortable(f"autoretry_for={code(errors)} is not written out")
    options.autoretry = [code(each.value) for each in errors.elements]
    countdown = keywords.pop("countdown", None)
    if keywords:
        raise NotPortable(f"retry_kwargs has {', '.join(keywords)}")
    if backoff is None or code(backoff) in ("False", "0"):
        shortest = milliseconds(countdown) if countdown is not None else options.retry_delay
        options.actor |= {"min_backoff": shortest, "max_backoff": shortest}
        return
    options.actor["min_backoff"] = "1_000" if code(backoff) == "True" else milliseconds(backoff)
    options.actor["max_backoff"] = milliseconds(longest) if longest is not None else f"{BACKOFF_MAX_S * 1000:_}"


def _true(node: cst.BaseExpression | None) -> bool:
    if node is None:
        return False
    if code(node) not in ("True", "False"):
        raise NotPortable(f"{code(node)} stands where True or False does")
    return code(node) == "True"


def _dictionary(node: cst.BaseExpression | None) -> dict[str, cst.BaseExpression]:
    """`{"a": 1}` or `dict(a=1)` by key."""
    match node:
        case None:
            return {}
        case cst.Dict():
            pairs = [each for each in node.elements if isinstance(each, cst.DictElement)]
            if len(pairs) == len(node.elements) and all(isinstance(each.key, cst.SimpleString) for each in pairs):
                return {str(each.key.evaluated_value): each.value for each in pairs}  # type: ignore[attr-defined]
        case cst.Call(func=cst.Name(value="dict"), args=arguments) if all(each.keyword for each in arguments):
            return {each.keyword.value: each.value for each in arguments if each.keyword is not None}
    raise NotPortable(f"{code(node)} is not written out")


def written(name: str, options: Mapping[str, str]) -> str:
    """A decorator with these options, as code."""
    if not options:
        return f"@{name}"
    line = f"@{name}({', '.join(f'{option}={value}' for option, value in options.items())})"
    if len(line) <= WIDTH:
        return line
    return f"@{name}(\n" + "".join(f"    {option}={value},\n" for option, value in options.items()) + ")"
