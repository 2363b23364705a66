"""What is within Arrow's types. A leaf module: knows no records and no values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from functools import lru_cache
from typing import Any

import pyarrow as pa


def has(kind: pa.DataType, is_such: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or one that is anywhere within it, is such a type."""
    return is_such(kind) or any(has(kind.field(number).type, is_such) for number in range(kind.num_fields))


_EPOCHS = {
    pa.timestamp("us"): datetime(1970, 1, 1),
    pa.timestamp("us", "+00:00"): datetime(1970, 1, 1, tzinfo=timezone.utc),
}
_FIRST_DAY = date(1970, 1, 1)


def python_values(column: pa.Array) -> list[Any]:
    """The values of a column; times in UTC have `timezone.utc`, as those have that msgspec decodes.

    Raises `OverflowError` for a time that Python does not have. Arrow would make a `ZoneInfo` of UTC, and takes three
    to six times as long for times, dates and spans of time.
    """
    kind = _with_offsets(column.type)
    span = timedelta
    if kind in _EPOCHS:
        epoch = _EPOCHS[kind]
        return [None if n is None else epoch + span(0, 0, n) for n in column.cast(pa.int64()).to_pylist()]
    if pa.types.is_date32(kind):
        return [None if n is None else _FIRST_DAY + span(n) for n in column.cast(pa.int32()).to_pylist()]
    if kind == pa.duration("us"):
        return [None if n is None else span(0, 0, n) for n in column.cast(pa.int64()).to_pylist()]
    found: list[Any] = (column if kind == column.type else column.cast(kind)).to_pylist()
    return found


@lru_cache(maxsize=1024)
def _with_offsets(kind: pa.DataType) -> pa.DataType:
    """The type with the offset +00:00 in place of the zone UTC."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit, "+00:00") if kind.tz == "UTC" else kind
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_offsets(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_offsets(kind.value_type)))
    if pa.types.is_map(kind):
        items = kind.item_field.with_type(_with_offsets(kind.item_type))
        return pa.map_(kind.key_field.with_type(_with_offsets(kind.key_type)), items)
    return kind


def is_number(kind: pa.DataType) -> bool:
    """Whether a sum of values of a type is a value of that type as well: of two bools it would be a number."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
