"""Event times from the clock: when a record is read."""

from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import IngestionTimeAssigner, Pipeline, TumblingEventTimeWindows, WatermarkStrategy
from dagster_unified.errors import UnsupportedError
from dagster_unified.testing import run_pipeline

MODES = pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
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
