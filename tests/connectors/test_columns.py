"""Columns of Parquet files as fields: no value is changed by its type."""

import shutil
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors.exceptions.base import PySparkException

from dagster_unified.api import Pipeline
from dagster_unified.connectors import FileSink, ParquetSource
from dagster_unified.errors import MalformedInputError, PipelineError

NEW_YEAR = datetime(2024, 1, 1, tzinfo=timezone.utc)
MILLIS = 1704067200000


class Point(NamedTuple):
    x: int
    y: int


def read(spark, folder, column, kind):
    record = NamedTuple("Record", [("v", kind | None)])  # noqa: UP014 - its type differs from call to call
    pq.write_table(pa.table({"v": column}), folder / "in.parquet")
    frame = ParquetSource(str(folder / "in.parquet"), record, name="in").with_fixed_range().read(spark)
    return frame.toArrow()["v"].to_pylist()


FITTING = [
    (pa.array([1], pa.int8()), int, 1),
    (pa.array([200], pa.uint8()), int, 200),
    (pa.array([2**32 - 1], pa.uint32()), int, 2**32 - 1),
    (pa.array([7], pa.uint64()), int, 7),
    (pa.array([Decimal(7)], pa.decimal128(10, 0)), int, 7),
    (pa.array([7]), float, 7.0),
    (pa.array([0.5], pa.float32()), float, 0.5),
    (pa.array([Decimal("0.5")]), float, 0.5),
    (pa.array([7]), Decimal, Decimal(7)),
    (pa.array([Decimal("1.25")], pa.decimal128(5, 2)), Decimal, Decimal("1.25")),
    (pa.array(["a"]), str, "a"),
    (pa.array([b"a"]), str, "a"),
    (pa.array([MILLIS], pa.timestamp("ms", "UTC")), datetime, NEW_YEAR),
    (pa.array([MILLIS], pa.timestamp("ms")), datetime, NEW_YEAR),
    (pa.array([NEW_YEAR.date()]), datetime, NEW_YEAR),
    (pa.array([NEW_YEAR.date()]), date, NEW_YEAR.date()),
    (pa.array([{"x": 1, "y": 2}]), Point, {"x": 1, "y": 2}),
    (pa.array([[1]], pa.list_(pa.int16())), list[int], [1]),
]


def test_what_fits_is_read_in_both_modes(run_on_spark, run_streaming, tmp_path):
    (tmp_path / "in").mkdir()
    names = [f"v{number}" for number in range(len(FITTING))]
    pq.write_table(pa.table([column for column, _, _ in FITTING], names=names), tmp_path / "in" / "1.parquet")
    record = NamedTuple("Record", [(n, kind) for n, (_, kind, _) in zip(names, FITTING, strict=True)])
    pipeline = Pipeline("columns")
    rows = pipeline.from_source(ParquetSource(str(tmp_path / "in"), record, name="in"))
    rows.sink_to(FileSink(str(tmp_path / "out"), name="out"))
    found = []
    for run in (run_on_spark, run_streaming):
        run(pipeline)
        found.append(pq.read_table(tmp_path / "out").to_pylist())
        shutil.rmtree(tmp_path / "out")
    assert found == [[{name: value for name, (_, _, value) in zip(names, FITTING, strict=True)}]] * 2


class Whole(NamedTuple):
    v: int


@pytest.mark.a_day(2)
@pytest.mark.parametrize("mode", ["BATCH", "STREAMING"])
@pytest.mark.parametrize(
    ("second", "message"),
    [
        (pa.array([1.5]), r"column 'v' of \S+2.parquet is DOUBLE in Parquet, and was read as bigint; "),
        (pa.array(["x"]), r"column 'v' of \S+2.parquet is BINARY in Parquet, and was read as bigint; "),
        (b"no table", r"\S+2.parquet is no Parquet file; repair it, or remove it"),
    ],
)
def test_a_later_file_that_does_not_fit_is_named(run_in, tmp_path, mode, second, message):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"v": [1]}), tmp_path / "in" / "1.parquet")
    if isinstance(second, bytes):
        (tmp_path / "in" / "2.parquet").write_bytes(second)
    else:
        pq.write_table(pa.table({"v": second}), tmp_path / "in" / "2.parquet")
    pipeline = Pipeline("columns")
    pipeline.from_source(ParquetSource(str(tmp_path / "in"), Whole, name="in")).print("out")
    with pytest.raises(MalformedInputError, match=f"^columns: source 'in': {message}"):
        run_in[mode](pipeline)


