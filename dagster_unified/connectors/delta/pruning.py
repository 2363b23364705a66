"""Which files of a table may have rows of the partitions that are read, by their values and statistics in the log.

A file counts as one that may have rows wherever its values say nothing, or cannot be compared.
"""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from typing import TypeAlias

import pyarrow as pa

from dagster_unified.connectors.delta.log import AddedFile, Statistics
from dagster_unified.connectors.protocol.bounds import PartitionBounds
from dagster_unified.graph.connectors import TimeRange
from dagster_unified.operators.time import to_millis

_TICK = timedelta(milliseconds=1)
"""How far the last time of a file may be after the one that its statistics have, which are cut to milliseconds."""

_Moment: TypeAlias = "int | date | datetime"


def may_have_rows(file: AddedFile, statistics: Statistics, covered: PartitionBounds, schema: pa.Schema) -> bool:
    """Whether a file may have rows of the partitions that `covered` bounds."""
    for column, bounds in covered.items():
        in_partition = file.partition_values.get(column)
        low, high = statistics.min_values.get(column, in_partition), statistics.max_values.get(column, in_partition)
        if low is not None and high is not None and _is_outside(low, high, bounds, schema.field(column).type):
            return False
    return True


def _is_outside(low: object, high: object, bounds: TimeRange | frozenset[str], kind: pa.DataType) -> bool:
    """Whether no value from `low` to `high`, both as in the log, is one that partitions have."""
    if not isinstance(bounds, TimeRange):
        return low == high and pa.types.is_string(kind) and low not in bounds
    try:
        first, last = _moment(low, kind), _moment(high, kind)
        if first is None or last is None:
            return False
        start, end = _bounds(bounds, kind)
        return bool(last < start or first >= end)  # type: ignore[operator]
    except ValueError:
        return False


def _moment(value: object, kind: pa.DataType) -> _Moment | None:
    """A value of the log as its column's type; None where the type has no order in time that is known here."""
    if pa.types.is_integer(kind):
        return int(str(value))
    if pa.types.is_date(kind):
        return date.fromisoformat(str(value))
    if pa.types.is_timestamp(kind):
        moment = datetime.fromisoformat(str(value))
        if kind.tz is None:
            return moment.replace(tzinfo=None)
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
    return None


def _bounds(range_: TimeRange, kind: pa.DataType) -> tuple[_Moment, _Moment]:
    """The first moment of a range and the first after it, so that no value that may belong to it is outside."""
    if pa.types.is_integer(kind):
        return to_millis(range_.start), to_millis(range_.end)
    if pa.types.is_date(kind):
        return range_.start.date(), (range_.end + timedelta(days=1)).date()
    start, end = range_.start - _TICK, range_.end
    return (start.replace(tzinfo=None), end.replace(tzinfo=None)) if kind.tz is None else (start, end)
