"""Files as sources: what all formats share, and Parquet. `text_sources.py` has CSV and JSON."""

from __future__ import annotations

import copy
import logging
import re
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import pyarrow as pa

from dagster_unified.connectors.files.file_columns import FileColumns, as_spark_reads, schemas, unreadable
from dagster_unified.connectors.files.folder import Folder, table_format
from dagster_unified.connectors.files.listing import last_chunk, last_chunk_found, names_until, show
from dagster_unified.connectors.files.path_template import PathTemplate
from dagster_unified.connectors.files.texts import in_texts, misfits_of_text, of_text
from dagster_unified.connectors.protocol.bounds import in_folder
from dagster_unified.connectors.protocol.frame import as_fields, spark_schema, widened
from dagster_unified.connectors.protocol.positions import (
    ALL,
    FilesRead,
    Position,
    Unread,
    cannot_follow,
    cannot_stop,
)
from dagster_unified.connectors.protocol.source import Ending, SparkSource
from dagster_unified.errors import PipelineError, SourceError
from dagster_unified.graph.connectors import Boundedness, Place, Slice
from dagster_unified.graph.fingerprint import digest
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.records import record_type
from dagster_unified.spark_internals import spark_log
from dagster_unified.storage.paths import (
    STRICT,
    folder_place,
    for_spark,
    is_local,
    load,
    load_one,
    name_of,
    path_text,
    storage_path,
)
from dagster_unified.values import check_count

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructField, StructType
    from typing_extensions import TypeForm
    from upath import UPath

    from dagster_unified.graph.connectors import Dimensions

_log = logging.getLogger(__name__)

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:/+")
_PLAIN = re.compile(r"(?!.*/\.\.?/)[\w./=+:@-]+", re.ASCII)
"""Paths that Spark shows as they are."""

_MOST = 2_000
"""Files whose partitions are looked up in a table of their paths, at most."""


Load: TypeAlias = "Callable[[DataFrameReader], DataFrame]"
"""Reads the files of a source by a reader that has its format, schema and options."""