class Wide(NamedTuple):
    whole: int
    real: float


@pytest.mark.parametrize("small_first", [True, False])
def test_numbers_of_several_widths_in_one_folder(spark, tmp_path, small_first):
    small = pa.table({"whole": pa.array([1], pa.int32()), "real": pa.array([0.5], pa.float32())})
    wide = pa.table({"whole": [2**40], "real": [0.1]})
    for name, table in zip("ab" if small_first else "ba", (small, wide), strict=True):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    frame = ParquetSource(str(tmp_path), Wide, name="in").with_fixed_range().read(spark)
    assert sorted(frame.toArrow().to_pylist(), key=str) == [
        {"whole": 1, "real": 0.5},
        {"whole": 2**40, "real": 0.1},
    ]


@pytest.mark.parametrize("number", [2**53 + 1, 2**63 - 1, -(2**63) + 1])
def test_a_whole_number_that_a_float_cannot_hold_is_an_error(spark, tmp_path, number):
    with pytest.raises(PySparkException, match=f"source 'in': column 'v' has {number}, which a float cannot hold"):
        read(spark, tmp_path, pa.array([1, None, number]), float)
    assert read(spark, tmp_path, pa.array([1, None, 2**53, -(2**63)]), float) == [1.0, None, 2.0**53, -(2.0**63)]


def test_a_whole_number_that_64_bits_cannot_hold_is_an_error(spark, tmp_path):
    with pytest.raises(PySparkException, match=r"'v' has 9223372036854775808, which 64 bits cannot hold; .* a Decimal"):
        read(spark, tmp_path, pa.array([1, None, 2**63], pa.uint64()), int)
    assert read(spark, tmp_path, pa.array([1, None, 2**63 - 1], pa.uint64()), int) == [1, None, 2**63 - 1]


@pytest.mark.parametrize(
    ("column", "kind", "of"),
    [
        (pa.array([1.5]), int, "double"),
        (pa.array([Decimal("1.5")]), int, r"decimal\(2,1\)"),
        (pa.array(["7"]), int, "string"),
        (pa.array([True]), int, "boolean"),
        (pa.array([MILLIS], pa.timestamp("ms", "UTC")), int, "timestamp"),
        (pa.array([1]), bool, "bigint"),
        (pa.array([1.5]), str, "double"),
        (pa.array([0.1]), Decimal, "double"),
        (pa.array([Decimal("0.1")], pa.decimal128(38, 19)), Decimal, r"decimal\(38,19\)"),
        (pa.array([MILLIS]), datetime, "bigint"),
        (pa.array(["2024-01-01"]), datetime, "string"),
        (pa.array([MILLIS], pa.timestamp("ms", "UTC")), date, "timestamp"),
        (pa.array([5_000_000]), timedelta, "bigint"),
        (pa.array([5_000_000], pa.duration("us")), timedelta, "bigint"),
        (pa.array([{"y": 1, "x": 2}]), Point, "struct<y:bigint,x:bigint>"),
        (pa.array([{"x": 1.5, "y": 2}]), Point, "struct<x:double,y:bigint>"),
        (pa.array([[1.5]]), list[int], "array<double>"),
    ],
)
def test_what_could_change_is_refused(spark, tmp_path, column, kind, of):
    with pytest.raises(
        PipelineError, match=f"source 'in': column 'v' is {of}, and a value of it could change on its way"
    ):
        read(spark, tmp_path, column, kind)
