"""The harnesses of one operator: by hand, with watermarks and the clock, state that is encoded, and snapshots."""

from collections.abc import Iterable
from datetime import date, timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    CoFlatMapFunction,
    ContinuousEventTimeTrigger,
    EventTimeSessionWindows,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    TimeDomain,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    ValueStateDescriptor,
)
from dagster_unified.errors import PipelineError
from dagster_unified.testing import BroadcastHarness, KeyedHarness, ManualClock, OneInputHarness, TwoInputHarness


class Order(NamedTuple):
    shop: str
    amount: int


SECOND = timedelta(seconds=1)
LATE = OutputTag("late", Order)


def test_a_window_with_late_data():
    windows = OneInputHarness(
        lambda s: (
            s.key_by("shop").window(TumblingEventTimeWindows.of(SECOND)).side_output_late_data(LATE).sum("amount")
        ),
        Order,
        side_outputs=[LATE],
    )
    windows.process_element(Order("a", 1), 10)
    windows.process_element(Order("a", 2), 990)
    windows.process_element(Order("b", 5), 1500)
    assert windows.process_watermark(999) == [Order("a", 3)]
    assert windows.process_element(Order("a", 7), 100) == []
    assert windows.side_output(LATE) == [Order("a", 7)]
    assert windows.end_input() == [Order("b", 5)]
    assert windows.timed_output == [(Order("a", 3), 999), (Order("b", 5), 1999)]


def test_windows_by_processing_time_fire_as_the_clock_is_set():
    windows = OneInputHarness(
        lambda s: s.key_by("shop").window(TumblingProcessingTimeWindows.of(SECOND)).sum("amount"), Order
    )
    windows.set_processing_time(100)
    windows.process_element(Order("a", 1))
    assert windows.num_processing_time_timers() == 1
    assert windows.set_processing_time(998) == []
    assert windows.set_processing_time(999) == [Order("a", 1)]


def test_sessions_go_on_from_a_snapshot():
    def build(stream):
        return stream.key_by("shop").window(EventTimeSessionWindows.with_gap(SECOND)).sum("amount")

    first = OneInputHarness(build, Order)
    first.process_element(Order("a", 1), 0)
    first.process_element(Order("b", 9), 0)
    snapshot = first.snapshot()
    first.process_element(Order("a", 100), 100)
    second = OneInputHarness(build, Order)
    second.restore(snapshot)
    assert (second.num_event_time_timers(), sorted(second.keys())) == (2, ["a", "b"])
    second.process_element(Order("a", 2), 500)
    assert sorted(second.process_watermark(2000)) == [Order("a", 3), Order("b", 9)]


def test_sessions_that_merge_first_after_a_snapshot_keep_when_they_fire():
    """The trigger's state is that of a job before, which this one meets for the first time where two windows merge."""

    def build(stream):
        sessions = stream.key_by("shop").window(EventTimeSessionWindows.with_gap(SECOND))
        return sessions.trigger(ContinuousEventTimeTrigger.of(SECOND / 2)).sum("amount")

    first, second = OneInputHarness(build, Order), OneInputHarness(build, Order)
    first.process_element(Order("a", 1), 100)
    second.restore(first.snapshot())
    second.process_element(Order("a", 2), 300)
    assert second.process_watermark(500) == [Order("a", 3)]
    assert second.process_watermark(1299) == [Order("a", 3), Order("a", 3)]


class Latest(KeyedProcessFunction):
    """Keeps a key's last amount."""

    def open(self, context):
        self.last = context.get_state(ValueStateDescriptor("last", int))

    def process_element(self, value, ctx) -> Iterable[Order]:
        self.last.update(value.amount)


def test_state_is_read_as_it_was_written_and_by_its_declared_type():
    latest = OneInputHarness(lambda s: s.key_by("shop").process(Latest()), Order)
    latest.process_element(Order("a", 3))
    assert (latest.state("a"), latest.state("b"), latest.keys()) == ({"last": 3}, {}, ["a"])


class Matched(KeyedCoProcessFunction):
    def open(self, context):
        self.open_order = context.get_state(ValueStateDescriptor("order", int))

    def process_element1(self, value, ctx) -> Iterable[str]:
        self.open_order.update(value.amount)
        ctx.timer_service().register_event_time_timer(ctx.timestamp() + 100)

    def process_element2(self, value, ctx) -> Iterable[str]:
        yield f"{value} pays {self.open_order.value()}"
        self.open_order.clear()

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        if self.open_order.value() is not None:
            yield f"{ctx.get_current_key()} is due"


