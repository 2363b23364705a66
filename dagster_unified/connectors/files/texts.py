"""Values that files have as texts: read as they are, or not at all.

Spark's readers of CSV and JSON take a number for seconds since the epoch, cut times off after microseconds, dates off
after the day, round decimals, and know zones by words. So these are read as texts, in CSV all values are, and become
values here. Knows no files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_unified.connectors.protocol.frame import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

    from dagster_unified.connectors.files.checks import Check

SQUEEZED = r"[\s\"]+"
"""What a line of a file has more or less of than its row written anew, where nothing else differs."""

_DAY = r"\d{4}-\d\d-\d\d"
_OFFSET = r"(Z|[+-]\d\d:\d\d)"
_MOMENT = rf"^\s*{_DAY}([T ]\d\d:\d\d(:\d\d(\.\d+)?)?{_OFFSET}?)?\s*$"
_TIME = _MOMENT.replace(r"\.\d+", r"\.\d{1,6}0*")
_ZONE = rf":\d\d.*{_OFFSET}\s*$"
_DATE = r"^\s*\d{4}-\d{1,2}-\d{1,2}([T ][0:.]*Z?)?\s*$"

_FINER = (37, 28, 19)
"""Digits behind the point with which a decimal is compared, as many as there is room for."""


def as_texts(schema: pa.Schema) -> pa.Schema:
    """The schema with texts in place of what is read as such."""
    return pa.schema([field.with_type(_as_text(field.type)) for field in schema])


def in_texts(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """The schema with texts in place of the fields with these names."""
    return pa.schema([field.with_type(pa.string()) if field.name in names else field for field in schema])


def moment_of(text: Column) -> Column:
    """The moment that a text in ISO 8601 names, in UTC where it names no zone; null for any other text."""
    from pyspark.sql import functions as F

    return F.when(text.rlike(_MOMENT), text.try_cast("timestamp"))


def of_text(text: Column, field: pa.Field) -> Column:
    """A field's value, of the text that stands for it in CSV or in the name of a folder; null where that is none."""
    return text.try_cast(_spark_type(field.type)).alias(field.name)


def misfits_of_text(field: pa.Field, value: Column) -> Iterator[Check]:
    """Whether the text that stands for a field's value in CSV, or in the name of a folder, does not fit.

    `value` is what `of_text` makes of it.
    """
    kind = field.type
    if _is_text(kind):
        yield from unfit(field, field.name, value)
    elif not pa.types.is_string(kind):
        yield f"field '{field.name}' is not {expected(kind)}", partial(_is_none, kind, value)


def expected(kind: pa.DataType) -> str:
    """What a value of a type is, in words."""
    if pa.types.is_integer(kind):
        return "a whole number of 64 bits"
    if pa.types.is_floating(kind):
        return "a number that a float holds"
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_duration(kind):
        return "an interval such as INTERVAL '1 02:03:04' DAY TO SECOND"
    if pa.types.is_struct(kind):
        return "an object"
    if pa.types.is_map(kind):
        return "an object of names and values"
    if pa.types.is_list(kind):
        return "a list"
    return "a text" if pa.types.is_string(kind) else f"a value of {kind}"


def _is_none(kind: pa.DataType, value: Column, text: Column) -> Column:
    misfit = value.isNull()
    if pa.types.is_floating(kind):
        misfit |= is_overflow(value, text)
    return text.isNotNull() & misfit


def has_half_surrogates(json: Column) -> Column:
    """Whether a text of JSON escapes half a surrogate pair, which is no character."""
    from pyspark.sql import functions as F

    escapes = F.regexp_replace(json, r"\\\\", "")  # a backslash that is escaped escapes nothing
    alone = F.regexp_replace(escapes, r"(?i)\\ud[89ab]..\\ud[c-f]..", "")
    return json.contains(r"\u") & alone.rlike(r"(?i)\\ud[89a-f]")


def is_overflow(value: Column, text: Column) -> Column:
    """Whether a float is infinite, and what it was read from does not say so."""
    from pyspark.sql import functions as F

    return (F.abs(value) == float("inf")) & ~F.lower(text).contains("inf")


def squeezed(line: str) -> str:
    """A line without blanks and quotes."""
    return re.sub(SQUEEZED, "", line)


def _as_text(kind: pa.DataType) -> pa.DataType:
    if _is_text(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_text(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_text(kind.value_type)))
    return pa.map_(kind.key_type, _as_text(kind.item_type)) if pa.types.is_map(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_decimal(kind))


def converted(column: Column, field: pa.Field) -> Column:
    """The column of a field whose texts are in place of it; null where one does not fit."""
    return column if _as_text(field.type) == field.type else _value(column, field.type).alias(field.name)


def _value(value: Column, kind: pa.DataType) -> Column:
    from pyspark.sql import functions as F

    if _as_text(kind) == kind:
        return value
    if _is_text(kind):
        return value.try_cast(_spark_type(kind))
    if pa.types.is_struct(kind):
        members = [_value(value[field.name], field.type).alias(field.name) for field in kind]
        return F.when(value.isNotNull(), F.struct(*members))
    if pa.types.is_list(kind):
        return F.transform(value, lambda element: _value(element, kind.value_type))
    return F.transform_values(value, lambda _, item: _value(item, kind.item_type))


def unfit(field: pa.Field, path: str, value: Column | None = None) -> Iterator[Check]:
    """Whether a text in place of a field's value does not fit; `value` is what it was cast to, if it was."""
    if _is_text(field.type):
        yield _misfit(field.type, path), partial(_is_unfit, field.type, value)


def _bounds(kind: pa.DataType) -> tuple[str, str]:
    """The first and the last day or time that Python has, in SQL."""
    if pa.types.is_date(kind):
        return "DATE'0001-01-01'", "DATE'9999-12-31'"
    zone, name = ("", "TIMESTAMP_NTZ") if kind.tz is None else ("Z", "TIMESTAMP")
    return f"{name}'0001-01-01 00:00:00{zone}'", f"{name}'9999-12-31 23:59:59.999999{zone}'"


def _misfit(kind: pa.DataType, path: str) -> str:
    if pa.types.is_timestamp(kind):
        zone = "" if kind.tz is not None else " and without a zone"
        return f"field '{path}' is not a time in ISO 8601, to the microsecond{zone}, in the years 1 to 9999"
    if pa.types.is_date(kind):
        return f"field '{path}' is not a date such as 2024-01-31, in the years 1 to 9999"
    return f"field '{path}' is not a number of at most {kind.scale} digits behind the point and {kind.precision} in all"


def _is_unfit(kind: pa.DataType, value: Column | None, text: Column) -> Column:
    from pyspark.sql import functions as F

    value = text.try_cast(_spark_type(kind)) if value is None else value
    if pa.types.is_decimal(kind):
        kept = [
            finer == value.try_cast(f"decimal(38,{digits})")
            for digits in _FINER
            for finer in [text.try_cast(f"decimal(38,{digits})")]
        ]
        fits = F.coalesce(*kept, F.lit(True))
    else:
        fits = text.rlike(_DATE if pa.types.is_date(kind) else _TIME) & value.between(*map(F.expr, _bounds(kind)))
        if pa.types.is_timestamp(kind) and kind.tz is None:
            fits &= ~text.rlike(_ZONE)
    return text.isNotNull() & (value.isNull() | ~fits)


def _spark_type(kind: pa.DataType) -> DataType:
    return spark_schema(pa.schema([pa.field("value", kind)]))[0].dataType
