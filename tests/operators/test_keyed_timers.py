"""Timers in whole pipelines, in both modes."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from dagster_unified.api import KeyedProcessFunction, OutputTag, Pipeline, TimeDomain, WatermarkStrategy
from dagster_unified.errors import UnsupportedError
from dagster_unified.testing import KeyedHarness, ManualClock, run_pipeline
from tests.support import MODES, results


class Row(NamedTuple):
    key: str
    at: int


def keyed(function, rows, mode, timestamped=True, options=None):
    pipeline = Pipeline("p")
    stream = pipeline.from_collection(rows)
    if timestamped:
        stream = stream.assign_timestamps_and_watermarks(
            WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
        )
    out = stream.key_by("key").process(function, str)
    out.print("out")
    out.get_side_output(LATE).print("late")
    return run_pipeline(pipeline, mode, options=options, clock=ManualClock(5_000))


LATE = OutputTag("late", int)


class OutOfOrder(KeyedProcessFunction):
    def process_element(self, value, ctx):
        for at in (30, 10, 20, 10):
            ctx.timer_service().register_event_time_timer(at)
        ctx.timer_service().delete_event_time_timer(20)

    def on_timer(self, timestamp, ctx):
        yield f"{ctx.get_current_key()}{timestamp} {ctx.timestamp()} {ctx.time_domain() is TimeDomain.EVENT_TIME}"
        yield LATE, timestamp


@MODES
def test_timers_fire_in_order_once_and_not_when_deleted(mode):
    result = keyed(OutOfOrder(), [Row("a", 1), Row("a", 2)], mode)
    assert result.sinks == {"out": ["a10 10 True", "a30 30 True"], "late": [10, 30]}


class Past(KeyedProcessFunction):
    def process_element(self, value, ctx):
        ctx.timer_service().register_event_time_timer(100)

    def on_timer(self, timestamp, ctx):
        yield str(timestamp)
        if timestamp == 100:
            ctx.timer_service().register_event_time_timer(50)


@MODES
def test_a_timer_registered_by_a_timer_fires_although_its_time_has_passed(mode):
    assert keyed(Past(), [Row("a", 1)], mode).sinks["out"] == ["100", "50"]


CHAIN = "pipeline.event-time.end-of-input-chain"


class Forever(KeyedProcessFunction):
    """Every timer registers the next one. Gives up after 1,000, so that a missing bound is an error and not a hang."""

    def __init__(self):
        self.fired = 0

    def process_element(self, value, ctx):
        ctx.timer_service().register_event_time_timer(value.at)

    def on_timer(self, timestamp, ctx):
        self.fired += 1
        if self.fired > 1_000:
            raise RecursionError("the chain of timers does not end")
        yield str(timestamp)
        ctx.timer_service().register_event_time_timer(timestamp + 1)


@MODES
@pytest.mark.parametrize(("options", "generations"), [({}, 16), ({CHAIN: 3}, 3), ({CHAIN: 0}, 0)])
def test_a_chain_of_timers_ends_some_generations_past_the_end_and_is_counted(mode, options, generations):
    # The timer at 5 is not past the end; the one at 6 is, and 16 generations follow it where no option says otherwise.
    result = keyed(Forever(), [Row("a", 5)], mode, options=options)
    assert result.sinks["out"] == [str(t) for t in range(5, 6 + 1 + generations)]
    assert result.metrics.counters == {"timers past the end of input, not followed": 1}


@MODES
def test_a_chain_of_timers_ends_also_where_records_have_no_event_time(mode):
    assert len(keyed(Forever(), [Row("a", 5)], mode, timestamped=False).sinks["out"]) == 17


def test_a_chain_of_timers_ends_also_in_the_harness():
    harness = KeyedHarness(Forever())
    harness.element("a", Row("a", 5), timestamp=5)
    assert len(harness.end_of_input()) in (17, 18)  # the timer at 5 may count as the first of the chain


def test_a_later_source_elsewhere_in_the_pipeline_ends_a_chain_at_the_same_place_in_both_modes():
    def ran(mode):
        pipeline = Pipeline("p")
        by_at = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
        pipeline.from_collection([Row("a", 1)]).assign_timestamps_and_watermarks(by_at).key_by("key").process(
            Forever(), str
        ).print("out")
        pipeline.from_collection([Row("a", 50)], name="other").assign_timestamps_and_watermarks(by_at).print(
            "other out"
        )
        return run_pipeline(pipeline, mode).sinks["out"]

    assert ran("BATCH") == ran("STREAMING")


class Clocked(KeyedProcessFunction):
    def process_element(self, value, ctx):
        timers = ctx.timer_service()
        timers.register_processing_time_timer(timers.current_processing_time() + 1_000)
        timers.register_processing_time_timer(timers.current_processing_time() + 2_000)
        timers.delete_processing_time_timer(timers.current_processing_time() + 2_000)

    def on_timer(self, timestamp, ctx):
        yield f"{timestamp} {ctx.time_domain().name}"
        ctx.timer_service().register_processing_time_timer(timestamp + 1_000)
        if ctx.time_domain() is TimeDomain.PROCESSING_TIME:
            ctx.timer_service().register_event_time_timer(7)


@MODES
@pytest.mark.parametrize(
    ("options", "fired"),
    [
        ({}, ["6000 PROCESSING_TIME", "7 EVENT_TIME"]),
        ({"pipeline.processing-time.end-of-input": "IGNORE"}, []),
        ({"pipeline.processing-time.allow": "IGNORE"}, []),
    ],
)
def test_pending_processing_time_timers_fire_once_at_the_end_or_not_at_all(mode, options, fired):
    assert keyed(Clocked(), [Row("a", 1)], mode, options=options).sinks["out"] == fired


@MODES
def test_the_domain_is_known_in_on_timer_only(mode):
    class Asks(KeyedProcessFunction):
        def process_element(self, value, ctx) -> Iterable[str]:
            return [ctx.time_domain().name]

    with pytest.raises(UnsupportedError, match="known in on_timer only"):
        keyed(Asks(), [Row("a", 1)], mode)


class Nested(NamedTuple):
    place: Row
    at: int


class KeyText(KeyedProcessFunction):
    def process_element(self, value, ctx):
        yield repr(ctx.get_current_key())


@MODES
@pytest.mark.parametrize(
    ("key", "python", "shown"),
    [
        ("at", None, "3"),
        (lambda r: r.at, None, "3"),
        (lambda r: r.at + 1, int, "4"),
        (lambda r: (r.at, r.at + 1), tuple[int, int], "(3, 4)"),
        (lambda r: (r.at,), tuple[int], "(3,)"),
        ("place", None, "Row(key='x', at=2)"),
        (lambda r: (r.place.at, 1), tuple[int, int], "(2, 1)"),
    ],
    ids=["field", "reads a field", "computes", "tuple", "tuple of one", "nested record", "field of a nested record"],
)
def test_the_current_key_is_what_the_key_function_gives(mode, key, python, shown):
    made = Pipeline("p").from_collection([Nested(Row("x", 2), 3)]).key_by(key, key_type=python).process(KeyText(), str)
    assert results(made, mode) == [shown]


@MODES
@pytest.mark.parametrize("python", [int, tuple[int, int]], ids=["scalar", "tuple"])
def test_a_key_function_that_gives_none_is_an_error_that_says_what_to_do(mode, python):
    made = Pipeline("p").from_collection([1]).key_by(lambda v: None, key_type=python).process(KeyText(), str)
    with pytest.raises(Exception, match=r"key.* is None for .*filter such records out"):
        results(made, mode)


class OnlyInTimers(KeyedProcessFunction[str, tuple[str, int], str]):
    def process_element(self, value: tuple[str, int], ctx: KeyedProcessFunction.Context[str]) -> None:
        ctx.timer_service().register_event_time_timer(value[1])

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext[str]) -> list[str]:
        return [f"{ctx.get_current_key()} at {timestamp}"]


@MODES
def test_a_function_that_emits_in_its_timers_only_may_say_that_process_element_returns_nothing(mode):
    made = Pipeline("p").from_collection([("a", 5)]).key_by(lambda row: row[0], key_type=str).process(OnlyInTimers())
    assert results(made, mode) == ["a at 5"]
