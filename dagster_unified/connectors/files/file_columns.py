"""The columns of files: from the footer of each Parquet file, and the first lines of text files.

The driver reads them before Spark reads the files.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from dagster_unified.errors import MalformedInputError, PipelineError
from dagster_unified.storage.paths import for_spark, is_local, load_one

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from upath import UPath

_TAIL = 1 << 15
"""Bytes of a file's end that are read at once; most footers are shorter."""

_AT_ONCE = 8
"""Files of a disk that are opened at once."""

_SHOWN = 20
"""Names of files that metadata lists."""

_log = logging.getLogger(__name__)


def schemas(files: Sequence[UPath]) -> list[pa.Schema | None]:
    """The schema of each file; None for one that is empty, gone or no Parquet file.

    A store is asked once for a file, and twice where its footer is longer than 32 KB; for many files at a time.
    """
    if not files:
        return []
    tails = _tails(files, _TAIL)
    long = {place: size for place, tail in enumerate(tails) if (size := _footer_size(tail)) > len(tail)}
    again = {size: [place for place in long if long[place] == size] for size in set(long.values())}
    for size, places in again.items():
        for place, tail in zip(places, _tails([files[place] for place in places], size), strict=True):
            tails[place] = tail
    return list(map(_schema, tails))


def _tails(files: Sequence[UPath], size: int) -> list[bytes]:
    """The last bytes of each file; empty for one that cannot be read."""
    if is_local(files[0]):
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda file: _local_tail(file, size), files))
    paths = [file.path for file in files]
    tails = files[0].fs.cat_ranges(paths, [-size] * len(paths), [None] * len(paths), on_error="return")
    return [tail if isinstance(tail, bytes) else b"" for tail in tails]


def _local_tail(file: UPath, size: int) -> bytes:
    try:
        with open(file.path, "rb") as opened:
            opened.seek(-min(size, opened.seek(0, 2)), 2)
            return opened.read()
    except OSError:
        return b""


def _footer_size(tail: bytes) -> int:
    return int.from_bytes(tail[-8:-4], "little") + 8 if tail.endswith(b"PAR1") else 0


def _schema(tail: bytes) -> pa.Schema | None:
    import pyarrow.parquet as pq  # slow to load, and a pipeline is built without it

    try:
        return pq.read_schema(pa.BufferReader(tail)) if tail else None
    except (pa.ArrowException, OSError):
        return None


class _Shape(NamedTuple):
    """A file's columns and their members: those that a field takes, and the others."""

    taken: frozenset[str]
    others: frozenset[str]


class FileColumns:
    """The record's columns in the Parquet files of a source.

    `where` names the source in errors, `path` is what it reads.
    """

    def __init__(self, wanted: pa.Schema, where: str, path: str) -> None:
        self._wanted, self._where, self._path = wanted, where, path
        self._nullable = dict(_paths(wanted))
        self._shapes: dict[_Shape, UPath] = {}
        self._lacking: dict[str, list[str]] = {}
        self._known: set[str] = set()
        self.examples: dict[str, UPath] = {}
        """By column, a file that has it."""

        self.types: dict[str, pa.DataType] = {}
        """By column, its type in that file."""

    def add(self, files: Sequence[UPath]) -> None:
        """Look at new files.

        Raises `MalformedInputError` for a file that lacks a column, where its field may not be None, or where the file
        has another column that no field takes: then somebody has renamed it. Raises `PipelineError` where no file has
        the column.
        """
        new_shapes: dict[_Shape, list[UPath]] = {}
        further = [file for file in files if file.path not in self._known]
        self._known.update(file.path for file in further)
        for file, schema in zip(further, schemas(further), strict=True):
            if schema is None:
                self._tell_empty(file)
                continue
            new_shapes.setdefault(_shape(schema, self._wanted), []).append(file)
            for name in self._wanted.names:
                if name not in self.examples and name in schema.names:
                    self.examples[name], self.types[name] = file, schema.field(name).type
        self._shapes = {shape: files_of_shape[0] for shape, files_of_shape in new_shapes.items()} | self._shapes
        for shape in self._shapes:
            for column in self._missing(shape):
                self._check(shape, column)
                for file in new_shapes.get(shape, ()):
                    self._note(column, file)

    def lacking(self) -> Mapping[str, str]:
        """By column, the files that lack it; it is None in their rows."""
        return {
            column: f"{len(files)}: {', '.join(files[:_SHOWN])}{', …' if len(files) > _SHOWN else ''}"
            for column, files in self._lacking.items()
        }

    def _missing(self, shape: _Shape) -> list[str]:
        """The columns that a file lacks, and the missing members of columns that it has."""
        missing = [path for path in self._nullable if path not in shape.taken]
        return [path for path in missing if path.rpartition(".")[0] not in missing]

    def _check(self, shape: _Shape, column: str) -> None:
        file = self._shapes[shape]
        having = [other for other in self._shapes if column in other.taken]
        has = ", ".join(sorted(name for name in shape.taken | shape.others if "." not in name))
        if not having:
            raise PipelineError(f"{self._where}: no column '{column}' in {self._path}; it has {has[:200]}")
        new = shape.others - frozenset[str]().union(*[other.others for other in having])
        if new:
            raise MalformedInputError(
                f"{self._where}: {file} has no column '{column}', which other files have, and has"
                f" {', '.join(map(repr, sorted(new)))}, which no field takes; if it was renamed, write the file"
                " anew with the old name, or read files of each kind by a source of their own"
            )
        if not self._nullable[column]:
            raise MalformedInputError(
                f"{self._where}: {file} has no column '{column}', which other files have, and its field may not be"
                f" None; it has {has[:200]}; write the file anew, or declare the field as one that may be None"
            )

    def _note(self, column: str, file: UPath) -> None:
        self._lacking.setdefault(column, []).append(file.name)
        if len(self._lacking[column]) <= _SHOWN:
            _log.warning("%s: %s has no column '%s', which is None in its rows", self._where, file, column)

    def _tell_empty(self, file: UPath) -> None:
        try:
            is_empty = file.stat().st_size == 0
        except OSError:  # Spark says what is wrong with it
            return
        if is_empty:
            _log.warning("%s: %s has no bytes, and so no rows; a Parquet file has a footer", self._where, file)


