"""Watermarks of the author's own: by what a record says, or by what a micro-batch has brought."""

import threading
from collections import deque
from datetime import date, datetime, timedelta, timezone
from typing import NamedTuple

import pytest

from dagster_unified.api import (
    KeyedProcessFunction,
    OutputTag,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkGenerator,
    WatermarkOutput,
    WatermarkStrategy,
)
from dagster_unified.connectors.structured import StructuredSource
from dagster_unified.errors import RecordTypeError, UserFunctionError
from dagster_unified.operators.time import MIN_TIMESTAMP
from dagster_unified.operators.watermarks import encoded_attributes, restore_attributes
from dagster_unified.testing import run_pipeline


class Event(NamedTuple):
    key: str
    at: int
    amount: int
    complete: int | None = None
    """Up to when every event has come."""


class Punctuated(WatermarkGenerator[Event]):
    def on_event(self, event: Event, event_timestamp: int, output: WatermarkOutput) -> None:
        if event.complete is not None:
            output.emit_watermark(event.complete)


class Behind(WatermarkGenerator[Event]):
    """Some milliseconds behind the latest event."""

    def __init__(self, bound: int) -> None:
        self.bound, self.latest = bound, 0

    def on_event(self, event: Event, event_timestamp: int, output: WatermarkOutput) -> None:
        self.latest = max(self.latest, event_timestamp)

    def on_periodic_emit(self, output: WatermarkOutput) -> None:
        output.emit_watermark(self.latest - self.bound - 1)


LATE = OutputTag("late", Event)
EVENTS = [Event("a", 1, 1), Event("a", 5, 2, 9), Event("a", 8, 4), Event("a", 12, 8), Event("a", 3, 16, 2)]


def windowed(strategy, events=EVENTS, key="key"):
    pipeline = Pipeline("p")
    stream = pipeline.from_collection(events, Event).assign_timestamps_and_watermarks(strategy)
    windows = stream.key_by(key).window(TumblingEventTimeWindows.of(timedelta(milliseconds=10)))
    sums = windows.side_output_late_data(LATE).reduce(lambda a, b: b._replace(amount=a.amount + b.amount))
    sums.map(lambda e: e.amount, int).print("sums")
    sums.get_side_output(LATE).map(lambda e: e.amount, int).print("late")
    return pipeline


def generated(supplier):
    return WatermarkStrategy.for_generator(supplier).with_timestamp_assigner("at")


def test_a_record_that_comes_after_the_watermark_of_another_is_late():
    found = run_pipeline(windowed(generated(Punctuated)), "STREAMING").sinks
    assert found == {"sums": [3, 8], "late": [4, 16]}


def test_batch_asks_no_generator():
    class Failing(Punctuated):
        def on_event(self, event, event_timestamp, output):
            raise ValueError("asked")

    assert run_pipeline(windowed(generated(Failing)), "BATCH").sinks == {"sums": [23, 8], "late": []}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_periodic_generator_does_as_the_strategy_that_it_spells_out(size):
    bounded = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=3)).with_timestamp_assigner("at")
    events = [Event("a", at, 1 << i) for i, at in enumerate((1, 11, 7, 15, 3, 26, 22, 12, 40))]

    def run(strategy):
        return run_pipeline(windowed(strategy, events), "STREAMING", micro_batch=size, watermark_interval=size).sinks

    assert run(generated(lambda: Behind(3))) == run(bounded)
    assert run(bounded)["late"]


def test_the_assigner_may_be_a_function():
    strategy = WatermarkStrategy.for_generator(Punctuated).with_timestamp_assigner(lambda event: event.at)
    assert run_pipeline(windowed(strategy), "STREAMING").sinks["late"] == [4, 16]


def test_a_watermark_may_be_a_moment():
    class Moments(Punctuated):
        def on_event(self, event, event_timestamp, output):
            output.emit_watermark(datetime.fromtimestamp((event.complete or 0) / 1000, timezone.utc))

    assert run_pipeline(windowed(generated(Moments)), "STREAMING").sinks["late"] == [4, 16]


def two_sources(second):
    """The late records of a source with this generator, and of a punctuated one whose records come after it."""
    pipeline = Pipeline("p")
    other = pipeline.from_source(StructuredSource("rate", Event, name="other"))
    first = pipeline.from_collection(EVENTS, Event, "first").assign_timestamps_and_watermarks(generated(Punctuated))
    both = other.assign_timestamps_and_watermarks(generated(second)).union(first)
    windows = both.key_by("key").window(TumblingEventTimeWindows.of(timedelta(milliseconds=10)))
    windows.side_output_late_data(LATE).sum("amount").get_side_output(LATE).map(lambda e: e.amount, int).print()
    return run_pipeline(pipeline, "STREAMING", {"other": [Event("b", 0, 1)]}).only()


