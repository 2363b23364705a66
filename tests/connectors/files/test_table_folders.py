"""The folder of a table is none of files: its log says which of them count."""

from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from upath import UPath

from dagster_unified.connectors import JsonSource, ParquetSource
from dagster_unified.errors import PipelineError


class Sale(NamedTuple):
    amount: int


def delta(folder):
    for amounts in ([1, 2, 3], [4, 5]):
        write_deltalake(folder, pa.table({"amount": amounts, "day": ["a"] * len(amounts)}), mode="overwrite")


def delta_by_day(folder):
    write_deltalake(folder, pa.table({"amount": [1], "day": ["a"]}), partition_by=["day"])


def others(log, file):
    def write(folder):
        (folder / log).mkdir(parents=True)
        (folder / log / file).write_text("{}")
        data = folder / "data" if log == "metadata" else folder
        data.mkdir(exist_ok=True)
        pq.write_table(pa.table({"amount": [1]}), data / "a.parquet")

    return write


iceberg, hudi = others("metadata", "00000-aa.metadata.json"), others(".hoodie", "hoodie.properties")


@pytest.mark.parametrize(
    ("write", "name", "path"),
    [
        (delta, "Delta", "lake/sales"),
        (delta, "Delta", "lake/sales/*.parquet"),
        (delta, "Delta", "lake/*"),
        (delta_by_day, "Delta", "lake/sales"),
        (delta_by_day, "Delta", "lake/sales/day=*/*.parquet"),
        (iceberg, "Iceberg", "lake/sales/data"),
        (iceberg, "Iceberg", "lake/*/data/*"),
        (hudi, "Hudi", "lake/sales"),
    ],
)
@pytest.mark.parametrize("monitor", [False, True])
def test_it_is_an_error_that_names_the_format(tmp_path, write, name, path, monitor):
    write(tmp_path / "lake" / "sales")
    source = ParquetSource(f"{tmp_path}/{path}", Sale, name="sales", monitor=monitor)
    with pytest.raises(PipelineError, match=rf"source 'sales': {tmp_path}/lake/sales is a table of {name}, whose log"):
        source.read(None) if not monitor else source.read_stream(None, UPath(tmp_path / "job"))


def test_a_file_of_a_table_and_its_log_can_be_named(spark, tmp_path):
    delta(tmp_path / "sales")
    (file,) = DeltaTable(tmp_path / "sales").file_uris()
    assert sorted(ParquetSource(file, Sale, name="sales").read(spark).toArrow()["amount"].to_pylist()) == [4, 5]

    class Entry(NamedTuple):
        commitInfo: dict[str, str] | None

    source = JsonSource(str(tmp_path / "sales" / "_delta_log" / "*.json"), Entry, on_malformed="drop")
    assert source.files()


def test_a_folder_that_is_called_metadata_makes_no_table(spark, tmp_path):
    (tmp_path / "in" / "metadata").mkdir(parents=True)
    (tmp_path / "in" / "metadata" / "notes.json").write_text("{}")
    pq.write_table(pa.table({"amount": [1]}), tmp_path / "in" / "a.parquet")
    assert [row.amount for row in ParquetSource(str(tmp_path / "in"), Sale).read(spark).collect()] == [1]
