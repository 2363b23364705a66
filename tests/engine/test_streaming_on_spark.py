"""STREAMING on Spark: the same pipelines, the same results, over whatever micro-batches and restarts."""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_unified.api import (
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Pipeline,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from dagster_unified.connectors import DeltaSink, ParquetSource


class Row(NamedTuple):
    key: str
    at: int
    amount: int


def add(a: Row, b: Row) -> Row:
    return Row(a.key, max(a.at, b.at), a.amount + b.amount)


class Silence(KeyedProcessFunction):
    """Says when a key has been silent for ten, with what it had by then."""

    requires_time_sorted_input = True

    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", int))
        self.timer = context.get_state(ValueStateDescriptor("timer", int))

    def process_element(self, value, ctx) -> Iterable[Row]:
        self.total.update((self.total.value() or 0) + value.amount)
        if self.timer.value() is not None:
            ctx.timer_service().delete_event_time_timer(self.timer.value())
        self.timer.update(value.at + 10)
        ctx.timer_service().register_event_time_timer(value.at + 10)

    def on_timer(self, timestamp, ctx) -> Iterable[Row]:
        yield Row(ctx.get_current_key(), timestamp, self.total.value())


@pytest.fixture
def table(tmp_path):
    from deltalake import DeltaTable

    return lambda name: sorted(
        tuple(r.values()) for r in DeltaTable(str(tmp_path / name)).to_pyarrow_table().to_pylist()
    )


ROWS = [Row("a", 1, 1), Row("b", 2, 2), Row("a", 3, 3), Row("b", 30, 4), Row("c", 31, 5)]


def test_a_rolling_reduce_ends_with_the_totals(run_streaming, table, tmp_path):
    pipeline = Pipeline("p")
    pipeline.from_collection(ROWS).key_by("key").reduce(add).sink_to(
        DeltaSink(str(tmp_path / "out"), mode="upsert", key="key")
    )
    assert run_streaming(pipeline) == "finished"
    assert table("out") == [("a", 3, 4), ("b", 30, 6), ("c", 31, 5)]


def test_timers_fire_in_order_through_two_levels_to_the_end_of_input(run_streaming, table, tmp_path):
    pipeline = Pipeline("p")
    by_at = WatermarkStrategy.for_bounded_out_of_orderness(timedelta(milliseconds=5)).with_timestamp_assigner("at")
    rows = pipeline.from_collection(ROWS).assign_timestamps_and_watermarks(by_at)
    silences = rows.key_by("key").process(Silence()).name("silences")
    silences.sink_to(DeltaSink(str(tmp_path / "silences"), mode="append"))
    silences.map(lambda r: Row("all", r.at, r.amount), Row).key_by("key").reduce(add).sink_to(
        DeltaSink(str(tmp_path / "totals"), mode="upsert", key="key")
    )
    assert run_streaming(pipeline) == "finished"
    assert table("silences") == [("a", 13, 4), ("b", 12, 2), ("b", 40, 6), ("c", 41, 5)]
    assert table("totals") == [("all", 41, 17)]


class Hoard(KeyedProcessFunction):
    """Keeps everything in a list and a map, until an amount of -1 clears both."""

    def open(self, context):
        self.items = context.get_list_state(ListStateDescriptor("items", int))
        self.by = context.get_map_state(MapStateDescriptor("by", int, int))

    def process_element(self, value: Row, ctx) -> Iterable[Row]:
        if value.amount < 0:
            yield Row(value.key, len(self.by.keys()), sum(self.items.get()))
            self.items.clear()
            self.by.clear()
        else:
            self.items.add(value.amount)
            self.by.put(value.amount, value.at)


def test_lists_and_maps_that_outgrow_a_page(run_streaming, table, tmp_path):
    parts = [
        [Row("a", 0, i) for i in range(3000)],
        [Row("a", 0, i) for i in range(2000, 4000)] + [Row("a", 0, -1)],
        [Row("a", 0, 7), Row("a", 0, -1)],
    ]
    (tmp_path / "in").mkdir()
    for number, rows in enumerate(parts):
        pq.write_table(pa.Table.from_pylist([r._asdict() for r in rows]), tmp_path / f"in/{number}.parquet")
        os.utime(tmp_path / f"in/{number}.parquet", (number, number))
    pipeline = Pipeline("p")
    rows = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Row, max_files_per_trigger=1))
    rows.key_by("key").process(Hoard()).sink_to(DeltaSink(str(tmp_path / "out"), mode="append"))
    assert run_streaming(pipeline) == "finished"
    assert table("out") == [("a", 1, 7), ("a", 4000, sum(range(3000)) + sum(range(2000, 4000)))]


class Noted(KeyedProcessFunction):
    """Writes down what it is given."""

    def __init__(self, file):
        self.file = file

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def process_element(self, value: Row, ctx) -> Iterable[Row]:
        with open(self.file, "a") as notes:
            notes.write(f"{value.key} {value.amount}\n")
        yield value


def test_a_sink_that_unites_streams_makes_no_operator_run_again(run_streaming, table, tmp_path):
    pipeline = Pipeline("p")
    rows = pipeline.from_collection([Row("a", 0, 1), Row("b", 0, 2)], Row).key_by("key")
    noted, notes = rows.process(Noted(str(tmp_path / "notes"))), tmp_path / "notes"
    noted.union(rows.reduce(add), noted.map(add_one)).sink_to(DeltaSink(str(tmp_path / "out"), mode="append"))
    assert run_streaming(pipeline) == "finished"
    assert sorted(notes.read_text().splitlines()) == ["a 1", "b 2"]
    assert [amount for _, _, amount in table("out")] == [1, 1, 2, 2, 2, 3]


def add_one(row: Row) -> Row:
    return row._replace(amount=row.amount + 1)
