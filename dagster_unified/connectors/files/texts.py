"""Values that files have as texts: read as they are, or not at all, and why a row cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pyarrow as pa

from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.records import shorten

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

Check: TypeAlias = "tuple[str, Callable[[Column], Column]]"
"""A problem, and a test of whether a value has it."""


def within(field: pa.Field, path: str, checks: Callable[[pa.Field, str], Iterator[Check]]) -> Iterator[Check]:
    """The checks of a field, and of all that is within its values, each as one of the field's value."""
    yield from checks(field, path)
    kind = field.type
    if pa.types.is_struct(kind):
        for member in kind:
            for problem, test in within(member, f"{path}.{member.name}", checks):
                yield problem, partial(_of_member, member.name, test)
    elif pa.types.is_list(kind):
        for problem, test in within(kind.value_field, f"{path}[]", checks):
            yield problem, partial(_of_any, test)
    elif pa.types.is_map(kind):
        for problem, test in within(kind.item_field, f"{path}[]", checks):
            yield problem, partial(_of_any_value, test)


def _of_member(name: str, test: Callable[[Column], Column], value: Column) -> Column:
    return value.isNotNull() & test(value[name])


def _of_any(test: Callable[[Column], Column], values: Column) -> Column:
    from pyspark.sql import functions as F

    return F.exists(values, lambda value: test(value))


def _of_any_value(test: Callable[[Column], Column], mapped: Column) -> Column:
    from pyspark.sql import functions as F

    return _of_any(test, F.map_values(mapped))


SQUEEZED = r"[\s\"]+"
"""Characters in which a line of a file may differ from its row written anew."""

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
    """How messages describe a value of a type."""
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
    """Whether a text of JSON escapes half a surrogate pair, which is not a character."""
    from pyspark.sql import functions as F

    escapes = F.regexp_replace(json, r"\\\\", "")  # a backslash that is escaped escapes nothing
    alone = F.regexp_replace(escapes, r"(?i)\\ud[89ab]..\\ud[c-f]..", "")
    return json.contains(r"\u") & alone.rlike(r"(?i)\\ud[89a-f]")


def is_overflow(value: Column, text: Column) -> Column:
    """Whether a float is infinite although the text that it was read from is not."""
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
        exact_casts = [
            finer == value.try_cast(f"decimal(38,{digits})")
            for digits in _FINER
            for finer in [text.try_cast(f"decimal(38,{digits})")]
        ]
        fits = F.coalesce(*exact_casts, F.lit(True))
    else:
        fits = text.rlike(_DATE if pa.types.is_date(kind) else _TIME) & value.between(*map(F.expr, _bounds(kind)))
        if pa.types.is_timestamp(kind) and kind.tz is None:
            fits &= ~text.rlike(_ZONE)
    return text.isNotNull() & (value.isNull() | ~fits)


def _spark_type(kind: pa.DataType) -> DataType:
    return spark_schema(pa.schema([pa.field("value", kind)]))[0].dataType


UNREADABLE = "cannot be read as"
"""The reason begins with this where a text is not a row at all, whatever its values are."""

_HALF = re.compile("[\ud800-\udfff]")


class Rows(Protocol):
    """The form of the rows of a source's files."""

    def explain(self, file: str, row: str) -> str | None:
        """Why a text of a file is not a row: the field, what was found and what was expected; None if unknown."""


def explained(rows: Rows, file: str, row: str, reason: str) -> str:
    """The reason why a row is malformed, with details where the text is not a row at all."""
    problem = rows.explain(file, row) if reason.startswith(UNREADABLE) else None
    return reason if problem is None else f"{reason}: {problem}"