class FileSource(SparkSource[Out]):
    """Files of one format under a path: a file, a folder, or a pattern with `*`; `[*]` is a star, and all else itself.

    Bounded: the files that are there when the run begins. With `monitor` unbounded, for STREAMING: files are read as
    they appear, each once, and have to appear at once (by rename), at most `max_files_per_trigger` in one micro-batch.

    A run for a partition reads the files that the path names when it is a template, such as
    `flights/{start:%Y-%m-%d}.csv` or `{key}/*.csv`; or the records that a field puts into it (`partitioned_by`).
    Without partitions a template matches all.
    """

    format: str
    _chosen: frozenset[str] | None = None
    """The names below the path of the files that it reads, where these are decided."""

    @property
    def scanned_as(self) -> str:
        """The format in which Spark reads the files."""
        return self.format

    def __init__(
        self,
        path: str,
        record: TypeForm[Out],
        name: str | None = None,
        monitor: bool = False,
        max_files_per_trigger: int | None = None,
    ) -> None:
        if max_files_per_trigger is not None:
            check_count(f"{self.format} source: max_files_per_trigger", max_files_per_trigger)
        self.kind = self.format
        self.boundedness = Boundedness.UNBOUNDED if monitor else Boundedness.BOUNDED
        self.max_files_per_trigger = max_files_per_trigger
        self.name = name or name_of(str(path), self.format)
        written = PathTemplate(str(path), f"source '{self.name}'") if "{" in str(path) else None
        self.template = written if written is not None and written.has_fields() else None
        self.path = storage_path(path if written is None else written.everything(), f"source '{self.name}'")
        self._whole = self.path
        self.records = record_type(record, f"source '{self.name}'")

    def describe(self) -> str:
        appearing = "appearing " if self.boundedness is Boundedness.UNBOUNDED else ""
        return f"{self.format} files {appearing}at {self.path}{self.of_partition()}"

    def places(self) -> Sequence[Place]:
        fixed = list(takewhile(lambda part: "*" not in part.replace("[*]", ""), self._whole.parts))
        folder = self._whole.with_segments(*(part.replace("[*]", "*") for part in fixed))
        return [folder_place(folder)]

    def can_be_bounded(self) -> bool:
        return super().can_be_bounded() or self.template is not None

    def says_partition(self) -> bool:
        return super().says_partition() or self.template is not None

    def has_present(self) -> bool:
        return True

    def distinguishes(self, one: Slice, other: Slice) -> bool:
        if self.template is None or self.partition_columns:
            return True
        differing = {name for name, value in one.dimensions.items() if other.dimensions[name] != value}
        return not self.template.names(differing) or self.template.of(one) != self.template.of(other)

    def how_to_bound(self) -> str:
        return (
            f"{super().how_to_bound()}, or write a path template such as"
            f" {self.path.parent}/{{start:%Y-%m-%d}}.{self.format}"
        )

    def check_dimensions(self, known: Dimensions) -> None:
        super().check_dimensions(known)
        if self.template is not None:
            self.template.check(known)

    def bounded_to(self, slice_: Slice | Dimensions) -> Self:
        changed = super().bounded_to(slice_)
        changed.stop_position = changed._chosen = None
        if isinstance(slice_, Slice) and self.template is not None:
            changed.path = storage_path(self.template.of(slice_), f"source '{self.name}'")
        return changed

    def reads_all(self) -> bool:
        return self.template is None

    def snapshot(self) -> str:
        if self.boundedness is Boundedness.UNBOUNDED or (self.bound and self.slice is None):
            return ""
        files = Folder(self.path)
        chosen = [file for file in sorted(files.files()) if self._is_chosen(file.name)]
        return digest(files.root, *[f"{file.name}:{file.size}:{file.changed}" for file in chosen])

    def files(self) -> list[UPath]:
        """The files that are read now, in order of their names."""
        return self._chosen_of(self._files_of(Folder(self.path)))

    def _files_of(self, folder: Folder) -> list[UPath]:
        from upath import UPath

        options = self.path.storage_options
        return sorted((UPath(f, protocol=self.path.protocol, **options) for f in folder.paths()), key=str)

    def _stream(
        self,
        spark: SparkSession,
        schema: StructType,
        options: dict[str, Any],
        folder: UPath,
        path_fields: Collection[str],
    ) -> DataFrame:
        """Files from the oldest to the newest, from a listing of the library's own.

        A monitored folder may still be empty; no file is ignored because it is old.
        """
        from pyspark.sql.types import StructType

        monitors = self.boundedness is Boundedness.UNBOUNDED
        files = Folder(self.path)

        def check(names: Sequence[str]) -> None:
            self._check_each(spark, [self.path.with_segments(f"{files.root}/{name}") for name in names])

        most = self.max_files_per_trigger

        def skip(name: str) -> bool:
            return self._in_read_partition(name) or not self._is_chosen(name)

        listing = show(spark, folder, files, self._files_read(), skip, most, monitors, check)
        in_path = [field for field in schema if field.name in path_fields]
        file_schema = StructType([field for field in schema if field not in in_path])
        reader = spark.readStream.format(self.scanned_as).schema(file_schema).options(**options)
        # each "file" that Spark finds in the listing is a chunk of files, of which it can take one at a time
        reader = reader.option("maxFilesPerTrigger", 1).option("maxFileAge", "36500d")
        # and of which it would not find any that are not in the chunk's folder
        frame = load_one(reader.option("recursiveFileLookup", True).options(**STRICT), listing)
        from_path = {field.name: _from_path(field) for field in in_path}
        return frame.withColumns(from_path) if from_path else frame

    def batch_position(self, spark: SparkSession) -> Position:
        if self.slice is not None:
            return super().batch_position(spark)
        files = Folder(self.path)
        names = self._names(files) if self._chosen is None else self._chosen
        return FilesRead.of(files.root, self._files_read().union(names), self.partitions_read_before())

    def with_fixed_range(self) -> Self:
        if self._chosen is not None:
            return self
        changed = copy.copy(self)
        changed._chosen = self._names(Folder(self.path))
        return changed

    def stops_at(self) -> Position | None:
        return None if self._chosen is None else FilesRead.of(Folder(self.path).root, self._chosen)

    def until(self, position: Position) -> Self:
        if not isinstance(position, FilesRead) or position.root != Folder(self.path).root:
            raise cannot_stop(self.name, position, f"it reads {self.path}")
        changed = copy.copy(self)
        changed.stop_position, changed._chosen = position, position.files()
        changed.boundedness = Boundedness.BOUNDED
        return changed

    def lost(self, position: Position) -> Sequence[str]:
        if not isinstance(position, FilesRead):
            return ()
        return sorted(position.files() - self._names(Folder(self.path)))

    @staticmethod
    def _names(folder: Folder) -> frozenset[str]:
        return frozenset(file.name for file in folder.files())

    def _is_chosen(self, name: str) -> bool:
        return self._chosen is None or name in self._chosen

    def _chosen_of(self, files: list[UPath]) -> list[UPath]:
        """Of the files that are there, those that it reads."""
        if self._chosen is None:
            return files
        below = f"{Folder(self.path).root}/"
        return [file for file in files if path_text(file).removeprefix(below) in self._chosen]

    def stream_position(self, checkpoint_sources: UPath | None, offset: str | None) -> Position:
        logged = spark_log.offset_of(offset)
        if checkpoint_sources is None or logged < 0:
            return self.resume_position
        root = Folder(self.path).root
        names = self._files_read().union(names_until(spark_log.Reader(checkpoint_sources, logged), root))
        return FilesRead.of(root, names, self.partitions_read_before())

    def ending(self, folder: UPath) -> Ending | None:
        if self.boundedness is Boundedness.UNBOUNDED:
            return None
        last = last_chunk(folder)

        def read(log: UPath, offset: str | None) -> frozenset[str]:
            has_read = last < 0 or (spark_log.offset_of(offset) >= 0 and last_chunk_found(log, folder) >= last)
            return frozenset([ALL] if has_read else ())

        return read

    def check_resume_position(self) -> None:
        if isinstance(self.resume_position, FilesRead) and self.resume_position.root != Folder(self.path).root:
            raise cannot_follow(self.name, self.resume_position, f"it reads {self.path}")
        read = self.partitions_read_before()
        if read is not None and self.template is not None and not self.partition_columns:
            problem = self.template.tells_no_time()
            if problem is not None:
                raise cannot_follow(self.name, self.resume_position, problem)
        elif read is not None or not isinstance(self.resume_position, FilesRead):
            super().check_resume_position()

    def _files_read(self) -> frozenset[str]:
        return self.resume_position.files() if isinstance(self.resume_position, FilesRead) else frozenset()

    def _in_read_partition(self, name: str) -> bool:
        read = self.partitions_read_before()
        if read is None or self.template is None:
            return False
        return self.template.ends_by(name, read.until.replace(tzinfo=None))

    def read(self, spark: SparkSession) -> DataFrame:
        folder = Folder(self.path)
        files, others = self._existing_in(folder)
        self._look_at(files[0])
        self._check_table(files)
        if isinstance(self.resume_position, Unread):
            self._check_each(spark, files)
            whole = partial(load, paths=files) if others else partial(folder.load, files=files)
            return self._read(spark, files, whole, self._path_fields(files[0]))
        unread = self._unread_of(files)
        self._check_each(spark, unread)
        if not unread:
            first = files[:1]
            return self._read(spark, first, partial(load, paths=first), self._path_fields(files[0])).limit(0)
        return self.unread(self._read(spark, unread, partial(load, paths=unread), self._path_fields(unread[0])))

    def _unread_of(self, files: list[UPath]) -> list[UPath]:
        below = f"{Folder(self._whole).root}/"
        read = self._files_read()
        names = [(file, path_text(file).removeprefix(below)) for file in files]
        return [file for file, name in names if name not in read and not self._in_read_partition(name)]

    @abstractmethod
    def _read(self, spark: SparkSession, files: Sequence[UPath], load: Load, path_fields: Collection[str]) -> DataFrame:
        """The rows of files that `load` reads; folder names give the fields in `path_fields`."""

    def _first_files(self) -> list[UPath]:
        """The files that a bounded stream reads; of a monitored folder any one file that is there."""
        if self.boundedness is Boundedness.BOUNDED:
            files = self._existing()
            self._look_at(files[0])
        else:
            folder = Folder(self.path)
            name = folder.any()
            files = [] if name is None else [self.path.with_segments(f"{folder.root}/{name}")]
        if files:
            self._check_table(files)
        return files

    def _path_fields(self, file: UPath) -> set[str]:
        """The fields that folder names give, such as the day in day=2024-01-01/a.csv.

        They are read as texts, as names are texts; Spark would read 007 as the number 7.
        """
        folders = path_text(file).removeprefix(f"{Folder(self._whole).root}/").split("/")[:-1]
        named = {name for name, is_column, _ in (folder.partition("=") for folder in folders) if is_column}
        return named & set(self.records.names)

    def _rooted(self, path_fields: Collection[str]) -> dict[str, str]:
        """Spark's option for the folder below which folder names are fields; for a pattern Spark finds none itself."""
        return {"basePath": for_spark(self._whole.with_segments(Folder(self._whole).root))} if path_fields else {}

    def _in_folders(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        """The rows of folders such as day=2024-01-01 that may belong to the partitions that are read.

        After the checks of rows it is too late for Spark to skip the other folders.
        """
        covered = self.covered()
        for field in spark_schema(self.records.schema):
            if field.name in path_fields and field.name in covered:
                frame = frame.where(in_folder(field.name, field.dataType, covered[field.name]))
        return frame

    def read_partitions(self, spark: SparkSession, bounded: Sequence[SparkSource[Any]]) -> DataFrame:
        """Reads all partitions in one scan; a file's path says which partition it is in.

        A scan for each partition would be planned and compiled by itself.
        """
        from pyspark.sql import functions as F

        if self.template is None or self.partition_columns or self.in_every_partition:
            return super().read_partitions(spark, bounded)
        places: dict[str, int] = {}
        files: list[UPath] = []
        folders = False
        for place, source in enumerate(bounded):
            assert isinstance(source, FileSource)
            source_files = source._existing()
            path = Folder(source.path).place
            folders = folders or (path is not None and path.is_dir())  # of which Spark itself says what it reads
            files += source_files
            places |= {_SCHEME.sub("", str(file)): place for file in source_files}
        self._look_at(files[0])
        if (
            folders
            or len(places) < len(files)
            or len(files) > _MOST
            or not isinstance(self.resume_position, Unread)
            or not all(map(_PLAIN.fullmatch, places))
            or not self._alike(files)
        ):
            return super().read_partitions(spark, bounded)
        by_path = F.create_map(*[F.lit(v) for path, place in places.items() for v in (path, place)])
        partition = F.try_element_at(
            by_path, F.regexp_replace("_metadata.file_path", _SCHEME.pattern, "/" if not self.path.protocol else "")
        )
        unknown = F.raise_error(
            F.concat(F.lit(f"source '{self.name}': a file of no partition: "), "_metadata.file_path")
        ).cast("int")
        self._check_table(files)
        self._check_each(spark, files)
        frame = self._read(spark, files, partial(load, paths=files), self._path_fields(files[0]))
        return frame.withColumn(PARTITION_INDEX, F.coalesce(partition, unknown))

    def _alike(self, files: list[UPath]) -> bool:
        """Whether these are files that can be read as one table."""
        return all(file.is_file() and not file.name.startswith(("_", ".")) for file in files)

    def _existing(self) -> list[UPath]:
        return self._existing_in(Folder(self.path))[0]

    def _existing_in(self, folder: Folder) -> tuple[list[UPath], bool]:
        """The files that it reads, and whether there are others; raises `PipelineError` where there is none to read."""
        there = self._files_of(folder)
        files = self._chosen_of(there)
        endings = {f".{self.format}", *[file.suffix for file in files]}
        hidden = sorted(name for name in folder.hidden if PurePosixPath(name).suffix in endings)
        shown = f"names that begin with _ or . are hidden, as {', '.join(hidden[:20])}" if hidden else ""
        if not files:
            whose = f" for partition {self.slice.key}" if self.slice is not None else ""
            advice = shown or "check the path"
            raise PipelineError(f"source '{self.name}': there are no files at {self.path}{whose}; {advice}")
        if hidden:
            _log.warning("source '%s': of the files at %s it does not read all: %s", self.name, self.path, shown)
        self._check_folders(files)
        return files, len(files) < len(there)

    def _check_table(self, files: Sequence[UPath]) -> None:
        """Raise `PipelineError` where files lie in a table, unless the path is that of one of them."""
        place = Folder(self.path).place
        if place is not None and path_text(place) == path_text(files[0]):
            return
        table = table_format(files)
        if table is not None:
            folder, name = table
            knows = "DeltaSource" if name == "Delta" else "a query of DuckDB's (DatabaseSource)"
            raise PipelineError(
                f"source '{self.name}': {folder} is a table of {name}, whose log says which of its files count, and all"
                f" that lie there would be read; read it with what knows {name}, such as {knows}, or with"
                " StructuredSource where the session has its package"
            )

    def _look_at(self, file: UPath) -> None:
        """Raise `PipelineError` where the first file is not of the format and Spark would not say so."""

    def _check_each(self, spark: SparkSession, files: Sequence[UPath]) -> None:
        """Raise `MalformedInputError` where one of the files to be read is not of the format.

        Raises `SourceError` where Spark cannot read it.
        """
        for file in files:
            if ":" in file.name and is_local(file):
                raise SourceError(
                    f"source '{self.name}': the name of {file} has a colon, which Hadoop does not read on a disk;"
                    " rename the file"
                )

    def _check_folders(self, files: list[UPath]) -> None:
        """Raise `PipelineError` where files lie in folders of different columns; Spark would read only some."""
        folder = Folder(self.path).place
        if folder is None:
            return
        below = len(path_text(folder)) + 1
        first: dict[tuple[str, ...], UPath] = {}
        for file in files:
            first.setdefault(tuple(name.partition("=")[0] for name in path_text(file)[below:].split("/")[:-1]), file)
        if len(first) > 1:
            first_file, other = list(first.values())[:2]
            raise PipelineError(
                f"source '{self.name}': {first_file} and {other} lie in folders of different columns, of which Spark"
                " reads only some; move them, or read each folder by a source of its own"
            )


_ILLEGAL = "Illegal Parquet type"
"""A part of Spark's message for a file with a column that it cannot read, whichever columns are to be read."""


class ParquetSource(FileSource[Out]):
    """Parquet files; the columns of the record's fields are read, by name.

    Paths, modes and partitions are as in `CsvSource`; there is an example at `CsvSource`. Folders with names such as
    day=2024-01-01 give a column too. Raises `PipelineError` for a path without files, unless `monitor`, for a missing
    column, and for one whose values could change when they become the field's, such as a double for an int;
    `MalformedInputError` for a file that lacks a column that others have, unless its field may be None and no other
    column is new in the file.
    """

    format = "parquet"

    _files: FileColumns | None = None
    """The columns of the files that were looked at."""

    def lacking(self) -> Mapping[str, str]:
        return {} if self._files is None else self._files.lacking()

    def _read(self, spark: SparkSession, files: Sequence[UPath], load: Load, path_fields: Collection[str]) -> DataFrame:
        self._check_each(spark, files)
        reader = spark.read.format(self.format).options(**self._rooted(path_fields))
        columns = self._columns(spark, self._columns_known(files), files[0], path_fields)
        return self._typed(self._in_folders(load(reader.schema(columns)), path_fields), path_fields)

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        files = self._first_files()
        path_fields = self._path_fields(files[0]) if files else set()
        self._files = self._columns_of_none(path_fields)
        try:
            self._check_each(spark, self._unread_of(files) or files)
        except PipelineError:
            if self.boundedness is Boundedness.BOUNDED:
                raise
            self._files = self._columns_of_none(path_fields)
            self._check_each(spark, self._existing())  # others may have what that one lacks
        columns = self._columns(spark, self._files, files[0] if files else None, path_fields)
        return self.unread(self._typed(self._stream(spark, columns, {}, folder, path_fields), path_fields))

    def read(self, spark: SparkSession) -> DataFrame:
        self._files = None
        return super().read(spark)

    def read_partitions(self, spark: SparkSession, bounded: Sequence[SparkSource[Any]]) -> DataFrame:
        self._files = None
        return super().read_partitions(spark, bounded)

    def _check_each(self, spark: SparkSession, files: Sequence[UPath]) -> None:
        super()._check_each(spark, files)
        if files:
            self._columns_known(files).add(files)

    def _columns_known(self, files: Sequence[UPath]) -> FileColumns:
        """The columns of the files that were looked at; begins anew with these where none were."""
        if self._files is None:
            self._files = self._columns_of_none(self._path_fields(files[0]))
        return self._files

    def _columns_of_none(self, path_fields: Collection[str]) -> FileColumns:
        file_schema = pa.schema([field for field in self.records.schema if field.name not in path_fields])
        return FileColumns(file_schema, f"source '{self.name}'", str(self.path))

    def _typed(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        from pyspark.sql import functions as F

        raised = "dagster_unified.errors.MalformedInputError: "
        where = f"source '{self.name}'"
        file = F.regexp_replace(_decoded(F.col("_metadata.file_path")), "^file:/+", "/")
        values = {}
        for field in self.records.schema:
            if field.name in path_fields:
                text = F.col(field.name)
                value = values[field.name] = of_text(text, field)
                for misfit, test in misfits_of_text(field, value):
                    problem = F.raise_error(F.concat(F.lit(f"{raised}{where}: "), file, F.lit(f": {misfit}")))
                    values[field.name] = F.when(~test(text), value).otherwise(problem)
        return as_fields(frame.withColumns(values) if values else frame, self.records.schema, where)

    def _columns(
        self, spark: SparkSession, known: FileColumns, file: UPath | None, path_fields: Collection[str]
    ) -> StructType:
        """The columns of the record's fields as the files have them, with small numbers widened to the fields' types.

        Where no file has rows they have the fields' types. Raises `PipelineError` for a column whose values could
        change when they become the field's.
        """
        from pyspark.sql.types import StructType

        schema = self.records.schema
        wanted = spark_schema(in_texts(schema, path_fields))
        if not known.types and file is not None:  # for Spark to say what is wrong with it
            load(spark.read.format(self.format).schema(wanted), [file]).limit(1).collect()
        if not known.types:
            return wanted
        by_file: dict[UPath, list[str]] = {}
        for name, example in known.examples.items():
            by_file.setdefault(example, []).append(name)
        fields: dict[str, StructField] = {}
        for example, names in by_file.items():
            file_schema = pa.schema([schema.field(name) for name in names])
            frame = self._sample(spark, example, {name: known.types[name] for name in names})
            as_fields(frame, file_schema, f"source '{self.name}'")
            fields |= {field.name: field for field in widened(frame.schema, file_schema)}
        return StructType([fields.get(field.name, field) for field in wanted])

    def _sample(self, spark: SparkSession, file: UPath, types: Mapping[str, pa.DataType]) -> DataFrame:
        """The columns of a file as Spark reads them; `types` are those of the columns that are read."""
        from pyspark.errors import PySparkException

        try:
            return load(spark.read.format(self.format), [file])
        except PySparkException as error:
            if _ILLEGAL not in str(error):
                raise
        for name, kind in types.items():
            if unreadable(kind):
                raise PipelineError(
                    f"source '{self.name}': column '{name}' of {file} is {kind}, which Spark does not read from"
                    " Parquet; write the file anew, times in microseconds, others as texts or bytes, or leave the field"
                    " out"
                ) from None
        read = pa.schema([pa.field(name, as_spark_reads(kind)) for name, kind in types.items()])
        return spark.createDataFrame([], spark_schema(read))

    def _alike(self, files: list[UPath]) -> bool:
        if not super()._alike(files):
            return False
        file_schemas = [schema and schema.remove_metadata() for schema in schemas(files)]
        return file_schemas[0] is not None and all(schema == file_schemas[0] for schema in file_schemas)


def _from_path(field: StructField) -> Column:
    """A field's value in the names of a file's folders."""
    from pyspark.sql import functions as F

    path = _decoded(F.col("_metadata.file_path"))
    text = _decoded(F.regexp_extract(path, f"/{re.escape(field.name)}=([^/]*)/", 1))
    return F.when(~text.isin("", "__HIVE_DEFAULT_PARTITION__"), text).cast(field.dataType).alias(field.name)


def _decoded(text: Column) -> Column:
    """A part of a path as it is on the disk."""
    from pyspark.sql import functions as F

    # a + is one in a path, and a blank in what url_decode is for
    return F.url_decode(F.replace(text, F.lit("+"), F.lit("%2B")))
