"""What users get for their own tests: both modes in memory, and the comparison of their ends."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import KeyedProcessFunction, Pipeline, ValueStateDescriptor, WatermarkStrategy
from dagster_unified.api import functions as F
from dagster_unified.connectors import CsvSource
from dagster_unified.connectors.protocol.commits import SparkSink
from dagster_unified.errors import PipelineError, UnsupportedError
from dagster_unified.graph.connectors import Capabilities
from dagster_unified.testing import ManualClock, assert_same_in_both_modes, run_pipeline
from tests.support import MODES, results


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
    pipeline.from_source(CsvSource("/nowhere/readings.csv", Reading, name="readings")).filter(
        lambda r: r.degrees > 20
    ).print()
    assert run_pipeline(pipeline, "BATCH", {"readings": READINGS}).only() == [READINGS[2], READINGS[3]]
    with pytest.raises(
        PipelineError,
        match=(
            r"p: source 'readings' reads .*, which the harness does not; give its records as inputs=\{'readings':"
            r" \[...\]\}"
        ),
    ):
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
    made = Pipeline("p").from_collection(READINGS[:1]).select("room", F.col("degrees") / 2, output_type=Mean)
    assert results(made, mode) == [Mean("a", 10.0)]


@pytest.mark.parametrize(
    ("expression", "kind", "message"),
    [
        ("degrees / 3", int, "operator 'select': column 'degrees' is a float, but output_type says int64; cast it in"),
        ("room", int, "operator 'select': column 'degrees' is a text, but output_type says int64; cast it in the"),
        ("degrees", str, "operator 'select': column 'degrees' is a whole number, but output_type says string; cast"),
        ("degrees > 3", int, "operator 'select': column 'degrees' is a boolean, but output_type says int64; cast it"),
        ("no_such(room)", str, "operator 'select': the harness, which computes columns with DuckDB, does not accept"),
    ],
)
def test_a_column_of_another_type_than_the_output_type_is_an_error_as_on_spark(expression, kind, message):
    class Given(NamedTuple):
        room: str
        degrees: kind

    made = Pipeline("p").from_collection(READINGS).select("room", f"{expression} as degrees", output_type=Given)
    with pytest.raises(PipelineError, match=f"^p: .*{message}"):
        results(made, "BATCH")


class Lasting(NamedTuple):
    room: str
    took: timedelta


@MODES
def test_spans_of_time_are_aggregated_in_columns(mode):
    pipeline = Pipeline("p")
    values = [Lasting("a", timedelta(days=2, microseconds=1)), Lasting("a", timedelta(seconds=5))]
    rows = pipeline.from_collection(values, Lasting)
    rows.key_by("room").agg(F.min("took").alias("took"), output_type=Lasting).print()
    assert list(map(tuple, run_pipeline(pipeline, mode).only())) == [("a", timedelta(seconds=5))]


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
    pipeline.from_collection(readings, Reading).assign_timestamps_and_watermarks(BY_AT).key_by("room").process(
        Changes(ordered)
    ).print("changes")
    return pipeline


@given(st.permutations([Reading(room, at, at * at % 7) for at in range(6) for room in "ab"]))
def test_time_sorted_input_makes_both_modes_equal_whatever_order_records_arrive_in(readings):
    assert_same_in_both_modes(changes(readings, ordered=True))


class Latest(SparkSink):
    """A sink of one's own, which keeps the last record of a room."""

    name, capabilities, upserts, key = "latest", Capabilities(upsert=True), True, ("room",)

    def describe(self):
        return "the latest readings"

    def check(self, records):
        pass

    def committer(self, schema):
        raise NotImplementedError

    def preview(self, spark, rows):
        return None


def test_any_sink_with_a_key_is_compared_by_the_last_record_of_each():
    pipeline = Pipeline("p")
    largest = pipeline.from_collection(READINGS, Reading).key_by("room").max("degrees")
    largest.map(lambda r: Mean(r.room, r.degrees / 2), output_type=Mean).sink_to(Latest())
    assert_same_in_both_modes(pipeline)


def test_a_difference_between_the_modes_is_shown_with_its_records():
    with pytest.raises(AssertionError) as caught:
        assert_same_in_both_modes(changes([Reading("a", 2, 5), Reading("a", 1, 3)], ordered=False))
    assert (
        str(caught.value)
        == "p: sink 'changes' ends differently\n  only in BATCH: ('a', 3), ('a', 2)\n  only in STREAMING: ('a', 5),"
        " ('a', -2)"
    )


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
    pipeline.from_collection([Reading("a", 1, 20), Reading("a", 10, 30)]).assign_timestamps_and_watermarks(
        in_order
    ).key_by("room").process(Report()).print()
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
    made = Pipeline("p").from_collection([1])
    with pytest.raises(Exception, match="'BACH' is not one of BATCH, STREAMING, AUTOMATIC"):
        results(made, "BACH")


