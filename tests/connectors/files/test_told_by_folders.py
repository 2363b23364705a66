"""Columns that the names of folders tell, such as day=2024-01-01: in every format and both modes the same."""

import shutil
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import NamedTuple
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import StaticPartitionsDefinition
from pyspark.errors.exceptions.base import PySparkException

from dagster_unified.api import Pipeline
from dagster_unified.connectors import CsvSource, FileSink, JsonSource, ParquetSource
from dagster_unified.errors import MalformedInputError
from dagster_unified.orchestration.partitions import slice_of
from tests.support import MODES

SOURCES = {"csv": CsvSource, "json": JsonSource, "parquet": ParquetSource}
BY_FORMAT = pytest.mark.parametrize("format", SOURCES)


def write(root, format, folders):
    for number, folder in enumerate(folders):
        path = root / f"k={quote(folder, safe='')}"
        path.mkdir(parents=True)
        if format == "parquet":
            pq.write_table(pa.table({"v": [number]}), path / "a.parquet")
        else:
            (path / f"a.{format}").write_text(f'{{"v": {number}}}\n' if format == "json" else f"v\n{number}\n")


def of(kind):
    return NamedTuple("Record", [("v", int), ("k", kind | None)])


NONE = "__HIVE_DEFAULT_PARTITION__"
VALUES = {
    "texts of digits": (str, ["007", "08"], ["007", "08"]),
    "texts": (str, ["1.50", "a+b c%", "2024-1-2", NONE], ["1.50", "a+b c%", "2024-1-2", None]),
    "whole numbers": (int, ["007", "-8", NONE], [7, -8, None]),
    "floats": (float, ["7", "1.5"], [7.0, 1.5]),
    "booleans": (bool, ["true", "false"], [True, False]),
    "dates": (date, ["2024-01-01", NONE], [date(2024, 1, 1), None]),
    "times": (datetime, ["2024-01-01 10:00:00"], [datetime(2024, 1, 1, 10, tzinfo=timezone.utc)]),
    "decimals": (Decimal, ["1.50", "2"], [Decimal("1.50"), Decimal(2)]),
}


def sources(folder, format):
    """Sources over folders that tell a column, by name, and what they read of it."""
    for what, (kind, folders, expected) in VALUES.items():
        write(folder / what, format, folders)
        yield SOURCES[format](str(folder / what), of(kind), name=what), expected
    texts = str(folder / "texts of digits" / "k=*" / "*")
    yield SOURCES[format](texts, of(str), name="a pattern of folders"), ["007", "08"]
    if format != "parquet":
        write(folder / "dropped", format, ["1", "x", "2"])
        yield SOURCES[format](str(folder / "dropped"), of(int), name="dropped", on_malformed="drop"), [1, 2]


@pytest.mark.a_day(1)
@BY_FORMAT
def test_both_modes_read_the_same(run_on_spark, run_streaming, tmp_path, format):
    given = list(sources(tmp_path / "in", format))
    for run in (run_on_spark, run_streaming):
        pipeline = Pipeline("folders")
        for source, _ in given:
            pipeline.from_source(source).sink_to(FileSink(str(tmp_path / "out" / source.name), name=source.name))
        run(pipeline)
        for source, expected in given:
            rows = pq.read_table(tmp_path / "out" / source.name).to_pylist()
            assert [row["k"] for row in sorted(rows, key=lambda row: row["v"])] == expected, source.name
        shutil.rmtree(tmp_path / "out")


@pytest.mark.a_day(2)
@BY_FORMAT
@MODES
def test_a_name_that_does_not_fit_is_said_to_be_one(run_in, tmp_path, format, mode):
    write(tmp_path / "in", format, ["1", "x"])
    pipeline = Pipeline("folders")
    pipeline.from_source(SOURCES[format](str(tmp_path / "in"), of(int), name="in")).print("out")
    with pytest.raises(MalformedInputError, match=rf"^folders: source 'in': .*k=x/a\.{format}.*field 'k' is n"):
        run_in[mode](pipeline)


@pytest.mark.a_day(4)
@BY_FORMAT
@pytest.mark.parametrize(("kind", "folder"), [(int, "1.5"), (int, str(2**63)), (bool, "2"), (date, "x")])
def test_a_name_does_not_fit_that_is_not_written_as_its_type_is(spark, tmp_path, format, kind, folder):
    write(tmp_path / "in", format, ["2024-01-01" if kind is date else "1", folder])
    source = SOURCES[format](str(tmp_path / "in"), of(kind), name="in")
    with pytest.raises(PySparkException, match="field 'k' is n"):
        source.with_fixed_range().read(spark).collect()


@pytest.mark.a_day(1)
@BY_FORMAT
def test_a_partition_reads_its_folder_however_the_number_is_written(spark, tmp_path, format):
    write(tmp_path / "in", format, ["007", "8", "07", "x"])
    source = SOURCES[format](str(tmp_path / "in"), of(int), name="in").partitioned_by("k")
    keys = StaticPartitionsDefinition(["7", "8"])
    frame = source.bounded_to(slice_of(keys, "8")).with_fixed_range().read_partition(spark)
    with pytest.raises(PySparkException, match="field 'k' is "):  # whose partition nobody knows
        frame.collect()
    shutil.rmtree(tmp_path / "in" / "k=x")
    frame = source.bounded_to(slice_of(keys, "7")).with_fixed_range().read_partition(spark)
    assert sorted(row.v for row in frame.collect()) == [0, 2]
