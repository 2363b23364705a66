"""A pendulum duration does as well as a timedelta, wherever one is taken."""

from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import pendulum
import pytest
from dagster import DailyPartitionsDefinition

from dagster_unified.api import (
    AsyncDataStream,
    AsyncFunction,
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    EventTimeSessionWindows,
    KeyedProcessFunction,
    Pipeline,
    ProcessingTimeSessionWindows,
    ProcessJoinFunction,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    StateTtlConfig,
    TimeEvictor,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.errors import ConfigurationError
from dagster_unified.graph.options import Configuration
from dagster_unified.operators.time import to_millis, to_span
from dagster_unified.orchestration import (
    BatchDeployment,
    BatchSchedule,
    Checks,
    Retention,
    StreamingDeployment,
    unified_definitions,
)
from dagster_unified.testing import run_pipeline

TWO = pendulum.duration(seconds=2)


class Tick(NamedTuple):
    key: str
    at: int


TICKS = [Tick("a", 0), Tick("a", 1000), Tick("a", 2000), Tick("a", 5000)]


def later(a: Tick, b: Tick) -> Tick:
    return Tick(a.key, b.at)


class Pairs(ProcessJoinFunction):
    def process_element(self, left: Tick, right: Tick, ctx) -> Iterable[Tick]:
        yield Tick(left.key, right.at - left.at)


class Slow(AsyncFunction):
    async def async_invoke(self, value: Tick) -> Iterable[Tick]:
        return [value]


class First(KeyedProcessFunction):
    def __init__(self, ttl):
        self.ttl = ttl

    def open(self, context):
        self.seen = context.get_state(ValueStateDescriptor("seen", bool, StateTtlConfig(self.ttl)))

    def process_element(self, value: Tick, ctx) -> Iterable[Tick]:
        if self.seen.value() is None:
            yield value
        self.seen.update(True)


def windowed(assigner):
    return lambda keyed, d: keyed.window(assigner(d)).reduce(later)


USES = {
    "tumbling": windowed(TumblingEventTimeWindows.of),
    "tumbling by the clock": windowed(TumblingProcessingTimeWindows.of),
    "offset": windowed(lambda d: TumblingEventTimeWindows.of(timedelta(seconds=3), d)),
    "sliding": windowed(lambda d: SlidingEventTimeWindows.of(timedelta(seconds=4), d)),
    "sliding by the clock": windowed(lambda d: SlidingProcessingTimeWindows.of(timedelta(seconds=4), d)),
    "session": windowed(EventTimeSessionWindows.with_gap),
    "session by the clock": windowed(ProcessingTimeSessionWindows.with_gap),
    "dynamic gap": windowed(lambda d: EventTimeSessionWindows.with_dynamic_gap(lambda tick: d)),
    "lateness": lambda keyed, d: (
        keyed.window(TumblingEventTimeWindows.of(timedelta(seconds=4))).allowed_lateness(d).reduce(later)
    ),
    "evictor": lambda keyed, d: (
        keyed.window(TumblingEventTimeWindows.of(timedelta(seconds=4))).evictor(TimeEvictor.of(d)).reduce(later)
    ),
    "trigger": lambda keyed, d: (
        keyed.window(TumblingEventTimeWindows.of(timedelta(seconds=4)))
        .trigger(ContinuousEventTimeTrigger.of(d))
        .reduce(later)
    ),
    "trigger by the clock": lambda keyed, d: (
        keyed.window(TumblingProcessingTimeWindows.of(timedelta(days=1)))
        .trigger(ContinuousProcessingTimeTrigger.of(d))
        .reduce(later)
    ),
    "interval": lambda keyed, d: keyed.interval_join(keyed).between(-d, d).process(Pairs()),
    "time to live": lambda keyed, d: keyed.process(First(d)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_window_a_join_or_a_state_takes_one(use):
    def results(duration):
        pipeline = Pipeline("ticks")
        in_time = (
            WatermarkStrategy.for_bounded_out_of_orderness(duration)
            .with_timestamp_assigner("at")
            .with_idleness(duration)
        )
        ticks = pipeline.from_collection(TICKS).assign_timestamps_and_watermarks(in_time)
        use(ticks.key_by("key"), duration).print()
        return sorted(run_pipeline(pipeline, "BATCH").only())

    assert results(TWO) == results(timedelta(seconds=2)) != []


def test_an_asynchronous_call_takes_one_as_its_timeout():
    pipeline = Pipeline("ticks")
    AsyncDataStream.ordered_wait(pipeline.from_collection(TICKS), Slow(), TWO).print()
    assert run_pipeline(pipeline, "BATCH").only() == TICKS


def test_options_and_definitions_take_them():
    assert Configuration.of({"restart-strategy.fixed-delay.delay": TWO})[
        "restart-strategy.fixed-delay.delay"
    ] == timedelta(seconds=2)
    pipeline = Pipeline("ticks")
    pipeline.from_collection(TICKS).print()
    streaming = StreamingDeployment(pipeline, stall_after=TWO, observe_every=TWO, materialize_every=TWO, tick_every=TWO)
    assert (
        unified_definitions(pipeline, streaming).resolve_sensor_def("ticks_streaming_sensor").minimum_interval_seconds
        == 2
    )


@pytest.mark.parametrize("name", ["stall_after", "observe_every", "materialize_every", "tick_every"])
@pytest.mark.parametrize("length", [timedelta(0), timedelta(seconds=-5), timedelta(milliseconds=300)])
def test_a_length_of_no_time_is_an_error(name, length):
    pipeline = Pipeline("ticks")
    pipeline.from_collection(TICKS).print()
    with pytest.raises(ConfigurationError, match=f"^ticks: {name} is at least 1 second, and .* was given"):
        StreamingDeployment(pipeline, **{name: length})


def test_a_schedules_offset_a_retention_and_a_freshness_take_them(tmp_path):
    from dagster_unified.connectors import CsvSource, DeltaSink

    pipeline = Pipeline("ticks")
    pipeline.from_source(CsvSource(f"{tmp_path}/{{key}}.csv", Tick)).sink_to(DeltaSink(f"{tmp_path}/table"))
    definitions = unified_definitions(
        BatchDeployment(
            pipeline,
            partitions=DailyPartitionsDefinition("2024-01-01"),
            schedule=BatchSchedule(offset=pendulum.duration(hours=2, minutes=30)),
            retention=Retention(max_age=pendulum.duration(days=2), failed_for=TWO),
            checks=Checks(fresh_within=TWO),
        )
    )
    assert definitions.resolve_schedule_def("ticks_schedule").cron_schedule == "30 2 * * *"


def test_lengths_and_moments_of_pendulum_are_milliseconds_as_pythons_are():
    for length in ({"months": 1}, {"minutes": -5}, {"microseconds": 1500}):
        duration = pendulum.duration(**length)
        assert to_span(duration) == to_span(timedelta(seconds=duration.total_seconds()))
    assert to_millis(pendulum.datetime(1970, 1, 1, 0, 0, 2)) == 2000
