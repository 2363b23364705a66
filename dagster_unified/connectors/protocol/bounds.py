"""How a source reads only a partition of itself, by the values of columns.

Knows slices and columns; not which source it is.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from dagster_unified.connectors.files.texts import moment_of
from dagster_unified.connectors.protocol.frame import MALFORMED, fitting, non_deterministic
from dagster_unified.errors import PipelineError, nearest
from dagster_unified.graph.connectors import Dimensions, Slice, TimeRange
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.operators.time import to_millis

if TYPE_CHECKING:
    import pyarrow.compute as pc
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


def checked_columns(columns: Mapping[str, str], names: tuple[str, ...], where: str) -> dict[str, str]:
    """The column of each dimension; raises `PipelineError` where there is no such column."""
    for column in columns.values():
        if column not in names:
            raise PipelineError(
                f"{where}: cannot be partitioned by '{column}': there is no such field{nearest(column, names)}"
            )
    return dict(columns)


def check_partition_columns(columns: Mapping[str, str], schema: pa.Schema, known: Dimensions, where: str) -> None:
    """Raise `PipelineError` where a field is named for an unknown dimension, or cannot say its partition."""
    for dimension, column in columns.items():
        if dimension not in known.names:
            dimension_name = f"dimension '{dimension}'" if dimension else "its only dimension"
            raise PipelineError(
                f"{where}: is partitioned by '{column}' as {dimension_name}, and the partitions have"
                f" {known.describe()}{nearest(dimension, known.names)}"
            )
        kind = schema.field(column).type
        if dimension not in known.in_time and not any(is_key(kind) for is_key in _KEY_TYPES):
            raise PipelineError(
                f"{where}: field '{column}' of type {kind} cannot be compared with the keys of {known.describe()};"
                " a text, a whole number or a date can"
            )
        if dimension in known.in_time and not any(is_time(kind) for is_time in _TIMES):
            raise PipelineError(
                f"{where}: cannot be partitioned in time by field '{column}' of type {kind}; a datetime, a date,"
                " milliseconds since the epoch or an ISO text can"
            )


_KEY_TYPES = (pa.types.is_string, pa.types.is_int64, pa.types.is_date)
"""Types whose values have one text only."""

_TIMES = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_int64, pa.types.is_string)


_DAY, _TICK = timedelta(days=1), timedelta(microseconds=1)

PartitionBounds: TypeAlias = Mapping[str, "TimeRange | frozenset[str]"]
"""By column, the time range or the keys that partitions cover: all their rows have values within."""


def bounding_range(columns: Mapping[str, str], slices: Sequence[Slice]) -> PartitionBounds:
    """Bounds of partitions, so that a server may leave out rows that are surely outside; Spark filters exactly."""
    by_column: dict[str, TimeRange | frozenset[str]] = {}
    for dimension, column in columns.items():
        bounds = [slice_.dimensions[dimension] for slice_ in slices if dimension in slice_.dimensions]
        times = [bound for bound in bounds if isinstance(bound, TimeRange)]
        if not bounds or len(bounds) < len(slices):
            continue
        if len(times) == len(bounds):
            # by moments: datetimes of one zone are compared by the clock, which may show an hour twice
            start = min((bound.start for bound in times), key=to_millis)
            by_column[column] = TimeRange(start, max((bound.end for bound in times), key=to_millis))
        elif not times:
            by_column[column] = frozenset(bound for bound in bounds if isinstance(bound, str))
    return by_column


def in_any_zone(bounds: TimeRange) -> TimeRange:
    """Bounds wide enough for values without a time zone: dates and times may be in any zone."""
    return TimeRange(bounds.start - _DAY, bounds.end + _DAY)


def in_folder(column: str, kind: DataType, bounds: TimeRange | frozenset[str]) -> Column:
    """Whether a text in a folder's name, for a field of this type, may be one that partitions cover."""
    from pyspark.sql import functions as F

    text = F.col(column)
    if not isinstance(bounds, TimeRange):
        key = text.try_cast(kind).cast("string")  # 7 for 007, where that is a number
        return key.isNull() | key.isin(sorted(bounds))
    range_ = in_any_zone(bounds)
    first, last = range_.start.date().isoformat(), (range_.end - _TICK).date().isoformat()
    day = F.substring(text, 1, 10)
    return text.isNull() | ~day.rlike(r"^\d{4}-\d{2}-\d{2}$") | day.between(first, last)


