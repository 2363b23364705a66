"""A length of time is never cut to milliseconds without a word, wherever an author gives one."""

import inspect
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified import api, connectors, orchestration, testing
from dagster_unified.api import (
    AsyncDataStream,
    AsyncFunction,
    AsyncRetryStrategy,
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    EventTimeSessionWindows,
    Pipeline,
    ProcessingTimeSessionWindows,
    SlidingEventTimeWindows,
    SlidingProcessingTimeWindows,
    StateTtlConfig,
    TimeEvictor,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WatermarkStrategy,
    types,
)
from dagster_unified.connectors import GeneratorSource, KafkaSink, KafkaSource, PostgresSource
from dagster_unified.errors import ConfigurationError, PipelineError, UnifiedError
from dagster_unified.graph.options import OPTIONS, Configuration
from dagster_unified.orchestration import BatchSchedule, Checks, Retention, StreamingDeployment
from dagster_unified.testing import run_pipeline

SECOND = timedelta(seconds=1)
RETRY = AsyncRetryStrategy.fixed_delay(2, SECOND)


class Lookup(AsyncFunction[int, int]):
    async def async_invoke(self, value: int) -> list[int]:
        return [value]


def identity(number: int) -> int:
    return number


def numbers():
    return Pipeline("p").from_collection([1, 2, 3])


def timed():
    return numbers().assign_timestamps_and_watermarks(
        WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(int)
    )


def assigned(**times):
    numbers().assign_timestamps_and_watermarks(
        WatermarkStrategy(**{"max_out_of_orderness": SECOND, "assigner": int, **times})
    )


def windowed():
    return timed().key_by(identity).window(TumblingEventTimeWindows.of(SECOND))


def joined():
    stream = timed()
    return stream.join(stream).where(identity).equal_to(identity).window(TumblingEventTimeWindows.of(SECOND))


def sessions(kind):
    pipeline = Pipeline("p")
    times = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(int)
    stream = pipeline.from_collection([1]).assign_timestamps_and_watermarks(times)

    def run(length):
        stream.window_all(kind.with_dynamic_gap(lambda n: length)).sum().print()
        run_pipeline(pipeline, "BATCH")

    return run


def pipeline():
    made = Pipeline("p")
    made.from_collection([1]).print()
    return made


BOUNDED = WatermarkStrategy.for_bounded_out_of_orderness(SECOND)
GIVEN = {
    "AsyncDataStream.ordered_wait(timeout)": lambda t: AsyncDataStream.ordered_wait(numbers(), Lookup(), t),
    "AsyncDataStream.ordered_wait_with_retry(timeout)": lambda t: AsyncDataStream.ordered_wait_with_retry(
        numbers(), Lookup(), t, RETRY
    ),
    "AsyncDataStream.unordered_wait(timeout)": lambda t: AsyncDataStream.unordered_wait(numbers(), Lookup(), t),
    "AsyncDataStream.unordered_wait_with_retry(timeout)": lambda t: AsyncDataStream.unordered_wait_with_retry(
        numbers(), Lookup(), t, RETRY
    ),
    "AsyncRetryStrategy.__init__(backoff)": lambda t: AsyncRetryStrategy(2, t),
    "AsyncRetryStrategy.fixed_delay(backoff)": lambda t: AsyncRetryStrategy.fixed_delay(2, t),
    "ContinuousEventTimeTrigger.of(interval)": ContinuousEventTimeTrigger.of,
    "ContinuousProcessingTimeTrigger.of(interval)": ContinuousProcessingTimeTrigger.of,
    "EventTimeSessionWindows.__init__(gap)": sessions(EventTimeSessionWindows),
    "EventTimeSessionWindows.with_dynamic_gap(extractor)": sessions(EventTimeSessionWindows),
    "EventTimeSessionWindows.with_gap(gap)": EventTimeSessionWindows.with_gap,
    "GeneratorSource.__init__(flush_every)": lambda t: GeneratorSource(lambda: [1], int, flush_every=t),
    "KafkaSink.__init__(transaction_timeout)": lambda t: KafkaSink("topic", "localhost:9092", transaction_timeout=t),
    "KafkaSource.__init__(partition_discovery_interval)": lambda t: KafkaSource(
        "topic", str, "localhost:9092", partition_discovery_interval=t
    ),
    "PostgresSource.__init__(lag)": lambda t: PostgresSource("table", int, "postgresql://localhost/db", lag=t),
    "ProcessingTimeSessionWindows.__init__(gap)": sessions(ProcessingTimeSessionWindows),
    "ProcessingTimeSessionWindows.with_dynamic_gap(extractor)": sessions(ProcessingTimeSessionWindows),
    "ProcessingTimeSessionWindows.with_gap(gap)": ProcessingTimeSessionWindows.with_gap,
    "SlidingEventTimeWindows.of(size)": lambda t: SlidingEventTimeWindows.of(t, SECOND),
    "SlidingEventTimeWindows.of(slide)": lambda t: SlidingEventTimeWindows.of(SECOND, t),
    "SlidingEventTimeWindows.of(offset)": lambda t: SlidingEventTimeWindows.of(SECOND, SECOND, t),
    "SlidingProcessingTimeWindows.of(size)": lambda t: SlidingProcessingTimeWindows.of(t, SECOND),
    "SlidingProcessingTimeWindows.of(slide)": lambda t: SlidingProcessingTimeWindows.of(SECOND, t),
    "SlidingProcessingTimeWindows.of(offset)": lambda t: SlidingProcessingTimeWindows.of(SECOND, SECOND, t),
    "StateTtlConfig.__init__(ttl)": StateTtlConfig,
    "StateTtlConfig.new_builder(ttl)": lambda t: StateTtlConfig.new_builder(t).build(),
    "TimeEvictor.of(length)": TimeEvictor.of,
    "TumblingEventTimeWindows.of(size)": TumblingEventTimeWindows.of,
    "TumblingEventTimeWindows.of(offset)": lambda t: TumblingEventTimeWindows.of(SECOND, t),
    "TumblingProcessingTimeWindows.of(size)": TumblingProcessingTimeWindows.of,
    "TumblingProcessingTimeWindows.of(offset)": lambda t: TumblingProcessingTimeWindows.of(SECOND, t),
    "WatermarkStrategy.__init__(max_out_of_orderness)": lambda t: assigned(max_out_of_orderness=t),
    "WatermarkStrategy.__init__(idleness)": lambda t: assigned(idleness=t),
    "WatermarkStrategy.__init__(max_drift)": lambda t: assigned(max_drift=t),
    "WatermarkStrategy.for_bounded_out_of_orderness(max_out_of_orderness)": (
        WatermarkStrategy.for_bounded_out_of_orderness
    ),
    "WatermarkStrategy.with_idleness(timeout)": BOUNDED.with_idleness,
    "WatermarkStrategy.with_watermark_alignment(max_allowed_watermark_drift)": lambda t: (
        BOUNDED.with_watermark_alignment("g", t)
    ),
    "WatermarkStrategy.with_watermark_alignment(update_interval)": lambda t: BOUNDED.with_watermark_alignment(
        "g", SECOND, t
    ),
    "WindowedStream.allowed_lateness(lateness)": lambda t: windowed().allowed_lateness(t),
    "BatchSchedule.__init__(offset)": lambda t: BatchSchedule(offset=t),
    "Checks.__init__(fresh_within)": lambda t: Checks(fresh_within=SECOND + t),
    "Retention.__init__(max_age)": lambda t: Retention(max_age=t),
    "Retention.__init__(failed_for)": lambda t: Retention(failed_for=t),
    "StreamingDeployment.__init__(stall_after)": lambda t: StreamingDeployment(pipeline(), stall_after=SECOND + t),
    "StreamingDeployment.__init__(observe_every)": lambda t: StreamingDeployment(pipeline(), observe_every=SECOND + t),
    "StreamingDeployment.__init__(materialize_every)": lambda t: StreamingDeployment(
        pipeline(), materialize_every=SECOND + t
    ),
    "StreamingDeployment.__init__(tick_every)": lambda t: StreamingDeployment(pipeline(), tick_every=SECOND + t),
}
BESIDES = {
    "JoinedStreams.allowed_lateness": lambda t: joined().allowed_lateness(t),
    "IntervalJoined.between lower": lambda t: (
        timed().key_by(identity).interval_join(timed().key_by(identity)).between(-t, timedelta(0))
    ),
    "IntervalJoined.between upper": lambda t: (
        timed().key_by(identity).interval_join(timed().key_by(identity)).between(timedelta(0), t)
    ),
}


