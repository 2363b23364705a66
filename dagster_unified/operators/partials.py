"""Partial aggregates: a task aggregates its records of a key before they are exchanged, and partials merge afterwards.

Arrow aggregates whole batches, so that of many records of a key one goes on. Nulls do not count, and NaN is the largest
number, as in Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Context, Decimal
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.arrow_aggregate import GroupBy
from dagster_unified.operators.functions.base import ReduceFunction
from dagster_unified.operators.functions.windows import WindowFunction
from dagster_unified.operators.keyed import ReduceOperator, add, greatest, least
from dagster_unified.operators.keys import key_part
from dagster_unified.operators.layout import TIMESTAMP
from dagster_unified.operators.operator import OperatorContext
from dagster_unified.operators.program.blocks import Block, Consumer, encoded
from dagster_unified.operators.program.step import BlockStep, StepContext
from dagster_unified.operators.time import to_datetime
from dagster_unified.operators.windows.window import TimeWindow
from dagster_unified.records import RecordType
from dagster_unified.values import TOO_LARGE

AT_ONCE = 1 << 18
"""Records that Arrow aggregates at once."""

EMITTED = 1 << 16
"""Rows of partials in one batch."""

PANE = "__pane"
EXACT = Context(prec=76)
"""Adds decimals as columns hold them, without rounding."""


@dataclass(frozen=True)
class Partial:
    """One partial aggregate: a `count`, `sum`, `min` or `max`."""

    name: str
    """The field that holds it."""

    kind: str
    column: str | None
    """The column that it reads; None where it counts records."""

    shown: str
    """The aggregate, as its author wrote it."""

    carry: str | None = None
    """Of a sum over a window, the field that holds how many times its `Wide.unit` are to be added to it, null for none.

    So the sum of a window goes beyond what its type holds, and comes back.
    """


@dataclass(frozen=True)
class Wide:
    """How numbers too large for a type are kept in it: as a multiple of `unit`, and the rest."""

    unit: Any
    add: Callable[[Any, Any], Any]

    def holds(self, total: Any) -> bool:
        """Whether the type holds a number."""
        return bool(-self.unit < total < self.unit)

    def split(self, total: Any) -> tuple[int | None, Any]:
        """How often the unit is in a number, None for not at all, and the rest."""
        if total is None or self.holds(total):
            return None, total
        times = int(abs(total) // self.unit) * (1 if total > 0 * self.unit else -1)
        return times, self.add(total, -times * self.unit)

    def whole(self, times: int | None, rest: Any) -> Any:
        """The number; raises `OverflowError` where the type cannot hold it."""
        if times:
            times, rest = self.split(self.add(rest, times * self.unit))
        if times:
            raise OverflowError
        return rest


def _plus(a: Any, b: Any) -> Any:
    return a + b


def _add_decimals(a: Any, b: Any) -> Any:
    return EXACT.add(a, b)


WIDE: dict[type, Wide] = {
    int: Wide(1 << 63, _plus),
    timedelta: Wide(timedelta(microseconds=1 << 63), _plus),
    Decimal: Wide(Decimal(10**20), _add_decimals),
}
"""By the type of the numbers that are added up."""


@dataclass(frozen=True)
class PartialsStep(BlockStep):
    """Aggregates the records of each key that reach a task in a micro-batch, or in BATCH in a partition.

    With `panes` (length and offset in milliseconds) it aggregates by key and pane of event time. A result then has the
    event time of the pane's last record, and is in the same windows.
    """

    keys: tuple[str, ...] = ()
    partials: tuple[Partial, ...] = ()
    panes: tuple[int, int] | None = None

    def consumer(self, context: StepContext) -> Consumer:
        assert self.input is not None
        assert self.output is not None
        holding = _PendingPartials(self, self.input, self.output, context)
        context.flushing.append(holding.flush)
        return holding.take


class _PendingPartials:
    """The records and partials of a micro-batch that are not emitted yet."""

    def __init__(self, step: PartialsStep, records: RecordType, output: RecordType, context: StepContext) -> None:
        self._step, self._records, self._output, self._step_context = step, records, output, context
        read = [*step.keys, *(partial.column for partial in step.partials if partial.column is not None)]
        self._columns = list(dict.fromkeys(read))
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._partials: list[pa.Table] = []

    def take(self, block: Block) -> None:
        batch = encoded(block, self._records, self._step_context.before)
        for name in self._step.keys:
            key = key_part(name, batch.column(name), batch, self._records.names, self._step_context.where)
            batch = batch.set_column(batch.schema.get_field_index(name), batch.schema.field(name), key)
        batch = batch.select(self._columns)
        if self._step.panes is not None:
            times = [None] * block.size if block.timestamps is None else block.timestamps
            batch = batch.append_column(TIMESTAMP, pa.array(times, pa.int64()))
        self._batches.append(batch)
        self._rows += batch.num_rows
        if self._rows >= AT_ONCE:
            self._aggregate()

    def flush(self) -> None:
        """Emit everything."""
        self._aggregate()
        if len(self._partials) > 1:
            self._partials = [self._merged()]
        for table in self._partials:
            self._emit(table)
        self._partials = []

    def _aggregate(self) -> None:
        if not self._rows:
            return
        aggregated, rows = self._aggregated(), self._rows
        self._batches, self._rows = [], 0
        self._partials.append(aggregated)
        pending = sum(table.num_rows for table in self._partials)
        if (
            2 * aggregated.num_rows > rows or pending > AT_ONCE
        ):  # hardly any key comes twice: holding it would gain nothing
            for table in self._partials:
                self._emit(table)
            self._partials = []

    def _aggregated(self) -> pa.Table:
        table = pa.Table.from_batches(self._batches)
        if self._step.panes is not None:
            table = table.append_column(PANE, _panes(table.column(TIMESTAMP), *self._step.panes))
        return self._grouped(table, [(partial, partial.column, partial.kind) for partial in self._step.partials])

    def _merged(self) -> pa.Table:
        merging = [(p, p.name, "sum" if p.kind == "count" else p.kind) for p in self._step.partials]
        return self._grouped(pa.concat_tables(self._partials), merging)

    def _grouped(self, table: pa.Table, wanted: Sequence[tuple[Partial, str | None, str]]) -> pa.Table:
        step = self._step
        keys = [*step.keys, *([PANE] if step.panes is not None else [])]
        work = GroupBy(table.select(keys))
        sums: dict[str, str] = {}
        finish: list[TakeColumn] = []
        for partial, column, kind in wanted:
            if kind == "sum" and column is not None:
                sums[partial.name] = work.add_sum(_countable(table.column(column)))
                finish.append(_sum(sums[partial.name], partial, self._step_context.where))
            else:
                finish.append(_take_column(work, table, column, kind))
        if step.panes is not None:
            latest = work.add(table.column(TIMESTAMP), "max")
        carried = {p.name: p.carry for p in step.partials if p.carry is not None and p.carry in table.column_names}
        carries = {name: work.add(table.column(carry), "sum") for name, carry in carried.items()}
        grouped = work.result()
        columns = {name: _cast(name)(grouped, self._output.schema.field(name).type) for name in step.keys}
        if step.panes is not None:
            columns[PANE] = grouped.column(PANE)
        for partial, take in zip(step.partials, finish, strict=True):
            kind_declared = self._output.schema.field(partial.name).type
            if partial.carry is None:
                columns[partial.name] = take(grouped, kind_declared)
            else:
                before = grouped.column(carries[partial.name]) if partial.name in carries else None
                rest, times = _with_carry(grouped.column(sums[partial.name]), kind_declared, before)
                columns[partial.name], columns[partial.carry] = rest, times
        if step.panes is not None:
            columns[TIMESTAMP] = grouped.column(latest)
        return pa.table(columns)

    def _emit(self, table: pa.Table) -> None:
        schema, names = self._output.schema, list(self._output.names)
        for start in range(0, table.num_rows, EMITTED):
            whole = table.slice(start, EMITTED).combine_chunks()
            arrays = [_whole(whole.column(name)) for name in names]
            times = _whole(whole.column(TIMESTAMP)).to_pylist() if self._step.panes is not None else None
            batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
            self._step_context.send(None, Block(None, batch, times, self._output))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _panes(times: pa.ChunkedArray, length: int, offset: int) -> pa.ChunkedArray:
    """The start of the pane that each moment is in."""
    shifted = pc.subtract(times, offset)
    past = pc.subtract(shifted, pc.multiply(pc.divide(shifted, length), length))  # with the sign of the moment
    past = pc.if_else(pc.less(past, 0), pc.add(past, length), past)
    return pc.subtract(times, past)


TakeColumn = Callable[[pa.Table, pa.DataType], pa.ChunkedArray]
"""Takes an aggregate from Arrow's result, as a column of a type."""


