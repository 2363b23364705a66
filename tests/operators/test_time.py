"""Moments and lengths of time, and event times: of a field, or of the clock as a record is read."""

from datetime import datetime, timedelta, timezone
from typing import Annotated, NamedTuple

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dagster_unified.api import (
    IngestionTimeAssigner,
    Pipeline,
    ProcessFunction,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.errors import RecordTypeError, UnsupportedError
from dagster_unified.graph.options import written
from dagster_unified.operators.time import to_millis
from dagster_unified.testing import run_pipeline
from tests.support import MODES

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@given(st.integers(min_value=-(2**40), max_value=2**41))
@example(541_555_200_004)  # of which int(moment.timestamp() * 1000) makes one less
def test_the_milliseconds_of_a_moment_are_those_that_it_was_made_of(millis):
    assert to_millis(EPOCH + timedelta(milliseconds=millis)) == millis
    assert to_millis(EPOCH + timedelta(milliseconds=millis, microseconds=999)) == millis
    assert to_millis((EPOCH + timedelta(milliseconds=millis)).replace(tzinfo=None)) == millis


@given(st.integers(min_value=1, max_value=2**40))
@example(1001)  # of which int(length.total_seconds() * 1000) makes one less
def test_a_length_of_time_keeps_its_milliseconds(millis):
    length = timedelta(milliseconds=millis)
    assert written(length) == f"{millis} ms"
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(length).with_idleness(length)
    pipeline = Pipeline("p")
    pipeline.from_collection([1], int).assign_timestamps_and_watermarks(strategy.with_timestamp_assigner(int)).print()
    (assigner,) = pipeline.graph().assigners
    assert (assigner.max_out_of_orderness_ms, assigner.idleness_ms) == (millis, millis)


NAIVE = Annotated[datetime, msgspec.Meta(tz=False)]


class Event(NamedTuple):
    at: datetime | None
    local: NAIVE
    millis: int


class Times(ProcessFunction[Event, int]):
    def process_element(self, value, ctx) -> list[int]:
        return [ctx.timestamp()]


def times(events, field, mode):
    pipeline = Pipeline("p")
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(0)).with_timestamp_assigner(field)
    timed = pipeline.from_collection(events, Event).assign_timestamps_and_watermarks(strategy)
    timed.process(Times()).print()
    return sorted(run_pipeline(pipeline, mode).only())


MOMENTS = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1))


@given(st.lists(MOMENTS, max_size=4), st.sampled_from(["BATCH", "STREAMING"]))
def test_the_times_are_whole_milliseconds_also_before_1970(moments, mode):
    events = [Event(m.replace(tzinfo=timezone.utc), m, to_millis(m)) for m in moments]
    expected = sorted(e.millis for e in events)
    assert [times(events, field, mode) for field in Event._fields] == [expected] * 3


@MODES
def test_a_record_without_one_is_an_error(mode):
    event = Event(None, datetime(2026, 1, 1), 0)
    with pytest.raises(RecordTypeError, match="a timestamp assigner must give milliseconds"):
        times([event], "at", mode)


BY_CLOCK = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(IngestionTimeAssigner())


class Click(NamedTuple):
    user: str
    count: int


def counted():
    pipeline = Pipeline("p")
    clicks = pipeline.from_collection([Click("ann", 1)] * 6).assign_timestamps_and_watermarks(BY_CLOCK)
    clicks.key_by("user").window(TumblingEventTimeWindows.of(timedelta(milliseconds=100))).sum("count").print()
    return pipeline


class Clock:
    """Shows one reading after another, and the last one for ever."""

    def __init__(self, *readings):
        self.readings = list(readings)

    def __call__(self):
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]


def test_batch_stamps_each_record_as_it_reads_it():
    assert run_pipeline(counted(), "BATCH", clock=Clock(10, 20, 110, 120, 130, 250)).only() == [
        Click("ann", 2),
        Click("ann", 3),
        Click("ann", 1),
    ]


@MODES
def test_a_clock_that_is_set_back_does_not_take_event_time_back(mode):
    pipeline = Pipeline("p")
    stamped = pipeline.from_collection([1] * 3).assign_timestamps_and_watermarks(BY_CLOCK)
    stamped.key_by(lambda v: v, key_type=int).window(TumblingEventTimeWindows.of(timedelta(milliseconds=100))).reduce(
        lambda a, b: a + b
    ).print()
    assert run_pipeline(pipeline, mode, clock=Clock(150, 150, 20, 10), micro_batch=None).only() == [3]


def test_the_watermark_follows_the_clock():
    shown = iter(range(10, 10_000, 30))
    found = run_pipeline(counted(), "STREAMING", clock=lambda: next(shown)).only()
    assert sum(click.count for click in found) == 6
    assert len(found) > 1


@MODES
def test_it_is_an_error_where_the_clock_may_not_be_read(mode):
    with pytest.raises(UnsupportedError, match=r"p: .*'timestamps': the processing time was read, and pipeline"):
        run_pipeline(counted(), mode, options={"pipeline.processing-time.allow": "FAIL"})
