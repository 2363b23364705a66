"""The lint: what depends on the mode is warned of, and nothing else."""

import os
import random
import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    IngestionTimeAssigner,
    KeyedProcessFunction,
    OutputTag,
    Pipeline,
    ProcessJoinFunction,
    TumblingEventTimeWindows,
    WatermarkGenerator,
    WatermarkStrategy,
    iterations,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import DeltaSink, FileSink
from tests.support import Sale


class Noted(NamedTuple):
    shop: str | None
    amount: int
    note: str


def add(a, b):
    return a._replace(amount=a.amount + b.amount)


class Plain(KeyedProcessFunction):
    def process_element(self, value, ctx) -> Iterable[Sale]:
        yield value


class Sorted(Plain):
    requires_time_sorted_input = True


class Clock(Sorted):
    def process_element(self, value, ctx) -> Iterable[Sale]:
        yield value._replace(amount=ctx.timer_service().current_processing_time())


class Timed(Sorted):
    def process_element(self, value, ctx) -> Iterable[Sale]:
        ctx.timer_service().register_processing_time_timer(ctx.timer_service().current_processing_time() + 1)
        yield value


class ClockAsItComes(Plain):
    def process_element(self, value, ctx) -> Iterable[Sale]:
        yield value._replace(amount=ctx.timer_service().current_processing_time())


class Watermark(Sorted):
    def process_element(self, value, ctx) -> Iterable[Sale]:
        yield value._replace(amount=ctx.timer_service().current_watermark())


class Summing(Plain):
    def open(self, runtime_context):
        self.total = 0

    def process_element(self, value, ctx) -> Iterable[Sale]:
        self.total += value.amount
        yield value._replace(amount=self.total)


HELD = open(os.devnull)  # noqa: SIM115


class Once(iterations.IterationBody):
    def __init__(self, function):
        self.function = function

    def process(self, variables, data):
        once = variables[0].key_by("shop").process(self.function)
        return iterations.IterationBodyResult([once.filter(lambda sale: False)], [once])


def looped(p, function):
    (out,) = iterations.iterate_bounded_streams_until_termination([sales(p)], [], Once(function))
    return out


class Total(NamedTuple):
    shop: str
    amount: int


class First(ProcessJoinFunction):
    def process_element(self, left, right, ctx) -> Iterable[Sale]:
        yield left


LATE = OutputTag("late", Sale)


def at(sale):
    return int(str(sale.amount))


class Complete(WatermarkGenerator[Sale]):
    def on_event(self, event, event_timestamp, output):
        output.emit_watermark(event_timestamp)


class EverySecond(WatermarkGenerator[Sale]):
    def __init__(self, seen):
        self.seen = seen

    def on_event(self, event, event_timestamp, output):
        self.seen += 1
        if self.seen % 2 == 0:
            output.emit_watermark(event_timestamp)


def timed(p, *amounts, bound=0, function="amount", strategy=None):
    strategy = strategy or WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=bound))
    return p.from_collection([Sale("a", amount) for amount in amounts]).assign_timestamps_and_watermarks(
        strategy.with_timestamp_assigner(function)
    )