def test_two_keyed_streams_with_a_watermark_of_each():
    two = TwoInputHarness(
        lambda a, b: a.connect(b).key_by("shop", lambda shop: shop, key_type=str).process(Matched()), Order, str
    )
    two.process_element1(Order("a", 3), 10)
    two.process_element1(Order("b", 4), 10)
    assert two.process_element2("a", 20) == ["a pays 3"]
    assert two.process_watermark1(1000) == []
    assert two.process_watermark2(110) == ["b is due"]
    assert two.output == ["a pays 3", "b is due"]


class Numbered(CoFlatMapFunction):
    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def flat_map1(self, value) -> Iterable[str]:
        self.count.update((self.count.value() or 0) + 1)
        yield f"{value.shop} {self.count.value()}"

    def flat_map2(self, value) -> Iterable[str]:
        yield value


def test_a_keyed_stream_beside_one_without_a_key():
    two = TwoInputHarness(lambda a, b: a.key_by("shop").connect(b).flat_map(Numbered()), Order, str)
    assert [two.process_element1(Order("a", 0)), two.process_element2("x"), two.process_element1(Order("a", 0))] == [
        ["a 1"],
        ["x"],
        ["a 2"],
    ]
    assert (two.state("a"), two.keys()) == ({"count": 2}, ["a"])


LIMITS = MapStateDescriptor("limits", str, int)


class Limited(KeyedBroadcastProcessFunction):
    def process_element(self, value, ctx) -> Iterable[Order]:
        if value.amount <= (ctx.get_broadcast_state(LIMITS).get(value.shop) or 0):
            yield value

    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(LIMITS).put(value.shop, value.amount)


def test_broadcast_state_and_its_snapshot():
    def build(stream, limits):
        return stream.key_by("shop").connect(limits.broadcast(LIMITS)).process(Limited())

    first = BroadcastHarness(build, Order, Order)
    assert first.process_element(Order("a", 3)) == []
    first.process_broadcast_element(Order("a", 5))
    assert first.process_element(Order("a", 3)) == [Order("a", 3)]
    second = BroadcastHarness(build, Order, Order)
    second.restore(first.snapshot())
    assert second.broadcast_state(LIMITS) == {"a": 5}
    assert second.process_element(Order("a", 6)) == []


def test_a_harness_drives_one_operator():
    with pytest.raises(PipelineError, match="'filter' comes before 'Latest', and a harness drives one operator"):
        OneInputHarness(lambda s: s.filter(lambda o: True).key_by("shop").process(Latest()), Order)
    with pytest.raises(PipelineError, match="'where' is no operator that runs in Python"):
        OneInputHarness(lambda s: s.where("amount > 1"), Order)


class Later(KeyedProcessFunction):
    """Passes a value on by a side output, and by timers: one ten later, and one a second later that goes on."""

    def process_element(self, value, ctx):
        timers = ctx.timer_service()
        timers.register_event_time_timer(value + 10)
        timers.register_processing_time_timer(timers.current_processing_time() + 1000)
        yield LATE, value

    def on_timer(self, timestamp, ctx):
        yield timestamp
        if ctx.time_domain() is TimeDomain.PROCESSING_TIME:
            ctx.timer_service().register_processing_time_timer(timestamp + 1000)


def test_timers_of_the_keyed_harness_fire_as_either_time_moves_and_once_more_at_the_end():
    harness = KeyedHarness(Later(), ManualClock(0))
    assert harness.element("a", 5) == []
    assert harness.side_outputs == {"late": [5]}
    assert [harness.watermark(14), harness.watermark(15)] == [[], [15]]
    assert [harness.processing_time(999), harness.processing_time(2500)] == [[], [1000, 2000]]
    assert harness.end_of_input() == [3000]


def test_state_of_the_keyed_harness_is_what_was_written_and_not_what_became_of_it_since():
    class Shared(KeyedProcessFunction):
        def open(self, context):
            self.kept = context.get_state(ValueStateDescriptor("kept", list[int]))

        def process_element(self, value, ctx):
            yield list(self.kept.value() or [])
            seen = []
            if not self.kept.value():
                self.kept.update(seen)
            seen.append(value)

    keyed = KeyedHarness(Shared())
    assert [keyed.element(("a", 1), value) for value in (1, 2, 3)] == [[[]], [[1]], [[1]]]
    assert keyed.state(("a", 1)) == {"kept": [1]}


def test_the_keyed_harness_refuses_what_needs_a_type_that_it_does_not_know():
    class Waits(KeyedProcessFunction):
        requires_time_sorted_input = True

        def process_element(self, value, ctx):
            return []

    class Passes(KeyedProcessFunction):
        def process_element(self, value, ctx):
            return []

    with pytest.raises(PipelineError, match=r"Waits: requires_time_sorted_input makes .* OneInputHarness"):
        KeyedHarness(Waits())
    with pytest.raises(PipelineError, match="Passes: a date as a key needs its type; use OneInputHarness"):
        KeyedHarness(Passes()).element(date(2026, 1, 2), 1)
