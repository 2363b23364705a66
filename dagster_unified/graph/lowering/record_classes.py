"""Classes of records that hold their fields and do nothing more, so that it is known what making one does."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import inspect as mi

from dagster_unified.graph.lowering.language import ANY, Built, Expression, Field, Kinds, kinds_of
from dagster_unified.graph.lowering.source import UnreadableError
from dagster_unified.records import RecordType


def record_of(records: RecordType, first: int = 0) -> Expression:
    """Return the record of a type that a function is given, in terms of its fields, whose numbers begin at `first`.

    Raises `UnreadableError` for a class of records that does more than hold its fields.
    """
    fields: list[Expression] = [Field(kinds_of(info), number) for number, info in enumerate(records.types, first)]
    if records.shape == "value":
        return fields[0]
    is_class = records.shape == "class"
    if is_class:
        check_class(records.python)
    return Built(ANY, records.python if is_class else tuple, dict(zip(records.names, fields, strict=True)))


def kinds_of_attribute(python: type, name: str) -> Kinds | None:
    """Return the classes of an attribute of a record that is in another one; None where it is no field.

    Raises `UnreadableError` for a class of records that does more than hold its fields.
    """
    if not (issubclass(python, tuple) or dataclasses.is_dataclass(python)):
        return None
    info = mi.type_info(python)
    if not isinstance(info, (mi.NamedTupleType, mi.DataclassType)):
        return None
    check_class(python)
    return next((kinds_of(field.type) or None for field in info.fields if field.name == name), None)


class _Plain(NamedTuple):
    field: int


_REPLACE, _MAKE = _Plain._replace.__code__, vars(_Plain)["_make"].__func__.__code__
"""The code of the methods that each NamedTuple has."""


def _gets(getter: Any, number: int) -> bool:
    """Whether a class attribute is what gives the value of a NamedTuple at this place."""
    return type(getter) is type(vars(_Plain)["field"]) and getter.__reduce__()[1][0] == number


def check_class(python: Any) -> None:
    """Raise `UnreadableError` for a class of records that does more than hold its fields."""
    why = f"{getattr(python, '__name__', python)} does more than hold its fields"
    if not isinstance(python, type) or type(python) is not type:
        raise UnreadableError(why)
    own = vars(python)
    if issubclass(python, tuple):
        made = getattr(getattr(own.get("__new__"), "__func__", None), "__code__", None)
        names = getattr(python, "_fields", ())
        plain = (
            python.__bases__ == (tuple,)
            and made is not None
            and made.co_names == ("_tuple_new",)
            and getattr(own.get("_replace"), "__code__", None) is _REPLACE
            and getattr(getattr(own.get("_make"), "__func__", None), "__code__", None) is _MAKE
            and all(_gets(own.get(name), number) for number, name in enumerate(names))
            and not own.keys() & {"__init__", "__iter__", "__getitem__", "__getattribute__", "__getattr__"}
        )
    else:
        made = getattr(own.get("__init__"), "__code__", None)
        fields = dataclasses.fields(python) if dataclasses.is_dataclass(python) else ()
        names = tuple(f.name for f in fields)
        plain = (
            bool(names)
            and python.__bases__ == (object,)
            and made is not None
            and made.co_filename == "<string>"
            and all(f.init for f in fields)
            and not own.keys() & {"__post_init__", "__new__", "__getattribute__", "__getattr__", "__signature__"}
            and not own.keys() & {"__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__del__"}
            and getattr(getattr(own.get("__setattr__"), "__code__", made), "co_filename", "") == "<string>"
            and not any(isinstance(own.get(name), (property, types.FunctionType)) for name in names)
            and not any(hasattr(type(own.get(name)), "__set__") for name in names if not _is_slot(own.get(name)))
        )
    if not plain:
        raise UnreadableError(why)


def _is_slot(value: object) -> bool:
    return isinstance(value, types.MemberDescriptorType)


def fields_of(python: Any) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, object]]:
    """Return the fields of a record's class, those that it takes by their place, and the constants they are by default.

    Raises `UnreadableError` where it takes others than it declares.
    """
    if issubclass(python, tuple):
        names, declared = tuple(python._fields), dict(python._field_defaults)
    else:
        fields = dataclasses.fields(python)
        names = tuple(f.name for f in fields)
        declared = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    parameters = inspect.signature(python).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    if parameters.keys() != set(names) or defaults.keys() != declared.keys():
        raise UnreadableError(f"{python.__name__} takes other fields than it declares")
    if any(defaults[name] is not value for name, value in declared.items()):
        raise UnreadableError(f"{python.__name__} has other defaults than it declares")
    by_place = tuple(n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return names, by_place, defaults