def hourly(stream):
    return stream.key_by("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))


def windows_joined(stream):
    joined = stream.join(stream).where("shop").equal_to("shop").window(TumblingEventTimeWindows.of(timedelta(hours=1)))
    return joined.apply(lambda left, right: left, Sale)


def interval_joined(stream):
    keyed = stream.key_by("shop")
    return keyed.interval_join(keyed).between(timedelta(0), timedelta(1)).process(First())


def is_young(sale):
    return sale.amount > time.time()


def with_import(sale):
    import time as clock

    return sale.amount > clock.time()


def sales(p, record=Sale):
    return p.from_collection([Sale("a", 1) if record is Sale else Noted("a", 1, "")], record)


def totals(p):
    return sales(p).key_by("shop").reduce(add).name("totals")


CASES = {
    "appending updates": (lambda p: totals(p).sink_to(FileSink("/x")), "counts-updates warning"),
    "upserting updates": (lambda p: totals(p).sink_to(DeltaSink("/x", mode="upsert", key="shop")), ""),
    "mapping updates, then upserting": (
        lambda p: totals(p).map(lambda s: s, Sale).sink_to(DeltaSink("/x", mode="upsert", key="shop")),
        "",
    ),
    "filtering updates": (lambda p: totals(p).filter(lambda s: s.amount > 9).print(), "counts-updates warning"),
    "counting updates": (lambda p: totals(p).key_by("amount").max("shop").print(), "counts-updates warning"),
    "appending what is not rolled": (lambda p: sales(p).sink_to(FileSink("/x")), ""),
    "sum of the only other field": (lambda p: sales(p).key_by("shop").sum("amount").print(), ""),
    "sum with other fields": (lambda p: sales(p, Noted).key_by("amount").max("note").print(), "other-fields warning"),
    "max_by with other fields": (lambda p: sales(p, Noted).key_by("amount").max_by("note").print(), ""),
    "a key that may be None": (lambda p: sales(p, Noted).key_by("shop").reduce(add).print(), "null-key note"),
    "a function that may depend on order": (lambda p: sales(p).key_by("shop").process(Plain()).print(), "order note"),
    "a function with sorted input": (lambda p: sales(p).key_by("shop").process(Sorted()).print(), ""),
    "a function that reads the clock": (lambda p: sales(p).key_by("shop").process(Clock()).print(), "clock warning"),
    "a function of the time of day": (
        lambda p: sales(p).map(lambda s: s._replace(amount=int(time.time())), Sale).print(),
        "clock warning",
    ),
    "a helper of the time of day": (lambda p: sales(p).filter(lambda s: is_young(s)).print(), "clock warning"),
    "a function that imports the clock": (lambda p: sales(p).filter(with_import).print(), "clock warning"),
    "a function of today": (
        lambda p: sales(p).filter(lambda s: datetime.now().year > s.amount).print(),
        "clock warning",
    ),
    "a function of chance": (lambda p: sales(p).filter(lambda s: random.random() < 0.5).print(), "clock warning"),
    "a combination by chance": (
        lambda p: sales(p).key_by("shop").reduce(lambda a, b: a if random.random() < 0.5 else b).print(),
        "clock warning",
    ),
    "a function that only parses times": (
        lambda p: sales(p).filter(lambda s: datetime.fromtimestamp(s.amount).year > 2000).print(),
        "",
    ),
    "a function that reads the watermark": (
        lambda p: sales(p).key_by("shop").process(Watermark()).print(),
        "watermark warning",
    ),
    "event times from the clock": (
        lambda p: hourly(timed(p, 1, function=IngestionTimeAssigner())).sum("amount").print(),
        "clock warning, late-records warning",
    ),
    "a timestamp assigner that reads the clock": (
        lambda p: hourly(timed(p, 1, function=lambda sale: time.time_ns())).sum("amount").print(),
        "clock warning, late-records warning",
    ),
    "a watermark generator that counts": (
        lambda p: timed(p, 1, strategy=WatermarkStrategy.for_generator(lambda: EverySecond(0))).print(),
        "generator note",
    ),
    "windows by the watermarks of a generator": (
        lambda p: hourly(timed(p, 1, 2, strategy=WatermarkStrategy.for_generator(Complete))).sum("amount").print(),
        "late-records warning",
    ),
    "windows over records in order": (lambda p: hourly(timed(p, 1, 2)).sum("amount").print(), "late-records note"),
    "windows over records that the bound covers": (
        lambda p: hourly(timed(p, 9, 2, bound=7)).sum("amount").print(),
        "late-records note",
    ),
    "windows over records that may be late": (
        lambda p: hourly(timed(p, 9, 1, bound=7)).sum("amount").print(),
        "late-records warning",
    ),
    "windows over records of which nobody knows": (
        lambda p: hourly(timed(p, 1, function=at)).sum("amount").print(),
        "late-records warning",
    ),
    "windows with no watermarks": (
        lambda p: hourly(timed(p, 9, 1, strategy=WatermarkStrategy.no_watermarks())).sum("amount").print(),
        "",
    ),
    "windows with a side output": (
        lambda p: hourly(timed(p, 9, 1)).side_output_late_data(LATE).sum("amount").print(),
        "late-records warning",
    ),
    "windows with allowed lateness": (
        lambda p: hourly(timed(p, 9, 1)).allowed_lateness(timedelta(1)).sum("amount").print(),
        "late-records warning",
    ),
    "windows of columns": (
        lambda p: hourly(timed(p, 9, 1)).agg(F.sum("amount").alias("amount"), output_type=Total).print(),
        "late-records warning",
    ),
    "a join of windows": (lambda p: windows_joined(timed(p, 9, 1)).print(), "late-records warning, windows note"),
    "a join of intervals": (lambda p: interval_joined(timed(p, 9, 1)).print(), "late-records warning"),
    "a function in an iteration": (lambda p: looped(p, ClockAsItComes()).print(), "clock warning, order note"),
    "a function in an iteration that keeps something in itself": (
        lambda p: looped(p, Summing()).print(),
        "attributes note, order note",
    ),
    "a function with a value that cannot be compared": (
        lambda p: sales(p).filter(lambda sale: HELD is not None).print(),
        "left-out note",
    ),
    "a function with processing-time timers": (
        lambda p: sales(p).key_by("shop").process(Timed()).print(),
        "clock note",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_lint_finds(case):
    build, expected = CASES[case]
    pipeline = Pipeline("p")
    build(pipeline)
    found = {f"{f.rule} {f.severity}" for f in pipeline.plan().findings}
    assert ", ".join(sorted(found)) == expected


def test_an_operator_that_leads_to_no_sink_is_noted_by_name():
    pipeline = Pipeline("p")
    rows = pipeline.from_collection([1])
    rows.map(lambda v: v, int).name("forgotten")
    rows.print()
    assert [f.message for f in pipeline.plan().findings] == [
        "its output is not used: 'forgotten' leads to no sink, and it does not run"
    ]
