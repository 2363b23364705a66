"""Values of other assets as records: what fits is taken as it is, what does not is an error that names the place."""

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import NamedTuple

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from dagster_unified.api import Pipeline
from dagster_unified.connectors import AssetSource, PrintSink
from dagster_unified.connectors.asset import table_of, values_of
from dagster_unified.errors import ConfigurationError, MalformedInputError, PipelineError
from dagster_unified.graph.options import Configuration
from dagster_unified.graph.plan import plan
from dagster_unified.records import record_type
from dagster_unified.testing import run_pipeline


class Order(NamedTuple):
    id: int
    shop: str
    price: Decimal
    weight: float | None
    day: date
    at: datetime
    took: timedelta


ORDERS = [
    Order(
        9007199254740993, "a", Decimal("1.10"), None, date(2024, 1, 1), datetime(2024, 1, 1, 10, tzinfo=timezone.utc),
        timedelta(seconds=1),
    ),
    Order(
        2, "b", Decimal("2.20"), 0.5, date(2024, 1, 2), datetime(2024, 1, 2, 10, tzinfo=timezone.utc), timedelta(days=1)
    ),
]  # fmt: skip
RECORDS = record_type(Order)
ROWS = [order._asdict() for order in ORDERS]


def taken(value, record=Order):
    records = record_type(record)
    batches = table_of(value, records, "here").to_batches()
    return [taken for batch in batches for taken in records.from_batch(batch)]


@pytest.mark.parametrize(
    "value",
    [
        ORDERS,
        tuple(ORDERS),
        pa.Table.from_pylist(ROWS),
        pa.Table.from_pylist([{"more": 1, **row} for row in ROWS]),
        pa.RecordBatch.from_pylist(ROWS),
        pa.concat_tables([pa.Table.from_pylist([row], RECORDS.schema) for row in ROWS]),
        pd.DataFrame(ROWS),
        pl.DataFrame(ROWS),
        pl.DataFrame(ROWS).lazy(),
        pl.DataFrame(ROWS, schema_overrides={"shop": pl.Categorical, "id": pl.UInt64, "at": pl.Datetime("ns", "UTC")}),
    ],
    ids=["list", "tuple", "table", "further columns", "batch", "chunks", "pandas", "polars", "lazy", "other types"],
)
def test_a_value_is_taken_as_it_is(value):
    assert taken(value) == ORDERS


def test_no_rows_fit_too():
    assert taken([]) == taken(RECORDS.schema.empty_table()) == []


class One(NamedTuple):
    value: int


class Half(NamedTuple):
    value: float


class Price(NamedTuple):
    value: Decimal


class Moment(NamedTuple):
    value: datetime


LARGE = pa.scalar("12345678901234567890123.1").cast(pa.decimal128(30, 1)).as_py()
"""What Arrow casts to another number, without a word."""


@pytest.mark.parametrize(
    ("value", "record", "words"),
    [
        (pa.table({"vlaue": [1]}), One, r"here has no column 'value'; did you mean 'vlaue'\?, which One"),
        (pa.table({"value": [1.0]}), One, "here has a column 'value' of double, and a value of it could change on its"),
        (pa.table({"value": ["2024-01-01"]}), Moment, "here has a column 'value' of string, and a value of it could"),
        (pa.table({"value": [2**53 + 1]}), Half, "here: column 'value' does not fit double: Integer value"),
        (pa.table({"value": pa.array([1], pa.timestamp("ns"))}), Moment, "here: column 'value' does not fit timestamp"),
        (pa.table({"value": [LARGE]}), Price, "here: column 'value' does not fit decimal128"),
        (pa.table({"value": [1, None]}), One, "here does not fit: field 'value' of One is null"),
        (
            pd.DataFrame({"value": [1, None]}),
            One,
            "here has a column 'value' of double, and a value of it could change",
        ),
        ([One(1), 2], One, r"here does not fit: expected a One\(.*\), got 2 \(int\)"),
        ([One("1")], One, "here does not fit: field 'value' of One is declared int, and is '1'"),
        ("text", One, "here does not fit: 'text' is one value, whose letters would be the records"),
        (7, One, r"here does not fit: 7 \(int\) is no collection"),
    ],
)
def test_what_would_be_changed_is_refused(value, record, words):
    with pytest.raises(MalformedInputError, match=words):
        taken(value, record)


def test_the_harness_takes_records_and_streaming_does_not_follow_a_value():
    pipeline = Pipeline("shops")
    ones = pipeline.from_source(AssetSource("shop/orders", One))
    ones.map(lambda one: One(one.value + 1), output_type=One).sink_to(PrintSink(name="more"))
    assert run_pipeline(pipeline, "BATCH", {"orders": [One(1)]}).sinks["more"] == [One(2)]
    with pytest.raises(PipelineError) as raised:
        plan(pipeline.graph(), Configuration.of({"execution.runtime-mode": "STREAMING"}))
    assert str(raised.value) == (
        "shops: source 'orders' (what asset shop/orders returns): STREAMING cannot follow a value in memory; write the"
        " asset to a table, and read that, or launch with execution.runtime-mode=BATCH"
    )
    with pytest.raises(PipelineError, match="'shop//orders' is no key of an asset"):
        AssetSource("shop//orders", One)


def test_values_of_partitions_go_to_the_partitions_of_a_run():
    source = AssetSource("orders", One)
    assert values_of("v", ["a"], source) == {"a": ["v"]}
    assert values_of({"00": "v", "01": "w"}, ["a"], source) == {"a": ["v", "w"]}
    assert values_of({"b": "w", "a": "v"}, ["a", "b"], source) == {"a": ["v"], "b": ["w"]}
    assert values_of("v", ["a", "b"], source.partitioned_by("value")) == {"a": ["v"], "b": ["v"]}
    for value in ("v", {"00": "v", "01": "w", "02": "x"}):
        with pytest.raises(ConfigurationError, match=r"source 'orders' .*: the run is of several partitions, and its"):
            values_of(value, ["a", "b"], source)


def test_without_a_step_there_is_no_value(spark):
    pipeline = Pipeline("shops")
    pipeline.from_source(AssetSource("shop/orders", One)).print()
    with pytest.raises(
        ConfigurationError, match=r"source 'orders' .*: only a step of its own stage, in BATCH under Dag"
    ):
        pipeline.execute(spark=spark).result()
