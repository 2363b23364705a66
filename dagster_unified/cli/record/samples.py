"""The types of columns of CSV and JSON, which name none, from a sample of their values.

A type is only inferred where the source's own rules read each value of the sample without changing it: `007`, `+1` and
`1e400` stay texts. Knows no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa

from dagster_unified.cli.record.classes import can_be_field

_WHOLE = re.compile(r"0|-?[1-9]\d*", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_DECIMAL = re.compile(r"-?(?:0|[1-9]\d{0,19})(?:\.\d{1,18})?", re.ASCII)
_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_MOMENT = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ](?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:0\d|1[0-4]):[0-5]\d)?)?",
    re.ASCII,
)
_INT = range(-(1 << 63), 1 << 63)
_MOST = 10**20
"""Whole numbers below this are those of a Decimal."""

_UTC = pa.timestamp("us", "UTC")
_DECIMALS = pa.decimal128(38, 18)


def of_texts(names: Sequence[str], rows: Iterable[Sequence[str | None]]) -> pa.Schema:
    """The columns of rows of texts, where None is a missing value."""
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return pa.schema([_field(name, texts, of_csv) for name, texts in zip(names, columns, strict=True)])


def of_objects(objects: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The columns of objects of JSON; one that an object does not have may be None."""
    return pa.schema(_members(objects))


def of_csv(texts: Collection[Any]) -> pa.DataType:
    """The type of values that are texts in CSV, or in the names of folders."""
    for kind, is_such in _KINDS:
        if texts and all(map(is_such, texts)):
            return kind
    return pa.string()


def of_json(values: Collection[Any]) -> pa.DataType:
    """The type of values of JSON; a text where they are of several types: the source reads them as they are written.

    Objects whose members have names that no field can have, and values of one type, are dicts.
    """
    kinds = set(map(type, values))
    if kinds == {dict}:
        items = [item for value in values for item in value.values()]
        names = {name for value in values for name in value}
        if names and (all(map(can_be_field, names)) or len({type(item) for item in items if item is not None}) > 1):
            return pa.struct(_members(list(values)))
        return pa.map_(pa.string(), _field("value", items, of_json))
    if kinds == {list}:
        return pa.list_(_field("element", [item for value in values for item in value], of_json))
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return next((kind for kind, fits in _WHOLES if all(map(fits, values))), pa.string())
    if kinds and kinds <= {int, float}:
        return pa.float64()
    if kinds == {str}:
        return next((kind for kind, is_such in _TIMES if all(map(is_such, values))), pa.string())
    return pa.string()


def _field(name: str, values: Collection[Any], type_of: Callable[[Collection[Any]], pa.DataType]) -> pa.Field:
    present = [value for value in values if value is not None]
    return pa.field(name, type_of(present), nullable=len(present) < len(values) or not present)


def _members(objects: Sequence[Mapping[str, Any]]) -> list[pa.Field]:
    names = dict.fromkeys(name for each in objects for name in each)
    return [_field(name, [each.get(name) for each in objects], of_json) for name in names]


def _is_bool(text: str) -> bool:
    return text.lower() in ("true", "false")


def _is_int(text: str) -> bool:
    return _WHOLE.fullmatch(text) is not None and int(text) in _INT


def _is_float(text: str) -> bool:
    """Whether a float is this number: one with more digits would be rounded."""
    if _NUMBER.fullmatch(text) is None:
        return False
    value = float(text)
    return value not in (float("inf"), float("-inf")) and Decimal(repr(value)) == Decimal(text)


def _is_decimal(text: str) -> bool:
    return _DECIMAL.fullmatch(text) is not None


def _is_date(text: str) -> bool:
    return _DAY.fullmatch(text) is not None and _is_day(text)


def _is_moment(text: str) -> bool:
    return _MOMENT.fullmatch(text) is not None and _is_day(text[:10])


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


_TIMES: list[tuple[pa.DataType, Callable[[str], bool]]] = [(pa.date32(), _is_date), (_UTC, _is_moment)]
_KINDS: list[tuple[pa.DataType, Callable[[str], bool]]] = [
    (pa.bool_(), _is_bool),
    (pa.int64(), _is_int),
    (pa.float64(), _is_float),
    (_DECIMALS, _is_decimal),
    *_TIMES,
]
"""The types of texts, and whether a text is such a value; the first that all are is the type."""

_WHOLES: list[tuple[pa.DataType, Callable[[int], bool]]] = [
    (pa.int64(), _INT.__contains__),
    (_DECIMALS, lambda value: abs(value) < _MOST),
]
