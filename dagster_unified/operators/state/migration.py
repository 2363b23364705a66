"""How values of a stored type become values of the type that is declared now.

Allowed are fields that are added with a default, dropped, widened (int to float) or made optional, at any depth. Values
come as Arrow gives them: records as dicts, maps as lists of pairs. Knows types; no state, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timezone
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.records import decoder_of

Convert = Callable[[Any], Any]


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
        return decoder_of(declared) if _is_scalar(stored) else None
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
        return float if pa.types.is_int64(stored) else None
    if isinstance(declared, mi.DateTimeType) and pa.types.is_timestamp(stored):
        return _same if stored.tz is None else lambda v: v.astimezone(timezone.utc)
    for kind, is_that in _SCALARS:
        if isinstance(declared, kind) and is_that(stored):
            return _same
    return None


def _is_scalar(stored: pa.DataType) -> bool:
    return bool(pa.types.is_string(stored) or pa.types.is_int64(stored))


def _same(value: Any) -> Any:
    return value


def _optional(convert: Convert | None) -> Convert | None:
    if convert is None or convert is _same:
        return convert
    return lambda v: None if v is None else convert(v)


def _of_union(stored: pa.DataType, declared: mi.UnionType) -> Convert | None:
    members = [t for t in declared.types if not isinstance(t, mi.NoneType)]
    return _optional(migration(stored, members[0])) if len(members) == 1 else None


def _takes_none(info: mi.Type) -> bool:
    return isinstance(info, mi.UnionType) and any(isinstance(t, mi.NoneType) for t in info.types)


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
            values.append((field.name, _taken(field.name, convert, _takes_none(field.type))))
        elif field.default is not msgspec.NODEFAULT:
            values.append((field.name, _constant(field.default)))
        elif field.default_factory is not msgspec.NODEFAULT:
            values.append((field.name, _fresh(field.default_factory)))
        else:
            return None
    make = declared.cls
    return lambda v: make(**{name: get(v) for name, get in values})


def _taken(name: str, convert: Convert, optional: bool) -> Callable[[dict[str, Any]], Any]:
    if optional:
        return lambda v: None if v[name] is None else convert(v[name])

    def required(v: dict[str, Any]) -> Any:
        if v[name] is None:
            raise ValueError(f"field '{name}' may not be None any more, and is None in {v}")
        return convert(v[name])

    return required


def _constant(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda _: value


def _fresh(make: Callable[[], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda _: make()


def _of_tuple(stored: pa.DataType, declared: mi.TupleType) -> Convert | None:
    if not pa.types.is_struct(stored) or stored.num_fields != len(declared.item_types):
        return None
    items = [_optional(migration(f.type, info)) for f, info in zip(stored, declared.item_types, strict=True)]
    if None in items:
        return None
    return lambda v: tuple(item(x) for item, x in zip(items, v.values(), strict=True) if item is not None)


def _of_items(
    stored: pa.DataType, declared: mi.ListType | mi.VarTupleType | mi.SetType | mi.FrozenSetType
) -> Convert | None:
    if not pa.types.is_list(stored):
        return None
    item = _optional(migration(stored.value_type, declared.item_type))
    if item is None:
        return None
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
    key, value = (
        migration(stored.key_type, declared.key_type),
        _optional(migration(stored.item_type, declared.value_type)),
    )
    if key is None or value is None:
        return None
    return lambda v: {key(k): value(x) for k, x in v}