def _shape(schema: pa.Schema, wanted: pa.Schema) -> _Shape:
    taken: set[str] = set()
    others: set[str] = set()
    _compare(list(schema), {field.name: field for field in wanted}, "", taken, others)
    return _Shape(frozenset(taken), frozenset(others))


def _compare(
    fields: Sequence[pa.Field], wanted: Mapping[str, pa.Field], below: str, taken: set[str], others: set[str]
) -> None:
    for field in fields:
        path = f"{below}{field.name}"
        if field.name not in wanted:
            others.add(path)
            continue
        taken.add(path)
        wanted_members, actual_members = _members(wanted[field.name].type), _members(field.type)
        if wanted_members and actual_members:
            _compare(actual_members, {member.name: member for member in wanted_members}, f"{path}.", taken, others)


def _paths(fields: Sequence[pa.Field] | pa.Schema, below: str = "") -> Iterator[tuple[str, bool]]:
    """Each column and each member of one, and whether it may be None."""
    for field in fields:
        yield f"{below}{field.name}", field.nullable
        yield from _paths(_members(field.type), f"{below}{field.name}.")


def _members(kind: pa.DataType) -> list[pa.Field]:
    """The members of a struct, or of the structs in a list or a map."""
    if pa.types.is_struct(kind):
        return list(kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _members(kind.value_type)
    return _members(kind.item_type) if pa.types.is_map(kind) else []


def unreadable(kind: pa.DataType) -> bool:
    """Whether Spark does not read a column of this type, or a part of it."""
    if pa.types.is_timestamp(kind):
        return bool(kind.unit == "ns")
    if pa.types.is_nested(kind):
        return any(unreadable(kind.field(place).type) for place in range(kind.num_fields))
    return (
        isinstance(kind, pa.BaseExtensionType)
        or pa.types.is_time(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_float16(kind)
        or pa.types.is_interval(kind)
    )


def as_spark_reads(kind: pa.DataType) -> pa.DataType:
    """The type in which Spark reads a column of this Arrow type."""
    if pa.types.is_dictionary(kind):
        return as_spark_reads(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(as_spark_reads(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(as_spark_reads(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(as_spark_reads(kind.key_type), as_spark_reads(kind.item_type))
    return _READ_AS.get(kind, kind)


_READ_AS = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    **{pa.duration(unit): pa.int64() for unit in ("s", "ms", "us", "ns")},
}
"""The types that Spark reads instead: it has no unsigned numbers, and Parquet has no durations."""


_BYTES = (1 << 14, 1 << 20)
"""Bytes of a file in which its first line is searched: at first, and where the line does not end there."""

_THREADS = 32
_FEW = 4
_DEFLATED = {".gz": 31, ".deflate": 15}
"""Compressed files whose start is enough, and zlib's `wbits` for them."""

_COMPRESSED = (".bz2", ".lz4", ".snappy", ".zst", ".zstd", ".xz")
"""Compressed files that Spark, or a codec of Hadoop's, reads."""


def first_lines(spark: SparkSession, files: Sequence[UPath]) -> Iterator[str | None]:
    """The first line of each file that has more than blanks; None where there is none, or the file is gone."""
    first = partial(_first_line, spark)
    if len(files) < _FEW:
        yield from map(first, files)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(first, files)


def _first_line(spark: SparkSession, file: UPath) -> str | None:
    if file.suffix in _COMPRESSED:
        rows = load_one(spark.read.format("text"), for_spark(file))
        lines = rows.where(rows.value.rlike(r"[^\x00-\x20]")).limit(1).collect()
        return lines[0].value if lines else None
    for size in _BYTES:
        try:
            start: bytes = file.fs.cat_file(file.path, 0, size)
        except FileNotFoundError:
            return None
        if (window := _DEFLATED.get(file.suffix)) is not None:
            start = zlib.decompressobj(window).decompress(start)
        text = re.sub(r"\A[\x00-\x20]+", "", start.decode("utf-8-sig", "replace"))
        line, ended, _ = re.sub("\r\n?", "\n", text).partition("\n")
        if ended or len(start) < size:
            break
    return line or None
