"""The types of values: a record's type as formats spell it, and its columns as formats take them.

Reading decodes to the spelled type; writing passes Arrow's values through `plain` to a format. Both use the same
inspected type, so that what is written is what is read. Knows no format.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect as mi

from dagster_unified.connectors.plain_values import NO_FLOAT, check_each, finder, times_in
from dagster_unified.errors import PipelineError, nearest
from dagster_unified.records import RecordType, shorten

Convert = Callable[[Any], Any]
"""Converts a value; raises `ValueError` where it cannot."""


class Column(NamedTuple):
    """A column of a record type in a value."""

    name: str
    encoded: str
    """Its name in a value."""

    type: mi.Type


def columns(kind: RecordType) -> tuple[Column, ...]:
    """The columns of a spelled record type."""
    info = typing.cast("Any", mi.type_info(kind.python))
    if kind.shape == "class":
        return tuple(Column(field.name, field.encode_name, field.type) for field in info.fields)
    kinds = info.item_types if kind.shape == "tuple" else (info,)
    return tuple(Column(name, name, of_item) for name, of_item in zip(kind.names, kinds, strict=True))


def check_names(kind: RecordType, known: Sequence[str], what: str, where: str) -> None:
    """Raise `PipelineError` where `what` lacks a field of a spelled record type."""
    for column in columns(kind) if kind.shape == "class" else ():
        if column.encoded not in known:
            raise PipelineError(
                f"{where}: {what} has no field '{column.encoded}'; it has {', '.join(known)}"
                f"{nearest(column.encoded, known)}"
            )


# The types that values are decoded to


@cache
def spelled_class(python: Any, names: tuple[str, ...]) -> type[msgspec.Struct]:
    """A msgspec struct with these fields of an annotated class, to which an object in JSON is decoded."""
    info = typing.cast("Any", mi.type_info(python))
    hints = typing.get_type_hints(python, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    renamed = {}
    for field in info.fields:
        if field.name not in names:
            continue
        kind = spelled(hints[field.name])
        renamed[field.name] = field.encode_name
        if field.default is not msgspec.NODEFAULT:
            fields.append((field.name, kind, _default(field.default, hints[field.name])))
        elif field.default_factory is not msgspec.NODEFAULT:
            fields.append((field.name, kind, _default_factory(field.default_factory, hints[field.name])))
        elif type(None) in typing.get_args(kind):
            fields.append((field.name, kind, None))
        else:
            fields.append((field.name, kind))
    return msgspec.defstruct(python.__name__, fields, rename=renamed, kw_only=True, gc=False)


def spelled(python: Any) -> Any:
    """A type as values spell it: annotated classes, also NamedTuples, are objects by field name."""
    origin, arguments = typing.get_origin(python), typing.get_args(python)
    if origin is typing.Annotated:
        return typing.Annotated[(spelled(arguments[0]), *arguments[1:])]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(spelled, arguments))]  # noqa: UP007 - made of values
    if origin is not None:
        return origin[tuple(map(spelled, arguments))]
    if not isinstance(python, type):
        return python
    info = mi.type_info(python)
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        return spelled_class(python, tuple(field.name for field in info.fields))
    return python


def _default(value: Any, python: Any) -> Any:
    """A field's default in the field's spelled type."""
    value = _respelled(value, python)
    # msgspec shares a default with all objects, and so refuses what could be changed
    return msgspec.field(default_factory=lambda: value) if isinstance(value, (list, dict, msgspec.Struct)) else value


def _default_factory(make: Callable[[], Any], python: Any) -> Any:
    return msgspec.field(default_factory=lambda: _respelled(make(), python))


def _respelled(value: Any, python: Any) -> Any:
    """A value in its type's spelled form; a value of another type stays as it is."""
    origin, arguments = typing.get_origin(python), typing.get_args(python)
    if origin is typing.Annotated:
        return _respelled(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return value if value is None else _respelled(value, without_none(python))
    if isinstance(value, dict) and len(arguments) == 2:
        return {key: _respelled(item, arguments[1]) for key, item in value.items()}
    if isinstance(value, list) and len(arguments) == 1:
        return [_respelled(item, arguments[0]) for item in value]
    if isinstance(value, tuple) and origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(map(_respelled, value, kinds)) if len(kinds) == len(value) else value
    kind = spelled(python)
    if kind is python or not isinstance(value, python):
        return value
    hints = typing.get_type_hints(python, include_extras=True)
    return kind(**{name: _respelled(getattr(value, name), hints[name]) for name in kind.__struct_fields__})


_NOT_TEXTS = (bytes, bytearray, memoryview)
"""Types that a text is not converted to: msgspec would decode it from Base64, as in JSON."""


def from_plain(python: Any) -> Convert:
    """A function that turns plain values into this type.

    Raises `ValueError` for texts of times that it would cut off, and for whole numbers that a float does not hold.
    """
    info = mi.type_info(python)
    times, whole = times_in(info), finder(info, (mi.FloatType,), int)

    def convert(value: Any) -> Any:
        if times is not None:
            check_each(times(value))
        if whole is not None:
            for number in whole(value):
                if int(float(number)) != number:
                    raise ValueError(NO_FLOAT.format(number))
        return msgspec.convert(value, python, builtin_types=_NOT_TEXTS)

    return convert


def without_none(python: Any) -> Any:
    """The type without None."""
    kinds = [kind for kind in typing.get_args(python) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else python


def inside(where: str, path: str) -> str:
    """The place within a field, for messages: `field 'items[].price'`."""
    return f"{where[:-1]}{path}'" if where.endswith("'") else f"{where}{path}"


# Values to be encoded


def plain(info: mi.Type) -> Convert | None:
    """A function that turns an Arrow value into one that formats take; None where these are the same.

    Objects are dicts by the names in values, tuples are lists and maps dicts; an enum's member is its value.
    """
    kind, nullable = needed(info)
    convert = _plain(kind)
    return convert if convert is None or not nullable else optional(convert)


def _plain(info: mi.Type) -> Convert | None:
    if isinstance(info, (mi.StructType, mi.DataclassType, mi.NamedTupleType)):
        fields = [(field.name, field.encode_name, plain(field.type)) for field in info.fields]
        if all(name == encoded and convert is None for name, encoded, convert in fields):
            return None
        return lambda value: {
            encoded: value[name] if convert is None else convert(value[name]) for name, encoded, convert in fields
        }
    if isinstance(info, mi.TupleType):
        items = [(f"f{place}", plain(item)) for place, item in enumerate(info.item_types)]
        return lambda value: [value[name] if convert is None else convert(value[name]) for name, convert in items]
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        item = plain(info.item_type)
        return item and each(item)
    if isinstance(info, mi.DictType):
        item = plain(info.value_type)
        return dict if item is None else lambda value: {key: item(entry) for key, entry in value}
    return None


def needed(info: mi.Type) -> tuple[mi.Type, bool]:
    """The type without None, and whether None is allowed."""
    if isinstance(info, mi.Metadata):
        return needed(info.type)
    if isinstance(info, mi.UnionType):
        kinds = [needed(kind)[0] for kind in info.types if not isinstance(kind, mi.NoneType)]
        return kinds[0], len(kinds) < len(info.types)
    return info, False


def optional(convert: Convert) -> Convert:
    """The same conversion for values that may be None."""
    return lambda value: None if value is None else convert(value)


def each(convert: Convert) -> Convert:
    """The same conversion for lists of values."""
    return lambda values: list(map(convert, values))


def in_order(converts: Sequence[Convert | None]) -> Convert | None:
    """A converter of a tuple's items; None where they stay as they are."""
    if not any(converts):
        return None
    functions = [convert or itself for convert in converts]
    return lambda values: [convert(value) for convert, value in zip(functions, values, strict=True)]


def entries(key: Convert | None, item: Convert | None) -> Convert | None:
    """A converter of a dict's keys and values; None where they stay as they are."""
    if key is None and item is None:
        return None
    as_key, as_item = key or itself, item or itself
    return lambda mapping: {as_key(name): as_item(value) for name, value in mapping.items()}


def members(converts: Mapping[str, Convert | None]) -> Convert | None:
    """A converter of an object's fields; None where they stay as they are."""
    if not any(converts.values()):
        return None
    functions = {name: convert or itself for name, convert in converts.items()}
    return lambda value: {name: convert(value[name]) for name, convert in functions.items()}


def itself(value: Any) -> Any:
    """The same value."""
    return value


T = TypeVar("T")


def field_converters(
    fields: Sequence[tuple[str, mi.Type]],
    known: Mapping[str, T],
    needed: Mapping[str, str],
    schema: str,
    fit: Callable[[mi.Type, T, str], Convert | None],
    where: str,
) -> dict[str, Convert | None]:
    """A converter for each field of a record, for a schema with these fields; `needed` says why it needs some.

    Raises `ValueError` where the schema cannot hold all values of the record.
    """

    def place(name: str) -> str:
        return inside(where, f".{name}") if where else f"field '{name}'"

    names = [name for name, _ in fields]
    for name in names:
        if name not in known:
            raise ValueError(f"{place(name)} is not in {schema}, which has {', '.join(known)}")
    for name, why in needed.items():
        if name not in names:
            raise ValueError(f"{place(name)} of {schema} {why}, and the record has no such field")
    return {name: fit(info, known[name], place(name)) for name, info in fields}


def check_members(kind: mi.EnumType, known: Collection[str], what: str, where: str) -> list[str]:
    """The values of an enum; raises `ValueError` where the schema's enum does not have all of them."""
    values = [member.value for member in kind.cls]
    missing = [value for value in values if value not in known]
    if missing:
        raise ValueError(
            f"{where} may be {', '.join(map(str, missing))}, which {what} does not have; it has {', '.join(known)}"
        )
    return values


def converted(arrays: Sequence[Sequence[Any]], names: Sequence[str], converts: Sequence[Convert | None]) -> list[Any]:
    """Columns of converted values; raises `ValueError` that names the field and the value that does not fit."""
    return [
        values if convert is None else _converted(values, name, convert)
        for values, name, convert in zip(arrays, names, converts, strict=True)
    ]


def _converted(values: Sequence[Any], name: str, convert: Convert) -> list[Any]:
    done: list[Any] = []
    try:
        done.extend(map(convert, values))
    except Exception as error:
        raise ValueError(f"field '{name}' is {shorten(values[len(done)])}, and {error}") from error
    return done


# A schema's requirements of a value


def in_32_bits(value: int) -> int:
    """The int, if it fits in 32 bits; else raises `ValueError`."""
    if not -(1 << 31) <= value < 1 << 31:
        raise ValueError("the schema's type takes 32 bits; declare one of 64 in the schema")
    return value


def single(value: float) -> float:
    """The float, if one of 32 bits is equal to it; else raises `ValueError`."""
    import struct

    try:
        exact = value != value or struct.unpack("f", struct.pack("f", value))[0] == value
    except OverflowError:
        exact = False
    if not exact:
        raise ValueError("the schema's float of 32 bits cannot hold it exactly; declare a double in the schema")
    return value


def one_of(names: Sequence[str], what: str) -> Convert:
    """A check that a text is one of these."""
    known = frozenset(names)

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(f"{what} has {', '.join(names)}")
        return value

    return check


def text(value: Any) -> str:
    """A time, a date or a duration in ISO 8601."""
    iso: str = msgspec.to_builtins(value)
    return iso


SCALARS: dict[tuple[type[mi.Type], str], tuple[Convert | None]] = {
    (mi.FloatType, "double"): (None,),
    (mi.FloatType, "float"): (single,),
    (mi.StrType, "string"): (None,),
    (mi.BytesType, "bytes"): (None,),
    (mi.DecimalType, "string"): (str,),
    **{(kind, "string"): (text,) for kind in (mi.DateTimeType, mi.DateType, mi.TimeDeltaType)},
}
"""The converters from a record's type to a type that Avro and Protobuf share."""
