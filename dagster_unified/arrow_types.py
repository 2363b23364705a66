"""The structure of Arrow's types. A leaf module: knows no records and no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec.inspect as mi
import pyarrow as pa


def has(kind: pa.DataType, is_such: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or one anywhere within it, is such a type."""
    return is_such(kind) or any(has(kind.field(number).type, is_such) for number in range(kind.num_fields))


_EPOCHS = {
    pa.timestamp("us"): datetime(1970, 1, 1),
    pa.timestamp("us", "+00:00"): datetime(1970, 1, 1, tzinfo=timezone.utc),
}
_FIRST_DAY = date(1970, 1, 1)


def python_values(column: pa.Array) -> list[Any]:
    """The values of a column; times in UTC have `timezone.utc`, as msgspec decodes them.

    Raises `OverflowError` for a time that Python does not have. Arrow would make a `ZoneInfo` of UTC, and takes three
    to six times as long for times, dates and durations.
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
    values: list[Any] = (column if kind == column.type else column.cast(kind)).to_pylist()
    return values


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
    """Whether a sum of values of a type is of that type as well: of two bools it would be a number."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


class Part(NamedTuple):
    """All values in one place of nested values."""

    path: str
    """The suffix to the name of the whole: `.city` of a record, `[]` of a list."""

    name: str
    """Its name in a sentence: `a list's element`."""

    values: pa.Array
    type: mi.Type

    @property
    def has_forbidden_null(self) -> bool:
        """Whether a value is null, and the type does not allow None."""
        return bool(self.values.null_count) and not takes_none(self.type)


def takes_none(info: mi.Type) -> bool:
    """Whether a value of a type may be None."""
    if isinstance(info, mi.Metadata):
        return takes_none(info.type)
    return isinstance(info, mi.UnionType) and any(isinstance(t, mi.NoneType) for t in info.types)


def parts(column: pa.Array, info: mi.Type) -> Iterator[Part]:
    """The parts of a column's values; none where they are not nested."""
    info = _without_none(info)
    if not pa.types.is_nested(column.type):
        return
    present = column.drop_null() if column.null_count else column
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType)):
        for number, field in enumerate(info.fields):
            yield Part(f".{field.name}", f"field '{field.name}'", present.field(number), field.type)
    elif isinstance(info, mi.TupleType):
        for number, item in enumerate(info.item_types):
            yield Part(f".f{number}", f"item {number} of a tuple", present.field(number), item)
    elif isinstance(info, mi.DictType):
        first, last = present.offsets[0].as_py(), present.offsets[-1].as_py()  # of a slice, `keys` and `items` have all
        yield Part(".keys()", "a map's key", present.keys[first:last], info.key_type)
        yield Part("[]", "a map's value", present.items[first:last], info.value_type)
    elif isinstance(info, (mi.ListType, mi.VarTupleType)):
        yield Part("[]", "a list's element", present.flatten(), info.item_type)


def forbidden_null(column: pa.Array, info: mi.Type) -> str | None:
    """The path to a null that the type does not allow: empty for a value itself, None if there is no such null."""
    if Part("", "", column, info).has_forbidden_null:
        return ""
    paths = ((part.path, forbidden_null(part.values, part.type)) for part in parts(column, info))
    return next((path + rest for path, rest in paths if rest is not None), None)


def with_nulls_declared(kind: pa.DataType, info: mi.Type) -> pa.DataType:
    """An Arrow type that also says for maps' values whether they may be null, as the declared type does."""
    info = _without_none(info)
    if isinstance(info, (mi.NamedTupleType, mi.DataclassType, mi.StructType, mi.TupleType)):
        items = info.item_types if isinstance(info, mi.TupleType) else [field.type for field in info.fields]
        fields = zip(kind, items, strict=True)
        return pa.struct([field.with_type(with_nulls_declared(field.type, item)) for field, item in fields])
    if isinstance(info, mi.DictType):
        item = with_nulls_declared(kind.item_type, info.value_type)
        return pa.map_(kind.key_type, kind.item_field.with_type(item).with_nullable(takes_none(info.value_type)))
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        return pa.list_(kind.value_field.with_type(with_nulls_declared(kind.value_type, info.item_type)))
    return kind


def _without_none(info: mi.Type) -> mi.Type:
    if isinstance(info, mi.Metadata):
        return _without_none(info.type)
    if isinstance(info, mi.UnionType):
        return _without_none(next(t for t in info.types if not isinstance(t, mi.NoneType)))
    return info
