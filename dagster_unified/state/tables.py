"""The tables of a savepoint as files: read with verified checksums, and written, by workers and the driver."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from os import SEEK_END
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast
from urllib.parse import urlsplit
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from dagster_unified.errors import StateError
from dagster_unified.operators.keys import key_hashes, key_values
from dagster_unified.state.manifest import SUBTASK_ROLES, DataFile, OperatorState, table_schema
from dagster_unified.storage.paths import is_data, load, sizes, storage_path

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from pyspark.sql import DataFrame, SparkSession
    from upath import UPath

_S3 = ("s3://", "s3a://")


def open_input(path: str) -> BinaryIO:
    """Open a file to read at any position; raises `FileNotFoundError` where it is missing."""
    in_arrow = _in_arrow(path)
    if in_arrow is None:
        return storage_path(path, "savepoint").open("rb")
    system, name = in_arrow
    return cast("BinaryIO", system.open_input_file(name))


def open_output(path: str) -> BinaryIO:
    """Create a file in an existing folder."""
    in_arrow = _in_arrow(path)
    if in_arrow is None:
        return storage_path(path, "savepoint").open("wb")
    system, name = in_arrow
    return cast("BinaryIO", system.open_output_stream(name))


def _in_arrow(path: str) -> tuple[FileSystem, str] | None:
    """pyarrow's file system for a path, and the path in it; None where another package opens it."""
    from pyarrow.fs import LocalFileSystem

    if "://" not in path or path.startswith("file://"):
        return LocalFileSystem(), path.removeprefix("file://")
    if path.startswith(_S3) and not any(name == "FSSPEC_S3" or name.startswith("FSSPEC_S3_") for name in os.environ):
        url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return _s3(url, region), path.partition("://")[2]
    return None


@cache
def _s3(url: str | None, region: str | None) -> FileSystem:
    """S3 with the credentials of the environment, the profile or the machine, as s3fs finds them."""
    from pyarrow.fs import S3FileSystem

    options: dict[str, Any] = {} if region is None else {"region": region}
    if url is not None:
        at = urlsplit(url)
        options |= {"scheme": at.scheme, "endpoint_override": f"{at.netloc}{at.path.rstrip('/')}"}
    return S3FileSystem(**options)


CODEC = "zstd"
"""Files are written once, and kept."""

_ENCODING: dict[str, Any] = {"compression": CODEC, "use_dictionary": False, "write_statistics": False}
"""Keys are unique and in no order: a dictionary and statistics would take half of the time, without any use."""

ROWS, ROWS_BYTES = 65_536, 32 << 20
"""Rows that a row group has, or their bytes in memory."""

BYTES_READ_TOGETHER = 16 << 20
"""Bytes in memory, more or less, of the rows that are read at a time."""

SPLIT_BYTES = 8 << 20
"""Bytes in a savepoint's files of the row groups that one task reads."""


FOOTERS_AT_ONCE = 16
"""Files whose footers are read at a time."""

_MAGIC = b"PAR1"
"""How a Parquet file begins and ends."""

_END = 4 + len(_MAGIC)
"""Bytes behind a footer: how many it has, and the magic."""


class Split(NamedTuple):
    """Row groups of a file, relative to the savepoint, that one task reads."""

    file: str
    row_groups: Sequence[int]