@dataclass(frozen=True)
class CsvRows(Rows):
    """The form of rows of CSV; its patterns work in Python and in Java."""

    names: tuple[str, ...]
    delimiter: str
    escape: str

    def beside(self, file: str) -> CsvRows:
        """The rows of a file, without the fields that the names of its folders give."""
        return replace(self, names=tuple(name for name in self.names if f"/{name}=" not in file))

    def _field(self, possessive: str = "+") -> str:
        """A field in quotes, which close before the next delimiter; or one that begins with no quote.

        Java matches it without going back. Python before 3.11.5 has a fault there: it gets no `possessive` sign.
        """
        delimiter, escape, all_ = re.escape(self.delimiter), re.escape(self.escape), f"*{possessive}"
        if self.escape == '"':
            quoted = rf'[^"]{all_}(?:""[^"]{all_}){all_}"(?!")'
        else:
            quoted = rf'(?:[^"{escape}]|{escape}(?s:.)){all_}"'
        plain = rf"[^{delimiter}\n]{all_}" if len(self.delimiter) == 1 else rf"(?:(?!{delimiter})[^\n]){all_}"
        return rf'"{quoted}(?:(?!{delimiter})[\x00-\x09\x0b\x0c\x0e-\x20]){all_}|(?!"){plain}'

    @property
    def row(self) -> str:
        """The pattern of a row with a field for each name, whose quotes all close."""
        field = self._field()
        return rf"\A(?:{field})(?:{re.escape(self.delimiter)}(?:{field})){{{len(self.names) - 1}}}\z"

    @property
    def header(self) -> str:
        """The pattern of a line that names the columns, in order."""
        names = re.escape(self.delimiter).join(f'"?{re.escape(name)}"?' for name in self.names)
        return rf"(?i)\A{names}\z"

    def is_header(self, line: str) -> bool:
        """Whether a line names the columns, in order."""
        return re.fullmatch(self.header.removesuffix(r"\z"), line) is not None

    def explain(self, file: str, row: str) -> str | None:
        names = self.beside(file).names
        field, place, number = re.compile(self._field("")), 0, 0
        while (match := field.match(row, place)) is not None and row.startswith(self.delimiter, match.end()):
            place, number = match.end() + len(self.delimiter), number + 1
        if match is None or match.end() < len(row):
            whose = f"field '{names[number]}'" if number < len(names) else f"column {number + 1}"
            return f"{whose} is {shorten(row[place:])}, and the quotes of a text have to close at its end"
        if number + 1 == len(names):
            return None
        return f"it has {number + 1} columns, and {len(names)} are expected: {', '.join(names)}"


@dataclass(frozen=True)
class JsonRows(Rows):
    """The form of rows of JSON, by the Arrow schema of their fields."""

    schema: pa.Schema

    def explain(self, file: str, row: str) -> str | None:
        try:
            value = json.loads(row)
        except (ValueError, RecursionError) as error:
            return f"it is no JSON: {error}"
        if not isinstance(value, dict):
            return f"it is {_shown(value)}, and an object is expected"
        return next(self._misfits(value), None)

    def _misfits(self, row: dict[str, Any]) -> Iterator[str]:
        for field in self.schema:
            for path, found, wanted in _misfits_within(row.get(field.name), field.type, field.name):
                yield f"field '{path}' is {_shown(found)}, not {wanted}"
        for path, text in _half_surrogates(row):
            yield f"field '{path}' is {_shown(text)}, with half a character of two surrogates, not a text"


Misfit = tuple[str, Any, str]

_PLAIN: dict[Callable[[pa.DataType], bool], Callable[[Any], bool]] = {
    pa.types.is_boolean: lambda value: isinstance(value, bool),
    pa.types.is_integer: lambda v: isinstance(v, int) and not isinstance(v, bool) and -(1 << 63) <= v < 1 << 63,
    pa.types.is_floating: lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
}


def _misfits_within(value: Any, kind: pa.DataType, path: str) -> Iterator[Misfit]:
    """The parts of a plain value that do not fit a type."""
    if value is None:
        return
    if pa.types.is_struct(kind) and isinstance(value, dict):
        for field in kind:
            yield from _misfits_within(value.get(field.name), field.type, f"{path}.{field.name}")
    elif pa.types.is_map(kind) and isinstance(value, dict):
        for name, item in value.items():
            yield from _misfits_within(item, kind.item_type, f"{path}[{name!r}]")
    elif pa.types.is_list(kind) and isinstance(value, list):
        for place, item in enumerate(value):
            yield from _misfits_within(item, kind.value_type, f"{path}[{place}]")
    elif pa.types.is_nested(kind):
        yield path, value, expected(kind)
    else:
        fits = next((test for is_kind, test in _PLAIN.items() if is_kind(kind)), None)
        if fits is not None and not fits(value):
            yield path, value, expected(kind)


def _half_surrogates(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The texts with half a surrogate pair in a plain value."""
    if isinstance(value, str) and _HALF.search(value):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            if _HALF.search(name):
                yield path, name
            yield from _half_surrogates(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _half_surrogates(item, f"{path}[{place}]")


def _shown(value: Any) -> str:
    return shorten(json.dumps(value))[1:-1]
