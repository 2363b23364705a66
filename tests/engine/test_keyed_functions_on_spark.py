"""State in `map`, `flat_map` and their connected forms on Spark, in both modes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from dagster_unified.api import (
    CoFlatMapFunction,
    MapFunction,
    Pipeline,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from dagster_unified.connectors import DeltaSink, FileSink
from dagster_unified.state import Savepoint
from tests.operators.test_keyed_functions import CountWindowAverage
from tests.support import MODES, table_rows


class Row(NamedTuple):
    key: str
    number: int


class Numbered(CoFlatMapFunction):
    """Numbers the records of a key, and says how many of the other stream its instance has met before."""

    def __init__(self):
        self.met = 0

    def open(self, context):
        self.count = context.get_state(ValueStateDescriptor("count", int))

    def flat_map1(self, value) -> Iterable[Row]:
        self.count.update((self.count.value() or 0) + 1)
        yield Row(value.key, self.count.value() + 100 * self.met)

    def flat_map2(self, value) -> Iterable[Row]:
        self.met += 1
        return []


@dataclass(frozen=True)
class Place:
    shop: str
    floor: Floor


@dataclass(frozen=True)
class Floor:
    number: int
    name: str | None


class Counted(MapFunction):
    """Counts the records of a key that is a frozen class."""

    def open(self, context):
        self.count = context.get_state(ReducingStateDescriptor("count", add, int))

    def map(self, value) -> str:
        self.count.add(1)
        return f"{value.key} {self.count.get()}"


def place(row) -> Place:
    return Place(row.key, Floor(1, None if row.key == "a" else "first"))


@pytest.mark.a_day(1)
@MODES
def test_folders_may_have_what_patterns_have(run_in, mode, spark, tmp_path):
    folder = tmp_path / "w[1]{a} b#c*?"
    pipeline = Pipeline("p")
    rows = pipeline.from_collection([Row("a", 0), Row("b", 0), Row("a", 1)], Row, "rows").key_by("key")
    counted = rows.map(Counted()).uid("counted")
    counted.sink_to(DeltaSink(str(folder / "table"), name="table"))
    counted.sink_to(FileSink(str(folder / "files"), name="files"))
    streaming = {"execution.checkpointing.dir": str(folder / "checkpoints")} if mode == "STREAMING" else {}
    run_in[mode](pipeline, {**streaming, "execution.savepoint.path": str(folder / "left")})
    assert table_rows(folder / "table") == [("a 1",), ("a 2",), ("b 1",)]
    files = pq.read_table(sorted((folder / "files").glob("*.parquet"))).column(0).to_pylist()
    assert sorted(files) == ["a 1", "a 2", "b 1"]
    left = Savepoint.read(str(folder / "left")).keyed_state("counted", spark=spark)
    assert sorted((row["key"], row["count"]) for row in left.collect()) == [("a", 2), ("b", 1)]


@pytest.mark.a_day(1)
@MODES
def test_the_first_example_of_flinks_page_on_state_and_a_key_beside_a_stream_without_one(run_in, mode, tmp_path):
    pipeline = Pipeline("p")
    values = pipeline.from_collection([(1, 3), (1, 5), (2, 1), (1, 7), (1, 4), (1, 2)], tuple[int, int], "values")
    # Values of equal event time come in no defined order, so that each average is of two equal ones, or all are of one
    # pair.
    same = values.map(lambda v: (v[0], v[0] * 10), tuple[int, int]).key_by(lambda row: row[0], key_type=int)
    same.flat_map(CountWindowAverage()).sink_to(DeltaSink(str(tmp_path / "averages"), mode="append", name="averages"))
    keyed = pipeline.from_collection([Row("a", 0), Row("b", 0), Row("a", 1)], Row, "keyed").key_by("key")
    plain = pipeline.from_collection(["x"] * 3, str, "plain")
    keyed.connect(plain).flat_map(Numbered()).sink_to(
        DeltaSink(str(tmp_path / "numbered"), mode="append", name="numbered")
    )
    placed = pipeline.from_collection([Row("a", 0), Row("b", 0), Row("a", 1)], Row, "placed").key_by(place)
    placed.map(Counted()).sink_to(DeltaSink(str(tmp_path / "counted"), mode="append", name="counted"))
    run_in[mode](pipeline, {"parallelism.default": 1})
    assert table_rows(tmp_path / "counted") == [("a 1",), ("a 2",), ("b 1",)]
    assert table_rows(tmp_path / "averages") == [(1, 10), (1, 10)]
    numbered = table_rows(tmp_path / "numbered")
    if mode == "BATCH":  # in the one partition that there is, every record without a key comes first
        assert numbered == [("a", 301), ("a", 302), ("b", 301)]
    assert [(key, number % 100) for key, number in numbered] == [("a", 1), ("a", 2), ("b", 1)]
