"""The columns of files and of Delta tables, as a record has them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from dagster_unified.cli.record import samples
from dagster_unified.errors import ConfigurationError, PipelineError

if TYPE_CHECKING:
    from upath import UPath

    from dagster_unified.connectors.files.sources import FileSource

Format = Literal["csv", "json", "parquet"]

_ENDINGS: dict[str, Format] = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Compressed text files that are looked into."""

_MOST = 20
"""Files that are looked into, from the first to the last."""

_PANDAS_INDEX = "__index_level_"
"""The names of columns with which pandas writes the labels of rows."""


class Sample:
    """What is looked at of text files: so many rows, and how rows of CSV are written."""

    def __init__(self, rows: int, delimiter: str | None, null_value: str) -> None:
        if delimiter is not None and len(delimiter) != 1:
            raise ConfigurationError(f"record: --delimiter is one character, not {delimiter!r}")
        self.rows, self.delimiter, self.null_value = rows, delimiter, null_value


def is_delta_table(path: str) -> bool:
    """Whether a path is the folder of a Delta table."""
    from dagster_unified.storage.paths import children, storage_path

    return bool(children(storage_path(path, "record") / "_delta_log"))


def of_delta_table(path: str) -> pa.Schema:
    """The columns of a Delta table as it stands, with their comments."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    from dagster_unified.connectors.delta.store import ask_store, table_folder

    folder = table_folder(path, "record")
    try:
        return pa.schema(ask_store(folder, lambda: DeltaTable(str(folder), without_files=True)).schema().to_arrow())
    except DeltaError as error:
        raise PipelineError(f"record: the Delta table at {folder} cannot be read: {error}") from error


def of_files(path: str, format_: Format | None, sample: Sample) -> tuple[Format, pa.Schema]:
    """The format and the columns of files: a path, a folder, a pattern or a template, as the sources take them.

    Those that the names of folders give, such as the day in day=2024-01-01, come last.
    """
    from dagster_unified.connectors.files.folder import Folder, table_format
    from dagster_unified.storage.paths import path_text

    source = _source(path, format_ or "parquet")
    files = source.files()
    if not files:
        raise PipelineError(f"record: there are no files at {source.path}; check the path")
    place = Folder(source.path).place
    table = table_format(files) if place is None or path_text(place) != path_text(files[0]) else None
    if table is not None:
        folder, kind = table
        raise PipelineError(
            f"record: {folder} is a table of {kind}; give the folder of a Delta table itself, or a query of DuckDB's to"
            " DatabaseSource for a table of Iceberg or Hudi"
        )
    format_ = format_ or _format_of(files)
    looked_into = _spread(files)
    columns = _READ[format_](looked_into, sample)
    in_path = _of_folders(source, looked_into)
    return format_, pa.schema([*(field for field in columns if field.name not in in_path.names), *in_path])


def _source(path: str, format_: Format) -> FileSource[Any]:
    """A source of the files, which finds them."""
    from dagster_unified.connectors import CsvSource, JsonSource, ParquetSource

    if format_ == "csv":
        return CsvSource(path, str)
    return JsonSource(path, str) if format_ == "json" else ParquetSource(path, str)


def _format_of(files: Sequence[UPath]) -> Format:
    endings = {_ending(file) for file in files}
    formats = {_ENDINGS[ending] for ending in endings & set(_ENDINGS)}
    if len(formats) != 1 or not endings <= set(_ENDINGS):
        raise ConfigurationError(
            f"record: files that end in {', '.join(map(repr, sorted(endings)))} do not say what they are; give"
            " --format csv, json or parquet"
        )
    return formats.pop()


def _ending(file: UPath) -> str:
    """The ending of a file's name, without that of what it is compressed with."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    while len(suffixes) > 1 and suffixes[-1] not in _ENDINGS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _spread(files: Sequence[UPath]) -> list[UPath]:
    """Some of many files, as far from each other as can be."""
    if len(files) <= _MOST:
        return list(files)
    return [files[place * (len(files) - 1) // (_MOST - 1)] for place in range(_MOST)]


def _of_folders(source: FileSource[Any], files: Sequence[UPath]) -> pa.Schema:
    from dagster_unified.connectors.files.folder import Folder
    from dagster_unified.storage.paths import path_text

    root = Folder(source.path).root
    rows = [
        dict(part.split("=", 1) for part in path_text(file).removeprefix(f"{root}/").split("/")[:-1] if "=" in part)
        for file in files
    ]
    if len({tuple(row) for row in rows}) > 1:
        raise PipelineError(
            f"record: the files at {source.path} lie in folders of different columns; give the path of one kind of them"
        )
    missing = ("", "__HIVE_DEFAULT_PARTITION__")
    texts = [[None if text in missing else text for text in row.values()] for row in rows]
    return samples.of_texts(list(rows[0]), texts)


def _of_parquet(files: Sequence[UPath], sample: Sample) -> pa.Schema:
    from dagster_unified.connectors.files.file_columns import schemas

    found = {file: schema for file, schema in zip(files, schemas(files), strict=True) if schema is not None}
    if not found:
        raise PipelineError(f"record: {files[0]} is no Parquet file; give --format csv or json, or another path")
    try:
        merged = pa.unify_schemas([schema.remove_metadata() for schema in found.values()], promote_options="permissive")
    except pa.ArrowException as error:
        raise PipelineError(
            f"record: the files at {files[0].parent} have no columns in common ({error}); give the path of files of one"
            " kind"
        ) from error
    columns = []
    for field in merged:
        if field.name.startswith(_PANDAS_INDEX):
            continue
        everywhere = all(field.name in schema.names for schema in found.values())
        kind = _as_numbers(field.type)
        columns.append(field.with_type(kind).with_nullable(field.nullable or not everywhere))
    return pa.schema(columns)


def _as_numbers(kind: pa.DataType) -> pa.DataType:
    """The type with whole numbers in place of durations, which Parquet has not."""
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_numbers(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, kind.item_field.with_type(_as_numbers(kind.item_type)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_as_numbers(kind.value_type)))
    return kind


def _of_csv(files: Sequence[UPath], sample: Sample) -> pa.Schema:
    names: list[str] | None = None
    rows: list[list[str | None]] = []
    for file in files:
        delimiter = sample.delimiter or ("\t" if _ending(file) == ".tsv" else ",")
        with _lines(file) as lines:
            reader = (row for row in csv.reader(lines, delimiter=delimiter) if row)
            header = next(reader, None)
            names = names or header
            if header != names:
                continue  # of a file without a line, or with other columns, which the source names
            complete = (row for row in reader if len(row) == len(header or ()))
            rows += [
                [None if text in ("", sample.null_value) else text for text in row]
                for row in islice(complete, -(-sample.rows // len(files)))
            ]
    if names is None:
        raise PipelineError(f"record: {files[0]} has no line, and the first one of CSV names its columns")
    return samples.of_texts(names, rows)


def _of_json(files: Sequence[UPath], sample: Sample) -> pa.Schema:
    objects: list[Mapping[str, Any]] = []
    for file in files:
        with _lines(file) as lines:
            objects += islice(_objects(lines), -(-sample.rows // len(files)))
    if not objects:
        raise PipelineError(
            f"record: {files[0]} has no line with an object; JSON is read by lines of one object each, as `jq -c .`"
            " writes them"
        )
    return samples.of_objects(objects)


def _objects(lines: io.TextIOWrapper) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # a malformed row, which the source names
            continue
        if isinstance(value, dict):
            yield value


def _lines(file: UPath) -> io.TextIOWrapper:
    opened: Any = file.open("rb")
    codec = _CODECS.get(file.suffix)
    if codec is not None:
        opened = pa.CompressedInputStream(pa.PythonFile(opened), codec)
    return io.TextIOWrapper(opened, "utf-8-sig", "replace", newline="")


_READ: Mapping[Format, Callable[[Sequence[UPath], Sample], pa.Schema]] = {
    "csv": _of_csv,
    "json": _of_json,
    "parquet": _of_parquet,
}