def _take_column(work: GroupBy, table: pa.Table, column: str | None, kind: str) -> TakeColumn:
    """Add the aggregation that a count, a minimum or a maximum needs."""
    if column is None:
        ones = pa.chunked_array([pa.repeat(pa.scalar(1, pa.int64()), table.num_rows)])
        return _cast(work.add(ones, "sum"))
    values = table.column(column)
    if kind == "count":
        return _cast(work.add(values, "count"))
    values = _countable(values)
    largest = work.add(values, kind)
    if kind == "max" and pa.types.is_floating(values.type):
        unknown = pc.is_nan(values)
        if pc.any(unknown).as_py():
            return _or_nan(largest, work.add(unknown, "max"))
    return _cast(largest)


def _countable(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as Arrow aggregates it: durations as numbers."""
    return values.cast(pa.int64()) if pa.types.is_duration(values.type) else values


def _sum(name: str, partial: Partial, where: str) -> TakeColumn:
    def take(grouped: pa.Table, wanted: pa.DataType) -> pa.ChunkedArray:
        try:
            return _cast(name)(grouped, wanted)
        except pa.ArrowInvalid as error:
            raise RecordTypeError(f"{where}: {partial.shown} {TOO_LARGE}") from error

    return take


def _with_carry(
    sums: pa.ChunkedArray, kind: pa.DataType, before: pa.ChunkedArray | None
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Sums that fit a type, and how often the type's unit is to be added to each; `before` is that count so far."""
    carried = before if before is not None else pa.chunked_array([pa.nulls(len(sums), pa.int64())])
    try:
        return sums if sums.type == kind else sums.cast(kind), carried
    except pa.ArrowInvalid:
        wide = WIDE[Decimal if pa.types.is_decimal(kind) else int]
        totals = [total if total is None or wide is WIDE[Decimal] else int(total) for total in sums.to_pylist()]
        pairs = [wide.split(total) for total in totals]
        rest = pa.array([rest for _, rest in pairs], pa.int64() if pa.types.is_duration(kind) else kind).cast(kind)
        times = [(times or 0) + (earlier or 0) for (times, _), earlier in zip(pairs, carried.to_pylist(), strict=True)]
        return pa.chunked_array([rest]), pa.chunked_array([pa.array(times, pa.int64())])


def _cast(name: str) -> TakeColumn:
    def take(grouped: pa.Table, wanted: pa.DataType) -> pa.ChunkedArray:
        column = grouped.column(name)
        return column if column.type == wanted else column.cast(wanted)

    return take


def _or_nan(name: str, unknown: str) -> TakeColumn:
    def take(grouped: pa.Table, wanted: pa.DataType) -> pa.ChunkedArray:
        return pc.if_else(pc.fill_null(grouped.column(unknown), False), float("nan"), grouped.column(name))

    return take


# How two partials merge

MERGING: dict[str, Callable[[Any, Any], Any]] = {"count": add, "sum": add, "min": least, "max": greatest}


class MergePartials(ReduceFunction[Any]):
    """Merges the partials of one key, which are records of a class: the key's fields, the partials, and their carries.

    `types` has the type of each partial.
    """

    def __init__(
        self, record: type[Any], names: Sequence[str], partials: Sequence[Partial], types: Mapping[str, type]
    ) -> None:
        carrying = [p for p in partials if p.carry is not None]
        self._record, self._keys = record, len(names) - len(partials) - len(carrying)
        self._values, self._get = attrgetter(*names), [attrgetter(name) for name in names]
        self._merge = [
            _add_decimals if p.kind == "sum" and types[p.name] is Decimal else MERGING[p.kind] for p in partials
        ]
        self._merge += [add] * len(carrying)
        places = {name: place for place, name in enumerate(names[self._keys :])}
        self._sums = [
            (p.shown, places[p.name], None if p.carry is None else places[p.carry], WIDE[types[p.name]])
            for p in partials
            if p.kind == "sum" and types[p.name] in WIDE
        ]

    def reduce(self, value1: Any, value2: Any) -> Any:
        keys, first, second = self._keys, self._values(value1), self._values(value2)
        merged = [
            b if a is None else a if b is None else merge(a, b)
            for merge, a, b in zip(self._merge, first[keys:], second[keys:], strict=True)
        ]
        for shown, place, carry, wide in self._sums:
            times, merged[place] = wide.split(merged[place])
            if times is None:
                continue
            if carry is None:  # it is emitted after each micro-batch
                raise RecordTypeError(f"{shown} {TOO_LARGE}")
            merged[carry] = (merged[carry] or 0) + times
        return self._record(*first[:keys], *merged)

    def merged(self, values: Sequence[Any], starts: Sequence[int], records: Sequence[Any]) -> list[Any]:
        """Merge the records of several keys, of which each run begins where `starts` says, into the keys' values.

        A value is None where its key has none. Works by column, since a call for each record would cost most.
        """
        merged, owners, more = [], list[int](), list[Any]()
        for owner, (value, start, end) in enumerate(zip(values, starts, (*starts[1:], len(records)), strict=True)):
            merged.append(records[start] if value is None else value)
            others = records[start + (value is None) : end]
            owners += [owner] * len(others)
            more += others
        columns = [list(map(get, merged)) for get in self._get]
        for get, column, merge in zip(self._get[self._keys :], columns[self._keys :], self._merge, strict=True):
            for owner, added in zip(owners, map(get, more), strict=True):
                before = column[owner]
                column[owner] = added if before is None else before if added is None else merge(before, added)
        for shown, place, _, wide in self._sums:
            totals = [total for total in columns[self._keys + place] if total is not None]
            if totals and not (wide.holds(min(totals)) and wide.holds(max(totals))):
                raise RecordTypeError(f"{shown} {TOO_LARGE}")
        return list(map(self._record, *columns))


class MergeOperator(ReduceOperator):
    """Merges the partials of a key: one result in each micro-batch, and in BATCH at its end."""

    def __init__(self, function: Any, context: OperatorContext) -> None:
        super().__init__(function, replace(context, options=replace(context.options, incremental_updates=False)))

    @property
    def one_value(self) -> str | None:
        return "value"

    def process_runs(
        self,
        keys: Sequence[Hashable],
        starts: Sequence[int],
        records: Sequence[Any],
        timestamps: Sequence[int | None],
        after: Callable[[], None],
    ) -> None:
        try:
            updates = self.user_function.merged(self.state.take("value", keys), starts, records)
        except RecordTypeError as error:
            raise RecordTypeError(f"{self.where}: {error}") from None
        self.state.put("value", keys, updates)
        self.out.emit_records(updates)
        self.out.timestamps += [None] * len(keys)
        after()


class WindowResult(WindowFunction[Any, Any, Any, TimeWindow]):
    """The merged partials of a window, with its bounds.

    `bounds` are those of the result: the name of each, whether it is a datetime, and whether with a time zone. `sums`
    are those with a carry: the name in errors, the field, its carry's field, and how it is wide.
    """

    def __init__(
        self,
        record: type[Any],
        names: Sequence[str],
        keys: int,
        bounds: Sequence[tuple[str, bool, bool]],
        sums: Sequence[tuple[str, str, str, Wide]],
    ) -> None:
        self._record, self._keys, self._bounds = record, keys, tuple(bounds)
        self._values = attrgetter(*names)
        self._sums = [(shown, names.index(name), names.index(carry), wide) for shown, name, carry, wide in sums]
        self._width = len(names) - len(sums)

    def apply(self, key: Any, window: TimeWindow, inputs: Any) -> list[Any]:
        bounds = [self._bound(window, *bound) for bound in self._bounds]
        merged = map(self._whole, map(self._values, inputs))
        return [self._record(*values[: self._keys], *bounds, *values[self._keys : self._width]) for values in merged]

    def _whole(self, merged: tuple[Any, ...]) -> Sequence[Any]:
        """Merged partials with the whole of each sum; raises `RecordTypeError` where its type cannot hold it."""
        if not self._sums:
            return merged
        values = list(merged)
        for shown, place, carry, wide in self._sums:
            try:
                values[place] = wide.whole(values[carry], values[place])
            except OverflowError:
                raise RecordTypeError(f"{shown} {TOO_LARGE}") from None
        return values

    def _bound(self, window: TimeWindow, name: str, moment: bool, aware: bool) -> int | datetime:
        millis = window.start if name == "window_start" else window.end
        if not moment:
            return millis
        bound = to_datetime(millis)
        return bound if aware else bound.replace(tzinfo=None)
