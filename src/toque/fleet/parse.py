"""Documents from YAML files, the command line and HTTP bodies as the types of `fleet.spec`, with errors for people.

A key that does not exist is an error that names it, where it stands, and the nearest that exists.
"""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from toque.engine.options import EngineOptions
from toque.errors import ConfigError, RequestError
from toque.fleet.spec import DeploymentSpec

T = TypeVar("T", bound=Struct)


def parse_spec(document: object) -> DeploymentSpec:
    """A deployment. RequestError, whose ``param`` says where in the document, for what it cannot be."""
    spec = parse(document, DeploymentSpec)
    check_spec(spec)
    return spec


def parse(document: object, kind: type[T]) -> T:
    """``document`` (what JSON or YAML decode to) as ``kind``, strictly. RequestError names the place."""
    _check_keys(document, kind, "")
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        place = where.rstrip("`").lstrip(".")
        if "missing required field" in reason:
            missing = reason.rpartition("field `")[2].rstrip("`")
            place = f"{place}.{missing}" if place else missing
            raise RequestError(f"{place} is required", param=place) from None
        reason = reason.replace("`", "")
        got = "" if ", got" in reason else f", got {_brief(find(document, place))}"
        said = f"{reason[:1].lower()}{reason[1:]}{got}"
        raise RequestError(f"{place}: {said}" if place else said, param=place or None) from None


def check_spec(spec: DeploymentSpec) -> None:
    """RequestError for a specification whose parts do not go together."""
    scaling = spec.scaling
    if scaling.min_replicas > scaling.max_replicas:
        raise RequestError(
            f"scaling.min_replicas is {scaling.min_replicas}, more than scaling.max_replicas, {scaling.max_replicas}",
            param="scaling.min_replicas",
        )
    for number, window in enumerate(scaling.keep_warm):
        if window.min_replicas > scaling.max_replicas:
            raise RequestError(
                f"scaling.keep_warm[{number}].min_replicas is {window.min_replicas}, "
                f"more than scaling.max_replicas, {scaling.max_replicas}",
                param=f"scaling.keep_warm[{number}].min_replicas",
            )
    steps = spec.rollout.steps
    if list(steps) != sorted(set(steps)):
        raise RequestError(
            f"rollout.steps must rise from one to the next, got {', '.join(f'{step:g}' for step in steps)}",
            param="rollout.steps",
        )
    if not spec.model.strip():
        raise RequestError("model must name a model, got an empty text", param="model")
    check_engine(spec)


def check_engine(spec: DeploymentSpec) -> EngineOptions:
    """The engine options that ``spec.engine`` makes of the defaults. RequestError for one that cannot be."""
    known = {field.name for field in fields(EngineOptions)}
    for name in spec.engine:
        if name not in known:
            raise _unknown(f"engine.{name}", name, known)
    given = {name: value for name, value in spec.engine.items() if value is not None}
    try:
        return EngineOptions(**given)  # type: ignore[arg-type]  # it checks them itself
    except ConfigError as error:
        raise RequestError(f"engine.{error.message}", param=f"engine.{error.param}") from None


def find(document: object, place: str) -> object:
    """What stands at "a.b[0].c" of a document; None where nothing does."""
    found: Any = document
    for part in place.replace("[", ".[").split("."):
        try:
            if part.startswith("["):
                found = found[int(part[1:-1])]
            elif part:
                found = found[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return found


def _check_keys(value: object, kind: Any, place: str) -> None:
    if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, dict):
        hints = get_type_hints(kind)
        for name, inner in value.items():
            where = f"{place}.{name}" if place else str(name)
            if name not in hints:
                raise _unknown(where, str(name), hints)
            _check_keys(inner, hints[name], where)
    elif isinstance(kind, UnionType):  # a part that may be null
        for option in get_args(kind):
            _check_keys(value, option, place)
    elif get_origin(kind) is tuple and isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_keys(inner, get_args(kind)[0], f"{place}[{number}]")


def _unknown(place: str, name: str, known: Any) -> RequestError:
    close = get_close_matches(name, list(known), n=1)
    hint = f"did you mean {close[0]}?" if close else f"known here are {', '.join(sorted(known))}"
    shown = place if len(place) <= 120 else place[:117] + "..."
    return RequestError(f"{shown} is unknown; {hint}", param=shown)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
