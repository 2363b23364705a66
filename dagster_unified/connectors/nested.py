"""Nested values as texts of JSON, for systems whose columns hold no records, lists or maps. Needs no client."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Required, TypedDict

import msgspec
import pyarrow as pa

from dagster_unified.connectors.exact_times import json_decoder
from dagster_unified.errors import SinkError

Plain = Callable[[Any], Any]


def to_json(column: pa.Array, name: str, where: str) -> pa.Array:
    """Nested values as texts of JSON: records as objects, what JSON has no type for as msgspec writes it.

    Raises `SinkError` for NaN and the infinities, which would become null.
    """
    found = not_finite(column, name)
    if found is not None:
        raise SinkError(
            f"{where}: field '{found[0]}' is {found[1]}, and JSON, in which the column is written, has no such number;"
            " write None in its place, or leave the record out"
        )
    plain, encode = _plain(column.type), msgspec.json.Encoder().encode
    values = column.to_pylist()
    texts = [None if v is None else encode(v if plain is None else plain(v)).decode() for v in values]
    return pa.array(texts, pa.string())


def not_finite(column: pa.Array, path: str) -> tuple[str, float] | None:
    """The first number in a column that JSON does not have, and the field that it is in: NaN or an infinity."""
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    kind = column.type
    inner: list[tuple[pa.Array, str]] = []
    if pa.types.is_floating(kind):
        bad = pc.invert(pc.is_finite(column))
        return (path, column.filter(bad)[0].as_py()) if pc.any(bad).as_py() else None
    if pa.types.is_struct(kind):
        inner = [(part, f"{path}.{field.name}") for field, part in zip(kind, column.flatten(), strict=True)]
    elif pa.types.is_map(kind):
        entries = (column.keys, column.items)
        inner = [(pa.ListArray.from_arrays(column.offsets, part).flatten(), f"{path}[]") for part in entries]
    elif pa.types.is_list(kind):
        inner = [(column.flatten(), f"{path}[]")]
    return next((found for part, name in inner if (found := not_finite(part, name)) is not None), None)


def _plain(kind: pa.DataType) -> Plain | None:
    """What turns a value as Arrow gives it into one that JSON has; None where nothing is to be done.

    Arrow gives a map as a list of pairs.
    """
    if pa.types.is_map(kind):
        item = _plain(kind.item_type)
        return lambda v: {key: x if item is None or x is None else item(x) for key, x in v}
    if pa.types.is_list(kind):
        element = _plain(kind.value_type)
        return None if element is None else lambda v: [None if x is None else element(x) for x in v]
    if pa.types.is_struct(kind):
        found = {field.name: plain for field in kind if (plain := _plain(field.type)) is not None}
        if found:
            return lambda v: {k: found[k](x) if k in found and x is not None else x for k, x in v.items()}
    return None


def json_type(kind: pa.DataType) -> Any:
    """The Python type by which JSON is decoded for an Arrow type; what may not be null has to be there."""
    if pa.types.is_map(kind):
        return dict[json_type(kind.key_type), json_type(kind.item_type) | None]  # type: ignore[misc]
    if pa.types.is_list(kind):
        return list[_of_field(kind.value_field)]  # type: ignore[misc]
    if pa.types.is_struct(kind):
        fields = {field.name: _of_field(field) if field.nullable else Required[_of_field(field)] for field in kind}
        return TypedDict("Fields", fields, total=False)  # type: ignore[operator]
    if pa.types.is_decimal(kind):
        return Decimal
    return datetime if pa.types.is_timestamp(kind) else _PYTHON[kind]


def from_json(kind: pa.DataType) -> Callable[[str | bytes], Any]:
    """What makes values of an Arrow type of texts of JSON; raises `ValueError` where one does not fit."""
    return json_decoder(json_type(kind))


def _of_field(field: pa.Field) -> Any:
    return json_type(field.type) | None if field.nullable else json_type(field.type)


_PYTHON: dict[pa.DataType, type] = {
    pa.bool_(): bool,
    pa.int64(): int,
    pa.float64(): float,
    pa.string(): str,
    pa.binary(): bytes,
    pa.date32(): date,
    pa.duration("us"): timedelta,
}
