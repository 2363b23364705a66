"""Arrow's group-by with sums that do not overflow, and the combiner of what a subtask sends in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.arrow_types import is_number
from dagster_unified.errors import PipelineError, RecordTypeError
from dagster_unified.operators.functions.base import FlatMapFunction, Function, ReduceFunction, Wrapping
from dagster_unified.operators.functions.iterations import EmitsEachEpoch, EpochCollector
from dagster_unified.operators.functions.type_variables import T
from dagster_unified.operators.keys import key_part
from dagster_unified.records import RecordType


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
        """Sum a column, in a wider type where the sum might overflow."""
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


Kind = Literal["min", "max", "sum"]
"""How the values of a column become one."""

_AT_ONCE = 1 << 20
"""Rows that are collected before they are combined."""


class CombineColumns(Function, EmitsEachEpoch[pa.RecordBatch]):
    """Combines batches: for each key, every other column becomes its minimum, its maximum or its sum."""

    def __init__(self, records: RecordType, key: Sequence[str], columns: Mapping[str, Kind], where: str) -> None:
        self._schema, self._key, self._kinds = records.schema, list(key), dict(columns)
        self._where = where
        others = [name for name in records.names if name not in key]
        wrong = [name for name in columns if name not in others]
        missing = [name for name in others if name not in columns]
        kinds = get_args(Kind)
        if wrong:
            raise PipelineError(f"{where}: combine has '{wrong[0]}', which is no column beside the key")
        if missing:
            raise PipelineError(
                f"{where}: combine does not say what becomes of '{missing[0]}'; give {', '.join(kinds)}, or a function"
                " that reduces two records to one"
            )
        unknown = next((kind for kind in columns.values() if kind not in kinds), None)
        if unknown is not None:
            raise PipelineError(f"{where}: combine knows {', '.join(kinds)}, and not {unknown!r}")
        for name, kind in columns.items():
            field_type = self._schema.field(name).type
            if kind == "sum" and not is_number(field_type):
                raise PipelineError(
                    f"{where}: combine adds up numbers, and '{name}' is {field_type}; give a function that reduces two"
                    " records to one"
                )
        self._nothing = pa.RecordBatch.from_pylist([], schema=self._schema)
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        try:
            self.combined([])
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise PipelineError(
                f"{where}: combine cannot be computed on these columns: {error}; give a function that reduces two"
                " records to one"
            ) from error

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Take a batch; return no rows yet."""
        self._batches.append(batch)
        self._rows += batch.num_rows
        if self._rows >= _AT_ONCE:
            self._batches = [self.combined(self._batches)]
            self._rows = 0
        return batch.slice(0, 0)

    def emit(self, collector: EpochCollector[pa.RecordBatch]) -> None:
        batches, self._batches, self._rows = self._batches, [], 0
        if batches:
            collector.collect(self.combined(batches))

    def combined(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """One row for each key."""
        table = pa.Table.from_batches([self._with_keys_alike(batch) for batch in batches], self._schema)
        work = GroupBy(table.select(self._key))
        names = {name: name for name in self._key}
        for name, kind in self._kinds.items():
            values = table.column(name)
            names[name] = work.add_sum(values) if kind == "sum" else work.add(values, kind)
        grouped = work.result()
        columns = [self._in_type(grouped.column(names[field.name]), field) for field in self._schema]
        combined = pa.Table.from_arrays(columns, schema=self._schema)
        return pa.concat_batches([self._nothing, *combined.to_batches()])

    def _with_keys_alike(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of a batch, with equal keys alike; raises `RecordTypeError` for one that is None or NaN."""
        names = self._schema.names
        columns = [
            key_part(name, batch.column(name), batch, names, self._where) if name in self._key else batch.column(name)
            for name in names
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _in_type(self, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
        try:
            return column.cast(field.type)
        except pa.ArrowInvalid as error:
            raise RecordTypeError(
                f"{self._where}: combine: a sum of column '{field.name}' is larger than its type, {field.type}, holds:"
                f" {error}; use a column of a larger type"
            ) from error


class CombineRecords(Wrapping, FlatMapFunction[T, T], EmitsEachEpoch[T]):
    """Combines the records of a key by a function."""

    def __init__(self, function: Callable[[T, T], T] | ReduceFunction[T], key: Callable[[T], Hashable]) -> None:
        super().__init__(function)
        self._key = key
        self._reduce = function.reduce if isinstance(function, ReduceFunction) else function
        self._by_key: dict[Hashable, T] = {}

    def flat_map(self, value: T) -> list[T]:
        key = self._key(value)
        before = self._by_key.get(key)
        self._by_key[key] = combined = value if before is None else self._reduce(before, value)
        if combined is None:
            raise RecordTypeError(f"combine has made None of two records of key {key!r}; return a record")
        if before is not None and self._key(combined) != key:
            raise RecordTypeError(f"combine has made a record of key {self._key(combined)!r} of two of key {key!r}")
        return []

    def emit(self, collector: EpochCollector[T]) -> None:
        by_key, self._by_key = self._by_key, {}
        for record in by_key.values():
            collector.collect(record)
