"""A trigger is a class: what the lint says of it and how fast it runs follow from what it says of itself."""

from collections.abc import Iterable
from datetime import timedelta

import pytest

from dagster_unified.api import (
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    CountTrigger,
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
from dagster_unified.api.windows import Firing, Trigger, TriggerResult
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
