"""`map_batches` with a broadcast stream: it gives what a function of records with broadcast state does."""

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    BroadcastProcessFunction,
    CheckpointedFunction,
    MapStateDescriptor,
    Pipeline,
    WatermarkStrategy,
)
from dagster_unified.errors import PipelineError, RecordTypeError, UserFunctionError
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.arrow_list import ArrowRows
from dagster_unified.testing import run_pipeline
from tests.support import MODES, Sale

WEIGHTS = MapStateDescriptor("weights", str, int)


class Weight(NamedTuple):
    shop: str
    weight: int


class Weighed(BroadcastProcessFunction[Sale, Weight, Sale]):
    def process_element(self, value: Sale, ctx) -> list[Sale]:
        return [value._replace(amount=value.amount * (ctx.get_broadcast_state(WEIGHTS).get(value.shop) or 1))]

    def process_broadcast_element(self, value: Weight, ctx) -> list[Sale]:
        ctx.get_broadcast_state(WEIGHTS).put(value.shop, value.weight)
        return []


def weighed(sales: pa.RecordBatch, weights: pa.Table) -> pa.RecordBatch:
    assert weights.schema.names == ["shop", "weight"]
    latest = dict(zip(weights["shop"].to_pylist(), weights["weight"].to_pylist(), strict=True))
    factors = pa.array([latest.get(shop) or 1 for shop in sales["shop"].to_pylist()], pa.int64())
    return sales.set_column(1, "amount", pc.multiply(sales["amount"], factors))


def run(by_batch, sales, weights, mode, **how):
    pipeline = Pipeline("p")
    stream = pipeline.from_collection(sales, Sale, "sales")
    other = pipeline.from_collection(weights, Weight, "weights")
    if by_batch:
        stream.connect(other.broadcast()).map_batches(weighed, Sale).print()
    else:
        stream.connect(other.broadcast(WEIGHTS)).process(Weighed()).print()
    return sorted(run_pipeline(pipeline, mode, seed=None, **how).only())


SALES = st.lists(st.builds(Sale, st.sampled_from("abc"), st.integers(-9, 9)), max_size=12)


@given(SALES, st.lists(st.builds(Weight, st.sampled_from("abc"), st.integers(2, 5)), max_size=8), st.integers(1, 5))
@settings(deadline=None, max_examples=20)
def test_batches_give_what_records_give(sales, weights, micro_batch):
    for how in ({"mode": "BATCH"}, {"mode": "STREAMING", "micro_batch": micro_batch}):
        assert run(True, sales, weights, **how) == run(False, sales, weights, **how)


@MODES
def test_both_modes_agree_where_the_table_is_there_first(mode):
    sales, weights = [Sale("a", 2), Sale("b", 3)], [Weight("a", 10), Weight("b", 100)]
    assert run(True, sales, weights, mode, micro_batch=None) == [Sale("a", 20), Sale("b", 300)]


def timed(stream, field):
    return stream.assign_timestamps_and_watermarks(
        WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(field)
    )


@MODES
def test_event_times_are_columns_of_both(mode):
    def times(sales: pa.RecordBatch, weights: pa.Table) -> pa.RecordBatch:
        last = pc.max(weights["__ts"]).as_py()
        return sales.set_column(1, "amount", pa.array([moment + last for moment in sales["__ts"].to_pylist()]))

    pipeline = Pipeline("p")
    sales = timed(pipeline.from_collection([Sale("a", 2), Sale("b", 3)], Sale, "sales"), "amount")
    weights = timed(pipeline.from_collection([Weight("a", 50), Weight("a", 70)], Weight, "weights"), "weight")
    sales.connect(weights.broadcast()).map_batches(times, Sale).print()
    assert sorted(run_pipeline(pipeline, mode, micro_batch=None).only()) == [Sale("a", 72), Sale("b", 73)]


def streams():
    pipeline = Pipeline("p")
    return pipeline.from_collection([Sale("a", 2)], Sale, "sales"), pipeline.from_collection([1], int, "numbers")


class Held(CheckpointedFunction):
    def initialize_state(self, context):
        pass

    def snapshot_state(self, context):
        pass

    def __call__(self, batch, table):
        return batch


def test_mistakes_name_the_operator():
    sales, numbers = streams()
    with pytest.raises(
        PipelineError, match=r"operator 'weighed': map_batches needs the second stream in every subtask"
    ):
        sales.connect(numbers).map_batches(weighed, Sale)
    with pytest.raises(
        PipelineError, match=r"operator 'weighed': map_batches with a broadcast stream has no state of a"
    ):
        sales.key_by("shop").connect(numbers.broadcast()).map_batches(weighed, Sale)
    with pytest.raises(PipelineError, match="expected a function or a function object, got 3"):
        sales.connect(numbers.broadcast()).map_batches(3, Sale)
    sales.connect(numbers.broadcast()).map_batches(lambda batch, table: batch["nothing"], Sale).print()
    with pytest.raises(UserFunctionError, match=r"KeyError: .*nothing.*'shop': 'a'"):
        run_pipeline(sales._pipeline, "BATCH")
    sales, numbers = streams()
    sales.connect(numbers.broadcast()).map_batches(lambda batch, table: table, Sale).print()
    with pytest.raises(RecordTypeError, match=r"map_batches must return a pyarrow.RecordBatch, not Table"):
        run_pipeline(sales._pipeline, "BATCH")
    sales, numbers = streams()
    sales.connect(numbers.broadcast()).map_batches(Held(), Sale).print()
    with pytest.raises(PipelineError, match=r"operator 'Held' is given a CheckpointedFunction .*has no operator state"):
        sales._pipeline.graph()


def test_explain_and_the_lint_show_the_table():
    sales, numbers = streams()
    sales.connect(numbers.broadcast()).map_batches(weighed, Sale).print()
    text = sales._pipeline.explain()
    assert "broadcast table 'weighed'" in text
    assert "sees every broadcast record before its other records in BATCH" in text


def test_each_broadcast_row_is_stored_a_few_times_at_most(monkeypatch):
    written = []
    monkeypatch.setattr(chunks, "SMALL", 2_000)
    monkeypatch.setattr(
        ArrowRows, "encode", lambda rows, encode=ArrowRows.encode: written.append(len(rows)) or encode(rows)
    )

    def stored(records):
        written.clear()
        rows = [Weight("a", n) for n in range(records)]
        found = run(True, [Sale("a", 1)], rows, "STREAMING", micro_batch=100)
        assert found == [Sale("a", 1)] or found == [Sale("a", records - 1)]
        return sum(written) / records

    few, many = stored(1_000), stored(8_000)
    assert many < 1.5 * few
