"""A trigger is a class: what the lint says of it, how fast it runs, and when a window fires, as in Flink."""

from collections.abc import Iterable
from datetime import timedelta

import pytest

from dagster_unified.api import (
    AggregateFunction,
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    CountTrigger,
    EventTimeSessionWindows,
    EventTimeTrigger,
    Pipeline,
    ProcessingTimeTrigger,
    ProcessWindowFunction,
    PurgingTrigger,
    ReducingStateDescriptor,
    TimeWindow,
    TumblingEventTimeWindows,
    WatermarkStrategy,
)
from dagster_unified.api.windows import Evictor, Firing, Trigger, TriggerResult
from dagster_unified.errors import UserFunctionError
from dagster_unified.operators.windows.triggers import SlidingCountTrigger
from tests.operators.support import Row, Sum
from tests.support import MODES, results

TEN = TumblingEventTimeWindows.of(timedelta(milliseconds=10))


class Amounts(ProcessWindowFunction):
    def process(self, key, context, elements) -> Iterable[str]:
        yield f"{context.window().start}: {sorted(e.amount for e in elements)}"


ROWS = [Row("a", 0, 1), Row("a", 3, 9), Row("a", 7, 2), Row("a", 12, 3)]


def windowed(rows=ROWS, assigner=TEN):
    by_at = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    stream = Pipeline("p").from_collection(rows, Row).assign_timestamps_and_watermarks(by_at)
    return stream.key_by("key").window(assigner)


def windows(trigger, rows=ROWS, assigner=TEN):
    return windowed(rows, assigner).trigger(trigger)


def said(trigger):
    """What the lint says of windows with a trigger, beyond that they may have late records."""
    summed = windows(trigger).sum("amount")
    summed.print()
    return [(f.severity, f.message) for f in summed._pipeline.plan().findings if f.rule == "windows"]


class LateEnough(Trigger):
    """Fires once, at the window's end, and only where enough has come by then."""

    firing = Firing.EVENT_TIME
    total = ReducingStateDescriptor("total", lambda a, b: a + b, int)

    def on_element(self, element: Row, timestamp, window: TimeWindow, ctx: Trigger.TriggerContext) -> TriggerResult:
        ctx.get_partitioned_state(self.total).add(element.amount)
        ctx.register_event_time_timer(window.max_timestamp())
        return TriggerResult.CONTINUE

    def on_event_time(self, time, window, ctx):
        enough = (ctx.get_partitioned_state(self.total).get() or 0) >= 10
        return TriggerResult.FIRE if enough else TriggerResult.CONTINUE

    def on_processing_time(self, time, window, ctx):
        return TriggerResult.CONTINUE

    def clear(self, window, ctx):
        ctx.get_partitioned_state(self.total).clear()


@MODES
def test_a_new_trigger_fires_in_both_modes(mode):
    assert results(windows(LateEnough()).process(Amounts()), mode, watermark_interval=1) == ["0: [1, 2, 9]"]


def test_the_lint_says_nothing_of_a_trigger_by_event_time():
    assert said(LateEnough()) == []
    assert said(PurgingTrigger.of(LateEnough())) == []


class Undeclared(LateEnough):
    """Says nothing of itself: what its base class says is not inherited."""


def test_the_lint_notes_a_trigger_that_does_not_say_when_it_fires():
    note = "'sum' has the trigger Undeclared, which does not say whether it fires alike in BATCH and STREAMING"
    assert said(Undeclared()) == [("note", f"{note}; set Undeclared.firing")]


class EveryThird(LateEnough):
    firing = Firing.ELEMENTS


class Soon(LateEnough):
    firing = Firing.EARLY


class Clocked(LateEnough):
    firing = Firing.CLOCK


