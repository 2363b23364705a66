"""`process` on a stream without key."""

from datetime import UTC, datetime

import pytest

from dagster_unified.api import OutputTag, Pipeline, ProcessFunction, ValueStateDescriptor, WatermarkStrategy
from dagster_unified.errors import UnifiedError, UnsupportedError
from dagster_unified.testing import run_pipeline

BIG, SMALL = OutputTag("big", int), OutputTag("small", str)


class Split(ProcessFunction):
    def process_element(self, value, ctx):
        if value > 10:
            yield BIG, value
        elif value < 3:
            ctx.output(SMALL, f"{value} at {ctx.timestamp()}")
        else:
            yield value


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_side_outputs_go_their_own_ways(mode):
    pipeline = Pipeline("p")
    by_value = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda v: v * 1000)
    main = pipeline.from_collection([1, 5, 20]).assign_timestamps_and_watermarks(by_value).process(Split(), int)
    main.print("main")
    main.get_side_output(BIG).map(lambda v: v + 1, int).print("big")
    main.get_side_output(SMALL).print("small")
    assert run_pipeline(pipeline, mode).sinks == {"main": [5], "big": [21], "small": ["1 at 1000"]}


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_a_side_output_that_nobody_reads_is_dropped(mode):
    pipeline = Pipeline("p")
    pipeline.from_collection([1, 5, 20]).process(Split(), int).print()
    assert run_pipeline(pipeline, mode).only() == [5]


class Timer(ProcessFunction):
    def process_element(self, value, ctx):
        ctx.timer_service().register_event_time_timer(value)


class Stateful(ProcessFunction):
    def open(self, context):
        context.get_state(ValueStateDescriptor("seen", int))

    def process_element(self, value, ctx):
        yield value


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (Timer(), UnifiedError, "operator 'Timer': timers need a keyed stream"),
        (Stateful(), UnsupportedError, "state 'seen' needs a keyed"),
    ],
)
def test_timers_and_state_need_a_keyed_stream(function, kind, words):
    pipeline = Pipeline("p")
    pipeline.from_collection([1]).process(function, int).print()
    with pytest.raises(kind, match=words):
        run_pipeline(pipeline, "BATCH")


class Moment(ProcessFunction):
    def process_element(self, value, ctx):
        yield ctx.timestamp()


NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
@pytest.mark.parametrize(
    ("records", "kind", "field", "moments"),
    [
        ([("a", 5), ("b", 7)], tuple[str, int], "f1", [5, 7]),
        ([5, 7], int, "value", [5, 7]),
        ([NOON], datetime, "value", [int(NOON.timestamp() * 1000)]),
    ],
)
def test_a_field_gives_the_timestamp_in_every_shape_of_record(mode, records, kind, field, moments):
    pipeline = Pipeline("p")
    by_field = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(field)
    pipeline.from_collection(records, kind).assign_timestamps_and_watermarks(by_field).process(Moment(), int).print()
    assert run_pipeline(pipeline, mode).only() == moments
