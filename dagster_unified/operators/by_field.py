"""Combines runs of records by field: what a reduce function would make of each run, computed in columns.

Only the fields that are combined become Python's values, and one record is made for a run. Knows no function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pyarrow as pa

from dagster_unified.records import RecordType

Way = Literal["first", "last", "sum", "min", "max"]
"""How a field is combined, however a run is cut.

A sum is of integers, and the smallest and the largest are of integers or texts.
"""

LARGEST = 1 << 62
"""A sum whose parts, taken together, are no larger has 64 bits at each step."""

_COMBINE: dict[Way, Callable[[list[Any]], Any]] = {"sum": sum, "min": min, "max": max}


def combined_runs(
    records: RecordType, ways: Sequence[Way], batch: pa.RecordBatch, starts: Sequence[int], held: Any
) -> list[Any] | None:
    """The record that each run of a batch becomes; None where a sum may need more than 64 bits on the way.

    `held` is what the records before have become whose run goes on in the batch, if any.
    """
    records.check_nulls(batch)
    ends = [*starts[1:], batch.num_rows]
    rows = {"first": pa.array(starts, pa.int64()), "last": pa.array([end - 1 for end in ends], pa.int64())}
    columns: list[list[Any]] = []
    before = None if held is None else records.columns([held])
    for number, way in enumerate(ways):
        column = batch.column(number)
        if way == "first" or way == "last":
            records.check_readable(number, column)
            columns.append(records.values(number, column.take(rows[way])))
            continue
        if way == "sum" and not _fits(column, 0 if before is None else before[number][0]):
            return None
        values, combine = records.values(number, column), _COMBINE[way]
        columns.append([combine(values[start:end]) for start, end in zip(starts, ends, strict=True)])
    return records.records(columns)


def _fits(column: pa.Array, held: int) -> bool:
    """Whether all sums of some of the values, and of what was held before, have 64 bits."""
    import pyarrow.compute as pc  # slow to load, and a pipeline is built without it

    smallest, largest = pc.min_max(column).values()
    most: int = max(abs(smallest.as_py()), abs(largest.as_py()))
    return most * len(column) + abs(held) <= LARGEST
