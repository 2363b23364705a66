"""STREAMING on Spark: the same pipelines, the same results, over whatever micro-batches and restarts."""

import os
from collections.abc import Iterable
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
)
from dagster_unified.connectors import DeltaSink, ParquetSource


class Row(NamedTuple):
    key: str
    at: int
    amount: int


def add(a: Row, b: Row) -> Row:
    return Row(a.key, max(a.at, b.at), a.amount + b.amount)


@pytest.fixture
def table(tmp_path):
    from deltalake import DeltaTable

    return lambda name: sorted(
        tuple(r.values()) for r in DeltaTable(str(tmp_path / name)).to_pyarrow_table().to_pylist()
    )


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
