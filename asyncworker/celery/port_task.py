"""One task as an actor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import cast

import libcst as cst
import libcst.matchers as m

from asyncworker.celery.port_body import Blocking, Body, Plan, plan
from asyncworker.celery.port_options import NotPortable, code, read, written
from asyncworker.celery.port_types import Types, annotated


@dataclass
class Ported:
    """A task's function afterwards.

    Attributes:
        needs: What has to be imported: `Session`, `actor`, `dramatiq`, `get_broker`, `Retry`, `asyncio`.
        reasons: Why it is as it was; empty: it is an actor.
        is_plain: The actor has no session.
    """

    function: cst.FunctionDef
    needs: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    is_plain: bool = False


def port_task(function: cst.FunctionDef, shared: Mapping[str, str], constants: Collection[str]) -> Ported:
    """Make an actor of a task's function, or say why that cannot be done.

    Parameters:
        shared: The module's names of the browser, and of Playwright.
        constants: The module's names that can stand in a decorator.
    """
    try:
        return _ported(function, shared, constants)
    except NotPortable as reason:
        return Ported(function, reasons=[str(reason)])


def _ported(function: cst.FunctionDef, shared: Mapping[str, str], constants: Collection[str]) -> Ported:
    if len(function.decorators) > 1:
        raise NotPortable("it has another decorator")
    if function.asynchronous is not None or m.findall(function.body, m.Yield()):
        raise NotPortable("it is async, or a generator")
    if m.findall(function, m.Name("SoftTimeLimitExceeded")):
        raise NotPortable("it deals with SoftTimeLimitExceeded; the time limit of an actor cancels it")
    options = read(function.decorators[0].decorator)
    parameters, self_name = _without_self(function.params, is_bound=options.is_bound)
    names = {each.name.value for each in (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params)}
    types = Types({name: kind for name, kind in shared.items() if name not in names} | annotated(parameters))
    types.learn(function)
    made = plan(function, types, constants)
    body = Body(types, made, options, self_name)
    new = cast(cst.FunctionDef, function.visit(body))
    if self_name is not None and not body.reasons:
        body.reasons += _uses_of(self_name, new.body)
    is_plain = not body.uses_browser and "seed" not in names
    if is_plain and ("asyncio" in body.needs or m.findall(new.body, m.Name("session"))):
        is_plain = False
    if not is_plain and "session" in names | _assigned(function):
        body.reasons.append("a name of its own is `session`")
    if body.reasons:
        return Ported(function, reasons=list(dict.fromkeys(body.reasons)))
    retries = options.retries(asks=body.asks)
    if "min_backoff" in options.actor:  # beside the retries
        backoff = {name: options.actor.pop(name) for name in ("min_backoff", "max_backoff")}
        retries |= backoff
    actor = options.actor | retries
    if is_plain:
        return _plain(new, parameters, actor, body.needs)
    return _with_session(new, parameters, made, actor, body.needs)


def _plain(new: cst.FunctionDef, parameters: cst.Parameters, actor: Mapping[str, str], needs: set[str]) -> Ported:
    decorated = _decorated(new, "dramatiq.actor", {"broker": "get_broker()"} | dict(actor))
    return Ported(decorated.with_changes(params=parameters), needs | {"dramatiq", "get_broker"}, is_plain=True)


def _with_session(
    new: cst.FunctionDef, parameters: cst.Parameters, made: Plan, actor: Mapping[str, str], needs: set[str]
) -> Ported:
    options = dict(actor)
    if made.context_options is not None:
        options["context_options"] = made.context_options
    decorated = cast(cst.FunctionDef, _decorated(new, "actor", options).visit(Blocking()))
    return Ported(
        decorated.with_changes(
            params=_with_seed_by_name(parameters),
            asynchronous=cst.Asynchronous(whitespace_after=cst.SimpleWhitespace(" ")),
        ),
        needs | {"Session", "actor"},
    )


def _decorated(function: cst.FunctionDef, name: str, options: Mapping[str, str]) -> cst.FunctionDef:
    text = f"{written(name, options)}\ndef f(): pass\n"
    parsed = cast(cst.FunctionDef, cst.parse_statement(text))
    old = function.decorators[0]
    return function.with_changes(
        decorators=[parsed.decorators[0].with_changes(leading_lines=old.leading_lines)],
    )


def _without_self(parameters: cst.Parameters, *, is_bound: bool) -> tuple[cst.Parameters, str | None]:
    if not is_bound:
        return parameters, None
    if parameters.posonly_params or not parameters.params:
        raise NotPortable("it is bound, and does not take self first")
    return parameters.with_changes(params=parameters.params[1:]), parameters.params[0].name.value


_SESSION = cst.Param(name=cst.Name("session"), annotation=cst.Annotation(cst.Name("Session")))


def _with_seed_by_name(parameters: cst.Parameters) -> cst.Parameters:
    """The session first, and the seed by its name only, as messages have it."""
    seeds = [each for each in parameters.params if each.name.value == "seed"]
    rest = [each for each in parameters.params if each.name.value != "seed"]
    keywords = [*seeds, *parameters.kwonly_params]
    star = parameters.star_arg
    if keywords and not isinstance(star, cst.Param | cst.ParamStar):
        star = cst.ParamStar()
    if parameters.posonly_params:
        raise NotPortable("it has parameters that are given by position only")
    params = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in (_SESSION, *rest)]
    keywords = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in keywords]
    return parameters.with_changes(params=params, kwonly_params=keywords, star_arg=star)


def _uses_of(self_name: str, body: cst.BaseSuite) -> list[str]:
    """What is left of `self`."""
    reasons = []
    for each in m.findall(body, m.Attribute(value=m.Name(self_name))):
        reasons.append(f"an actor has no {code(each)}")
    if not reasons and m.findall(body, m.Name(self_name)):
        reasons.append(f"it hands on {self_name}")
    return reasons


def _assigned(function: cst.FunctionDef) -> set[str]:
    return {
        each.target.value
        for each in m.findall(function.body, m.AssignTarget(target=m.Name()))
        if isinstance(each, cst.AssignTarget) and isinstance(each.target, cst.Name)
    }
