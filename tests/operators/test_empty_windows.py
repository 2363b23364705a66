"""A window that holds nothing does not fire (Flink: `WindowOperator`); one whose elements are evicted first does."""

from datetime import timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    AggregateFunction,
    CountTrigger,
    EventTimeSessionWindows,
    Evictor,
    Pipeline,
    ProcessWindowFunction,
    ReducingStateDescriptor,
    TimeWindow,
    Trigger,
    TriggerResult,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.errors import UserFunctionError
from dagster_unified.testing import run_pipeline

MODES = pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
WINDOWS = pytest.mark.parametrize(
    "windows",
    [
        EventTimeSessionWindows.with_gap(timedelta(milliseconds=10)),
        TumblingEventTimeWindows.of(timedelta(milliseconds=100)),
    ],
    ids=["sessions", "tumbling"],
)


class R(NamedTuple):
    k: str
    at: int
    v: int


class TwoEach(Trigger[R, TimeWindow]):
    """Fires and purges with each two elements, and at the window's end."""

    count = ReducingStateDescriptor("count", lambda a, b: a + b, int)

    def on_element(self, element, timestamp, window, ctx):
        ctx.register_event_time_timer(window.max_timestamp())
        count = ctx.get_partitioned_state(self.count)
        count.add(1)
        if count.get() < 2:
            return TriggerResult.CONTINUE
        count.clear()
        return TriggerResult.FIRE_AND_PURGE

    def on_event_time(self, time, window, ctx):
        return TriggerResult.FIRE_AND_PURGE if time == window.max_timestamp() else TriggerResult.CONTINUE

    def on_processing_time(self, time, window, ctx):
        return TriggerResult.CONTINUE

    def can_merge(self):
        return True

    def on_merge(self, window, ctx):
        ctx.merge_partitioned_state(self.count)
        ctx.register_event_time_timer(window.max_timestamp())

    def clear(self, window, ctx):
        ctx.get_partitioned_state(self.count).clear()
        ctx.delete_event_time_timer(window.max_timestamp())


class Largest(ProcessWindowFunction[R, str, str, TimeWindow]):
    def process(self, key, context, elements):
        return [f"{key} {max(e.v for e in elements)} of {len(elements)}"]


class Count(AggregateFunction[R, int, int]):
    def create_accumulator(self):
        return 0

    def add(self, value, accumulator):
        return accumulator + 1

    def get_result(self, accumulator):
        return accumulator

    def merge(self, a, b):
        return a + b


class AllAfter(Evictor):
    def evict_after(self, elements, window):
        return []


class SmallBefore(Evictor):
    def evict_before(self, elements, window):
        return [entry for entry in elements if entry[0].v > 4]


def printed(mode, windows, rows, build):
    pipeline = Pipeline("windows")
    strategy = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda r: r.at)
    stream = pipeline.from_collection(rows, R).assign_timestamps_and_watermarks(strategy)
    build(stream.key_by("k").window(windows)).print("out")
    return sorted(run_pipeline(pipeline, mode).sinks["out"])


ROWS = [R("a", 1, 5), R("a", 2, 7), R("b", 3, 3)]


@MODES
@WINDOWS
def test_a_window_that_was_purged_does_not_fire_at_its_end(windows, mode):
    found = printed(mode, windows, ROWS, lambda w: w.trigger(TwoEach()).process(Largest()))
    assert found == ["a 7 of 2", "b 3 of 1"]


@MODES
@WINDOWS
def test_a_window_that_an_evictor_has_emptied_does_not_fire(windows, mode):
    found = printed(mode, windows, ROWS, lambda w: w.trigger(CountTrigger.of(1)).evictor(AllAfter()).process(Largest()))
    assert found == ["a 5 of 1", "a 7 of 1", "b 3 of 1"]


@MODES
def test_an_aggregate_has_a_result_where_an_evictor_drops_each_element(mode):
    windows = TumblingEventTimeWindows.of(timedelta(milliseconds=100))
    assert printed(mode, windows, ROWS, lambda w: w.evictor(SmallBefore()).aggregate(Count())) == [0, 2]


@MODES
def test_a_reduce_that_fails_names_the_record_that_it_failed_with(mode):
    def add(one, other):
        if other.v == 7:
            raise ValueError("seven")
        return one

    windows = TumblingEventTimeWindows.of(timedelta(milliseconds=100))
    with pytest.raises(UserFunctionError, match=r"ValueError: seven, .*on R\(k='a', at=2, v=7\)"):
        printed(mode, windows, [*ROWS, R("a", 4, 1)], lambda w: w.reduce(add))


@MODES
def test_a_flat_map_that_returns_nothing_to_iterate_names_operator_and_record(mode):
    pipeline = Pipeline("flat")
    pipeline.from_collection([1, 2], int).flat_map(lambda n: [n] if n == 1 else None, int).name("halves").print("out")
    with pytest.raises(UserFunctionError, match=r"'halves': TypeError: 'NoneType' object is not iterable.*, on 2"):
        run_pipeline(pipeline, mode)
