"""`map_batches`: Arrow in, Arrow out; of a key, with state and timers; and beside a broadcast stream as a table."""

from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    MAX_TIMESTAMP,
    BroadcastProcessFunction,
    CheckpointedFunction,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.errors import PipelineError, RecordTypeError, UserFunctionError
from dagster_unified.graph.execution_graph import Link, program
from dagster_unified.graph.nodes import Port
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.operators.drivers.batch import run_batch
from dagster_unified.operators.program.blocks import Collector
from dagster_unified.operators.program.step import Output
from dagster_unified.operators.state import chunks
from dagster_unified.operators.state.arrow_list import ArrowRows
from dagster_unified.records import record_type
from dagster_unified.testing import OneInputHarness, run_pipeline
from tests.support import MODES, Event, Sale, results


class Timed(KeyedProcessFunction):
    """Says of each value which event time it has."""

    def process_element(self, value, ctx):
        return [(value, ctx.timestamp())]


class Counted(CheckpointedFunction):
    """Forgets what it has to return."""

    def initialize_state(self, context):
        pass

    def snapshot_state(self, context):
        pass

    def __call__(self, *batches):
        return None


class Row(NamedTuple):
    key: str
    at: int


def times(function, timestamped=True):
    pipeline = Pipeline("p")
    stream = pipeline.from_collection([Row("a", 1), Row("a", 2), Row("a", 3)])
    if timestamped:
        stream = stream.assign_timestamps_and_watermarks(
            WatermarkStrategy.no_watermarks().with_timestamp_assigner("at")
        )
    stream = stream.map_batches(function, Row).name("vector")
    (
        stream.map(lambda row: row.at, int).key_by(lambda at: at, key_type=int).process(Timed(), tuple[int, int])
        if timestamped
        else stream
    ).print()
    return run_pipeline(pipeline, "BATCH").only()


def add_ten(batch):
    return pa.RecordBatch.from_pydict({"key": batch["key"], "at": pc.add(batch["at"], 10)})


def drop_first(batch):
    return batch.slice(1)


def drop_first_and_time(batch):
    return batch.slice(1).select(["key", "at"])


def test_rows_that_stay_as_many_keep_their_event_times():
    assert times(add_ten) == [(11, 1), (12, 2), (13, 3)]


def test_rows_that_change_in_number_need_the_column_of_event_times():
    assert times(drop_first) == [(2, 2), (3, 3)]
    with pytest.raises(
        RecordTypeError,
        match=r"operator 'vector': the function was given 3 rows and returned 2, .* keep the column '__ts'",
    ):
        times(drop_first_and_time)


def test_without_event_times_any_number_of_rows_may_come_back():
    assert times(drop_first_and_time, timestamped=False) == [Row("a", 2), Row("a", 3)]


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (lambda b: b.to_pylist(), RecordTypeError, "must return a pyarrow.RecordBatch, not list"),
        (lambda b: b.select(["key"]), RecordTypeError, "the returned batch has no column 'at'; it has key"),
        (
            lambda b: pa.RecordBatch.from_pydict({"key": b["key"], "at": ["x"] * 3}),
            RecordTypeError,
            r"column .at. of the returned batch is a string, and Row\(key: string, at: int64\) has a int64",
        ),
        (lambda b: b["nothing"], UserFunctionError, r"KeyError: .*nothing.* on \[\{'key': 'a', 'at': 1"),
        (
            lambda b: pa.RecordBatch.from_pydict({"key": b["key"], "at": pa.nulls(3, pa.int64())}),
            RecordTypeError,
            "field 'at'",
        ),
    ],
)
def test_a_batch_that_is_not_what_was_declared_is_an_error_that_names_the_operator(function, kind, words):
    with pytest.raises(kind, match=f"p: stage 'vector', operator 'vector'.*{words}"):
        times(function, timestamped=False)


