"""`map_batches` of a stream and a broadcast one: a function of batches that has a table at hand.

The table is the operator's broadcast state: all records of the broadcast stream that have come. In the body of an
iteration, where it is those of a round, `map_batches.py` runs the function without state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dagster_unified.operators.broadcast import Broadcasting, BroadcastOperator
from dagster_unified.operators.functions.base import Function, RuntimeContext
from dagster_unified.operators.keyed import KeyedOptions
from dagster_unified.operators.keyed_batches import KeyedBatchesStep, KeyedBatchOperator, Rows
from dagster_unified.operators.layout import StreamLayout, declared
from dagster_unified.operators.metrics import Metrics
from dagster_unified.operators.program.step import Place
from dagster_unified.operators.state.arrow_list import from_bytes, to_bytes
from dagster_unified.operators.state.backend import KeyedStateBackend
from dagster_unified.operators.state.map import MapStateDescriptor

TABLE = MapStateDescriptor("table", int, bytes)
"""The broadcast state: under 0 the rows of the table, as an Arrow stream."""


class BroadcastTableOperator(BroadcastOperator, KeyedBatchOperator):
    """Runs a function of a batch and a table."""

    table: StreamLayout
    """The columns of the table."""

    def __init__(
        self, where: str, spec: Broadcasting, options: KeyedOptions, clock: Callable[[], int], metrics: Metrics
    ) -> None:
        super().__init__(where, spec, options, clock, metrics)
        self._read: tuple[bytes | None, pa.Table] | None = None
        """What was read last, and the table that it is."""

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
        more = declared(records.batch.columns, self.table.schema)
        self.entries(TABLE)[0] = to_bytes(pa.concat_tables([self._current(), pa.Table.from_batches([more])]))

    def _call(self, batch: pa.RecordBatch) -> object:
        function: Any = self.function
        return function(batch, self._current())

    def _current(self) -> pa.Table:
        """The table of the instance that is current."""
        data = self.entries(TABLE).get(0)
        if self._read is None or self._read[0] is not data:
            schema, what = self.table.schema, f"{self.where}: the broadcast stream's table"
            self._read = data, schema.empty_table() if data is None else from_bytes(data, schema, what)
        return self._read[1]


@dataclass(frozen=True)
class BroadcastTableStep(KeyedBatchesStep):
    """`map_batches` behind `connect` with a broadcast stream."""

    table: StreamLayout = field(kw_only=True)

    runs = BroadcastTableOperator

    def operator(self, place: Place) -> KeyedBatchOperator:
        operator = super().operator(place)
        assert isinstance(operator, BroadcastTableOperator)
        operator.table = self.table
        return operator
