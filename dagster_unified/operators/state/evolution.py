"""Whether stored values of one type may become another type's, in a checkpoint and in a savepoint.

A checkpoint has msgpack, which stores a `NamedTuple`'s fields by place: a type whose fields have changed places would
silently read one for another, and a number or a text is read as any type that its value fits. So it stores the layout
of its state (`layout_of`), and `can_read` compares two layouts.

A savepoint has Arrow columns, whose fields have names. There fields may be added with a default, dropped, widened (int
to float) or made optional, at any depth: `migration` returns the function that converts a stored value to the declared
type. Values come as Arrow has them: records as dicts, maps as lists of pairs.

Knows types; no state, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from functools import cache
from typing import Any, Generic, NamedTuple, get_origin

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.arrow_types import takes_none
from dagster_unified.operators.functions.type_variables import R
from dagster_unified.records import decoder_of
from dagster_unified.values import described

_RECORDS = (mi.NamedTupleType, mi.DataclassType, mi.StructType)
_LISTS = (mi.ListType, mi.VarTupleType, mi.SetType, mi.FrozenSetType)


class Renewed(NamedTuple, Generic[R]):
    """A value with a time to live, as in the column of a savepoint; a checkpoint has a pair."""

    value: R
    renewed: int
    """When it was renewed last, in milliseconds since the epoch."""


# A checkpoint

Layout = str | list[Any]
"""A scalar's name, or a container's kind and members; a record's members have names."""

_BY_PLACE = "by place"
_BY_NAME = "by name"
_TIMED = "timed"


@cache
def layout_of(python: Any) -> str:
    """The layout of a type, as JSON."""
    return msgspec.json.encode(_layout(mi.type_info(python), ())).decode()


def can_read(declared: str, stored: str) -> bool:
    """Whether each value of the stored layout is the same in the declared layout, or an error where it is read."""
    return declared == stored or _reads(msgspec.json.decode(declared), msgspec.json.decode(stored))


def shown(layout: str) -> str:
    """A layout for a sentence: `{shop: str, amount: int}`."""
    return _shown(msgspec.json.decode(layout))


def _shown(layout: Layout) -> str:
    if isinstance(layout, str):
        return layout
    kind, parts = layout[0], layout[1:]
    if kind in (_BY_PLACE, _BY_NAME):
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in parts) + "}"
    if kind == "union":
        return " | ".join(map(_shown, parts))
    if kind == _TIMED:
        return f"{_shown(parts[0])} with a time to live"
    return parts[0] if kind == "again" else f"{kind}[{', '.join(map(_shown, parts))}]"


def _layout(info: mi.Type, above: tuple[type, ...]) -> Layout:
    if isinstance(info, mi.Metadata):
        return _layout(info.type, above)
    if isinstance(info, mi.UnionType):
        kinds = [_layout(kind, above) for kind in info.types if not isinstance(kind, mi.NoneType)]
        return kinds[0] if len(kinds) == 1 else ["union", *sorted(kinds, key=repr)]
    if isinstance(info, _RECORDS):
        if get_origin(info.cls) is Renewed:
            return [_TIMED, _layout(info.fields[0].type, above)]
        if info.cls in above:
            return ["again", info.cls.__name__]
        within = (*above, info.cls)
        by_place = isinstance(info, mi.NamedTupleType) or (isinstance(info, mi.StructType) and info.array_like)
        members = [[field.encode_name, _layout(field.type, within)] for field in info.fields]
        return [_BY_PLACE if by_place else _BY_NAME, *members]
    if isinstance(info, mi.TupleType):
        return ["tuple", *(_layout(item, above) for item in info.item_types)]
    if isinstance(info, _LISTS):
        return ["list", _layout(info.item_type, above)]
    if isinstance(info, mi.DictType):
        return ["dict", _layout(info.key_type, above), _layout(info.value_type, above)]
    if isinstance(info, mi.EnumType):
        return "str" if isinstance(next(iter(info.cls)).value, str) else "int"
    return described(info)


def _reads(declared: Layout, stored: Layout) -> bool:
    if isinstance(declared, str) or isinstance(stored, str) or declared[0] != stored[0]:
        return declared == stored
    kind, parts, others = declared[0], declared[1:], stored[1:]
    if kind == _BY_NAME:
        known = dict(others)
        return all(_reads(layout, known[name]) for name, layout in parts if name in known)
    if kind == _BY_PLACE:  # more fields may follow, with defaults
        pairs = list(zip(parts, others, strict=False))
        return len(parts) >= len(others) and all(a[0] == b[0] and _reads(a[1], b[1]) for a, b in pairs)
    if kind in ("union", "again"):
        return declared == stored
    return len(parts) == len(others) and all(map(_reads, parts, others))


# A savepoint

Convert = Callable[[Any], Any]

FILL_IN = "fill it in, or make it optional again"
"""The advice for a missing value."""


def migration(stored: pa.DataType, declared: mi.Type) -> Convert | None:
    """A function that converts a stored value to the declared type; None where that is impossible."""
    if isinstance(declared, mi.Metadata):
        return migration(stored, declared.type)
    if isinstance(declared, mi.UnionType):
        return _of_union(stored, declared)
    if isinstance(declared, _RECORDS):
        return _of_record(stored, declared)
    if isinstance(declared, mi.TupleType):
        return _of_tuple(stored, declared)
    if isinstance(declared, _LISTS):
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
    """A datetime in UTC; one without a time zone is in UTC already."""
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
    stored_fields = {f.name: f.type for f in stored}
    values: list[tuple[str, Callable[[dict[str, Any]], Any]]] = []
    for field in declared.fields:
        if field.name in stored_fields:
            convert = migration(stored_fields[field.name], field.type)
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
    """The conversion of a field or an element, which may be None if its type allows that."""
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
