"""Values that other systems know only in part: times, nested values as JSON, and types that msgspec decodes.

Knows no format and no client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Required, TypedDict

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.errors import SinkError

NO_FLOAT = "{} is a whole number that a float cannot hold; declare the field as an int"
"""Why a number does not fit a field that is a float."""

Find = Callable[[Any], Iterator[Any]]
"""Yields the values in a plain value that are looked for."""


def finder(info: mi.Type, declared: tuple[type[mi.Type], ...], plain: type) -> Find | None:
    """A function that finds values of the class `plain` where one of the `declared` types is expected.

    None where a type has no such place.
    """
    if isinstance(info, mi.Metadata):
        return finder(info.type, declared, plain)
    if isinstance(info, declared):
        return _itself(plain)
    if isinstance(info, mi.UnionType):
        return next((find for kind in info.types if (find := finder(kind, declared, plain)) is not None), None)
    if isinstance(info, (mi.StructType, mi.DataclassType, mi.NamedTupleType, mi.TypedDictType)):
        members = {field.encode_name: finder(field.type, declared, plain) for field in info.fields}
        return _in_members({name: find for name, find in members.items() if find is not None})
    if isinstance(info, mi.TupleType):
        return _in_places([finder(item, declared, plain) for item in info.item_types])
    if isinstance(info, (mi.ListType, mi.VarTupleType)):
        item = finder(info.item_type, declared, plain)
        return item and _in_items(item)
    if isinstance(info, mi.DictType):
        return _in_entries(finder(info.key_type, declared, plain), finder(info.value_type, declared, plain))
    return None


def _itself(plain: type) -> Find:
    def find_values(value: Any) -> Iterator[Any]:
        if type(value) is plain:
            yield value

    return find_values


def _in_members(members: dict[str, Find]) -> Find | None:
    def find_values(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for name, find in members.items():
                yield from find(value.get(name))

    return find_values if members else None


def _in_places(places: Sequence[Find | None]) -> Find | None:
    def find_values(value: Any) -> Iterator[Any]:
        for element, find in zip(value or (), places, strict=False):
            if find is not None:
                yield from find(element)

    return find_values if any(places) else None


def _in_items(item: Find) -> Find:
    def find_values(value: Any) -> Iterator[Any]:
        for element in value or ():
            yield from item(element)

    return find_values


def _in_entries(key: Find | None, item: Find | None) -> Find | None:
    def find_values(value: Any) -> Iterator[Any]:
        for name, element in (value or {}).items():
            if key is not None:
                yield from key(name)
            if item is not None:
                yield from item(element)

    return None if key is None and item is None else find_values


_FINER = re.compile(r"[.,]\d{6}\d*[1-9]")
_FINER_IN_JSON = re.compile(rb"\.(?:(?<=:\d\d\.)\d{6}\d*[1-9]|\d{6}\d*[1-9]S)")
"""Texts that look like a time or a duration finer than microseconds."""

Decode = Callable[[Any], Any]
"""Decodes JSON."""


def check_microseconds(text: str) -> None:
    """Raise `ValueError` for the text of a time or a duration that is finer than microseconds."""
    if _FINER.search(text):
        raise ValueError(
            f"'{text}' is finer than microseconds, which is all that a time has; declare a str to read it as it is"
        )


def check_each(texts: Iterable[str]) -> None:
    """Raise `ValueError` where one of these texts is finer than microseconds."""
    for text in texts:
        check_microseconds(text)


def json_decoder(python: Any) -> Decode:
    """A decoder of JSON to this type. It raises `ValueError` for times that msgspec would round."""
    decode, decode_plain = msgspec.json.Decoder[Any](python).decode, msgspec.json.Decoder[Any]().decode
    times = times_in(mi.type_info(python))
    if times is None:
        return decode

    def exact(value: bytes | str) -> Any:
        result = decode(value)
        if _FINER_IN_JSON.search(value.encode() if isinstance(value, str) else value):
            check_each(times(decode_plain(value)))
        return result

    return exact


def python_times(times: pa.Array) -> pa.Array:
    """The same days, or times in microseconds; raises `ValueError` where Python's classes do not have one of them."""
    if pa.types.is_timestamp(times.type):
        try:
            times = times.cast(pa.timestamp("us", times.type.tz))
        except pa.ArrowInvalid:
            if times.type.unit == "ns":
                raise ValueError(
                    "it is finer than microseconds, which is all that a time has; cast it to a text to read it as it is"
                ) from None
            raise _outside() from None
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    whole, kind = (pa.int32(), date) if pa.types.is_date(times.type) else (pa.int64(), datetime)
    low, high = (pa.scalar(value, times.type).value for value in (kind.min, kind.max))
    numbers = times.view(whole)
    inside = pc.and_(pc.greater_equal(numbers, low), pc.less_equal(numbers, high))
    if pc.all(inside).as_py() is False:
        raise _outside()
    return times


def _outside() -> ValueError:
    return ValueError(
        "it is infinite, or outside of the years 1 to 9999, which times are in; give another value for it in a query"
    )


def times_in(info: mi.Type) -> Find | None:
    """A function that finds the texts of times in a plain value of this type; None where it has no times."""
    return finder(info, (mi.DateTimeType, mi.TimeDeltaType), str)


Plain = Callable[[Any], Any]


def to_json(column: pa.Array, name: str, where: str) -> pa.Array:
    """Nested values as JSON texts: records as objects, and values without a JSON type as msgspec writes them.

    Raises `SinkError` for NaN and the infinities, which would become null.
    """
    bad = not_finite(column, name)
    if bad is not None:
        raise SinkError(
            f"{where}: field '{bad[0]}' is {bad[1]}, and JSON, in which the column is written, has no such number;"
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
        infinite = pc.invert(pc.is_finite(column))
        return (path, column.filter(infinite)[0].as_py()) if pc.any(infinite).as_py() else None
    if pa.types.is_struct(kind):
        inner = [(part, f"{path}.{field.name}") for field, part in zip(kind, column.flatten(), strict=True)]
    elif pa.types.is_map(kind):
        entries = (column.keys, column.items)
        inner = [(pa.ListArray.from_arrays(column.offsets, part).flatten(), f"{path}[]") for part in entries]
    elif pa.types.is_list(kind):
        inner = [(column.flatten(), f"{path}[]")]
    return next((bad for part, name in inner if (bad := not_finite(part, name)) is not None), None)


def _plain(kind: pa.DataType) -> Plain | None:
    """A function that turns an Arrow value into one that JSON has; None where nothing is to be done.

    Arrow gives a map as a list of pairs.
    """
    if pa.types.is_map(kind):
        item = _plain(kind.item_type)
        return lambda v: {key: x if item is None or x is None else item(x) for key, x in v}
    if pa.types.is_list(kind):
        element = _plain(kind.value_type)
        return None if element is None else lambda v: [None if x is None else element(x) for x in v]
    if pa.types.is_struct(kind):
        converters = {field.name: plain for field in kind if (plain := _plain(field.type)) is not None}
        if converters:
            return lambda v: {k: converters[k](x) if k in converters and x is not None else x for k, x in v.items()}
    return None


def json_type(kind: pa.DataType) -> Any:
    """The Python type to which JSON is decoded for an Arrow type; a field that may not be null is required."""
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
    """A function that turns JSON texts into values of an Arrow type; raises `ValueError` where one does not fit."""
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
