"""Pipelines with state behind an iteration, whose results are final: the same in BATCH and in STREAMING."""

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from dagster_unified.api import (
    KeyedCoProcessFunction,
    KeyedProcessFunction,
    Pipeline,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    iterations,
)
from dagster_unified.api import functions as F
from tests.iterations.support import Body


class Rec(NamedTuple):
    key: int
    value: int
    at: int
    """Milliseconds."""


GIVEN = [Rec(n % 3, n, (n * 700) % 9000) for n in range(20)]
EVERY = TumblingEventTimeWindows.of(timedelta(seconds=4))
BOUND = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(seconds=9)).with_timestamp_assigner("at")


def added(a: Rec, b: Rec) -> Rec:
    return Rec(a.key, a.value + b.value, max(a.at, b.at))


class Summed(KeyedProcessFunction[int, Rec, Rec]):
    """Adds up what a key has, and says so when its input has ended."""

    def open(self, runtime_context):
        self.sum = runtime_context.get_state(ValueStateDescriptor("sum", int))

    def process_element(self, value, ctx):
        self.sum.update((self.sum.value() or 0) + value.value)
        ctx.timer_service().register_event_time_timer(1_000_000)
        return []

    def on_timer(self, timestamp, ctx):
        return [Rec(ctx.get_current_key(), self.sum.value(), timestamp)]


class Both(KeyedCoProcessFunction[int, Rec, Rec, Rec]):
    """Weighs what two streams have of a key, and says so when both have ended."""

    def open(self, runtime_context):
        self.sum = runtime_context.get_state(ValueStateDescriptor("sum", int))

    def _add(self, number, ctx):
        self.sum.update((self.sum.value() or 0) + number)
        ctx.timer_service().register_event_time_timer(1_000_000)
        return []

    def process_element1(self, value, ctx):
        return self._add(value.value, ctx)

    def process_element2(self, value, ctx):
        return self._add(1000 * value.value, ctx)

    def on_timer(self, timestamp, ctx):
        return [Rec(ctx.get_current_key(), self.sum.value(), timestamp)]


def looped(stream, bounded: bool, name: str):
    """All records that come of counting a value down by seven."""

    def build(variables, data):
        less = variables[0].map(lambda r: r._replace(value=r.value - 7), Rec).filter(lambda r: r.value > 0)
        return iterations.IterationBodyResult([less], [variables[0]])

    config = iterations.IterationConfig(parallelism=2, name=name)
    if bounded:
        return iterations.iterate_bounded_streams_until_termination([stream], [], Body(build), config)[0]
    return iterations.iterate_unbounded_streams([stream], [], Body(build), config)[0]


def summed(given, loop):
    return loop(given, "down").key_by("key").process(Summed())


def windowed(given, loop):
    return loop(given, "down").key_by("key").window(EVERY).reduce(added)


def assigned_again(given, loop):
    moved = loop(given, "down").map(lambda r: r._replace(at=r.at + 5000), Rec)
    return moved.assign_timestamps_and_watermarks(BOUND).key_by("key").window(EVERY).reduce(added)


def beside(given, loop):
    """The loop's output meets a stream that does not go round, behind state of its own."""
    own = given.key_by("key").window(EVERY).reduce(added)
    return loop(given, "down").key_by("key").connect(own.key_by("key")).process(Both())


def joined(given, loop):
    pairs = loop(given, "down").join(given).where("key").equal_to("key").window(EVERY)
    return pairs.apply(lambda a, b: Rec(a.key, a.value * b.value, max(a.at, b.at)), Rec)


def between(given, loop):
    """State, a loop, state, a loop, and state."""
    first = given.key_by("key").window(EVERY).reduce(added)
    second = loop(first, "once").key_by("key").window(EVERY).reduce(added)
    return loop(second, "again").key_by("key").window(EVERY).reduce(added)


def aggregated(given, loop):
    windows = loop(given, "down").key_by("key").window(EVERY)
    return windows.agg(F.sum("value").alias("value"), F.max("at").alias("at"), output_type=Rec)


PIPELINES: dict[str, Callable] = {
    f.__name__: f for f in (summed, windowed, assigned_again, beside, joined, aggregated, between)
}


def together(names: list[str], bounded: bool):
    """Several of them as one pipeline, each with loops of its own, and the final records of each."""
    pipeline = Pipeline("behind")
    given = pipeline.from_collection(GIVEN, Rec, name="given").assign_timestamps_and_watermarks(BOUND)
    return pipeline, {
        name: PIPELINES[name](given, lambda stream, called, name=name: looped(stream, bounded, f"{name} {called}"))
        for name in names
    }


def built(name: str, bounded: bool, given=None):
    """The pipeline, its final records, and those that leave the loop where the pipeline has one."""
    pipeline = Pipeline(f"behind_{name}")
    records = pipeline.from_collection(GIVEN, Rec, name="given") if given is None else given(pipeline)
    loops = []

    def loop(stream, called):
        loops.append(looped(stream, bounded, called))
        return loops[-1]

    found = PIPELINES[name](records.assign_timestamps_and_watermarks(BOUND), loop)
    return pipeline, found, loops[0].map(lambda r: r, Rec)
