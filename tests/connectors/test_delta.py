"""The Delta sink on Spark: what each mode leaves in the table, once, whatever is repeated."""

import subprocess
import sys
from typing import NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dagster_unified.api import DeltaSink, Pipeline
from dagster_unified.connectors.base import WriteContext
from dagster_unified.errors import PipelineError, SinkError
from tests.depth import examples


class Stock(NamedTuple):
    shop: str | None
    item: str
    amount: int


@pytest.fixture
def write(spark, tmp_path):
    def run(rows, execution="first", schema="shop string, item string, amount long", **options):
        sink = DeltaSink(str(tmp_path / "table"), **options)
        return sink.write(spark.createDataFrame(rows, schema), WriteContext(spark, "p", "stage", execution, "all"))

    return run


@pytest.fixture
def table(tmp_path):
    return lambda: sorted(
        (Stock(**r) for r in DeltaTable(str(tmp_path / "table")).to_pyarrow_table().to_pylist()), key=str
    )


A, B, C = Stock("a", "pen", 1), Stock("b", "pen", 2), Stock(None, "pen", 3)


def test_append_adds_and_a_repeated_execution_does_not(write, table):
    write([A], "first", mode="append")
    assert write([A], "first", mode="append").repeated
    write([B], "second", mode="append")
    assert table() == sorted([A, B], key=str)


def test_overwrite_replaces_the_table_or_the_partitions_that_are_written(write, table):
    write([A, B, C], "first", partition_by="shop")
    write([A._replace(amount=9)], "second", partition_by="shop")
    assert table() == sorted([A._replace(amount=9), B, C], key=str)


def test_overwrite_replaces_the_whole_table_where_it_has_no_partitions(write, table):
    write([A, B], "first")
    write([C], "second")
    assert table() == [C]


def test_upsert_replaces_by_key_and_a_missing_key_is_one_key(write, table):
    write([A, C], "first", mode="upsert", key=("shop", "item"))
    write([B, C._replace(amount=9)], "second", mode="upsert", key=("shop", "item"))
    assert table() == sorted([A, B, C._replace(amount=9)], key=str)


def test_an_execution_that_wrote_nothing_is_remembered_as_well(write, table):
    write([A], "first", mode="upsert", key=("shop", "item"))
    write([], "second", mode="upsert", key=("shop", "item"))
    assert write([B], "second", mode="upsert", key=("shop", "item")).repeated
    assert table() == [A]


def test_columns_that_the_table_does_not_have_are_an_error_and_nothing_is_written(write, table):
    write([A])
    with pytest.raises(SinkError, match="no column 'price'"):
        write([(1,)], "second", "price long")
    with pytest.raises(SinkError, match="column 'amount' is string, and bigint in the table"):
        write([("a", "pen", "1")], "second", "shop string, item string, amount string")
    assert table() == [A]


def test_a_key_goes_with_upsert():
    with pytest.raises(PipelineError, match="upsert needs key="):
        DeltaSink("/x", mode="upsert")
    with pytest.raises(PipelineError, match="key= goes with mode='upsert'"):
        DeltaSink("/x", key="shop")


def test_of_two_writers_of_one_execution_at_once_one_writes(spark, tmp_path):
    sink = DeltaSink(str(tmp_path / "table"), mode="append")

    def write(before_commit):
        return sink.write(
            spark.createDataFrame([A], "shop string, item string, amount long"),
            WriteContext(spark, "p", "stage", "run", before_commit=before_commit),
        )

    def another_is_first():
        write(lambda: None)

    assert write(another_is_first).repeated
    assert DeltaTable(str(tmp_path / "table")).to_pyarrow_table().num_rows == 1


def test_the_preview_has_the_first_rows_also_of_a_partitioned_table(write, spark, tmp_path):
    write([A, B, C], "first", partition_by="shop")
    write([A._replace(amount=9)], "second", mode="append", partition_by="shop")
    sink = DeltaSink(str(tmp_path / "table"), mode="append", partition_by="shop")
    rows = [Stock(**r) for r in sink.preview(spark, 10).to_pylist()]
    assert sorted(rows, key=str) == sorted([A, B, C, A._replace(amount=9)], key=str)
    assert sink.preview(spark, 2).num_rows == 2


def test_a_process_that_has_previewed_a_table_ends_in_peace(tmp_path):
    for _ in range(8):
        write_deltalake(str(tmp_path), pa.table({"n": list(range(100))}), mode="append")
    program = (
        f"from dagster_unified.connectors.delta import DeltaSink; assert DeltaSink({str(tmp_path)!r}).preview(None,"
        " 5).num_rows == 5"
    )
    for _ in range(examples(2)):
        assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
def test_two_sinks_of_a_pipeline_that_append_to_one_table_both_leave_their_rows_once(
    mode, run_on_spark, run_streaming, table, tmp_path
):
    pipeline = Pipeline("two")
    pens, cups = pipeline.from_collection([A]), pipeline.from_collection([B], name="cups")
    for stream in (pens, cups):
        stream.sink_to(DeltaSink(str(tmp_path / "table"), mode="append"))
    if mode == "STREAMING":
        run_streaming(pipeline)
    for _ in range(2 if mode == "BATCH" else 0):  # a run that is executed again does not write again
        run_on_spark(pipeline)
    assert table() == [A, B]


def test_a_partition_that_two_sinks_append_to_is_replaced_by_the_sink_that_runs_it_again(spark, table, tmp_path):
    def append(row, sink, execution):
        context = WriteContext(spark, "p", "stage", execution, "2024-01-01", sink=sink)
        DeltaSink(str(tmp_path / "table"), mode="append").write(
            spark.createDataFrame([row], "shop string, item string, amount long"), context
        )

    append(A, "one", "first")
    append(B, "two", "first")
    append(A._replace(amount=9), "one", "second")
    assert table() == [A._replace(amount=9), B]
