"""A window that holds nothing does not fire (Flink: `WindowOperator`); one whose elements are evicted first does."""

from datetime import timedelta

import pytest

from dagster_unified.api import (
    AggregateFunction,
    CountTrigger,
    EventTimeSessionWindows,
    ProcessWindowFunction,
    ReducingStateDescriptor,
    TimeWindow,
    TumblingEventTimeWindows,
)
from dagster_unified.api.windows import Evictor, Trigger, TriggerResult
from dagster_unified.errors import UserFunctionError
from tests.operators.test_triggers import MODES, Row, results, windowed

HUNDRED = TumblingEventTimeWindows.of(timedelta(milliseconds=100))
WINDOWS = pytest.mark.parametrize(
    "windows",
    [EventTimeSessionWindows.with_gap(timedelta(milliseconds=10)), HUNDRED],
    ids=["sessions", "tumbling"],
)


class TwoEach(Trigger[Row, TimeWindow]):
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


class Largest(ProcessWindowFunction[Row, str, str, TimeWindow]):
    def process(self, key, context, elements):
        return [f"{key} {max(e.amount for e in elements)} of {len(elements)}"]


class Count(AggregateFunction[Row, int, int]):
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
        return [entry for entry in elements if entry[0].amount > 4]


def printed(mode, windows, rows, build):
    return sorted(results(build(windowed(rows, windows)), mode))


ROWS = [Row("a", 1, 5), Row("a", 2, 7), Row("b", 3, 3)]


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
    assert printed(mode, HUNDRED, ROWS, lambda w: w.evictor(SmallBefore()).aggregate(Count())) == [0, 2]


@MODES
def test_a_reduce_that_fails_names_the_record_that_it_failed_with(mode):
    def add(one, other):
        if other.amount == 7:
            raise ValueError("seven")
        return one

    with pytest.raises(UserFunctionError, match=r"ValueError: seven, .*on Row\(key='a', at=2, amount=7\)"):
        printed(mode, HUNDRED, [*ROWS, Row("a", 4, 1)], lambda w: w.reduce(add))
