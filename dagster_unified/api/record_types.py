"""The record type of an operator's output, from the same annotations that a type checker reads.

A function class says it as its base's argument, `MapFunction[Sale, int]`, or as the annotation of its method.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.functions.base import OutputTag
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import element_type, return_type, type_name

if TYPE_CHECKING:
    from collections.abc import Mapping

NOT_GIVEN: Any = None
"""The default of a parameter that takes a type. A checker sees nothing in it that would say one."""


def itself(annotation: Any) -> Any:
    """The record of a function that gives one record."""
    return annotation


def main_output(annotation: Any) -> Any | None:
    """The record of a function that gives an iterable; None where the annotation is not that of one.

    `(tag, record)` goes to a side output: `Iterable[Total | tuple[OutputTag[Sale], Sale]]` gives totals.
    """
    element = element_type(annotation)
    if typing.get_origin(element) not in (types.UnionType, typing.Union):
        return element
    members = [m for m in typing.get_args(element) if not _is_side_output(m)]
    return typing.Union[tuple(members)] if members else element  # noqa: UP007


def _is_side_output(annotation: Any) -> bool:
    if typing.get_origin(annotation) is not tuple:
        return False
    tag = typing.get_args(annotation)[0]
    return (typing.get_origin(tag) or tag) is OutputTag


def stated_output(method: Any) -> Any | None:
    """What a method's class says that it gives: `int` of `MapFunction[Sale, int]`; None where it says nothing."""
    return type_argument(type(getattr(method, "__self__", None)), Out)


def type_argument(cls: type, variable: TypeVar) -> Any | None:
    """What a class gives for a type variable of one of its bases; None where it gives none."""
    found = _argument(cls, variable, {})
    return None if isinstance(found, TypeVar) or found is Any else found


def _argument(cls: type, variable: TypeVar, given: Mapping[Any, Any]) -> Any | None:
    """`given` is what was given for the class's own type variables."""
    if variable in given:
        return given[variable]
    for base in vars(cls).get("__orig_bases__", cls.__bases__):
        origin = typing.get_origin(base) or base
        if not isinstance(origin, type) or origin is typing.Generic:
            continue
        arguments = [_resolved(_with(given, a), cls) for a in typing.get_args(base)]
        found = _argument(origin, variable, dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=False)))
        if found is not None:
            return found
    return None


def _with(given: Mapping[Any, Any], argument: Any) -> Any:
    """A type with what was given for type variables in it."""
    if argument in given:
        return given[argument]
    inner = getattr(argument, "__parameters__", ()) if typing.get_origin(argument) is not None else ()
    return argument[tuple(given.get(variable, variable) for variable in inner)] if inner else argument


def _resolved(argument: Any, cls: type) -> Any:
    """A type that was written in quotes."""
    if not isinstance(argument, typing.ForwardRef):
        return argument
    holder = type(cls.__name__, (), {"__annotations__": {"argument": argument}})
    try:
        return typing.get_type_hints(holder, vars(sys.modules[cls.__module__]))["argument"]
    except (NameError, KeyError):
        return None


def agreed_output(function: Any, methods: tuple[str, str], unwrap: Callable[[Any], Any], where: str) -> Any:
    """The output type of a function with two methods.

    Raises where nothing says it, or both are annotated with different ones.
    """
    stated = type_argument(type(function), Out)
    if stated is not None:
        return stated
    annotated = {m: t for m in methods if (t := return_type(getattr(function, m))) not in (None, type(None))}
    for method, given in annotated.items():
        if unwrap(given) is None:
            raise RecordTypeError(
                f"{where}: {method} is annotated to give {type_name(given)}, and has to give an iterable of records, "
                f"such as Iterable[{type_name(given)}]"
            )
    found = [unwrap(annotated[m]) if m in annotated else None for m in methods]
    agreed = next((t for t in found if t is not None), None)
    if agreed is None:
        raise RecordTypeError(f"{where} has no output type; annotate what {methods[0]} returns, or give output_type=")
    if None not in found and found[0] != found[1]:
        raise RecordTypeError(
            f"{where}: {methods[0]} gives {type_name(found[0])} and {methods[1]} gives {type_name(found[1])}; "
            "make them the same"
        )
    return agreed
