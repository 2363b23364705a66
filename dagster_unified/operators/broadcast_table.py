"""`map_batches` of a stream and a broadcast one: a function of batches that has a table at hand.

The table is the operator's broadcast state: all records of the broadcast stream that have come. In the body of an
iteration, where it is those of a round, `map_batches.py` runs the function without state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from dagster_unified.operators.broadcast import Broadcasting, BroadcastOperator
from dagster_unified.operators.functions.base import Function, RuntimeContext
from dagster_unified.operators.keyed_batches import KeyedBatchesStep, KeyedBatchOperator, Rows
from dagster_unified.operators.layout import StreamLayout, declared
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.operator import KeyedOptions
from dagster_unified.operators.program.step import Place
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.arrow_rows import ArrowRows
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.columns import TypedColumn
from dagster_unified.operators.state.map import MapStateDescriptor
from dagster_unified.operators.state.row_columns import RowsByKeyColumn, RowsColumn

TABLE = MapStateDescriptor("table", int, bytes)
"""The broadcast state: the rows of the table as Arrow streams, one after another under 0, 1, …"""


class TableDescriptor(MapStateDescriptor[int, bytes]):
    """As `TABLE`, where the columns of the table are known."""

    def __init__(self, layout: StreamLayout) -> None:
        super().__init__(TABLE.name, int, bytes)
        self.layout = layout

    def column(self, what: str) -> TypedColumn:
        return RowsByKeyColumn(what, int, RowsColumn(what, self.layout), several=False)


class BroadcastTableOperator(BroadcastOperator, KeyedBatchOperator):
    """Runs a function of a batch and a table."""

    may_return_none = False

    def __init__(
        self,
        where: str,
        spec: Broadcasting,
        options: KeyedOptions,
        clock: Callable[[], int],
        metrics: Metrics,
        table: StreamLayout,
    ) -> None:
        super().__init__(where, spec, options, clock, metrics)
        self.descriptors = {TABLE.name: TableDescriptor(table)}
        self.rows = ArrowRows("the broadcast stream's table", table)
        self._streams: list[bytes] = []
        """What the table was read from, one Arrow stream after another."""

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
        held = self.rows.read(streams[last]) if streams else None  # read, so that a type that it does not fit is seen
        if held is None or len(streams[last]) >= chunks.SMALL:
            streams[last + 1] = ArrowRows.encode(more)
        else:
            streams[last] = ArrowRows.encode(pa.concat_tables([held, more]))

    def _call(self, batch: pa.RecordBatch) -> object:
        function: Any = self.function
        return function(batch, self._current())

    def _current(self) -> pa.Table:
        """The table of the instance that is current. What was read of it before is not read again."""
        entries = self.entries(TABLE)
        streams = [entries[number] for number in range(len(entries))]
        known = {id(data): piece for data, piece in zip(self._streams, self._pieces, strict=True)}
        if not self._pieces or [id(data) for data in streams] != list(known):
            self._pieces = [known[id(data)] if id(data) in known else self.rows.read(data) for data in streams]
            self._streams = streams
            self._table = pa.concat_tables([self.rows.schema.empty_table(), *self._pieces])
        return self._table


class BroadcastTableStep(KeyedBatchesStep):
    """`map_batches` behind `connect` with a broadcast stream."""

    def made(self, place: Place) -> KeyedBatchOperator:
        assert place.broadcast is not None
        return BroadcastTableOperator(
            place.where, self.function, place.options, place.clock, place.metrics, place.broadcast
        )
