"""Counts records by their event time, in units of the same length, so that a job knows which times it has read."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc


def by_unit(timestamps: Sequence[int], unit: int) -> dict[int, int]:
    """Return how many of some moments are in each unit of `unit` milliseconds, by the unit's number since 1970.

    There is at least one moment. Most often all are in one unit, which costs a look at the first and the last.
    """
    first, last = min(timestamps) // unit, max(timestamps) // unit
    if first == last:
        return {first: len(timestamps)}
    since = pc.subtract(pa.array(timestamps, pa.int64()), first * unit)
    counts = pc.value_counts(pc.divide(since, unit))
    numbers = (first + number for number in counts.field("values").to_pylist())
    return dict(zip(numbers, counts.field("counts").to_pylist(), strict=True))
