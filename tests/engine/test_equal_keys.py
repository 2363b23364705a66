"""Keys that are equal and written differently are one in Spark, in both modes; a NaN is no key."""

import math
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from dagster_unified.api import Pipeline
from dagster_unified.api import functions as F
from dagster_unified.connectors import FileSink
from dagster_unified.errors import RecordTypeError
from tests.support import MODES


class Point(NamedTuple):
    x: float
    name: str


class Measured(NamedTuple):
    zero: float
    at: Point
    price: Decimal
    amount: int


class Total(NamedTuple):
    zero: float
    total: int


class TotalAt(NamedTuple):
    at: Point
    total: int


def moment(row: Measured) -> tuple[datetime, Decimal, float]:
    zone = timezone(timedelta(hours=row.amount % 5))
    return datetime(2024, 7, 1, 12, tzinfo=timezone.utc).astimezone(zone), row.price, row.zero


def add(one: Measured, other: Measured) -> Measured:
    return one._replace(amount=one.amount + other.amount)


def summed(rows, path):
    pipeline = Pipeline("equal")
    stream = pipeline.from_collection(rows, Measured, "rows").rebalance()
    streams = {
        "float": stream.key_by("zero").reduce(add).map(lambda row: row.amount, int),
        "nested": stream.key_by("at").reduce(add).map(lambda row: row.amount, int),
        "computed": stream.key_by(moment).reduce(add).map(lambda row: row.amount, int),
        "native": stream.key_by("zero").agg(F.sum("amount").alias("total"), output_type=Total),
        "native nested": stream.key_by("at").agg(F.sum("amount").alias("total"), output_type=TotalAt),
    }
    for name, totals in streams.items():
        totals.sink_to(FileSink(str(path / name), name=name))
    return pipeline


ROWS = [
    Measured(zero, Point(zero, "a"), Decimal(price), 1)
    for number in range(50)
    for zero, price in [(0.0, "17"), (-0.0, "17.00"), (0.0, "17.0")]
]


def largest(path):
    """The largest total of each sink: that of the key, if all records were of one."""
    found = {}
    for sink in sorted(path.iterdir()):
        table = pq.read_table(sink)
        found[sink.name] = max(table.column("total" if "total" in table.column_names else "value").to_pylist())
    return found


ALL = dict.fromkeys(["computed", "float", "native", "native nested", "nested"], len(ROWS))


@pytest.mark.a_day(1)
@MODES
def test_equal_keys_are_one(run_in, mode, tmp_path):
    run_in[mode](summed(ROWS, tmp_path / "out"))
    assert largest(tmp_path / "out") == ALL


@pytest.mark.a_day(1)
@pytest.mark.parametrize(("field", "output", "verb"), [("zero", Total, "is"), ("at", TotalAt, "has")])
def test_nan_is_no_key_of_a_native_aggregate(run_on_spark, run_streaming, tmp_path, field, output, verb):
    pipeline = Pipeline("unequal")
    stream = pipeline.from_collection([Measured(math.nan, Point(math.nan, "a"), Decimal(1), 1)], Measured, "rows")
    totals = stream.key_by(field).agg(F.sum("amount").alias("total"), output_type=output).name("op")
    totals.sink_to(FileSink(str(tmp_path / "out"), name="out"))
    message = f"operator 'op': the key '{field}' {verb} nan, which equals nothing"
    with pytest.raises(RecordTypeError, match=message):
        run_on_spark(pipeline)
    with pytest.raises(RecordTypeError, match=message):
        run_streaming(pipeline)