def read_batches(
    folder: UPath | str, state: OperatorState, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of an operator's table, with the roles of its columns; raises `StateError` naming a damaged file.

    `columns` are those to read, by default all.
    """
    for file in state.files:
        yield from _rows(folder, file, state, columns, None)


def read_split(
    folder: UPath | str, state: OperatorState, split: Split, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of one split, as `read_batches` yields them."""
    file = next(candidate for candidate in state.files if candidate.path == split.file)
    return _rows(folder, file, state, columns, split.row_groups)


def _rows(
    folder: UPath | str,
    file: DataFile,
    state: OperatorState,
    columns: Sequence[str] | None,
    row_groups: Sequence[int] | None,
) -> Iterator[pa.RecordBatch]:
    schema = table_schema(state)
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    with _opened(folder, file) as parquet:
        read = 0
        for batch in parquet.iter_batches(_at_a_time(parquet.metadata, row_groups), row_groups, columns):
            read += batch.num_rows
            yield from pa.Table.from_batches([batch]).select(schema.names).cast(schema).to_batches()
        numbers = range(parquet.num_row_groups) if row_groups is None else row_groups
        stored = sum(parquet.metadata.row_group(number).num_rows for number in numbers)
        if read != stored:
            raise pa.ArrowInvalid(f"it gives {read:,} rows, and should have {stored:,}")


def _at_a_time(file: pq.FileMetaData, row_groups: Sequence[int] | None) -> int:
    """Rows to read at a time: fewer large ones, since Arrow counts the bytes of a column with 31 bits."""
    numbers = range(file.num_row_groups) if row_groups is None else row_groups
    least = ROWS
    for group in map(file.row_group, numbers):
        least = min(least, BYTES_READ_TOGETHER * group.num_rows // max(group.total_byte_size, 1))
    return max(least, 1)


def splits(folder: UPath, state: OperatorState) -> list[Split]:
    """The files of an operator's table in pieces of about `SPLIT_BYTES`, which can be read at the same time."""
    pieces = []
    for file in state.files:
        with _opened(folder, file) as parquet:
            of_file = [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]
        sizes = [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in of_file]
        first, size = 0, 0
        for number, bytes_ in enumerate(sizes):
            size += bytes_
            if size >= SPLIT_BYTES or number + 1 == len(sizes):
                pieces.append(Split(file.path, range(first, number + 1)))
                first, size = number + 1, 0
    return pieces


@contextmanager
def _opened(folder: UPath | str, file: DataFile) -> Iterator[pq.ParquetFile]:
    path = f"{folder}/{file.path}"
    with _reading(path), open_input(path) as opened:
        metadata = _metadata(opened, file)
        yield pq.ParquetFile(
            opened, metadata=metadata, page_checksum_verification=True, coerce_int96_timestamp_unit="us"
        )


def _metadata(opened: BinaryIO, file: DataFile) -> pq.FileMetaData:
    """A file's footer, read only if it is as it was written: a damaged footer may say anything."""
    opened.seek(file.bytes - file.footer_bytes)
    footer = opened.read(file.footer_bytes)
    if len(footer) != file.footer_bytes or crc32(footer) != file.footer_crc:
        raise pa.ArrowInvalid("the checksum of its footer is another")
    return pq.read_metadata(pa.BufferReader(_MAGIC + footer))


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise StateError(f"{path} is missing, which the savepoint's manifest names; copy the whole folder") from None
    except (OSError, pa.ArrowException, KeyError) as error:
        raise StateError(f"{path} is damaged: {error}; copy the savepoint again, or take it again") from error


def read_frame(spark: SparkSession, folder: UPath, state: OperatorState) -> DataFrame:
    """The rows of an operator's table as a DataFrame; raises `StateError` where a file's footer is damaged.

    Spark verifies the checksums of pages.
    """
    from pyspark.sql.types import StructType

    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        list(pool.map(partial(_check_footer, folder), state.files))
    schema = StructType.fromJson(json.loads(state.schema))
    if not state.files:
        return spark.createDataFrame([], schema)
    reader = spark.read.format("parquet").schema(schema).option("parquet.page.verify-checksum.enabled", "true")
    return load(reader, [folder / file.path for file in state.files])


def _check_footer(folder: UPath, file: DataFile) -> None:
    with _opened(folder, file):
        pass  # to open it is to check it


def files_in(folder: UPath, root: UPath) -> list[DataFile]:
    """The Parquet files of a table that was just written, relative to the savepoint."""
    names = sorted((folder / name).relative_to(root).as_posix() for name in sizes(folder) if is_data(name))
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        return list(pool.map(partial(data_file, root), names))


def data_file(root: UPath | str, path: str) -> DataFile:
    """A Parquet file below a folder, with its footer's checksum."""
    with open_input(f"{root}/{path}") as opened:
        size = opened.seek(0, SEEK_END)
        opened.seek(size - _END)
        footer_bytes = int.from_bytes(opened.read(_END)[:4], "little") + _END
        opened.seek(size - footer_bytes)
        return DataFile(path, size, footer_bytes, crc32(opened.read(footer_bytes)))


def write_file(batches: Iterable[pa.RecordBatch], schema: pa.Schema, path: UPath | str) -> int:
    """Write rows as one Parquet file with checksums into an existing folder, and return the number of rows.

    Without rows there is no file.
    """
    written = 0
    with ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for rows in _row_groups(batches):
            if writer is None:
                writer = stack.enter_context(_writer(stack.enter_context(open_output(str(path))), schema))
            writer.write_table(rows, ROWS)
            written += rows.num_rows
    return written


def file_of(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Rows as `write_file` writes them, in memory."""
    sink = pa.BufferOutputStream()
    with _writer(sink, batches[0].schema) as writer:
        for rows in _row_groups(batches):
            writer.write_table(rows, ROWS)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _writer(opened: Any, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(opened, schema, write_page_checksum=True, **_ENCODING)


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= ROWS or size >= ROWS_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, rows, size = [], 0, 0
    if rows:
        yield pa.Table.from_batches(waiting)


def write_batches(table: pa.Table, folder: UPath, root: UPath) -> list[DataFile]:
    """Write a table as one file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(table.to_batches(ROWS), table.schema, folder / "part-00000.parquet")
    return files_in(folder, root)


def copy_files(state: OperatorState, source: UPath, folder: str, root: UPath) -> list[DataFile]:
    """Copy the files of an operator's table into a folder of another savepoint."""
    copied = []
    for file in state.files:
        name = f"{folder}/{file.path.rpartition('/')[2]}"
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        old_path = f"{source}/{file.path}"
        with _reading(old_path), open_input(old_path) as old, open_output(str(target)) as new:
            shutil.copyfileobj(old, new, 1 << 20)
        copied.append(replace(file, path=name))
    return copied


SAMPLE = 1_000_000
"""Keys that are sampled, evenly spaced."""


def keys_per_group(folder: UPath, state: OperatorState, groups: int, sample: int = SAMPLE) -> list[int] | None:
    """The number of keys in each of `groups` key groups; None for operator state, and for nested keys.

    For more than `sample` keys it is an estimate.
    """
    if any(column.role in SUBTASK_ROLES for column in state.columns):
        return None
    key = [column.name for column in state.columns if column.role == "key"]
    every = max(1, -(-state.rows // sample))
    counts: Counter[int] = Counter()
    offset = 0
    for batch in read_batches(folder, state, key):
        if not key or any(pa.types.is_nested(column.type) for column in batch.columns):
            return None
        rows = range(offset, batch.num_rows, every)
        offset = (offset - batch.num_rows) % every
        picked = batch.take(pa.array(rows, pa.int64())).drop_null()  # the row of broadcast state has no key
        counts.update(h % groups for h in key_hashes(key_values(picked.columns)))
    return [counts[group] * every for group in range(groups)]
