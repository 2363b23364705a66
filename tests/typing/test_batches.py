"""Functions of Arrow batches: their keys have types; their batches have none, as pyarrow has no type stubs."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false

from __future__ import annotations

from typing import NamedTuple, assert_type

import pyarrow as pa

from dagster_unified.api import (
    ArrowListState,
    ArrowListStateDescriptor,
    CheckpointedFunction,
    DataStream,
    FunctionInitializationContext,
    FunctionSnapshotContext,
    KeyedBatchFunction,
    OutputTag,
    Pipeline,
)
from dagster_unified.records import record_type


class Sale(NamedTuple):
    shop: str
    amount: int


class Total(NamedTuple):
    shop: str
    rows: int


LARGE = OutputTag("large", Sale)


class CountRows(KeyedBatchFunction[str]):
    def process_batch(self, batch: pa.RecordBatch, ctx: KeyedBatchFunction.Context[str]) -> pa.RecordBatch:
        assert_type(ctx.get_current_key(), str)
        ctx.output(LARGE, batch)
        return pa.RecordBatch.from_pydict({"shop": [ctx.get_current_key()], "rows": [batch.num_rows]})

    def on_timer(self, timestamp: int, ctx: KeyedBatchFunction.OnTimerContext[str]) -> None:
        ctx.timer_service().delete_event_time_timer(timestamp)


class Keeping(CheckpointedFunction):
    def initialize_state(self, context: FunctionInitializationContext) -> None:
        self.rows = context.get_operator_state_store().get_list_state(ArrowListStateDescriptor("rows", Sale))
        assert_type(self.rows, ArrowListState[Sale])

    def snapshot_state(self, context: FunctionSnapshotContext) -> None:
        self.rows.clear()

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.rows.add(batch)
        return batch


def sales() -> DataStream[Sale]:
    return Pipeline("p").from_collection([Sale("a", 1)])


def joined(batch: pa.RecordBatch, table: pa.Table) -> pa.RecordBatch:
    return batch


def test_a_function_of_batches_gives_the_output_type() -> None:
    stream = sales()
    assert_type(stream.connect(stream.broadcast()).map_batches(joined, Sale), DataStream[Sale])
    totals = sales().key_by(lambda sale: sale.shop).map_batches(CountRows(), Total)
    assert_type(totals, DataStream[Total])
    assert totals._records("test") == record_type(Total)
    assert_type(totals.get_side_output(LARGE), DataStream[Sale])
    assert_type(sales().map_batches(Keeping(), Sale), DataStream[Sale])
    assert_type(sales().map_batches(lambda batch: batch, Sale), DataStream[Sale])


def rejected() -> None:
    """Never called: what a checker has to reject."""
    sales().key_by(lambda sale: sale.amount).map_batches(CountRows(), Total)  # type: ignore[arg-type]  # pyright: ignore
    sales().connect(sales().broadcast()).map_batches(Keeping(), Sale)  # type: ignore[arg-type]  # pyright: ignore
    sales().map_batches(CountRows(), Total)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sales().key_by("shop").map_batches(joined, Total)  # type: ignore[arg-type]  # pyright: ignore
