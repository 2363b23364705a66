"""Keyed `map_batches`: a key's rows as Arrow batches, with state and timers, as a function of records has them."""

from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_unified.api import (
    MAX_TIMESTAMP,
    CheckpointedFunction,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.errors import PipelineError, RecordTypeError, UserFunctionError
from dagster_unified.operators.program.blocks import Collector
from dagster_unified.records import record_type
from dagster_unified.testing import OneInputHarness, run_pipeline
from tests.support import MODES, Event, results


class Summary(NamedTuple):
    key: str
    total: int
    values: list[int]
    even: int
    odd: int


IN_ORDER = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=1)).with_timestamp_assigner("at")
EVENTS = [Event("a", 3, 30), Event("b", 1, 1), Event("a", 1, 10), Event("b", 2, 2), Event("a", 2, 20)]
DOUBLED = OutputTag("doubled", int)


def timed(records=EVENTS):
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


def run(function, records, mode, **how):
    found = timed(records).key_by("key")
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
    expected = run(OfRecords(), records, "BATCH")
    assert run(OfBatches(), records, "BATCH") == expected
    assert run(OfBatches(), records, "STREAMING", micro_batch=micro_batch) == expected


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
    found = results(timed().key_by("key").map_batches(InTurn(), Before), mode)
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


class When(KeyedProcessFunction):
    def process_element(self, value: str, ctx) -> list[tuple[str, int]]:
        return [(value, ctx.timestamp())]


@MODES
def test_what_a_timer_emits_carries_its_timestamp(mode):
    due = timed([Event("a", 1, 1), Event("a", 2, 1)]).key_by("key").map_batches(Due(), str)
    found = results(due.key_by(lambda text: text, key_type=str).process(When()), mode)
    assert sorted(found) == [("a 11", 11), ("a 12", 12)]


class Values(KeyedBatchFunction[str]):
    def process_batch(self, batch, ctx):
        return batch.select(["value", "__ts"])


class WithoutTimes(KeyedBatchFunction[str]):
    def process_batch(self, batch, ctx):
        return batch.select(["value"]).slice(1)


class Times(KeyedProcessFunction):
    def process_element(self, value: int, ctx) -> list[tuple[int, int]]:
        return [(value, ctx.timestamp())]


def test_rows_carry_the_event_times_of_their_column():
    found = timed().key_by("key").map_batches(Values(), int).key_by(lambda n: n, key_type=int).process(Times())
    assert sorted(results(found, "BATCH")) == [(1, 1), (2, 2), (10, 1), (20, 2), (30, 3)]
    with pytest.raises(RecordTypeError, match=r"operator 'WithoutTimes': .* keep the column '__ts'"):
        results(timed().key_by("key").map_batches(WithoutTimes(), int), "BATCH")


class Numbered(KeyedBatchFunction[str]):
    def open(self, runtime_context):
        self.count = runtime_context.get_state(ValueStateDescriptor("count", int))

    def process_batch(self, batch, ctx):
        before = self.count.value() or 0
        self.count.update(before + batch.num_rows)
        return pa.RecordBatch.from_pydict({"value": pa.array(range(before, before + batch.num_rows))})


def test_another_function_gets_batches_of_many_keys():
    keys = (
        timed()
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


def test_a_harness_drives_it():
    harness = OneInputHarness(lambda s: s.key_by("key").map_batches(Numbered(), int), Event)
    assert harness.process_element(EVENTS[0]) == [0]
    snapshot = harness.snapshot()
    assert harness.process_element(EVENTS[2]) == [1]
    harness.restore(snapshot)
    assert harness.process_element(EVENTS[4]) == [1]


class Broken(KeyedBatchFunction[str]):
    def process_batch(self, batch, ctx):
        return batch["nothing"]


def test_mistakes_name_the_operator():
    with pytest.raises(UserFunctionError, match=r"operator 'Broken'.*KeyError.*nothing.*'key': 'a'"):
        results(timed().key_by("key").map_batches(Broken(), int), "BATCH")
    with pytest.raises(
        PipelineError, match=r"operator 'Broken': a KeyedBatchFunction needs a keyed stream, so call key_by"
    ):
        timed().map_batches(Broken(), int)
    with pytest.raises(PipelineError, match=r"Broken is a class; give an instance of it, Broken\(\)"):
        timed().key_by("key").map_batches(Broken, int)


class Forgotten(KeyedBatchFunction[str]):
    """Returns no batch, and emits to a side output."""

    def process_batch(self, batch, ctx):
        ctx.output(DOUBLED, batch.select(["value"]))


class Counted(CheckpointedFunction):
    """Forgets what it has to return."""

    def initialize_state(self, context):
        pass

    def snapshot_state(self, context):
        pass

    def __call__(self, batch):
        return None


@MODES
def test_only_a_keyed_function_may_return_no_batch(mode):
    assert results(timed().key_by("key").map_batches(Forgotten(), int), mode) == []
    with pytest.raises(
        RecordTypeError, match=r"operator 'Counted': map_batches must return a pyarrow.RecordBatch, not NoneType"
    ):
        results(timed().map_batches(Counted(), int), mode)


@MODES
def test_a_side_output_has_the_event_times_of_the_batch(mode):
    side = timed().key_by("key").map_batches(Forgotten(), int).get_side_output(DOUBLED)
    found = results(side.key_by(lambda n: n, key_type=int).process(Times()), mode)
    assert sorted(found) == [(1, 1), (2, 2), (10, 1), (20, 2), (30, 3)]


class Shorter(KeyedBatchFunction[str]):
    def process_batch(self, batch, ctx):
        ctx.output(DOUBLED, batch.select(["value"]).slice(1))


def test_a_side_output_of_other_rows_needs_their_event_times():
    made = timed().key_by("key").map_batches(Shorter(), int)
    made.get_side_output(DOUBLED).print("doubled")
    with pytest.raises(RecordTypeError, match=r"operator 'Shorter', side output 'doubled': .* keep the column '__ts'"):
        results(made, "BATCH")


def test_batches_without_rows_are_not_collected():
    collector, numbers = Collector(), record_type(int)
    for batch in ([], [1], []):
        collector.emit_batch(None, numbers.to_batch(batch), numbers)
    assert [batch.num_rows for batch, _ in collector.batches[None]] == [1]
