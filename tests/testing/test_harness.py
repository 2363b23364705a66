"""What users get for their own tests: both modes in memory, and the comparison of their ends."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import CsvSource, KeyedProcessFunction, Pipeline, ValueStateDescriptor, WatermarkStrategy
from dagster_unified.api import functions as F
from dagster_unified.errors import PipelineError
from dagster_unified.testing import assert_same_in_both_modes, run_pipeline

MODES = pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])


class Reading(NamedTuple):
    room: str
    at: int
    degrees: int


class Mean(NamedTuple):
    room: str
    degrees: float


READINGS = [Reading("a", 1, 20), Reading("b", 2, 10), Reading("a", 3, 24), Reading("b", 4, 30)]
BY_AT = WatermarkStrategy.no_watermarks().with_timestamp_assigner("at")


def add(a, b):
    return Reading(a.room, b.at, a.degrees + b.degrees)


@MODES
def test_a_pipeline_of_two_stages(mode):
    pipeline = Pipeline("p")
    sums = pipeline.from_collection(READINGS).key_by("room").reduce(add)
    sums.map(lambda r: (r.room, r.degrees >= 40), tuple[str, bool]).key_by(0).reduce(lambda a, b: b).print("hot")
    assert dict(run_pipeline(pipeline, mode).only()) == {"a": True, "b": True}
    assert len(run_pipeline(pipeline, mode).only()) == (2 if mode == "BATCH" else 4)


def test_inputs_are_given_by_source_name():
    pipeline = Pipeline("p")
    pipeline.from_source(CsvSource("/nowhere/readings.csv", Reading, name="readings")).filter(lambda r: r.degrees > 20).print()
    assert run_pipeline(pipeline, "BATCH", {"readings": READINGS}).only() == [READINGS[2], READINGS[3]]
    with pytest.raises(PipelineError, match=r"p: source 'readings' reads .*, which the harness does not; give its records as inputs=\{'readings': \[...\]\}"):
        run_pipeline(pipeline, "BATCH")
    with pytest.raises(PipelineError, match="p has no source 'reading'; its sources are readings"):
        run_pipeline(pipeline, "BATCH", {"reading": READINGS})


@MODES
def test_two_sources_of_one_name_keep_their_own_records(mode):
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).union(pipeline.from_collection([2])).print()
    assert sorted(run_pipeline(pipeline, mode).only()) == [1, 2]


@MODES
def test_column_operations_run_without_spark(mode):
    pipeline = Pipeline("p")
    rows = pipeline.from_collection(READINGS)
    rows.where(F.col("degrees") > 10).select("room", "degrees").print("selected")
    rows.with_columns({"degrees": F.col("degrees") * 2}, output_type=Reading).where("degrees >= 48").print("doubled")
    rows.key_by("room").agg(F.avg("degrees").alias("degrees"), output_type=Mean).print("means")
    result = run_pipeline(pipeline, mode)
    assert sorted(map(tuple, result.sinks["selected"])) == [("a", 20), ("a", 24), ("b", 30)]
    assert sorted(result.sinks["doubled"]) == [Reading("a", 3, 48), Reading("b", 4, 60)]
    assert sorted(result.sinks["means"]) == [Mean("a", 22.0), Mean("b", 20.0)]


@MODES
def test_an_output_type_names_the_columns_of_a_select(mode):
    pipeline = Pipeline("p")
    pipeline.from_collection(READINGS[:1]).select("room", F.col("degrees") / 2, output_type=Mean).print()
    assert run_pipeline(pipeline, mode).only() == [Mean("a", 10.0)]


class Changes(KeyedProcessFunction):
    """The difference to the reading before: depends on order."""

    def __init__(self, ordered):
        self.requires_time_sorted_input = ordered

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", int))

    def process_element(self, value, ctx) -> Iterable[tuple[str, int]]:
        yield value.room, value.degrees - (self.last.value() or 0)
        self.last.update(value.degrees)


def changes(readings, ordered):
    pipeline = Pipeline("p")
    pipeline.from_collection(readings, Reading).assign_timestamps_and_watermarks(BY_AT).key_by("room").process(Changes(ordered)).print("changes")
    return pipeline


@given(st.permutations([Reading(room, at, at * at % 7) for at in range(6) for room in "ab"]))
def test_time_sorted_input_makes_both_modes_equal_whatever_order_records_arrive_in(readings):
    assert_same_in_both_modes(changes(readings, ordered=True))


def test_a_difference_between_the_modes_is_shown_with_its_records():
    with pytest.raises(AssertionError) as caught:
        assert_same_in_both_modes(changes([Reading("a", 2, 5), Reading("a", 1, 3)], ordered=False))
    assert str(caught.value) == "p: sink 'changes' ends differently\n  only in BATCH: ('a', 3), ('a', 2)\n  only in STREAMING: ('a', 5), ('a', -2)"


class Report(KeyedProcessFunction):
    """Says a second after every reading what the last reading is."""

    requires_time_sorted_input = True

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", int))

    def process_element(self, value, ctx) -> Iterable[tuple[int, int]]:
        self.last.update(value.degrees)
        ctx.timer_service().register_event_time_timer(value.at + 1)
        return []

    def on_timer(self, timestamp, ctx):
        yield timestamp, self.last.value()


def test_time_sorted_input_makes_timers_that_read_state_equal_or_the_lint_warns():
    pipeline = Pipeline("p")
    in_order = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    pipeline.from_collection([Reading("a", 1, 20), Reading("a", 10, 30)]).assign_timestamps_and_watermarks(in_order).key_by("room").process(Report()).print()
    if not any(f.severity == "warning" for f in pipeline.plan().findings):
        assert_same_in_both_modes(pipeline)


def test_only_is_for_one_sink():
    pipeline = Pipeline("p")
    rows = pipeline.from_collection([1])
    rows.print("x")
    rows.print("y")
    with pytest.raises(PipelineError, match="the pipeline has 2 sinks: x, y; read one by its name"):
        run_pipeline(pipeline, "BATCH").only()


@MODES
def test_two_sinks_of_one_name_are_both_kept(mode):
    pipeline = Pipeline("p")
    rows = pipeline.from_collection([1])
    rows.print()
    rows.map(lambda v: v + 1, int).print()
    assert run_pipeline(pipeline, mode).sinks == {"print": [1], "print-2": [2]}


def test_an_unknown_mode_is_an_error():
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).print()
    with pytest.raises(Exception, match="'BACH' is not one of BATCH, STREAMING, AUTOMATIC"):
        run_pipeline(pipeline, "BACH")


def test_a_mode_may_be_written_small_as_at_launch():
    pipeline = Pipeline("p")
    pipeline.from_collection(READINGS).key_by("room").reduce(add).print()
    assert run_pipeline(pipeline, "batch").only() == run_pipeline(pipeline, "BATCH").only()


@MODES
def test_one_pipeline_can_run_again(mode):
    pipeline = changes(READINGS, ordered=True)
    assert run_pipeline(pipeline, mode).only() == run_pipeline(pipeline, mode).only()
