"""`pipeline.processing-time.allow`: who may read the clock."""

from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    MapStateDescriptor,
    Pipeline,
    ProcessFunction,
    ProcessWindowFunction,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.errors import UnsupportedError
from dagster_unified.testing import run_pipeline

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


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_registering_a_processing_time_timer_can_be_forbidden(mode):
    pipeline = Pipeline("p")
    pipeline.from_collection([Row("a", 1)]).key_by("key").process(Registering()).print("out")
    with pytest.raises(
        UnsupportedError,
        match=r"operator 'Registering': a processing-time timer was registered, .* FAIL; use event time",
    ):
        run_pipeline(pipeline, mode, options={"pipeline.processing-time.allow": "FAIL"})


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


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
@pytest.mark.parametrize("reader", READERS)
def test_reading_the_processing_time_can_be_forbidden(reader, mode):
    pipeline = Pipeline("p")
    READERS[reader](pipeline.from_collection([Row("a", 1)])).print("out")
    assert run_pipeline(pipeline, mode, clock=lambda: 7).only() == [7]
    with pytest.raises(
        UnsupportedError, match=rf"operator '{reader}': .*the processing time was read, .* FAIL; use event time"
    ):
        run_pipeline(pipeline, mode, options={"pipeline.processing-time.allow": "FAIL"})
