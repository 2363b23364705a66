"""The common part of sources of a table or a query: ranges of a column, and rows as Arrow batches."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from typing import Any
from uuid import UUID

import msgspec
import pyarrow as pa
from msgspec import inspect as mi

from dagster_unified.arrow_types import forbidden_null
from dagster_unified.connectors.plain_values import NO_FLOAT, check_microseconds, from_json, json_type, python_times
from dagster_unified.connectors.protocol.frame import Malformed
from dagster_unified.connectors.protocol.positions import cuts
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.errors import PipelineError, SourceError, nearest
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.records import RecordType, shorten
from dagster_unified.values import check_count


class KeyRange(msgspec.Struct, frozen=True):
    """The rows that one task reads: all, those of a range of `split_by`, or those without a value in it."""

    low: int | None = None
    high: int | None = None
    nulls: bool = False


def key_ranges(low: int | Decimal | None, high: int | Decimal | None, count: int) -> list[KeyRange]:
    """The ranges between the lowest and the highest whole number of a column, which may have none.

    Rows written meanwhile at either end belong to the first and the last range.
    """
    if low is None or high is None:
        return [KeyRange()]
    marks = [None, *[start for start, _ in cuts(int(low), int(high) + 1, count)[1:]], None]
    ranges = [KeyRange(start, end) for start, end in pairwise(marks)]
    return ranges if len(ranges) == 1 else [*ranges, KeyRange(nulls=True)]


class TableSource(SplitSource[Out]):
    """Reads the rows of a table or a query, by ranges of the column `split_by` if it is set."""

    reads_table = True
    split_by: str | None
    parallelism: int

    @abstractmethod
    def read_here(
        self, most: int | None = None, having: tuple[str, str | None] | None = None
    ) -> Iterator[pa.RecordBatch | Malformed]:
        """Read all rows, or the first `most`, here and at once.

        `having` is a column, which is no field, and its text in the rows that are wanted; None stands for no text.
        """

    def first_rows(self, most: int) -> pa.Table:
        """The first `most` rows, without those that do not fit."""
        return self._table(part for part in self.read_here(most) if isinstance(part, pa.RecordBatch))

    def rows(self, having: tuple[str, str | None] | None = None) -> pa.Table:
        """All rows; raises `SourceError` for one that does not fit."""
        return self._table(map(self._fitting, self.read_here(having=having)))

    def _fitting(self, part: pa.RecordBatch | Malformed) -> pa.RecordBatch:
        if isinstance(part, Malformed):
            raise SourceError(
                f"{self._where}: a row of {part.place} does not fit {self.records.describe()}: {part.reason}:"
                f" {part.content}; correct the row, or read the table with other tools"
            )
        return part

    def _table(self, batches: Iterator[pa.RecordBatch]) -> pa.Table:
        return pa.Table.from_batches((b.cast(self.records.schema) for b in batches), self.records.schema)

    @property
    @abstractmethod
    def _place(self) -> str:
        """What is read, for messages: `table shop`, or `the query`."""

    @property
    def _where(self) -> str:
        return f"source '{self.name}'"

    def _check_field(self, column: str) -> pa.DataType:
        """The type of a field that the author has named; raises `PipelineError` where there is no such field."""
        if column not in self.records.names:
            raise PipelineError(
                f"{self._where}: the records have no field '{column}'{nearest(column, self.records.names)}"
            )
        return self.records.schema.field(column).type

    def _check_split_by(self) -> None:
        if self.split_by is not None and self._check_field(self.split_by) != pa.int64():
            raise PipelineError(f"{self._where}: split_by='{self.split_by}' has to be an int")
        check_count(f"{self._where}: parallelism", self.parallelism)

    def _check_columns(self, names: Collection[str], unfit: Callable[[pa.Field], tuple[str, str] | None]) -> None:
        """Raise `SourceError` where the record has a field without a column, or one that does not fit.

        `unfit` returns the column's type and the field's, for messages, where one is not read as the other.
        """
        for field in self.records.schema:
            if field.name not in names:
                raise SourceError(
                    f"{self._where}: {self._place} has no column '{field.name}'{nearest(field.name, names)}; the record"
                    " has a field of this name"
                )
            if (types := unfit(field)) is not None:
                raise SourceError(
                    f"{self._where}: column '{field.name}' of {self._place} is {types[0]}, and cannot be read as the"
                    f" field's {types[1]}; declare another type, or cast it in a query"
                )


Column = Sequence[Any]
"""A column's values, or an array of Arrow's."""

_Convert = Callable[[Any], Any]

_REFUSED = (ValueError, TypeError, ArithmeticError, msgspec.MsgspecError, pa.ArrowException)
"""Errors for a value that does not fit."""

_NONE = type(None)

MONTHS = "it has months, which have no length; cast it to a text, or to a number of seconds, in a query"
"""Why an interval of a database is no duration."""

_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{6})?$"


@dataclass(frozen=True)
class ReadField:
    """A field of a record, as it is read."""

    field: pa.Field
    type: mi.Type
    convert: _Convert

    @classmethod
    def of(cls, records: RecordType) -> list[ReadField]:
        """The fields of a record type."""
        columns = zip(records.schema, records.types, strict=True)
        return [cls(field, info, _converter(field.type)) for field, info in columns]

    def array(self, column: Column) -> pa.Array:
        """The values in the field's Arrow type; raises `ValueError` for values that do not fit."""
        try:
            array = self._of_arrow(column) if isinstance(column, pa.Array) else self._of_values(column)
        except UnicodeEncodeError as error:
            raise ValueError(f"field '{self.field.name}': {error.object!a} has bytes that are not UTF-8") from error
        except _REFUSED as error:
            raise ValueError(f"field '{self.field.name}': {shorten(str(error))[1:-1]}") from error
        path = forbidden_null(array, self.type)
        if path is not None:
            null, there = (f"has a null at '{path}'", " there") if path else ("is null", "")
            raise ValueError(f"field '{self.field.name}': it {null}, and its type does not allow None{there}")
        return array

    def _of_values(self, values: Sequence[Any]) -> pa.Array:
        kind = self.field.type
        # Arrow takes these as they are: times without a zone as UTC, and others in UTC
        plain = None if pa.types.is_nested(kind) or pa.types.is_duration(kind) else json_type(kind)
        classes = set(map(type, values)) - {_NONE}
        if classes == {str} and pa.types.is_timestamp(kind) and (times := _times(values)) is not None:
            return times.cast(kind)
        if not classes <= {plain}:
            values = [None if value is None else self.convert(value) for value in values]
        array = pa.array(values, kind)
        # a time of another zone may be in a year that Python does not have, once it is in UTC
        return python_times(array) if pa.types.is_timestamp(kind) else array

    def _of_arrow(self, column: pa.Array) -> pa.Array:
        kind = self.field.type
        if pa.types.is_string(column.type) and (pa.types.is_decimal(kind) or pa.types.is_duration(kind)):
            return self._of_texts(column)
        if not _holds(kind, column.type):
            return self._of_values(column.to_pylist())
        if pa.types.is_temporal(column.type):
            column = python_times(column)
        if pa.types.is_list(kind) and pa.types.is_floating(kind.value_type):
            exact_floats(column.flatten())
        return exact_floats(column) if pa.types.is_floating(kind) else column.cast(kind)

    def _of_texts(self, column: pa.Array) -> pa.Array:
        """Decimals, and durations in microseconds, all at once; one by one where a text is written in another way."""
        try:
            counted = column.cast(pa.int64()) if pa.types.is_duration(self.field.type) else column
            return counted.cast(self.field.type)
        except pa.ArrowInvalid:
            return self._of_values(column.to_pylist())