def test_behind_a_side_output_it_gets_batches_of_the_side_outputs_type():
    names = OutputTag("names", str)

    class Split(ProcessFunction):
        def process_element(self, value: Row, ctx) -> list[Row]:
            ctx.output(names, value.key)
            return [value]

    pipeline = Pipeline("p")
    rows = pipeline.from_collection([], Row).process(Split())
    rows.print("rows")
    rows.get_side_output(names).map_batches(lambda batch: batch, str).print("names")
    decided = plan(pipeline.graph(), Configuration.of({"execution.runtime-mode": "BATCH"}))
    split, same = (node.id for node in decided.graph.nodes if node.name in ("Split", "map_batches"))
    links = [Link(split), Link(same, 0, names.name)]
    chained = program(decided, "stage", links, [Output(1, decided.layout(Port(same)))])
    batches = [chained.input.records.to_batch([Row("a", 1), Row("b", 2)])]
    (emitted,) = run_batch(chained, batches)
    assert emitted.batch.to_pylist() == [{"value": "a"}, {"value": "b"}]


class Summary(NamedTuple):
    key: str
    total: int
    values: list[int]
    even: int
    odd: int


IN_ORDER = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("at")
EVENTS = [Event("a", 3, 30), Event("b", 1, 1), Event("a", 1, 10), Event("b", 2, 2), Event("a", 2, 20)]
DOUBLED = OutputTag("doubled", int)


def timed_events(records=EVENTS):
    return Pipeline("p").from_collection(records, Event, "events").assign_timestamps_and_watermarks(IN_ORDER)


