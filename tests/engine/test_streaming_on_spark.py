"""STREAMING on Spark: the same pipelines, the same results, over whatever micro-batches and restarts."""

from collections.abc import Iterable
from typing import NamedTuple

from dagster_unified.api import (
    KeyedProcessFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    Pipeline,
    ValueStateDescriptor,
)
from dagster_unified.connectors import DeltaSink, ParquetSource
from tests.support import arrive, table_rows


class Row(NamedTuple):
    key: str
    at: int
    amount: int


def add(a: Row, b: Row) -> Row:
    return Row(a.key, max(a.at, b.at), a.amount + b.amount)


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


def test_lists_and_maps_that_outgrow_a_page(run_streaming, tmp_path):
    parts = [
        [Row("a", 0, i) for i in range(3000)],
        [Row("a", 0, i) for i in range(2000, 4000)] + [Row("a", 0, -1)],
        [Row("a", 0, 7), Row("a", 0, -1)],
    ]
    arrive(tmp_path / "in", *parts)
    pipeline = Pipeline("p")
    rows = pipeline.from_source(ParquetSource(str(tmp_path / "in"), Row, max_files_per_trigger=1))
    rows.key_by("key").process(Hoard()).sink_to(DeltaSink(str(tmp_path / "out"), mode="append"))
    assert run_streaming(pipeline) == "finished"
    assert table_rows(tmp_path / "out") == [("a", 1, 7), ("a", 4000, sum(range(3000)) + sum(range(2000, 4000)))]


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


def test_a_sink_that_unites_streams_makes_no_operator_run_again(run_streaming, tmp_path):
    pipeline = Pipeline("p")
    rows = pipeline.from_collection([Row("a", 0, 1), Row("b", 0, 2)], Row).key_by("key")
    noted, notes = rows.process(Noted(str(tmp_path / "notes"))), tmp_path / "notes"
    noted.union(rows.reduce(add), noted.map(add_one)).sink_to(DeltaSink(str(tmp_path / "out"), mode="append"))
    assert run_streaming(pipeline) == "finished"
    assert sorted(notes.read_text().splitlines()) == ["a 1", "b 2"]
    assert [amount for _, _, amount in table_rows(tmp_path / "out")] == [1, 1, 2, 2, 2, 3]


def add_one(row: Row) -> Row:
    return row._replace(amount=row.amount + 1)