def converted(
    columns: Sequence[Column], fields: Sequence[ReadField], place: str, refused: pa.Array | None = None
) -> Iterator[pa.RecordBatch | Malformed]:
    """Some rows, by column, in the records' columns; and the rows that do not fit.

    `refused` says for a row why the server could not return one of its values; null where it returned all.
    """
    try:
        if refused is not None and refused.null_count < len(refused):
            raise ValueError(refused.drop_null()[0].as_py())
        arrays = [field.array(column) for field, column in zip(fields, columns, strict=True)]
    except _REFUSED as error:
        size = len(columns[0])
        if size > 1:
            for half in (slice(None, size // 2), slice(size // 2, None)):
                yield from converted([c[half] for c in columns], fields, place, refused and refused[half])
        else:
            yield Malformed(place, _as_json(columns, fields), str(error))
    else:
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema([field.field for field in fields]))


def _as_json(columns: Sequence[Column], fields: Sequence[ReadField]) -> str:
    row = {field.field.name: first(column) for field, column in zip(fields, columns, strict=True)}
    row = {
        name: ascii(value) if isinstance(value, str) and not _is_utf8(value) else value for name, value in row.items()
    }
    return msgspec.json.encode(row, enc_hook=str).decode()


def _is_utf8(text: str) -> bool:
    """Whether a text has no bytes that could not be decoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _exact_float(value: Any) -> Any:
    if isinstance(value, str):
        return _refuse(value, "a float")
    number = float(value)
    if isinstance(value, int) and number != value:
        raise ValueError(NO_FLOAT.format(value))
    if isinstance(value, Decimal) and value.is_finite() and math.isinf(number):
        raise ValueError(f"it is {value}, which a float cannot hold; declare a Decimal")
    return number


def exact_floats(column: pa.Array) -> pa.Array:
    """Numbers as floats; raises a `ValueError` for a whole number that a float does not hold."""
    import pyarrow.compute as pc

    floats = column.cast(pa.float64(), safe=False)
    if pa.types.is_integer(column.type):
        back = floats.cast(column.type, safe=False)
        # the float above the largest whole number would come back as that one
        largest = 2.0 ** (column.type.bit_width - pa.types.is_signed_integer(column.type))
        exact = pc.and_(pc.equal(back, column), pc.less(floats, largest))
        if not pc.all(exact, min_count=0).as_py():  # a null is no number
            value = column.filter(pc.invert(exact))[0].as_py()
            raise ValueError(NO_FLOAT.format(value))
    return floats


def first(column: Any) -> Any:
    """The first value of a column, as JSON takes it."""
    if not isinstance(column, pa.Array):
        return column[0]
    # Python has not all of Arrow's times
    is_time = pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
    return (column.cast(pa.string()) if is_time else column)[0].as_py()


def _holds(field: pa.DataType, column: pa.DataType) -> bool:
    """Whether all values of a column's type are values of the field, once they have its width."""
    if pa.types.is_floating(field):
        return bool(pa.types.is_floating(column) or pa.types.is_integer(column))
    if pa.types.is_integer(field):
        return bool(pa.types.is_integer(column))
    if pa.types.is_timestamp(field):
        return bool(pa.types.is_timestamp(column))
    if pa.types.is_string(field):
        is_text = pa.types.is_dictionary(column) and pa.types.is_string(column.value_type)
        return bool(is_text or column == field)
    if pa.types.is_list(field) and pa.types.is_list(column):
        return not pa.types.is_nested(field.value_type) and _holds(field.value_type, column.value_type)
    return bool(column == field)


def _times(texts: Sequence[str | None]) -> pa.Array | None:
    """Times without a zone, if all are written as SQLite's functions and SQLAlchemy write them; else None."""
    import pyarrow.compute as pc

    array = pa.array(texts, pa.string())
    if pc.all(pc.match_substring_regex(array, _TIME)).as_py():
        try:
            return python_times(array.cast(pa.timestamp("us")))
        except pa.ArrowInvalid:  # it has a day or an hour that there is not: the one that has it is refused
            return None
    return None


def _converter(kind: pa.DataType) -> _Convert:
    """A function that makes a value of a type from drivers' values for it, such as a text for a time."""
    if pa.types.is_nested(kind):
        return _nested(kind)
    if pa.types.is_decimal(kind):
        return lambda v: Decimal(str(v)) if isinstance(v, float) else Decimal(v)
    if pa.types.is_timestamp(kind):
        return lambda v: _moment(v, kind.tz is not None)
    if pa.types.is_duration(kind):
        return _duration
    if pa.types.is_date(kind):
        return _day
    if pa.types.is_integer(kind):
        return _whole
    if kind == pa.bool_():
        return lambda v: {0: False, 1: True}[v] if v in (0, 1) else _refuse(v, "a bool")
    if kind == pa.float64():
        return _exact_float
    if kind == pa.string():
        return lambda v: str(v) if isinstance(v, (str, UUID)) else _refuse(v, "a text")
    return lambda v: v


def _refuse(value: Any, what: str) -> Any:
    raise TypeError(f"{shorten(value)} is not {what}")


def _nested(kind: pa.DataType) -> _Convert:
    python, decode = json_type(kind), from_json(kind)
    if pa.types.is_list(kind) and pa.types.is_duration(kind.value_type):
        return lambda v: decode(v) if isinstance(v, (str, bytes)) else [item and _duration(item) for item in v]
    return lambda v: decode(v) if isinstance(v, (str, bytes)) else msgspec.convert(v, python)


def _whole(value: Any) -> Any:
    """A whole number; some databases return one as a decimal, such as a sum, or as a float."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    is_whole = isinstance(value, (float, Decimal)) and math.isfinite(value) and value == int(value)
    return int(value) if is_whole else _refuse(value, "an int")


def _duration(value: Any) -> timedelta:
    if isinstance(value, pa.MonthDayNano):
        if value.months:
            raise ValueError(MONTHS)
        micros, rest = divmod(value.nanoseconds, 1000)
        return timedelta(value.days, microseconds=micros) if not rest else _refuse(value, "whole microseconds")
    if isinstance(value, str):  # of DuckDB
        if not value.removeprefix("-").isdecimal():
            raise ValueError(f"'{value}': {MONTHS}")
        value = int(value)
    return value if isinstance(value, timedelta) else timedelta(microseconds=_whole(value))


def _day(value: Any) -> Any:
    if isinstance(value, str):
        return date.fromisoformat(value)
    is_day = isinstance(value, date) and not isinstance(value, datetime)
    return value if is_day else _refuse(value, "a date")


def _moment(value: Any, zoned: bool) -> datetime:
    if isinstance(value, str):
        check_microseconds(value)
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        raise TypeError(f"{shorten(value)} is not a time")
    if value.tzinfo is None:
        return value.replace(tzinfo=timezone.utc) if zoned else value
    moment = value.astimezone(timezone.utc)
    return moment if zoned else moment.replace(tzinfo=None)
