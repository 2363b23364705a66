"""`process` on a stream without key, and who may read the clock."""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ProcessWindowFunction,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.errors import UnifiedError, UnsupportedError
from dagster_unified.testing import run_pipeline
from tests.support import MODES, results

BIG, SMALL = OutputTag("big", int), OutputTag("small", str)


class Split(ProcessFunction):
    def process_element(self, value, ctx):
        if value > 10:
            yield BIG, value
        elif value < 3:
            ctx.output(SMALL, f"{value} at {ctx.timestamp()}")
        else:
            yield value


@MODES
def test_side_outputs_go_their_own_ways(mode):
    pipeline = Pipeline("p")
    by_value = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda v: v * 1000)
    main = pipeline.from_collection([1, 5, 20]).assign_timestamps_and_watermarks(by_value).process(Split(), int)
    main.print("main")
    main.get_side_output(BIG).map(lambda v: v + 1, int).print("big")
    main.get_side_output(SMALL).print("small")
    assert run_pipeline(pipeline, mode).sinks == {"main": [5], "big": [21], "small": ["1 at 1000"]}


@MODES
def test_a_side_output_that_nobody_reads_is_dropped(mode):
    made = Pipeline("p").from_collection([1, 5, 20]).process(Split(), int)
    assert results(made, mode) == [5]


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
    made = Pipeline("p").from_collection([1]).process(function, int)
    with pytest.raises(kind, match=words):
        results(made, "BATCH")


class Moment(ProcessFunction):
    def process_element(self, value, ctx):
        yield ctx.timestamp()


NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


@MODES
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


RULES = MapStateDescriptor("rules", str, int)


class Row(NamedTuple):
    key: str
    at: int


class Plain(ProcessFunction):
    def process_element(self, value, ctx):
        yield ctx.timer_service().current_processing_time()


class Keyed(KeyedProcessFunction):
    def process_element(self, value, ctx):
        yield ctx.timer_service().current_processing_time()


class Registering(KeyedProcessFunction):
    def process_element(self, value, ctx) -> list[int]:
        ctx.timer_service().register_processing_time_timer(5)
        return [7]


class Windowed(ProcessWindowFunction):
    def process(self, key, context, elements):
        yield context.current_processing_time()


class Broadcast(KeyedBroadcastProcessFunction):
    def process_element(self, value, ctx):
        yield ctx.current_processing_time()

    def process_broadcast_element(self, value, ctx):
        return ()


@MODES
def test_registering_a_processing_time_timer_can_be_forbidden(mode):
    made = Pipeline("p").from_collection([Row("a", 1)]).key_by("key").process(Registering())
    with pytest.raises(
        UnsupportedError,
        match=r"operator 'Registering': a processing-time timer was registered, .* FAIL; use event time",
    ):
        results(made, mode, options={"pipeline.processing-time.allow": "FAIL"})


def windowed(rows):
    in_order = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    timed = rows.assign_timestamps_and_watermarks(in_order)
    return timed.key_by("key").window(TumblingEventTimeWindows.of(timedelta(seconds=1))).process(Windowed(), int)


READERS = {
    "Plain": lambda rows: rows.process(Plain(), int),
    "Keyed": lambda rows: rows.key_by("key").process(Keyed(), int),
    "Windowed": windowed,
    "Broadcast": lambda rows: rows.key_by("key").connect(rows.broadcast(RULES)).process(Broadcast(), int),
}


@MODES
@pytest.mark.parametrize("reader", READERS)
def test_reading_the_processing_time_can_be_forbidden(reader, mode):
    pipeline = Pipeline("p")
    READERS[reader](pipeline.from_collection([Row("a", 1)])).print("out")
    assert run_pipeline(pipeline, mode, clock=lambda: 7).only() == [7]
    with pytest.raises(
        UnsupportedError, match=rf"operator '{reader}': .*the processing time was read, .* FAIL; use event time"
    ):
        run_pipeline(pipeline, mode, options={"pipeline.processing-time.allow": "FAIL"})
