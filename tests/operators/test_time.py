from datetime import datetime, timedelta, timezone

from hypothesis import example, given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline, WatermarkStrategy, to_millis
from dagster_unified.graph.options import written

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