def whole_numbers(keys: Collection[str]) -> list[int]:
    """The numbers among keys that are written as Spark writes them; no row has the others."""
    numbers = (int(key) for key in keys if re.fullmatch(r"-?[0-9]{1,19}", key))
    return sorted(number for number in numbers if str(number) in keys and -(1 << 63) <= number < 1 << 63)


def expression_of(
    columns: Mapping[str, str], schema: pa.Schema, known: Dimensions, slices: Sequence[Slice], where: str
) -> pc.Expression:
    """The condition, for Arrow, that a row is in one of some partitions, by the columns of their dimensions.

    Raises `PipelineError` for a column that cannot say it. A text says a key, and no time: of a day it does not say
    the zone.
    """
    checked_columns(columns, tuple(schema.names), where)
    check_partition_columns(columns, schema, known, where)
    alternatives = []
    for slice_ in slices:
        tests = [
            _expression(column, schema.field(column).type, slice_.dimensions[dimension], where)
            for dimension, column in columns.items()
        ]
        alternatives.append(functools.reduce(operator.and_, tests))
    return functools.reduce(operator.or_, alternatives)


def _expression(column: str, kind: pa.DataType, bounds: TimeRange | str, where: str) -> pc.Expression:
    import pyarrow.compute as pc

    field = pc.field(column)
    if not isinstance(bounds, TimeRange):
        return field.cast(pa.string()) == bounds
    if pa.types.is_string(kind):
        raise PipelineError(
            f"{where}: '{column}' is a text, which does not say in which zone its day is; name a column with a"
            " datetime, a date or milliseconds since the epoch"
        )
    start, end = (_as_value(kind, moment, column, where) for moment in (bounds.start, bounds.end))
    return (field >= start) & (field < end)


def _as_value(kind: pa.DataType, moment: datetime, column: str, where: str) -> pa.Scalar:
    """A moment as a value of a column's type: of a type without a zone, by the clock of the partition's zone."""
    import pendulum

    zoned = pendulum.instance(moment)
    if pa.types.is_date(kind):
        if zoned.date() == (zoned - _TICK).date():
            raise PipelineError(_shorter_than_a_day(column, where))
        return pa.scalar(zoned.date(), kind)
    if pa.types.is_timestamp(kind):
        return pa.scalar(zoned.in_timezone("UTC") if kind.tz else zoned.naive(), kind)
    return pa.scalar(to_millis(moment), kind)


def _shorter_than_a_day(column: str, where: str) -> str:
    return (
        f"{where}: field '{column}' is a date, which cannot separate partitions that are shorter than a day; partition"
        " it by a field with a time"
    )


def rows_in(frame: DataFrame, columns: Mapping[str, str], slices: Sequence[Slice], source: str) -> DataFrame:
    """The rows of a partition or, for several, with the index of each row's partition in `PARTITION_INDEX`.

    A row whose partition is unknown is malformed: kept with the others, for every partition that it may belong to, or
    an error.
    """
    where = f"source '{source}'"
    tests = [
        (column, [_test(frame, dimension, column, slice_, where) for slice_ in slices])
        for dimension, column in columns.items()
    ]
    return _rows_that_pass(frame, tests, len(slices), source)


def rows_after(frame: DataFrame, column: str, until: datetime, source: str) -> DataFrame:
    """The rows of the partitions that begin at a moment or later.

    A row whose partition is unknown is treated as in a run for a partition.
    """
    from pyspark.sql import functions as F

    test = _in_time(F.col(column), frame.schema[column].dataType, until, None, column, f"source '{source}'")
    return _rows_that_pass(frame, [(column, [test])], 1, source)


