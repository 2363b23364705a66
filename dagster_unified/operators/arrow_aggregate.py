"""Arrow's group-by over computed columns, with sums that do not overflow."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


class GroupBy:
    """The rows of some keys, and the aggregates of columns beside them."""

    def __init__(self, keys: pa.Table) -> None:
        self._keys = keys.column_names
        self._table = keys
        self._aggregates: list[tuple[str, str]] = []

    def add(self, values: pa.ChunkedArray, function: str) -> str:
        """Aggregate a column; returns the name of the result."""
        name = f"#{len(self._aggregates)}"  # as no field is called
        self._table = self._table.append_column(name, values)
        self._aggregates.append((name, function))
        return f"{name}_{function}"

    def add_sum(self, values: pa.ChunkedArray) -> str:
        """Sum up a column, in a wider type where the sum might overflow."""
        return self.add(_widened(values), "sum")

    def result(self) -> pa.Table:
        """A row for each key, with its aggregates."""
        return self._table.group_by(self._keys, use_threads=False).aggregate(self._aggregates)


def _widened(values: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = values.type
    if pa.types.is_floating(kind):
        return values
    low, high = (value.as_py() or 0 for value in pc.min_max(values).values())
    largest = max(abs(low), abs(high)) * len(values)
    if pa.types.is_integer(kind) and largest >= 1 << 63:
        return values.cast(pa.decimal128(38, 0))
    if pa.types.is_decimal(kind) and largest >= 10 ** (kind.precision - kind.scale):
        return values.cast(pa.decimal256(76, kind.scale))
    return values
