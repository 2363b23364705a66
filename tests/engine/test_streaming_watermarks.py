"""The watermark moves between two micro-batches: what it makes due comes before the records that came after it."""

from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from dagster_unified.api import (
    KeyedBroadcastProcessFunction,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkGenerator,
    WatermarkStrategy,
)
from dagster_unified.api import functions as F
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.engine.streaming.job import Start, StreamingJob
from dagster_unified.testing import run_pipeline
from tests.support import arrive, committed, streaming


class Row(NamedTuple):
    key: str
    at: int
    amount: int


PARTS = [
    [Row("a", 1, 1), Row("a", 12, 2)],  # leaves the watermark at 11
    [Row("a", 20, 4), Row("a", 3, 8)],  # 3 is late; the watermark goes to 19
    [Row("a", 31, 16), Row("a", 13, 32)],  # 13 is late
]


class Total(KeyedProcessFunction):
    """Five after each record, tells the total by then and the watermark."""

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))

    def process_element(self, value, ctx) -> Iterable[Row]:
        self.total.update((self.total.value() or 0) + value.amount)
        ctx.timer_service().register_event_time_timer(value.at + 5)

    def on_timer(self, timestamp, ctx) -> Iterable[Row]:
        yield Row(ctx.get_current_key(), timestamp, self.total.value())


class Sorted(Total):
    requires_time_sorted_input = True


RULES = MapStateDescriptor("rules", str, int)


class LastRule(KeyedBroadcastProcessFunction):
    """Five after each record, tells the last rule by then."""

    def process_element(self, value, ctx) -> Iterable[Row]:
        ctx.timer_service().register_event_time_timer(value.at + 5)

    def process_broadcast_element(self, value, ctx):
        ctx.get_broadcast_state(RULES).put(value.key, value.amount)

    def on_timer(self, timestamp, ctx) -> Iterable[Row]:
        yield Row(ctx.get_current_key(), timestamp, ctx.get_broadcast_state(RULES).get(ctx.get_current_key()) or 0)


LATE = OutputTag("late", Row)


def add(a: Row, b: Row) -> Row:
    return Row(b.key, max(a.at, b.at), a.amount + b.amount)


def windowed(stream):
    return (
        stream.key_by("key")
        .window(TumblingEventTimeWindows.of(timedelta(milliseconds=10)))
        .side_output_late_data(LATE)
        .reduce(add)
    )


class Tens(WatermarkGenerator[Row]):
    """A record two after a ten says that all before that ten have come."""

    def on_event(self, event, event_timestamp, output):
        if event.at % 10 == 2:
            output.emit_watermark(event.at - 3)


def punctuated(rows):
    strategy = WatermarkStrategy.for_generator(Tens).with_timestamp_assigner("at")
    return windowed(rows.assign_timestamps_and_watermarks(strategy))


def totals(rows):
    return rows.key_by("key").process(Total())


STREAMS = {
    "totals": totals,
    "sorted": lambda rows: rows.key_by("key").process(Sorted()),
    "rules": lambda rows: rows.key_by("key").connect(rows.broadcast(RULES)).process(LastRule()),
    "windows": windowed,
    "late": lambda rows: windowed(rows).get_side_output(LATE),
    "punctuated": punctuated,
    "punctuated late": lambda rows: punctuated(rows).get_side_output(LATE),
    "chained": lambda rows: windowed(totals(rows)),
    "chained late": lambda rows: windowed(totals(rows)).get_side_output(LATE),
    "chained through a reduce": lambda rows: windowed(windowed(rows).key_by("key").reduce(lambda a, b: b)),
    "chained through columns": lambda rows: windowed(windowed(rows).with_columns({"amount": F.col("amount") * 2}, Row)),
}


def timed(rows):
    return rows.assign_timestamps_and_watermarks(
        WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    )


@pytest.fixture(scope="module")
def streamed(spark, tmp_path_factory):
    """Runs streams over PARTS, a micro-batch for each, as one job; gives each stream's records by name."""
    folder = tmp_path_factory.mktemp("watermarks")
    arrive(folder / "in", *PARTS)
    pipeline = Pipeline("p")
    rows = timed(pipeline.from_source(ParquetSource(str(folder / "in"), Row, max_files_per_trigger=1)))
    for name, stream in STREAMS.items():
        stream(rows).sink_to(FileSink(str(folder / name), name=name))
    options = streaming(folder, 2)
    assert StreamingJob(pipeline.plan(options), spark, Start("test")).run() == "finished"

    def found(name):
        return [
            tuple(r.values())
            for file in sorted((folder / name).glob("epoch-*"))
            for r in pq.read_table(file).to_pylist()
        ]

    return found


def test_a_due_timer_fires_before_the_records_of_the_next_micro_batch(streamed):
    assert streamed("totals") == [("a", 6, 3), ("a", 8, 15), ("a", 17, 15), ("a", 18, 63), ("a", 25, 63), ("a", 36, 63)]


