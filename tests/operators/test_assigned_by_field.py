"""Event times of a field: taken from columns, they are those that are taken from records."""

from datetime import datetime, timedelta, timezone
from typing import Annotated, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_unified.api import Pipeline, ProcessFunction, WatermarkStrategy
from dagster_unified.errors import RecordTypeError
from dagster_unified.operators.time import to_millis
from dagster_unified.testing import run_pipeline

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


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_a_record_without_one_is_an_error(mode):
    event = Event(None, datetime(2026, 1, 1), 0)
    with pytest.raises(RecordTypeError, match="a timestamp assigner must give milliseconds"):
        times([event], "at", mode)