def _rows_that_pass(
    frame: DataFrame, tests: Sequence[tuple[str, Sequence[tuple[Column, Column]]]], slices: int, source: str
) -> DataFrame:
    """The rows that pass the tests of some columns for one of the slices, or whose column does not say it."""
    from pyspark.sql import functions as F

    diverts = MALFORMED in frame.columns
    columns = [c for c in frame.columns if c != MALFORMED]
    text = F.coalesce(F.to_json(F.struct(*columns)), F.lit(""))  # never null, as the texts of other malformed rows
    problem = F.col(MALFORMED) if diverts else F.lit(None)
    passes = [problem.isNotNull() if diverts else F.lit(False)] * slices
    known = [F.lit(True)] * slices
    for column, outcomes in tests:
        unknown = outcomes[0][0].isNull()
        row = F.struct(
            F.lit("").alias("file"),
            text.alias("row"),
            non_deterministic(F.lit(f"field '{column}' does not say the partition")).alias("reason"),
        )
        problem = F.coalesce(problem, F.when(unknown, row.cast(frame.schema[MALFORMED].dataType) if diverts else row))
        known = [so_far & (inside | unknown) for so_far, (_, inside) in zip(known, outcomes, strict=True)]
    passes = [bad | belongs for bad, belongs in zip(passes, known, strict=True)]
    passing = frame.where(functools.reduce(lambda first, second: first | second, passes))
    if slices > 1:
        places = F.array_compact(F.array(*[F.when(belongs, F.lit(place)) for place, belongs in enumerate(passes)]))
        passing = passing.withColumn(PARTITION_INDEX, F.explode(places))
    passing = passing.withColumn(MALFORMED, problem)
    return passing if diverts else passing.where(fitting(source)).drop(MALFORMED)


def _test(frame: DataFrame, dimension: str, column: str, slice_: Slice, where: str) -> tuple[Column, Column]:
    """The value of a column that says the partition, and whether it is this one."""
    from pyspark.sql import functions as F

    bounds = slice_.dimensions[dimension]
    if isinstance(bounds, TimeRange):
        return _in_time(F.col(column), frame.schema[column].dataType, bounds.start, bounds.end, column, where)
    return _equal(F.col(column), bounds)


def _equal(value: Column, key: str) -> tuple[Column, Column]:
    return value, value.cast("string") == key


def _in_time(
    value: Column, kind: DataType, start: datetime, end: datetime | None, column: str, where: str
) -> tuple[Column, Column]:
    """The moment in a column, and a condition that it is within bounds; the end may be open.

    The condition is written so that a Parquet reader can skip row groups outside.
    """
    import pendulum
    from pyspark.sql import functions as F
    from pyspark.sql.types import DateType, LongType, StringType, TimestampNTZType, TimestampType

    def between(moment: Column, bound: Callable[[pendulum.DateTime], date | int]) -> Column:
        inside = moment >= F.lit(bound(pendulum.instance(start)))
        return inside if end is None else inside & (moment < F.lit(bound(pendulum.instance(end))))

    if isinstance(kind, TimestampType):
        return value, between(value, lambda moment: moment.in_timezone("UTC"))
    if isinstance(kind, StringType):
        moment = moment_of(value)
        return moment, between(moment, lambda moment: moment.in_timezone("UTC"))
    if isinstance(kind, LongType):
        return value, between(value, to_millis)
    if isinstance(kind, TimestampNTZType):
        return value, between(value, lambda moment: moment.naive())
    if isinstance(kind, DateType):
        bounds = [pendulum.instance(moment) for moment in (start, end) if moment is not None]
        if any(moment.date() == (moment - _TICK).date() for moment in bounds):  # a day may begin at 01:00
            raise PipelineError(_shorter_than_a_day(column, where))
        return value, between(value, lambda moment: moment.date())
    raise TypeError(
        f"{where}: field '{column}' of type {kind.simpleString()} holds no time"
    )  # `check_partition_columns` has been there