@pytest.mark.parametrize(
    ("trigger", "warnings"),
    [
        (EveryThird(), ["closes its windows by the elements that have come"]),
        (PurgingTrigger.of(CountTrigger.of(5)), ["closes its windows by the elements that have come"]),
        (SlidingCountTrigger(2, 1), ["closes its windows by the elements that have come"]),
        (Soon(), ["gives early results in STREAMING and each window's last one in BATCH"]),
        (
            ContinuousEventTimeTrigger.of(timedelta(milliseconds=5)),
            ["gives early results in STREAMING and each window's last one in BATCH"],
        ),
        (Clocked(), ["goes by processing time", "and none at a window's end, and so none at all in BATCH"]),
        (ProcessingTimeTrigger(), ["goes by processing time", "and none at a window's end, and so none at all in"]),
        (
            ContinuousProcessingTimeTrigger.of(timedelta(milliseconds=5)),
            ["goes by processing time", "and none at a window's end, and so none at all in"],
        ),
    ],
    ids=lambda given: type(given).__name__,
)
def test_the_lint_warns_as_a_trigger_says_when_it_fires(trigger, warnings):
    found = said(trigger)
    assert [severity for severity, _ in found] == ["warning"] * len(warnings)
    assert all(part in message for part, (_, message) in zip(warnings, found, strict=True))


def test_a_trigger_by_the_clock_gives_windows_by_event_time_nothing_in_batch():
    assert results(windows(ProcessingTimeTrigger()).aggregate(Sum()), "BATCH") == []


class Unless(EventTimeTrigger):
    """Fires at the window's end as well, and at once at a large amount: elements have to be seen one by one."""

    def on_element(self, element, timestamp, window, ctx):
        super().on_element(element, timestamp, window, ctx)
        return TriggerResult.FIRE if element.amount > 5 else TriggerResult.CONTINUE


class PurgingUnless(PurgingTrigger):
    def on_element(self, element, timestamp, window, ctx):
        found = super().on_element(element, timestamp, window, ctx)
        return TriggerResult.FIRE_AND_PURGE if element.amount > 5 else found


@MODES
def test_a_subclass_of_a_trigger_that_takes_elements_many_at_a_time_sees_each(mode):
    assert results(windows(Unless()).aggregate(Sum()), mode) == [10, 12, 3]
    assert results(windows(PurgingUnless(EventTimeTrigger())).aggregate(Sum()), mode) == [10, 2, 3]


class Declared(Unless):
    """Says that elements need not be seen, which for it is not so."""

    only_registers_end = True


def test_a_trigger_that_only_registers_the_end_is_not_called_for_each_element():
    assert results(windows(Declared()).aggregate(Sum()), "BATCH") == [12, 3]


class Shifted(TumblingEventTimeWindows):
    """Large amounts have windows of their own: what a pane's first element says does not hold for the others."""

    def assign_windows(self, element, timestamp, context):
        return self.windows_at(timestamp + (100 if element.amount > 5 else 0))


@MODES
def test_a_subclass_of_an_assigner_sees_each_element(mode):
    assigner = Shifted.of(timedelta(milliseconds=10))
    assert results(windows(EventTimeTrigger(), ROWS[:3], assigner).aggregate(Sum()), mode) == [3, 9]


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


PURGED = [Row("a", 1, 5), Row("a", 2, 7), Row("b", 3, 3)]


@MODES
@WINDOWS
def test_a_window_that_was_purged_does_not_fire_at_its_end(windows, mode):
    found = printed(mode, windows, PURGED, lambda w: w.trigger(TwoEach()).process(Largest()))
    assert found == ["a 7 of 2", "b 3 of 1"]


@MODES
@WINDOWS
def test_a_window_that_an_evictor_has_emptied_does_not_fire(windows, mode):
    found = printed(
        mode, windows, PURGED, lambda w: w.trigger(CountTrigger.of(1)).evictor(AllAfter()).process(Largest())
    )
    assert found == ["a 5 of 1", "a 7 of 1", "b 3 of 1"]


@MODES
def test_an_aggregate_has_a_result_where_an_evictor_drops_each_element(mode):
    assert printed(mode, HUNDRED, PURGED, lambda w: w.evictor(SmallBefore()).aggregate(Count())) == [0, 2]


@MODES
def test_a_reduce_that_fails_names_the_record_that_it_failed_with(mode):
    def add(one, other):
        if other.amount == 7:
            raise ValueError("seven")
        return one

    with pytest.raises(UserFunctionError, match=r"ValueError: seven, .*on Row\(key='a', at=2, amount=7\)"):
        printed(mode, HUNDRED, [*PURGED, Row("a", 4, 1)], lambda w: w.reduce(add))
