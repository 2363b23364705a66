"""How values of a stored type become values of the type that is declared now.

Allowed are fields that are added with a default, dropped, widened (int to float) or made optional, at any depth. Values
come as Arrow gives them: records as dicts, maps as lists of pairs. Knows types; no state, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.arrow_types import takes_none
from dagster_unified.records import decoder_of

Convert = Callable[[Any], Any]

FILL_IN = "fill it in, or make it optional again"
"""What to do about a value that is missing."""


def migration(stored: pa.DataType, declared: mi.Type) -> Convert | None:
    """What turns a stored value into the declared type; None where nothing does."""
    if isinstance(declared, mi.Metadata):
        return migration(stored, declared.type)
    if isinstance(declared, mi.UnionType):
        return _of_union(stored, declared)
    if isinstance(declared, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        return _of_record(stored, declared)
    if isinstance(declared, mi.TupleType):
        return _of_tuple(stored, declared)
    if isinstance(declared, (mi.ListType, mi.VarTupleType, mi.SetType, mi.FrozenSetType)):
        return _of_items(stored, declared)
    if isinstance(declared, mi.DictType):
        return _of_dict(stored, declared)
    if isinstance(declared, mi.EnumType):
        members = {type(member.value) for member in declared.cls}
        return decoder_of(declared) if any(_is_scalar(stored, member) for member in members) else None
    return _of_scalar(stored, declared)


_SCALARS: list[tuple[type, Callable[[pa.DataType], bool]]] = [
    (mi.StrType, pa.types.is_string),
    (mi.IntType, pa.types.is_int64),
    (mi.BoolType, pa.types.is_boolean),
    (mi.BytesType, pa.types.is_binary),
    (mi.DateType, pa.types.is_date32),
    (mi.DecimalType, pa.types.is_decimal),
    (mi.TimeDeltaType, pa.types.is_duration),
]


def _of_scalar(stored: pa.DataType, declared: mi.Type) -> Convert | None:
    if isinstance(declared, mi.FloatType):
        if pa.types.is_float64(stored):
            return _same
        return _widened if pa.types.is_int64(stored) else None
    if isinstance(declared, mi.DateTimeType) and pa.types.is_timestamp(stored):
        return _naive if declared.tz is False else _in_utc
    for kind, is_that in _SCALARS:
        if isinstance(declared, kind) and is_that(stored):
            return _same
    return None


def _widened(value: int) -> float:
    if int(float(value)) != value:
        raise ValueError(f"{value} is not a float, and the nearest is another number; keep it an int")
    return float(value)


def _in_utc(value: datetime) -> datetime:
    """A datetime without a time zone is in UTC."""
    return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


def _naive(value: datetime) -> datetime:
    return _in_utc(value).replace(tzinfo=None)


def _is_scalar(stored: pa.DataType, python: type) -> bool:
    return bool(pa.types.is_string(stored) if python is str else pa.types.is_int64(stored))


def _same(value: Any) -> Any:
    return value


def _optional(convert: Convert | None) -> Convert | None:
    if convert is None or convert is _same:
        return convert
    return lambda v: None if v is None else convert(v)


def _of_union(stored: pa.DataType, declared: mi.UnionType) -> Convert | None:
    members = [t for t in declared.types if not isinstance(t, mi.NoneType)]
    return _optional(migration(stored, members[0])) if len(members) == 1 else None


def _of_record(stored: pa.DataType, declared: mi.NamedTupleType | mi.DataclassType | mi.StructType) -> Convert | None:
    if not pa.types.is_struct(stored):
        return None
    held = {f.name: f.type for f in stored}
    values: list[tuple[str, Callable[[dict[str, Any]], Any]]] = []
    for field in declared.fields:
        if field.name in held:
            convert = migration(held[field.name], field.type)
            if convert is None:
                return None
            member = _member(convert, field.type, f"field '{field.name}'")
            values.append((field.name, _taken(field.name, member)))
        elif field.default is not msgspec.NODEFAULT:
            values.append((field.name, _constant(field.default)))
        elif field.default_factory is not msgspec.NODEFAULT:
            values.append((field.name, _fresh(field.default_factory)))
        else:
            return None
    make = declared.cls
    return lambda v: make(**{name: get(v) for name, get in values})


def _member(convert: Convert, info: mi.Type, what: str) -> Convert:
    """What converts a field or an element, which may be None if its type says so."""
    if takes_none(info):
        return lambda v: None if v is None else convert(v)

    def required(value: Any) -> Any:
        if value is None:
            raise ValueError(f"{what} may not be None any more, and is None; {FILL_IN}")
        return convert(value)

    return required


def _taken(name: str, convert: Convert) -> Callable[[dict[str, Any]], Any]:
    return lambda v: convert(v[name])


def _constant(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda _: value


def _fresh(make: Callable[[], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda _: make()


def _of_tuple(stored: pa.DataType, declared: mi.TupleType) -> Convert | None:
    names = [f"f{number}" for number in range(len(declared.item_types))]
    if not pa.types.is_struct(stored) or [field.name for field in stored] != names:
        return None
    items: list[Convert] = []
    for number, (field, info) in enumerate(zip(stored, declared.item_types, strict=True)):
        convert = migration(field.type, info)
        if convert is None:
            return None
        items.append(_member(convert, info, f"item {number} of a tuple"))
    return lambda v: tuple(item(x) for item, x in zip(items, v.values(), strict=True))


def _of_items(
    stored: pa.DataType, declared: mi.ListType | mi.VarTupleType | mi.SetType | mi.FrozenSetType
) -> Convert | None:
    if not pa.types.is_list(stored):
        return None
    convert = migration(stored.value_type, declared.item_type)
    if convert is None:
        return None
    item = _member(convert, declared.item_type, "a list's element")
    collect: Callable[[Iterable[Any]], Any] = {
        mi.ListType: list,
        mi.VarTupleType: tuple,
        mi.SetType: set,
        mi.FrozenSetType: frozenset,
    }[type(declared)]
    return lambda v: collect(map(item, v))


def _of_dict(stored: pa.DataType, declared: mi.DictType) -> Convert | None:
    if not pa.types.is_map(stored):
        return None
    key, convert = migration(stored.key_type, declared.key_type), migration(stored.item_type, declared.value_type)
    if key is None or convert is None:
        return None
    value = _member(convert, declared.value_type, "a map's value")
    return lambda v: {key(k): value(x) for k, x in v}