class Silent(WatermarkGenerator[Event]):
    def on_event(self, event, event_timestamp, output):
        """Says nothing."""


class Idle(WatermarkGenerator[Event]):
    def on_event(self, event, event_timestamp, output):
        output.mark_idle()


class IdleAndBack(Idle):
    def on_periodic_emit(self, output):
        output.mark_active()


def test_a_generator_that_is_idle_holds_nothing_back():
    assert two_sources(Silent) == []
    assert sorted(two_sources(Idle)) == [4, 16]
    assert two_sources(IdleAndBack) == []


def test_what_a_generator_raises_names_the_operator_and_the_record():
    class Failing(Punctuated):
        def on_event(self, event, event_timestamp, output):
            raise ValueError("no")

    with pytest.raises(UserFunctionError, match=r"p: .*'timestamps': ValueError: no, at .*, on Event\(key='a', at=1"):
        run_pipeline(windowed(generated(Failing)), "STREAMING")


def test_what_a_periodic_generator_raises_names_the_operator():
    class Failing(Punctuated):
        def on_periodic_emit(self, output):
            raise ValueError("no")

    with pytest.raises(UserFunctionError, match=r"p: .*'timestamps': ValueError: no, at .*, on 'on_periodic_emit\(\)'"):
        run_pipeline(windowed(generated(Failing)), "STREAMING")


def test_a_watermark_that_is_no_moment_is_an_error():
    class Wrong(Punctuated):
        def on_event(self, event, event_timestamp, output):
            output.emit_watermark(1.5)

    with pytest.raises(RecordTypeError, match=r"'timestamps': a watermark is milliseconds \(int\) or a datetime, not"):
        run_pipeline(windowed(generated(Wrong)), "STREAMING")


def test_a_supplier_that_supplies_something_else_is_an_error():
    with pytest.raises(RecordTypeError, match=r"'timestamps': .* must give a WatermarkGenerator, and gave an int"):
        run_pipeline(windowed(generated(lambda: 5)), "STREAMING")


class EveryThird(WatermarkGenerator[Event]):
    """Emits at every third record."""

    def __init__(self) -> None:
        self.count = 0

    def on_event(self, event: Event, event_timestamp: int, output: WatermarkOutput) -> None:
        self.count += 1
        if self.count % 3 == 0:
            output.emit_watermark(event_timestamp)


class Read(KeyedProcessFunction):
    def process_element(self, value: Event, ctx) -> list[int]:
        return [ctx.timer_service().current_watermark()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_a_generator_keeps_goes_on_to_the_next_micro_batch(size):
    pipeline = Pipeline("p")
    events = pipeline.from_collection([Event("a", at, 1) for at in range(1, 8)], Event)
    events.assign_timestamps_and_watermarks(generated(EveryThird)).key_by("key").process(Read()).print()
    found = run_pipeline(pipeline, "STREAMING", micro_batch=size, seed=None).only()
    first = 4 if size == 2 else 3
    assert found == [*[MIN_TIMESTAMP] * first, *[3] * (6 - first), 6]


KEPT = [
    None, True, 3, -(2**40), 1.5, "text", b"bytes", [1, [2]], (1, "a"), {1, 2}, frozenset({1, 2}), deque([1, 2]),
    {"a": (1, {2: "b"})}, datetime(2024, 7, 1, 12, tzinfo=timezone.utc), date(2024, 7, 1),
]  # fmt: skip


@pytest.mark.parametrize("value", KEPT, ids=repr)
def test_what_a_generator_keeps_comes_back_as_it_was(value):
    generator, other = EveryThird(), EveryThird()
    generator.count = value
    restore_attributes(other, encoded_attributes(generator, ["count"], "p"))
    assert other.count == value
    assert type(other.count) is type(value)


def test_a_generator_that_keeps_what_no_state_holds_is_refused_before_anything_runs():
    class Locked(EveryThird):
        def __init__(self):
            super().__init__()
            self.last = threading.Lock()

        def on_event(self, event, event_timestamp, output):
            self.last = event

    says = r"p: operator 'timestamps': Locked keeps self\.last from record to record, and <unlocked .* \(lock\) cannot"
    with pytest.raises(RecordTypeError, match=says):
        windowed(generated(Locked)).plan({"execution.runtime-mode": "STREAMING"})
    assert windowed(generated(Locked)).plan({"execution.runtime-mode": "BATCH"})
