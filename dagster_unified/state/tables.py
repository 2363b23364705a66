"""The tables of a savepoint as files: read with their checksums verified, and written.

Knows pyarrow and paths; of Spark only what a DataFrame that it is given can do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from upath import UPath

from dagster_unified.connectors.paths import for_spark
from dagster_unified.errors import StateError
from dagster_unified.state.manifest import DataFile, OperatorState, files_in
from dagster_unified.state.schemas import table_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CODEC = "zstd"
"""Written once, and kept."""

ROWS = 65_536
"""Rows that are read, and that a row group has, at a time."""


def read_batches(folder: UPath, state: OperatorState, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of an operator's table, with the roles of its columns; raises `StateError` naming a damaged file.

    `columns` are those to read, by default all.
    """
    schema = table_schema(state)
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    for file in state.files:
        path = folder / file.path
        with _reading(path), path.open("rb") as opened:
            parquet = pq.ParquetFile(opened, page_checksum_verification=True, coerce_int96_timestamp_unit="us")
            for batch in parquet.iter_batches(ROWS, columns=columns):
                yield from pa.Table.from_batches([batch]).select(schema.names).cast(schema).to_batches()


@contextmanager
def _reading(path: UPath) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise StateError(f"{path} is missing, which the savepoint's manifest names; copy the whole folder") from None
    except (OSError, pa.ArrowException, KeyError) as error:
        raise StateError(f"{path} is damaged: {error}; copy the savepoint again, or take it again") from error


def read_frame(spark: SparkSession, folder: UPath, state: OperatorState) -> DataFrame:
    """The rows of an operator's table as a DataFrame; Parquet's own checksums are verified."""
    from pyspark.sql.types import StructType

    schema = StructType.fromJson(json.loads(state.schema))
    paths = [for_spark(folder / file.path) for file in state.files]
    if not paths:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).option("parquet.page.verify-checksum.enabled", "true").parquet(*paths)


def write_batches(table: pa.Table, folder: UPath, root: UPath) -> list[DataFile]:
    """Write a table as one Parquet file with checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "part-00000.parquet").open("wb") as opened:
        pq.write_table(table, opened, compression=CODEC, row_group_size=ROWS, write_page_checksum=True)
    return files_in(folder, root)


def copy_files(state: OperatorState, source: UPath, folder: str, root: UPath) -> list[DataFile]:
    """Copy the files of an operator's table into a folder of another savepoint."""
    copied = []
    for file in state.files:
        name = f"{folder}/{file.path.rpartition('/')[2]}"
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with _reading(source / file.path), (source / file.path).open("rb") as old, target.open("wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)
        copied.append(DataFile(name, file.bytes))
    return copied
