"""Programs whose watermark moves in mid-stream, as `Oracle.java` has them.

Rows are out of order, and the watermark is two seconds behind the latest.
"""

from collections.abc import Iterable
from datetime import timedelta

from dagster_unified.api import (
    ContinuousEventTimeTrigger,
    ContinuousProcessingTimeTrigger,
    EventTimeSessionWindows,
    FlatMapFunction,
    GlobalWindows,
    KeyedProcessFunction,
    OutputTag,
    ProcessJoinFunction,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    ValueStateDescriptor,
    WatermarkGenerator,
    WatermarkStrategy,
)
from tests.conformance.programs import Row, WindowDump, combine, seconds, wm

ROWS = [
    ("a", 1, 1000),
    ("b", 2, 2000),
    ("a", 3, 4000),
    ("a", 4, 3000),
    ("b", 5, 7000),
    ("a", 6, 9000),
    ("b", 7, 4500),
    ("a", 8, 2500),
    ("b", 9, 11000),
    ("a", 10, 16000),
    ("b", 11, 8000),
    ("a", 12, 12000),
    ("a", 13, 21000),
    ("b", 14, 15000),
    ("b", 15, 24000),
]

BUNDLE = 3
"""How many records come between two watermarks, where not each has its own: in STREAMING on Spark, a micro-batch."""


def timed(stream):
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=2)).with_timestamp_assigner(
        lambda r: r[2]
    )
    return stream.assign_timestamps_and_watermarks(strategy)


class Behind(WatermarkGenerator[Row]):
    """Two seconds behind the latest event time, after every `count` records: the generator that Flink ran."""

    def __init__(self, count: int) -> None:
        self.count, self.seen, self.latest = count, 0, 0

    def on_event(self, event, event_timestamp, output):
        self.latest = max(self.latest, event_timestamp)
        self.seen += 1
        if self.seen % self.count == 0:
            output.emit_watermark(self.latest - 2000 - 1)


def generated(stream, count):
    """As `timed`, with the watermarks of a generator."""
    strategy = WatermarkStrategy.for_generator(lambda: Behind(count)).with_timestamp_assigner(lambda r: r[2])
    return stream.assign_timestamps_and_watermarks(strategy)


def by_key(stream):
    return stream.key_by(lambda r: r[0])


class Timers(KeyedProcessFunction):
    def open(self, ctx):
        self.n = ctx.get_state(ValueStateDescriptor("n", int))

    def process_element(self, value, ctx) -> Iterable[str]:
        self.n.update((self.n.value() or 0) + 1)
        ctx.timer_service().register_event_time_timer(value[2] + 3000)
        yield f"element key={value[0]} v={value[1]} n={self.n.value()} wm={wm(ctx.timer_service().current_watermark())}"

    def on_timer(self, timestamp, ctx):
        yield (
            f"timer key={ctx.get_current_key()} at={timestamp} n={self.n.value()}"
            f" wm={wm(ctx.timer_service().current_watermark())}"
        )


class Pair(ProcessJoinFunction):
    def process_element(self, left, right, ctx) -> Iterable[str]:
        yield f"key={left[0]} {left[1]}-{right[1]} at {ctx.get_timestamp()}"


class CountWindowAverage(FlatMapFunction):
    """Flink's first example of keyed state: the average of every two values of a key."""

    def open(self, ctx):
        self.sum = ctx.get_state(ValueStateDescriptor("average", tuple[int, int]))

    def flat_map(self, value) -> Iterable[str]:
        count, total = self.sum.value() or (0, 0)
        if count + 1 < 2:
            self.sum.update((count + 1, total + value[1]))
        else:
            self.sum.clear()
            yield f"key={value[0]} {(total + value[1]) // (count + 1)}"


LATE = OutputTag("late", Row)


def with_late(windowed):
    """A window's results, and what came too late for it."""
    main = windowed.side_output_late_data(LATE).process(WindowDump())
    return main.get_side_output(LATE).map(lambda r: f"late key={r[0]} {r[1]}", str).union(main)


def five_seconds(rows):
    return by_key(rows).window(TumblingEventTimeWindows.of(seconds(5)))


def triggered(rows, assigner, trigger):
    return by_key(rows).window(assigner).trigger(trigger).process(WindowDump())


def interval_join(rows):
    left, right = by_key(rows.filter(lambda r: r[1] % 2 == 1)), by_key(rows.filter(lambda r: r[1] % 2 == 0))
    return left.interval_join(right).between(seconds(-3), seconds(3)).process(Pair())


BY_THE_CLOCK = ContinuousProcessingTimeTrigger.of(timedelta(hours=1))

PROGRAMS = {
    "timers_in_mid_stream": lambda rows: by_key(rows).process(Timers()),
    "timers_behind_a_reduce": lambda rows: by_key(by_key(rows).reduce(combine)).process(Timers()),
    "tumbling_in_mid_stream": lambda rows: five_seconds(rows).process(WindowDump()),
    "tumbling_late_side_output": lambda rows: with_late(five_seconds(rows)),
    "tumbling_allowed_lateness": lambda rows: with_late(five_seconds(rows).allowed_lateness(seconds(3))),
    "session_in_mid_stream": lambda rows: (
        by_key(rows).window(EventTimeSessionWindows.with_gap(seconds(3))).process(WindowDump())
    ),
    "window_of_windows": lambda rows: (
        by_key(five_seconds(rows).reduce(combine))
        .window(TumblingEventTimeWindows.of(seconds(10)))
        .process(WindowDump())
    ),
    "interval_join": interval_join,
    "continuous_trigger": lambda rows: triggered(
        rows, TumblingEventTimeWindows.of(seconds(10)), ContinuousEventTimeTrigger.of(seconds(2))
    ),
    "continuous_trigger_on_a_global_window": lambda rows: triggered(
        rows, GlobalWindows.create(), ContinuousEventTimeTrigger.of(seconds(5))
    ),
    "continuous_processing_time_trigger_on_a_global_window": lambda rows: triggered(
        rows, GlobalWindows.create(), BY_THE_CLOCK
    ),
    "continuous_processing_time_trigger_on_clock_windows": lambda rows: triggered(
        rows, TumblingProcessingTimeWindows.of(timedelta(days=1)), BY_THE_CLOCK
    ),
    "count_window_average": lambda rows: by_key(rows).flat_map(CountWindowAverage()),
}
