"""The oracle's programs, written against this library. See README.md."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from dagster_unified.api import (
    MAX_TIMESTAMP,
    MIN_TIMESTAMP,
    AggregateFunction,
    CountTrigger,
    EventTimeSessionWindows,
    GlobalWindows,
    KeyedBroadcastProcessFunction,
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ProcessWindowFunction,
    PurgingTrigger,
    SlidingEventTimeWindows,
    TimeWindow,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)

Row = tuple[str, int, int]

A = [
    ("a", 3, 3000),
    ("b", 1, 1000),
    ("a", 1, 1000),
    ("c", 9, 9000),
    ("b", 7, 7000),
    ("a", 2, 2000),
    ("b", 4, 12000),
    ("a", 5, 21000),
]
B = [("b", 10, 2000), ("a", 20, 1500), ("c", 30, 8000), ("d", 40, 4000), ("a", 50, 2500)]


def wm(watermark: int) -> str | int:
    return "MAX" if watermark == MAX_TIMESTAMP else "MIN" if watermark == MIN_TIMESTAMP else watermark


def src(pipeline: Pipeline, data: list[Row], name: str = "a"):
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=60)).with_timestamp_assigner(
        lambda r: r[2]
    )
    return pipeline.from_collection(data, Row, name).assign_timestamps_and_watermarks(strategy)


def combine(x: Row, y: Row) -> Row:
    return (x[0], x[1] + y[1], max(x[2], y[2]))


def rolling_reduce(p):
    return src(p, A).key_by(lambda r: r[0]).reduce(combine)


def rolling_sum(p):
    return src(p, A).key_by(lambda r: r[0]).sum(1)


def rolling_min(p):
    return src(p, A).key_by(lambda r: r[0]).min(1)


def rolling_max_by(p):
    return src(p, A).key_by(lambda r: r[0]).max_by(1)


class Timers(KeyedProcessFunction):
    def open(self, ctx):
        self.n = ctx.get_state(ValueStateDescriptor("n", int))

    def process_element(self, value, ctx) -> Iterable[str]:
        n = (self.n.value() or 0) + 1
        self.n.update(n)
        ctx.timer_service().register_event_time_timer(value[2] + 5000)
        ctx.timer_service().register_event_time_timer(value[2])
        yield (
            f"element key={ctx.get_current_key()} v={value[1]} ts={ctx.timestamp()} n={n}"
            f" wm={wm(ctx.timer_service().current_watermark())}"
        )

    def on_timer(self, timestamp, ctx):
        yield (
            f"timer key={ctx.get_current_key()} at={timestamp} n={self.n.value()}"
            f" wm={wm(ctx.timer_service().current_watermark())}"
        )


def event_time_timers(p):
    return src(p, A).key_by(lambda r: r[0]).process(Timers())


class TimerInTimer(KeyedProcessFunction):
    def process_element(self, value, ctx) -> Iterable[str]:
        ctx.timer_service().register_event_time_timer(value[2])
        if value[1] == 2:
            ctx.timer_service().delete_event_time_timer(1000)
        return []

    def on_timer(self, timestamp, ctx):
        yield f"timer key={ctx.get_current_key()} at={timestamp}"
        if timestamp < 4000:
            ctx.timer_service().register_event_time_timer(timestamp + 10000)


def timers_registered_and_deleted_in_timers(p):
    return src(p, A).key_by(lambda r: r[0]).process(TimerInTimer())


class ProcTimers(KeyedProcessFunction):
    def process_element(self, value, ctx) -> Iterable[str]:
        t = ctx.timer_service().current_processing_time()
        ctx.timer_service().register_processing_time_timer(t + 3600_000)
        yield f"element key={ctx.get_current_key()} v={value[1]}"

    def on_timer(self, timestamp, ctx):
        yield f"processing-time timer key={ctx.get_current_key()} domain={ctx.time_domain().name}"


def processing_time_timers_far_in_the_future(p):
    return src(p, A).key_by(lambda r: r[0]).process(ProcTimers())


def union_then_reduce(p):
    return src(p, A).union(src(p, B, "b")).key_by(lambda r: r[0]).reduce(combine)


ODD = OutputTag("odd", str)


class Split(ProcessFunction):
    def process_element(self, value, ctx) -> Iterable[str]:
        if value[1] % 2:
            yield ODD, f"odd {value[1]}"
        else:
            yield f"even {value[1]}"


def side_output(p):
    main = src(p, A).process(Split())
    return main.get_side_output(ODD).union(main)


def two_keyed_stages(p):
    return (
        src(p, A)
        .key_by(lambda r: r[0])
        .reduce(combine)
        .map(lambda r: ("odd" if r[1] % 2 else "even", 1, r[2]), output_type=Row)
        .key_by(lambda r: r[0])
        .reduce(combine)
    )


class WindowDump(ProcessWindowFunction):
    def process(self, key, context, elements) -> Iterable[str]:
        window = context.window()
        span = f"[{window.start},{window.end})" if isinstance(window, TimeWindow) else "global"
        yield f"key={key} {span} {[e[1] for e in elements]}"


def seconds(n):
    return timedelta(seconds=n)


def tumbling(p):
    return src(p, A).key_by(lambda r: r[0]).window(TumblingEventTimeWindows.of(seconds(5))).process(WindowDump())


def tumbling_offset(p):
    return (
        src(p, A)
        .key_by(lambda r: r[0])
        .window(TumblingEventTimeWindows.of(seconds(5), seconds(2)))
        .process(WindowDump())
    )


def sliding(p):
    return (
        src(p, A)
        .key_by(lambda r: r[0])
        .window(SlidingEventTimeWindows.of(seconds(6), seconds(2)))
        .process(WindowDump())
    )


def session(p):
    return src(p, A).key_by(lambda r: r[0]).window(EventTimeSessionWindows.with_gap(seconds(4))).process(WindowDump())


def count_window(p):
    return src(p, A).key_by(lambda r: r[0]).count_window(2).process(WindowDump())


def count_window_sliding(p):
    return src(p, A).key_by(lambda r: r[0]).count_window(3, 1).process(WindowDump())


def global_window_count_trigger(p):
    return (
        src(p, A)
        .key_by(lambda r: r[0])
        .window(GlobalWindows.create())
        .trigger(PurgingTrigger.of(CountTrigger.of(2)))
        .process(WindowDump())
    )


class Mean(AggregateFunction):
    def create_accumulator(self) -> tuple[int, int]:
        return (0, 0)

    def add(self, value, accumulator):
        return (accumulator[0] + value[1], accumulator[1] + 1)

    def get_result(self, accumulator) -> str:
        return f"mean={accumulator[0] / accumulator[1]:.3f}"

    def merge(self, a, b):
        return (a[0] + b[0], a[1] + b[1])


def tumbling_aggregate(p):
    return src(p, A).key_by(lambda r: r[0]).window(TumblingEventTimeWindows.of(seconds(5))).aggregate(Mean())


class TwoInputs(KeyedCoProcessFunction):
    def open(self, ctx):
        self.seen = ctx.get_list_state(ListStateDescriptor("seen", str))

    def process_element1(self, value, ctx) -> Iterable[str]:
        self.seen.add(f"L{value[1]}@{ctx.timestamp()}")
        ctx.timer_service().register_event_time_timer(100000)
        return []

    def process_element2(self, value, ctx) -> Iterable[str]:
        self.seen.add(f"R{value[1]}@{ctx.timestamp()}")
        ctx.timer_service().register_event_time_timer(100000)
        return []

    def on_timer(self, timestamp, ctx) -> Iterable[str]:
        yield f"key={ctx.get_current_key()} {sorted(self.seen)}"


def keyed_co_process(p):
    return src(p, A).connect(src(p, B, "b")).key_by(lambda r: r[0], lambda r: r[0]).process(TwoInputs())


RULES = MapStateDescriptor("rules", str, int)


class Broadcast(KeyedBroadcastProcessFunction):
    def process_element(self, value, ctx) -> Iterable[str]:
        yield f"{value[0]} {value[1]} rule={ctx.get_broadcast_state(RULES).get(value[0])}"

    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(RULES).put(value[0], value[1])


def broadcast_state(p):
    return src(p, A).key_by(lambda r: r[0]).connect(src(p, B[:3], "b").broadcast(RULES)).process(Broadcast())


PROGRAMS = {
    f.__name__: f
    for f in (
        rolling_reduce,
        rolling_sum,
        rolling_min,
        rolling_max_by,
        event_time_timers,
        timers_registered_and_deleted_in_timers,
        processing_time_timers_far_in_the_future,
        tumbling,
        tumbling_offset,
        sliding,
        session,
        count_window,
        count_window_sliding,
        global_window_count_trigger,
        tumbling_aggregate,
        keyed_co_process,
        broadcast_state,
        union_then_reduce,
        side_output,
        two_keyed_stages,
    )
}

FLAGGED = {
    "event_time_timers",
    "rolling_sum",
    "rolling_min",
    "count_window",
    "count_window_sliding",
    "global_window_count_trigger",
    "broadcast_state",
    "two_keyed_stages",
}
"""Programs whose result depends on arrival order, on the watermark or on counting updates, by their nature.

The lint must warn.
"""