def test_a_mode_may_be_written_small_as_at_launch():
    pipeline = Pipeline("p")
    pipeline.from_collection(READINGS).key_by("room").reduce(add).print()
    assert run_pipeline(pipeline, "batch").only() == run_pipeline(pipeline, "BATCH").only()


@MODES
def test_one_pipeline_can_run_again(mode):
    pipeline = changes(READINGS, ordered=True)
    assert run_pipeline(pipeline, mode).only() == run_pipeline(pipeline, mode).only()


def lasts(readings, **how):
    """The last reading of each room: what is last is arrival's to say."""
    made = Pipeline("p").from_collection(readings, Reading).key_by("room").reduce(lambda a, b: b)
    return sorted(results(made, how.pop("mode", "BATCH"), **how))


def test_batch_shuffles_what_an_exchange_brings_in_no_order_by_its_seed():
    readings = [Reading("a", n, n) for n in range(20)]
    found = {lasts(readings, seed=seed)[0] for seed in range(10)}
    assert len(found) > 1
    assert lasts(readings, seed=3) == lasts(readings, seed=3)
    assert lasts(readings, seed=None) == [Reading("a", 19, 19)]


def test_a_stream_that_is_only_forwarded_keeps_its_order_in_batch():
    made = Pipeline("p").from_collection(list(range(20))).map(lambda v: v + 1, int)
    assert results(made, "BATCH") == list(range(1, 21))


def test_streaming_shuffles_the_records_of_a_micro_batch_and_no_others():
    readings = [Reading("a", n, n) for n in range(20)]

    def last_update(**how):
        made = Pipeline("p").from_collection(readings, Reading).key_by("room").reduce(lambda a, b: b)
        return results(made, "STREAMING", **how)[-1]

    assert last_update() == readings[-1]
    assert len({last_update(micro_batch=None, seed=seed) for seed in range(10)}) > 1


def test_a_function_that_depends_on_the_order_of_arrival_is_found_out_and_the_seed_named():
    class Difference(Changes):
        pass

    pipeline = Pipeline("p")
    pipeline.from_collection([Reading("a", n, n * n) for n in range(9)], Reading).key_by("room").process(
        Difference(False)
    ).print("changes")
    with pytest.raises(AssertionError) as caught:
        assert_same_in_both_modes(pipeline)
    assert caught.value.__notes__ == ["records that come in no defined order were shuffled with seed=0"]


class Reminder(KeyedProcessFunction):
    """Says a second later by the clock what came."""

    def process_element(self, value, ctx) -> Iterable[str]:
        ctx.timer_service().register_processing_time_timer(ctx.timer_service().current_processing_time() + 1000)
        yield f"came {value.degrees}"

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        yield f"fired at {timestamp}"


def test_processing_time_timers_fire_between_micro_batches_when_the_clock_has_passed_them():
    clock = ManualClock()

    def later(reading: Reading) -> Reading:
        clock.advance(600)
        return reading

    made = (
        Pipeline("p")
        .from_collection([Reading("a", n, n) for n in range(4)], Reading)
        .map(later)
        .key_by("room")
        .process(Reminder())
    )
    found = results(made, "STREAMING", clock=clock)
    assert found == [
        "came 0",
        "came 1",
        "came 2",
        "fired at 1600",
        "came 3",
        "fired at 2200",
        "fired at 2800",
        "fired at 3400",
    ]


def test_the_watermark_moves_between_micro_batches():
    in_order = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")

    class Marks(KeyedProcessFunction):
        def process_element(self, value, ctx) -> Iterable[int]:
            yield max(ctx.timer_service().current_watermark(), -1)

    def marks(size):
        pipeline = Pipeline("p")
        readings = pipeline.from_collection([Reading("a", n, n) for n in range(10, 14)], Reading)
        readings.assign_timestamps_and_watermarks(in_order).key_by("room").process(Marks()).print()
        return run_pipeline(pipeline, "STREAMING", micro_batch=size).only()

    assert marks(1) == [-1, 9, 10, 11]
    assert marks(2) == [-1, -1, 10, 10]
    assert marks(None) == [-1] * 4


@MODES
def test_functions_are_given_a_sources_records_in_their_declared_types(mode):
    pipeline = Pipeline("types")
    given = [(datetime(2020, 1, 1), 1, bytearray(b"x"))]
    stream = pipeline.from_collection(given, tuple[datetime, float, bytes], name="given")
    stream.map(lambda r: f"{r[0].tzinfo} {r[1]!r} {r[2]!r}", str).print("out")
    assert run_pipeline(pipeline, mode).sinks["out"] == ["UTC 1.0 b'x'"]


@MODES
@pytest.mark.parametrize("key", ["execution.savepoint.path", "execution.state-recovery.path"])
def test_savepoints_are_refused(mode, key, tmp_path):
    made = Pipeline("p").from_collection([1]).map(lambda n: n, int)
    with pytest.raises(UnsupportedError, match=rf"^p: {key} is set, and the harness has neither .*; leave the option"):
        results(made, mode, options={key: str(tmp_path)})