class Totals:
    """What both forms keep: a value, a list and a map."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))
        self.values = context.get_list_state(ListStateDescriptor("values", int))
        self.parity = context.get_map_state(MapStateDescriptor("parity", int, int))

    def summary(self, key):
        counts = [self.parity.get(parity) or 0 for parity in (0, 1)]
        return Summary(key, self.total.value(), sorted(self.values.get()), *counts)


class OfRecords(Totals, KeyedProcessFunction):
    def process_element(self, value: Event, ctx) -> list[Summary]:
        self.total.update((self.total.value() or 0) + value.value)
        self.values.add(value.value)
        self.parity.put(value.value % 2, (self.parity.get(value.value % 2) or 0) + 1)
        ctx.timer_service().register_event_time_timer(MAX_TIMESTAMP)
        ctx.output(DOUBLED, value.value * 2)
        return []

    def on_timer(self, timestamp, ctx):
        return [self.summary(ctx.get_current_key())]


class OfBatches(Totals, KeyedBatchFunction[str]):
    def process_batch(self, batch: pa.RecordBatch, ctx: KeyedBatchFunction.Context[str]) -> None:
        assert set(batch["key"].to_pylist()) == {ctx.get_current_key()}
        self.total.update((self.total.value() or 0) + pc.sum(batch["value"]).as_py())
        self.values.add_all(batch["value"].to_pylist())
        odd = pc.sum(pc.bit_wise_and(batch["value"], 1)).as_py()
        for parity, count in ((0, batch.num_rows - odd), (1, odd)):
            if count:
                self.parity.put(parity, (self.parity.get(parity) or 0) + count)
        ctx.timer_service().register_event_time_timer(MAX_TIMESTAMP)
        ctx.output(DOUBLED, pa.RecordBatch.from_pydict({"value": pc.multiply(batch["value"], 2)}))

    def on_timer(self, timestamp: int, ctx: KeyedBatchFunction.OnTimerContext[str]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([self.summary(ctx.get_current_key())._asdict()])


def run_keyed(function, records, mode, **how):
    found = timed_events(records).key_by("key")
    made = found.map_batches(function, Summary) if isinstance(function, OfBatches) else found.process(function)
    made.print("out")
    made.get_side_output(DOUBLED).print("doubled")
    sinks = run_pipeline(made._pipeline, mode, **how).sinks
    return sorted(sinks["out"]), sorted(sinks["doubled"])


@given(
    st.lists(st.builds(Event, st.sampled_from("abc"), st.integers(0, 5000), st.integers(-9, 9)), max_size=30),
    st.integers(1, 9),
)
@settings(deadline=None, max_examples=20)
def test_batches_give_what_records_give_in_both_modes(records, micro_batch):
    expected = run_keyed(OfRecords(), records, "BATCH")
    assert run_keyed(OfBatches(), records, "BATCH") == expected
    assert run_keyed(OfBatches(), records, "STREAMING", micro_batch=micro_batch) == expected


class InTurn(KeyedBatchFunction[str]):
    """The values of a batch, and what came before it."""

    requires_time_sorted_input = True

    def open(self, runtime_context):
        self.last = runtime_context.get_state(ValueStateDescriptor("last", int))

    def process_batch(self, batch, ctx):
        values = batch["value"].to_pylist()
        before, self_last = self.last.value(), values[-1]
        self.last.update(self_last)
        return batch.set_column(1, "before", pa.array([before, *values[:-1]], pa.int64())).drop_columns(["value"])


class Before(NamedTuple):
    key: str
    before: int | None


@MODES
def test_rows_may_be_asked_for_in_event_time_order(mode):
    found = results(timed_events().key_by("key").map_batches(InTurn(), Before), mode)
    assert sorted(found, key=str) == [
        Before("a", 10),
        Before("a", 20),
        Before("a", None),
        Before("b", 1),
        Before("b", None),
    ]


class Due(KeyedBatchFunction[str]):
    """When a batch and a timer were told of."""

    def process_batch(self, batch, ctx):
        for moment in batch["__ts"].to_pylist():
            ctx.timer_service().register_event_time_timer(moment + 10)

    def on_timer(self, timestamp, ctx):
        return pa.RecordBatch.from_pydict({"value": [f"{ctx.get_current_key()} {timestamp}"]})


@MODES
def test_what_a_timer_emits_carries_its_timestamp(mode):
    due = timed_events([Event("a", 1, 1), Event("a", 2, 1)]).key_by("key").map_batches(Due(), str)
    found = results(due.key_by(lambda text: text, key_type=str).process(Timed(), tuple[str, int]), mode)
    assert sorted(found) == [("a 11", 11), ("a 12", 12)]


class Values(KeyedBatchFunction[str]):
    def process_batch(self, batch, ctx):
        return batch.select(["value", "__ts"])


class WithoutTimes(KeyedBatchFunction[str]):
    def process_batch(self, batch, ctx):
        return batch.select(["value"]).slice(1)


def test_rows_carry_the_event_times_of_their_column():
    found = (
        timed_events()
        .key_by("key")
        .map_batches(Values(), int)
        .key_by(lambda n: n, key_type=int)
        .process(Timed(), tuple[int, int])
    )
    assert sorted(results(found, "BATCH")) == [(1, 1), (2, 2), (10, 1), (20, 2), (30, 3)]
    with pytest.raises(RecordTypeError, match=r"operator 'WithoutTimes': .* keep the column '__ts'"):
        results(timed_events().key_by("key").map_batches(WithoutTimes(), int), "BATCH")


class Numbered(KeyedBatchFunction[str]):
    def open(self, runtime_context):
        self.count = runtime_context.get_state(ValueStateDescriptor("count", int))

    def process_batch(self, batch, ctx):
        before = self.count.value() or 0
        self.count.update(before + batch.num_rows)
        return pa.RecordBatch.from_pydict({"value": pa.array(range(before, before + batch.num_rows))})


def test_another_function_gets_batches_of_many_keys():
    keys = (
        timed_events()
        .key_by("key")
        .map_batches(
            lambda batch: (
                pa.RecordBatch.from_pydict({"value": [",".join(sorted(batch["key"].to_pylist()))]})
                if "__ts" not in batch.schema.names
                else pa.RecordBatch.from_pydict({"value": batch["key"], "__ts": batch["__ts"]})
            ),
            str,
        )
    )
    assert sorted(results(keys, "BATCH")) == ["a", "a", "a", "b", "b"]


def test_a_harness_drives_a_keyed_function():
    harness = OneInputHarness(lambda s: s.key_by("key").map_batches(Numbered(), int), Event)
    assert harness.process_element(EVENTS[0]) == [0]
    snapshot = harness.snapshot()
    assert harness.process_element(EVENTS[2]) == [1]
    harness.restore(snapshot)
    assert harness.process_element(EVENTS[4]) == [1]


class Broken(KeyedBatchFunction[str]):
    def process_batch(self, batch, ctx):
        return batch["nothing"]


def test_mistakes_of_a_keyed_function_name_the_operator():
    with pytest.raises(UserFunctionError, match=r"operator 'Broken'.*KeyError.*nothing.*'key': 'a'"):
        results(timed_events().key_by("key").map_batches(Broken(), int), "BATCH")
    with pytest.raises(
        PipelineError, match=r"operator 'Broken': a KeyedBatchFunction needs a keyed stream, so call key_by"
    ):
        timed_events().map_batches(Broken(), int)
    with pytest.raises(PipelineError, match=r"Broken is a class; give an instance of it, Broken\(\)"):
        timed_events().key_by("key").map_batches(Broken, int)


class Forgotten(KeyedBatchFunction[str]):
    """Returns no batch, and emits to a side output."""

    def process_batch(self, batch, ctx):
        ctx.output(DOUBLED, batch.select(["value"]))


@MODES
def test_only_a_keyed_function_may_return_no_batch(mode):
    assert results(timed_events().key_by("key").map_batches(Forgotten(), int), mode) == []
    with pytest.raises(
        RecordTypeError, match=r"operator 'Counted': map_batches must return a pyarrow.RecordBatch, not NoneType"
    ):
        results(timed_events().map_batches(Counted(), int), mode)


@MODES
def test_a_side_output_has_the_event_times_of_the_batch(mode):
    side = timed_events().key_by("key").map_batches(Forgotten(), int).get_side_output(DOUBLED)
    found = results(side.key_by(lambda n: n, key_type=int).process(Timed(), tuple[int, int]), mode)
    assert sorted(found) == [(1, 1), (2, 2), (10, 1), (20, 2), (30, 3)]


class Shorter(KeyedBatchFunction[str]):
    def process_batch(self, batch, ctx):
        ctx.output(DOUBLED, batch.select(["value"]).slice(1))


def test_a_side_output_of_other_rows_needs_their_event_times():
    made = timed_events().key_by("key").map_batches(Shorter(), int)
    made.get_side_output(DOUBLED).print("doubled")
    with pytest.raises(RecordTypeError, match=r"operator 'Shorter', side output 'doubled': .* keep the column '__ts'"):
        results(made, "BATCH")


def test_batches_without_rows_are_not_collected():
    collector, numbers = Collector(), record_type(int)
    for batch in ([], [1], []):
        collector.emit_batch(None, numbers.to_batch(batch), numbers)
    assert [batch.num_rows for batch, _ in collector.batches[None]] == [1]


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


def run_weighed(by_batch, sales, weights, mode, **how):
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
def test_with_a_broadcast_stream_batches_give_what_records_give(sales, weights, micro_batch):
    for how in ({"mode": "BATCH"}, {"mode": "STREAMING", "micro_batch": micro_batch}):
        assert run_weighed(True, sales, weights, **how) == run_weighed(False, sales, weights, **how)


@MODES
def test_both_modes_agree_where_the_table_is_there_first(mode):
    sales, weights = [Sale("a", 2), Sale("b", 3)], [Weight("a", 10), Weight("b", 100)]
    assert run_weighed(True, sales, weights, mode, micro_batch=None) == [Sale("a", 20), Sale("b", 300)]


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


def test_mistakes_with_a_broadcast_stream_name_the_operator():
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
    sales.connect(numbers.broadcast()).map_batches(Counted(), Sale).print()
    with pytest.raises(
        PipelineError, match=r"operator 'Counted' is given a CheckpointedFunction .*has no operator state"
    ):
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
        found = run_weighed(True, [Sale("a", 1)], rows, "STREAMING", micro_batch=100)
        assert found == [Sale("a", 1)] or found == [Sale("a", records - 1)]
        return sum(written) / records

    few, many = stored(1_000), stored(8_000)
    assert many < 1.5 * few