def taken():
    """Every argument of the public classes and functions that takes a length of time."""
    found = set()
    for module in (api, types, connectors, orchestration, testing):
        for name in module.__all__:
            given = getattr(module, name)
            members = {n: getattr(given, n) for n in dir(given) if n == "__init__" or not n.startswith("_")}
            functions = {f"{name}.{n}": f for n, f in members.items()} if inspect.isclass(given) else {name: given}
            for where, function in functions.items():
                if inspect.isroutine(function) and hasattr(function, "__annotations__"):
                    arguments = {k: v for k, v in function.__annotations__.items() if k != "return"}
                    found |= {f"{where}({k})" for k, v in arguments.items() if "timedelta" in str(v)}
    return found


def test_every_public_argument_that_takes_a_length_of_time_is_tried_here():
    assert taken() == GIVEN.keys()


@pytest.mark.parametrize("give", [*GIVEN.values(), *BESIDES.values()], ids=[*GIVEN, *BESIDES])
@pytest.mark.parametrize("length", [timedelta(microseconds=1500), timedelta(seconds=1, microseconds=1)], ids=str)
def test_a_length_of_time_with_a_part_of_a_millisecond_is_an_error(give, length):
    with pytest.raises(UnifiedError, match=r"has to be in whole milliseconds, and is [0:-]+|is in whole minutes"):
        give(length)


@pytest.mark.parametrize("key", [option.key for option in OPTIONS if option.kind == "duration"])
@pytest.mark.parametrize("given", [timedelta(microseconds=60_000_500), "1000.5 ms", "1.00000000000000000000001 s"])
def test_an_option_with_a_part_of_a_millisecond_is_an_error(key, given):
    with pytest.raises(ConfigurationError, match=f"{key} has to be in whole milliseconds, and is"):
        Configuration.of({key: given})


@given(st.integers(min_value=1, max_value=10**15), st.sampled_from(["ms", "s", "min", "h", "d"]))
def test_a_duration_in_words_is_exact(number, unit):
    millis = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}[unit]
    text = f"{number // 1000}.{number % 1000:03} {unit}"
    option = "restart-strategy.fixed-delay.delay"
    if number * millis % 1000:
        with pytest.raises(ConfigurationError, match="whole milliseconds"):
            Configuration.of({option: text})
    elif number * millis // 1000 > 86_400_000 * 999_999_999:
        with pytest.raises(ConfigurationError, match="is not a duration"):
            Configuration.of({option: text})
    else:
        assert Configuration.of({option: text})[option] == timedelta(milliseconds=number * millis // 1000)


@pytest.mark.parametrize("gap", [1.5, "1", None, True])
def test_a_sessions_gap_that_is_no_length_of_time_is_an_error(gap):
    with pytest.raises(PipelineError, match=f"a session's gap is a timedelta or an int of milliseconds, not {gap!r}"):
        sessions(EventTimeSessionWindows)(gap)