def test_a_record_is_late_by_the_watermark_of_the_micro_batches_before(streamed):
    assert streamed("windows") == [("a", 1, 1), ("a", 12, 2), ("a", 20, 4), ("a", 31, 16)]
    assert streamed("late") == [("a", 3, 8), ("a", 13, 32)]


def test_a_record_is_late_by_the_watermark_that_a_generator_emitted(streamed):
    assert streamed("punctuated") == [("a", 1, 1), ("a", 13, 34), ("a", 20, 4), ("a", 31, 16)]
    assert streamed("punctuated late") == [("a", 3, 8)]


def test_in_batch_no_record_is_late_for_a_generator(run_on_spark, tmp_path):
    pipeline = Pipeline("p")
    windows = punctuated(timed(pipeline.from_collection([row for part in PARTS for row in part], Row)))
    windows.sink_to(FileSink(str(tmp_path / "windows")))
    windows.get_side_output(LATE).sink_to(FileSink(str(tmp_path / "late")))
    run_on_spark(pipeline)
    rows = pq.read_table(tmp_path / "windows").to_pylist()
    assert [tuple(row.values()) for row in rows] == [("a", 3, 9), ("a", 13, 34), ("a", 20, 4), ("a", 31, 16)]
    assert pq.read_table(tmp_path / "late").num_rows == 0


def test_time_sorted_input_is_released_before_the_records_of_the_next_micro_batch(streamed):
    assert streamed("sorted") == [("a", 6, 1), ("a", 8, 11), ("a", 17, 11), ("a", 18, 47), ("a", 25, 47), ("a", 36, 63)]


def test_a_timer_sees_broadcast_state_from_before_the_next_micro_batch(streamed):
    assert streamed("rules") == [("a", 6, 2), ("a", 8, 8), ("a", 17, 8), ("a", 18, 32), ("a", 25, 32), ("a", 36, 32)]


def test_what_the_watermark_makes_due_is_not_late_downstream(streamed):
    assert streamed("chained") == [("a", 6, 3), ("a", 17, 15), ("a", 25, 63), ("a", 36, 63)]
    assert streamed("chained late") == [("a", 8, 15), ("a", 18, 63)]  # their timers were late already
    assert streamed("chained through a reduce") == [("a", 1, 1), ("a", 12, 2), ("a", 20, 4), ("a", 31, 16)]
    assert streamed("chained through columns") == [("a", 1, 2), ("a", 12, 4), ("a", 20, 8), ("a", 31, 32)]


@pytest.mark.parametrize("name", STREAMS)
def test_the_harness_gives_the_same(streamed, name):
    pipeline = Pipeline("p")
    STREAMS[name](timed(pipeline.from_collection([row for part in PARTS for row in part], Row))).print("out")
    assert streamed(name) == run_pipeline(pipeline, "STREAMING", watermark_interval=2).only()


class EveryThird(WatermarkGenerator[Row]):
    """Emits at every third record."""

    def __init__(self):
        self.count = 0

    def on_event(self, event, event_timestamp, output):
        self.count += 1
        if self.count % 3 == 0:
            output.emit_watermark(event_timestamp)


class Watermarks(KeyedProcessFunction):
    def process_element(self, value, ctx) -> Iterable[Row]:
        yield Row("w", value.at, max(ctx.timer_service().current_watermark(), -1))


def test_what_a_generator_keeps_goes_on_to_the_next_micro_batch_and_the_next_job(spark, tmp_path):
    def write(*moments):
        arrive(tmp_path / "in", *[[Row("a", at, at)] for at in moments], first=moments[0])

    def run(until):
        pipeline = Pipeline("remembering")
        source = ParquetSource(str(tmp_path / "in"), Row, max_files_per_trigger=1, monitor=True)
        strategy = WatermarkStrategy.for_generator(EveryThird).with_timestamp_assigner("at")
        stream = pipeline.from_source(source).assign_timestamps_and_watermarks(strategy)
        stream.key_by("key").process(Watermarks()).sink_to(FileSink(str(tmp_path / "out")))
        options = {"execution.runtime-mode": "STREAMING", "execution.checkpointing.dir": str(tmp_path / "checkpoints")}
        epochs = []
        job = StreamingJob(pipeline.plan(options), spark, Start("job", patience=0.5), committed(epochs))
        assert job.run(lambda: sum(epoch.rows_in for epoch in epochs) >= until, 0.02) == "stopped"

    write(1, 2, 3, 4)
    run(4)
    write(5, 6, 7, 8)
    run(4)
    found = pq.read_table(tmp_path / "out").to_pylist()
    marks = [mark for _, mark in sorted((row["at"], row["amount"]) for row in found)]
    assert marks == [-1, -1, -1, 3, 3, 3, 6, 6]
