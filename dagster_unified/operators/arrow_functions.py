"""Functions of Arrow batches: `map_batches` with and without a key, with operator state, and with a broadcast table.

Drivers pass a keyed operator runs of records of a key, and do not look into them. Here the records are `Rows`, whose
slices are runs, so that each driver drives batches as it drives records. The table of `BroadcastTableOperator` is its
broadcast state: all records of the broadcast stream so far. In the body of an iteration the table is that of an epoch,
and `BroadcastBatchesStep` runs the function without state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any, overload

import pyarrow as pa

from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.broadcast import Broadcasting, BroadcastOperator
from dagster_unified.operators.failures import RAISED, placed, user_failure
from dagster_unified.operators.functions.base import (
    Function,
    KeyedBatchFunction,
    OutputTag,
    RuntimeContext,
    TimerService,
    Wrapping,
)
from dagster_unified.operators.keyed import KeyedProcessOperator
from dagster_unified.operators.layout import TIMESTAMP, StreamLayout, declared, in_declared_types
from dagster_unified.operators.operator import OperatorContext
from dagster_unified.operators.operator_state import CheckpointedOperator
from dagster_unified.operators.program.blocks import Block, Consumer, Emitting, encoded
from dagster_unified.operators.program.step import BlockStep, StepContext
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.arrow_list import ArrowRows, RowsByKeyColumn, RowsColumn
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.columns import TypedColumn
from dagster_unified.operators.state.handles import MapStateDescriptor
from dagster_unified.operators.time import TimeDomain
from dagster_unified.records import RecordType, record_type


class MapBatchesStep(BlockStep):
    """`map_batches`."""

    def emitted(self, collected: list[Any], timestamps: list[int | None], where: str) -> Block:
        output = self.output
        assert output is not None
        batches = [checked(returned, output, None, where)[0] for returned in collected]
        if not batches:
            return Block([], None, [], output)
        batch = pa.concat_batches(batches)
        return Block(None, batch, [None] * batch.num_rows, output)

    def applied(self, context: StepContext) -> Callable[[pa.RecordBatch], Any]:
        """The function that is called with a batch."""
        function: Callable[[pa.RecordBatch], Any] = self.function
        return function

    def consumer(self, context: StepContext) -> Consumer:
        function, records, output = self.function, self.input, self.output
        assert records is not None
        assert output is not None
        context.open(function)
        call = self.applied(context)

        def consume(block: Block) -> None:
            input_batch = encoded(block, records, context.before)
            if block.timestamps is not None:
                input_batch = input_batch.append_column(TIMESTAMP, pa.array(block.timestamps, pa.int64()))
            try:
                result = call(input_batch)
            except RAISED as error:
                raise user_failure(error, context.where, function, input_batch.slice(0, 3).to_pylist()) from error
            batch, timestamps = checked(result, output, block.timestamps, context.where)
            context.send(None, Block(None, batch, timestamps, output))

        return consume


class BroadcastBatchesStep(MapBatchesStep):
    """`map_batches` of a stream and a broadcast one: the function also gets all records of the latter, as a table."""

    def applied(self, context: StepContext) -> Callable[[pa.RecordBatch], Any]:
        return lambda batch: self.function(batch, context.table())


def checked(
    result: Any, output: RecordType, timestamps: Sequence[int | None] | None, where: str
) -> tuple[pa.RecordBatch, Sequence[int | None] | None]:
    """The returned batch in its declared type, and the event times of its rows; raises `RecordTypeError`."""
    if not isinstance(result, pa.RecordBatch):
        raise RecordTypeError(f"{where}: map_batches must return a pyarrow.RecordBatch, not {type(result).__name__}")
    names = result.schema.names
    missing = [name for name in output.names if name not in names]
    if missing:
        raise RecordTypeError(f"{where}: the returned batch has no column '{missing[0]}'; it has {', '.join(names)}")
    if timestamps is not None:
        if TIMESTAMP in names:
            timestamps = result.column(TIMESTAMP).to_pylist()
        elif result.num_rows != len(timestamps) and not any(moment is not None for moment in timestamps):
            timestamps = [None] * result.num_rows
        elif result.num_rows != len(timestamps):
            raise RecordTypeError(
                f"{where}: the function was given {len(timestamps)} rows and returned {result.num_rows}, so their event"
                f" times are not known; keep the column '{TIMESTAMP}', or assign timestamps after this operator"
            )
    batch = in_declared_types(result, output.schema, output, where)
    with placed(where):
        output.check_members(batch)
    return batch, timestamps


class Rows(Sequence[Any]):
    """Records that stay an Arrow batch, with the column of event times where they have them."""

    def __init__(self, batch: pa.RecordBatch, records: RecordType) -> None:
        self.batch, self._records = batch, records

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return Rows(self.batch.slice(start, stop - start), self._records)
        return next(iter(self[index : index + 1]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records.from_batch(self.batch))


class KeyedBatchOperator(KeyedProcessOperator):
    """Runs a `KeyedBatchFunction`."""

    may_return_none = True
    """Whether its function may return None for no rows: a `KeyedBatchFunction` may."""

    def __init__(self, function: Any, context: OperatorContext) -> None:
        super().__init__(function, context)
        assert context.input is not None
        assert context.output is not None
        self._input_type, self._output_type = context.input, context.output
        """The types of the function's input and output rows."""

        self._sides: dict[str, RecordType] = {}
        self._times: Sequence[int | None] | None = None
        """The event times of the current batch, where its stream has them."""

        self._for_function = _Context(self)

    def read(self, batch: pa.RecordBatch, layout: StreamLayout) -> Rows:
        names = [*layout.records.names, *([TIMESTAMP] if layout.timestamped else [])]
        return Rows(batch.select(names), layout.records)

    def process(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        batch = self._batch(records, timestamps)
        self._domain, self._timestamp, self._generation = None, None, -1
        times = self._times = timestamps if TIMESTAMP in batch.schema.names else None
        try:
            returned = self._call(batch)
        except RAISED as error:
            raise user_failure(error, self.where, self.function, batch.slice(0, 3).to_pylist()) from error
        finally:
            self._times = None
        if returned is not None or not self.may_return_none:
            self.emit(returned, times)

    def process_in_time_order(self, key: Hashable, records: Sequence[Any], timestamps: Sequence[int | None]) -> None:
        start = 0
        for timestamp, same in groupby(timestamps):
            end = start + len(list(same))
            if timestamp is not None and timestamp - 1 > self.watermark:
                self.advance_watermark(timestamp - 1)
            self.select(key)
            self.process(records[start:end], timestamps[start:end])
            start = end

    def on_timer(self, timestamp: int, generation: int, domain: TimeDomain) -> None:
        function: Any = self.function
        self._begin_timer(timestamp, generation, domain)
        try:
            returned = function.on_timer(timestamp, self._for_function)
        except RAISED as error:
            shown = f"timer at {timestamp} of key {self.key!r}"
            raise user_failure(error, self.where, function.on_timer, shown) from error
        if returned is not None:
            self.emit(returned, None, self._timer_time())

    def emit(self, returned: object, timestamps: Sequence[int | None] | None = None, moment: int | None = None) -> None:
        """Collect a batch for the main output, with the event times of its rows, or a timer's moment."""
        batch, times = checked(returned, self._output_type, timestamps, self.where)
        self.out.emit_batch(None, batch, self._output_type, times or [moment] * batch.num_rows)

    def emit_side(self, tag: OutputTag[Any], emitted: pa.RecordBatch) -> None:
        """Collect a batch for a side output.

        Its event times are those of its column, of the rows that it was made from, or the timer's moment.
        """
        where = f"{self.where}, side output '{tag.name}'"
        if tag.name not in self._sides:
            self._sides[tag.name] = record_type(tag.output_type, where)
        records = self._sides[tag.name]
        batch, times = checked(emitted, records, self._times, where)
        if times is None and TIMESTAMP in emitted.schema.names:
            times = emitted.column(TIMESTAMP).to_pylist()
        self.out.emit_batch(tag.name, batch, records, times or [self._timer_time()] * batch.num_rows)

    def _call(self, batch: pa.RecordBatch) -> object:
        function: Any = self.function
        return function.process_batch(batch, self._for_function)

    def _timer_time(self) -> int | None:
        return self._timestamp if self._domain is TimeDomain.EVENT_TIME else None

    def _batch(self, records: Sequence[Any], timestamps: Sequence[int | None]) -> pa.RecordBatch:
        if isinstance(records, Rows):
            return records.batch
        batch = self._input_type.to_batch(records)  # they waited for the watermark
        return batch.append_column(TIMESTAMP, pa.array(timestamps, pa.int64()))

    def _emitter(self) -> Emitting:
        return EmittingBatches(self, self.key)


class _Context(KeyedBatchFunction.OnTimerContext[Any]):
    """A function's context: its operator, with batches for records."""

    def __init__(self, operator: KeyedBatchOperator) -> None:
        self._operator = operator

    def get_current_key(self) -> Any:
        return self._operator.get_current_key()

    def timer_service(self) -> TimerService:
        return self._operator.timer_service()

    def time_domain(self) -> TimeDomain:
        return self._operator.time_domain()

    def output(self, tag: OutputTag[Any], batch: pa.RecordBatch) -> None:
        self._operator.emit_side(tag, batch)


class EmittingBatches(Emitting):
    """The collector of an `IterationListener` that emits batches."""

    def __init__(self, operator: KeyedBatchOperator, *key: Any) -> None:
        super().__init__(operator.out, *key)
        self._operator = operator

    def collect(self, value: Any) -> None:
        self._operator.emit(value)

    def output(self, tag: OutputTag[Any], value: Any) -> None:
        self._operator.emit_side(tag, value)


class OfBatches(Wrapping, KeyedBatchFunction[Any]):
    """A function of batches that takes nothing else."""

    def process_batch(self, batch: pa.RecordBatch, ctx: KeyedBatchFunction.Context[Any]) -> pa.RecordBatch | None:
        result: pa.RecordBatch | None = self.function(batch)
        return result


class CheckpointedBatchOperator(CheckpointedOperator, KeyedBatchOperator):
    """Runs a function of batches with operator state."""

    may_return_none = False

    def _emitter(self) -> Emitting:
        return EmittingBatches(self)


TABLE = MapStateDescriptor("table", int, bytes)
"""The broadcast state: the rows of the table as Arrow streams, one after another under 0, 1, …"""


class TableDescriptor(MapStateDescriptor[int, bytes]):
    """As `TABLE`, with the table's columns."""

    def __init__(self, layout: StreamLayout) -> None:
        super().__init__(TABLE.name, int, bytes)
        self.layout = layout

    def column(self, what: str) -> TypedColumn:
        return RowsByKeyColumn(what, int, RowsColumn(what, self.layout), several=False)


class BroadcastTableOperator(BroadcastOperator, KeyedBatchOperator):
    """Runs a function of a batch and a table."""

    may_return_none = False

    def __init__(self, spec: Broadcasting, context: OperatorContext) -> None:
        super().__init__(spec, context)
        table = context.broadcast
        assert table is not None
        self.descriptors = {TABLE.name: TableDescriptor(table)}
        self.rows = ArrowRows("the broadcast stream's table", table)
        self._streams: list[bytes] = []
        """The Arrow streams that the table was read from."""

        self._pieces: list[pa.Table] = []
        self._table = pa.table({})

    def open(self, context: Callable[[KeyedStateBackend | None], RuntimeContext]) -> None:
        if isinstance(self.function, Function):
            self.function.open(context(None))

    def close(self) -> None:
        if isinstance(self.function, Function):
            self.function.close()

    def read_broadcast(self, batch: pa.RecordBatch, layout: StreamLayout) -> Sequence[Any]:
        return self.read(batch, layout)

    def process_broadcast(self, records: Sequence[Any], timestamps: Sequence[int | None], leads: bool) -> None:
        assert isinstance(records, Rows)
        more = pa.Table.from_batches([declared(records.batch.columns, self.rows.schema)])
        if not more.num_rows:
            return
        streams = self.entries(TABLE)
        last = len(streams) - 1
        last_rows = (
            self.rows.read(streams[last]) if streams else None
        )  # read, so that a type that it does not fit is seen
        if last_rows is None or len(streams[last]) >= chunks.SMALL:
            streams[last + 1] = ArrowRows.encode(more)
        else:
            streams[last] = ArrowRows.encode(pa.concat_tables([last_rows, more]))

    def _call(self, batch: pa.RecordBatch) -> object:
        function: Any = self.function
        return function(batch, self._current())

    def _current(self) -> pa.Table:
        """The current instance's table. Streams that were read before are not read again."""
        entries = self.entries(TABLE)
        streams = [entries[number] for number in range(len(entries))]
        known = {id(data): piece for data, piece in zip(self._streams, self._pieces, strict=True)}
        if not self._pieces or [id(data) for data in streams] != list(known):
            self._pieces = [known[id(data)] if id(data) in known else self.rows.read(data) for data in streams]
            self._streams = streams
            self._table = pa.concat_tables([self.rows.schema.empty_table(), *self._pieces])
        return self._table
