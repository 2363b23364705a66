"""Files as sources: CSV, JSON and Parquet."""

from __future__ import annotations

import csv
import json
import logging
import re
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from urllib.parse import unquote

import pyarrow as pa

from dagster_unified.arrow_types import with_nulls_declared
from dagster_unified.connectors.files.file_columns import FileColumns, as_spark_reads, first_lines, schemas, unreadable
from dagster_unified.connectors.files.folder import Folder, table_format
from dagster_unified.connectors.files.listing import last_chunk, last_chunk_found, names_until, show
from dagster_unified.connectors.files.path_template import PathTemplate
from dagster_unified.connectors.files.texts import (
    SQUEEZED,
    UNREADABLE,
    CsvRows,
    JsonRows,
    Rows,
    as_texts,
    converted,
    expected,
    explained,
    has_half_surrogates,
    in_texts,
    is_overflow,
    misfits_of_text,
    of_text,
    squeezed,
    unfit,
    within,
)
from dagster_unified.connectors.protocol.bounds import in_folder
from dagster_unified.connectors.protocol.frame import (
    MALFORMED,
    OnMalformed,
    as_fields,
    fitting,
    non_deterministic,
    spark_schema,
    widened,
)
from dagster_unified.connectors.protocol.positions import ALL, FilesRead, Position, Unread, cannot_follow
from dagster_unified.connectors.protocol.source import Ending, SparkSource
from dagster_unified.errors import MalformedInputError, PipelineError, SourceError
from dagster_unified.graph.connectors import Boundedness, Slice
from dagster_unified.graph.fingerprint import digest
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.records import record_type
from dagster_unified.spark_internals import spark_log
from dagster_unified.storage.object_store import is_connect
from dagster_unified.storage.paths import (
    STRICT,
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
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructField, StructType
    from typing_extensions import TypeForm
    from upath import UPath

    from dagster_unified.connectors.files.texts import Check
    from dagster_unified.graph.connectors import Dimensions

_log = logging.getLogger(__name__)

_VALUE, _ROW, _MORE, _CORRUPT = "value", "__row", "__more", "__corrupt"
"""Columns: a line that Spark scans, a row as it stands in its file, surplus fields, and text that is no JSON."""

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:/+")
_PLAIN = re.compile(r"(?!.*/\.\.?/)[\w./=+:@-]+", re.ASCII)
"""Paths that Spark shows as they are."""

_FIRST_BYTES = 1_000_000
"""Bytes of a file in which its first line is searched."""

_SHOWN = 200
"""Characters of a value that are shown at most."""

_MOST = 2_000
"""Files whose partitions are looked up in a table of their paths, at most."""


Load: TypeAlias = "Callable[[DataFrameReader], DataFrame]"
"""Reads the files of a source by a reader that has its format, schema and options."""


class _FileSource(SparkSource[Out]):
    """Files of one format under a path: a file, a folder, or a pattern with `*`; `[*]` is a star, and all else itself.

    Bounded: the files that are there when the run begins. With `monitor` unbounded, for STREAMING: files are read as
    they appear, each once, and have to appear at once (by rename), at most `max_files_per_trigger` in one micro-batch.

    A run for a partition reads the files that the path names when it is a template, such as
    `flights/{start:%Y-%m-%d}.csv` or `{key}/*.csv`; or the records that a field puts into it (`partitioned_by`).
    Without partitions a template matches all.
    """

    format: str

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
        if isinstance(slice_, Slice) and self.template is not None:
            changed.path = storage_path(self.template.of(slice_), f"source '{self.name}'")
        return changed

    def reads_all(self) -> bool:
        return self.template is None

    def snapshot(self) -> str:
        if self.boundedness is Boundedness.UNBOUNDED or (self.bound and self.slice is None):
            return ""
        files = Folder(self.path)
        return digest(files.root, *[f"{f.name}:{f.size}:{f.changed}" for f in sorted(files.files())])

    def files(self) -> list[UPath]:
        """The files that are read now, in order of their names."""
        return self._files_of(Folder(self.path))

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
        listing = show(spark, folder, files, self._files_read(), self._in_read_partition, most, monitors, check)
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
        names = self._files_read().union(file.name for file in files.files())
        return FilesRead.of(files.root, names, self.partitions_read_before())

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
        files = self._existing()
        self._look_at(files[0])
        self._check_table(files)
        if isinstance(self.resume_position, Unread):
            self._check_each(spark, files)
            return self._read(spark, files, partial(Folder(self.path).load, files=files), self._path_fields(files[0]))
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
            assert isinstance(source, _FileSource)
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
        folder = Folder(self.path)
        files = self._files_of(folder)
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
        return files

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


class TextSource(_FileSource[Out]):
    """A text format, whose rows may not fit their schema."""

    def __init__(
        self,
        path: str,
        record: TypeForm[Out],
        name: str | None = None,
        on_malformed: OnMalformed = "fail",
        monitor: bool = False,
        max_files_per_trigger: int | None = None,
    ) -> None:
        super().__init__(path, record, name, monitor, max_files_per_trigger)
        if on_malformed not in ("fail", "drop", "divert"):
            raise PipelineError(
                f"source '{self.name}': on_malformed is 'fail', 'drop' or 'divert', not {on_malformed!r}"
            )
        self.on_malformed = on_malformed

    def describe(self) -> str:
        return f"{super().describe()}, malformed rows: {self.on_malformed}"

    def _read(self, spark: SparkSession, files: Sequence[UPath], load: Load, path_fields: Collection[str]) -> DataFrame:
        schema, options = self._scanned(path_fields)
        reader = spark.read.format(self.scanned_as).schema(schema).options(**options, **self._rooted(path_fields))
        return self._checked(self._in_folders(load(reader), path_fields), path_fields)

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        files = self._first_files()
        path_fields = self._path_fields(files[0]) if files else set()
        return self.unread(
            self._checked(self._stream(spark, *self._scanned(path_fields), folder, path_fields), path_fields)
        )

    def _scanned(self, path_fields: Collection[str]) -> tuple[StructType, dict[str, Any]]:
        """The columns and options with which Spark scans the files; by default only for their lines."""
        return self._text_columns([_VALUE], path_fields), {}

    def _text_columns(self, names: Iterable[str], path_fields: Collection[str]) -> StructType:
        """Columns with these names, and those of the fields that folder names give, all of texts."""
        from pyspark.sql.types import StringType, StructField, StructType

        in_path = [name for name in self.records.names if name in path_fields]
        return StructType([StructField(name, StringType()) for name in [*names, *in_path]])

    def _file_fields(self, path_fields: Collection[str]) -> pa.Schema:
        return pa.schema([field for field in self.records.schema if field.name not in path_fields])

    @abstractmethod
    def _parsed(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        """The scanned rows, with a column for each field."""

    @abstractmethod
    def _is_broken(self, path_fields: Collection[str]) -> Column:
        """Whether the text of a row is malformed, whatever its values are."""

    @abstractmethod
    def _misfits(self, field: pa.Field, value: Column) -> Iterator[Check]:
        """The checks of a field's column, except for a missing value; `value` is what `_value` returned."""

    @abstractmethod
    def _value(self, field: pa.Field) -> Column:
        """The values of a field, null where they do not fit."""

    @property
    @abstractmethod
    def rows(self) -> Rows:
        """The form of the rows."""

    def _row(self, path_fields: Collection[str]) -> Column:
        """The row as it stands in its file."""
        from pyspark.sql import functions as F

        return F.col(_ROW)

    def _checked(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        """Each row with its first problem; or, where a malformed row fails the run, only rows that fit.

        What is used more than once gets a projection of its own, which Catalyst then computes once.
        """
        from pyspark.sql import functions as F

        names = self.records.names
        # Catalyst reads all that it knows of a file where this is asked for behind a parser
        frame = self._parsed(frame.withColumn(_FILE, F.col("_metadata.file_path")), path_fields)
        values = {f"{_CONVERTED}{place}": name for place, name in enumerate(names)}
        fields = dict(zip(names, self.records.schema, strict=True))
        frame = frame.withColumns(
            {
                column: of_text(F.col(name), fields[name]) if name in path_fields else self._value(fields[name])
                for column, name in values.items()
            }
        )
        checks = list(self._checks(path_fields, {name: F.col(column) for column, name in values.items()}))
        first, reason = F.when(checks[0][0], F.lit(0)), F.when(F.col(_FIRST) == 0, checks[0][1])
        for place, (is_so, message) in enumerate(checks[1:], 1):
            first, reason = first.when(is_so, F.lit(place)), reason.when(F.col(_FIRST) == place, message)
        problem = F.when(
            F.col(_FIRST).isNotNull(),
            F.struct(
                F.col(_FILE).alias("file"),
                self._row(path_fields).alias("row"),
                non_deterministic(reason).alias("reason"),
            ),
        )
        frame = frame.withColumn(_FIRST, first)
        columns = [F.col(column).alias(name) for column, name in values.items()]
        if self.on_malformed != "fail":
            return frame.select(*columns, problem.alias(MALFORMED))
        return frame.withColumn(MALFORMED, problem).where(fitting(self.name)).select(*columns)

    def _checks(self, path_fields: Collection[str], values: Mapping[str, Column]) -> Iterator[tuple[Column, Column]]:
        """Each check of a row, in order: whether the row fails it, and the reason."""
        from pyspark.sql import functions as F

        yield self._is_broken(path_fields), F.lit(f"{UNREADABLE} {self.records.describe()}")
        for field, info in zip(self.records.schema, self.records.types, strict=True):
            column, value = F.col(field.name), values[field.name]
            declared = field.with_type(with_nulls_declared(field.type, info))
            for absent, test in within(declared, field.name, _missing):
                yield test(column), F.lit(absent)
            misfits = misfits_of_text(field, value) if field.name in path_fields else self._misfits(field, value)
            for misfit, test in misfits:
                yield test(column), _with_value(misfit, column, field.type)
        for name, enum in self.records.members().items():
            members = [member.value for member in enum]
            listed = ", ".join(map(repr, members))
            unknown = f"field '{name}' is not a value of {enum.__name__}, which has {listed}"
            kind = self.records.schema.field(name).type
            yield ~F.col(name).isin(members), _with_value(unknown, F.col(name), kind)

    def locate(self, spark: SparkSession, file: str, row: str, reason: str) -> MalformedInputError:
        """The error for a malformed row, with its line looked up in its file."""
        from pyspark.sql import functions as F

        file = unquote(file)
        first = row.splitlines()[0] if row else row
        text = load_one(spark.read.format("text"), file)
        lines = text.coalesce(1).select("value", (F.monotonically_increasing_id() + 1).alias("line"))
        matches = lines.where(F.regexp_replace("value", SQUEEZED, "") == squeezed(first)).limit(1).collect()
        line = f", line {matches[0].line}" if matches else ""
        reason = explained(self.rows, file, row, reason)
        return MalformedInputError(
            f"source '{self.name}': {_shown(file)}{line}: {reason}: {row[:200]}; fix the file, or read it with"
            " on_malformed='drop' or 'divert'"
        )


_ILLEGAL = "Illegal Parquet type"
"""A part of Spark's message for a file with a column that it cannot read, whichever columns are to be read."""

_UNDECODED = "\ufffd"
"""Spark's replacement of bytes that are not UTF-8."""

_NO_CHARACTER, _NO_DELIMITER = "\uffff", "\ufffe"
"""No characters. One stands before quotes that are escaped by themselves; by default NUL does, and is lost."""

_FILE, _PARSED, _CONVERTED, _FIRST = "__file", "__parsed", "__value", "__first"
"""Columns: a row's file, the parsed row, its fields' values by place, and its first problem."""

_SCANNED = "__field"
"""Columns: the text between the delimiters of a line, by place, with its quotes."""

_NO_VALUE = f"{_NO_DELIMITER}{_NO_CHARACTER}{_NO_DELIMITER}"
"""Stands for a missing value where none is to be taken for one."""


class CsvSource(TextSource[Out]):
    """CSV files: a path, a folder, a pattern with `*`, or a path template such as `sales/{start:%Y-%m-%d}.csv`.

    No other character makes a pattern; `[*]` is a star, and `{{` a brace.

    In BATCH a run reads the files that are there when it begins; a run for a partition those of which the template
    says so. In STREAMING the same files are read, and the input ends. With `monitor` it does not end, and only
    STREAMING reads it: each file once, as it appears, in the order of their age, and at most `max_files_per_trigger`
    in a micro-batch. Such a file has to appear at once, by a rename.

    `null_value` is the text that stands for a missing value, besides none at all. Unless it is given, an empty text in
    quotes is missing as well, as it is to pandas; where it is given, `""` is an empty text. With `header` the first
    line names the columns, and must name them in the order of the record's fields. A datetime without a zone is in UTC.
    A text may be in quotes, with quotes in it doubled, as RFC 4180 has it and most programs write it; `escape` is
    another character that stands before them, such as a backslash. A row whose quotes do not close is malformed. A row
    is one line, so that a line break in a text leaves two rows that are malformed. With `multi_line` such a text is
    read, and each file by one task; in a file whose lines end with CR LF, these two in a text become LF, and a quote
    that does not close makes the rows up to the next one part of its own. Blanks belong to a text, and a line of
    separators is a row; an empty line is none. A file with a header and one column is read by one task as well; where
    a tab or a blank is the delimiter, each line that names the columns is taken for a header. Files are in UTF-8; a
    text with other bytes makes its row malformed.

    A row that does not fit its record type fails the run with `MalformedInputError`, which names file and line. With
    `on_malformed="drop"` such rows are left out and counted; with `"divert"` they are kept in a table of their own.
    Raises `PipelineError` for a path without files, unless `monitor`, and `MalformedInputError` for a file whose header
    has other columns: the driver looks at the first line of each.

    Examples:
        >>> files = pipeline.from_source(CsvSource("sales/*.csv", Sale, name="files"))
        >>> [sale.amount for sale in collect(files, inputs={"files": [Sale("north", 3, at(9, 0))]})]
        [3]
    """

    format = "csv"

    def __init__(
        self,
        path: str,
        record: TypeForm[Out],
        name: str | None = None,
        on_malformed: OnMalformed = "fail",
        header: bool = True,
        delimiter: str = ",",
        null_value: str = "",
        escape: str = '"',
        multi_line: bool = False,
        monitor: bool = False,
        max_files_per_trigger: int | None = None,
    ) -> None:
        super().__init__(path, record, name, on_malformed, monitor, max_files_per_trigger)
        self.multi_line = multi_line
        if len(escape) != 1:
            raise PipelineError(f"source '{self.name}': escape is one character, not {escape!r}")
        self.header, self.null_value, self.escape = header, null_value, escape
        self.delimiter = "\t" if delimiter == r"\t" else delimiter
        nested = next((field.name for field in self.records.schema if pa.types.is_nested(field.type)), None)
        if nested is not None:
            raise PipelineError(f"source '{self.name}': field '{nested}' is nested, which CSV cannot hold; read JSON")

    def settings(self) -> str:
        settings = sorted({**self._dialect(), "header": self.header, "multiLine": self.multi_line}.items())
        return f"{super().settings()} {settings}"

    def _dialect(self) -> dict[str, str]:
        return {
            "sep": self.delimiter,
            "nullValue": self.null_value,
            "escape": self.escape,
            "charToEscapeQuoteEscaping": _NO_CHARACTER if self.escape == '"' else self.escape,
        }

    @property
    def scanned_as(self) -> str:
        return "text" if self._scans_lines else "csv"

    @property
    def _scans_lines(self) -> bool:
        """Whether Spark's CSV reader may miss rows: it leaves out lines of blanks and control characters."""
        blank = all(character <= " " for character in self.delimiter)
        return not self.multi_line and (blank or (len(self.records.names) == 1 and not self.header))

    @property
    def _scans_whole(self) -> bool:
        """Whether one task has to scan the lines: a header of one column may look like a row."""
        return not self.multi_line and not self._scans_lines and len(self.records.names) == 1

    @property
    def rows(self) -> CsvRows:
        return CsvRows(self.records.names, self.delimiter, self.escape)

    def _rows(self, path_fields: Collection[str]) -> CsvRows:
        return CsvRows(tuple(self._file_fields(path_fields).names), self.delimiter, self.escape)

    def _scanned(self, path_fields: Collection[str]) -> tuple[StructType, dict[str, Any]]:
        """Lines, split at the delimiter without regard to quotes.

        Spark returns a line as it stands in the file where it has more or fewer fields; else its fields give the line.
        With `multi_line` quotes say where a row ends: one column too many makes Spark return each row as it stands.
        """
        if self._scans_lines:
            return super()._scanned(path_fields)
        if self._scans_whole:
            lines = {"sep": _NO_DELIMITER, "quote": _NO_CHARACTER, "header": True, "multiLine": True}
            return self._text_columns([_VALUE], path_fields), lines
        names = self._file_fields(path_fields).names
        options = {
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": _ROW,
            "columnPruning": "false",
            "header": self.header,
            "multiLine": self.multi_line,
        }
        if self.multi_line:
            return self._text_columns([*names, _MORE, _ROW], path_fields), {**self._dialect(), **options}
        plain = {"sep": self.delimiter, "quote": _NO_CHARACTER, "escape": _NO_CHARACTER, "nullValue": _NO_VALUE}
        return self._text_columns([*_scanned_columns(names), _ROW], path_fields), {**plain, **options}

    def _parsed(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        from pyspark.sql import functions as F

        rows = self._rows(path_fields)
        if self._scans_lines or self._scans_whole:
            frame = frame.withColumnRenamed(_VALUE, _ROW)
            row = F.col(_ROW)
            is_row = row != "" if len(rows.names) == 1 else row.contains(self.delimiter) | row.rlike(r"[^\x00-\x20]")
            if self._scans_lines and self.header:
                is_row &= ~row.rlike(rows.header)
            frame = frame.where(is_row).withColumn(_PARSED, self._from_csv(row, rows))
            return frame.withColumns({name: F.col(f"{_PARSED}.{name}") for name in rows.names})
        if self.multi_line:
            keep_blanks = {"ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false"}
            written = F.to_csv(F.struct(*rows.names, _MORE), {**self._dialect(), **keep_blanks})
            # Spark gives no row of exactly one field too many as it stands in the file
            return frame.withColumn(_ROW, F.coalesce(_ROW, written))
        scanned = dict(zip(rows.names, map(F.col, _scanned_columns(rows.names)), strict=True))
        has_quotes = F.col(_ROW).contains('"')
        for text in scanned.values():
            has_quotes |= text.contains('"')
        frame = frame.withColumn(_PARSED, F.when(has_quotes, self._from_csv(self._row(path_fields), rows)))
        has_quotes = F.col(_PARSED).isNotNull()
        if self.null_value:
            scanned = {name: F.nullif(text, F.lit(self.null_value)) for name, text in scanned.items()}
        return frame.withColumns(
            {name: F.when(has_quotes, F.col(f"{_PARSED}.{name}")).otherwise(text) for name, text in scanned.items()}
        )

    def _from_csv(self, row: Column, rows: CsvRows) -> Column:
        from pyspark.sql import functions as F

        fields = ", ".join(f"`{name}` string" for name in rows.names)
        return F.from_csv(row, fields, {**self._dialect(), "mode": "PERMISSIVE"})

    @property
    def _scans_fields(self) -> bool:
        """Whether Spark scans the text between the delimiters of a line."""
        return not (self.multi_line or self._scans_lines or self._scans_whole)

    def _row(self, path_fields: Collection[str]) -> Column:
        from pyspark.sql import functions as F

        row = F.col(_ROW)
        if not self._scans_fields:
            return row
        texts = [
            F.coalesce(F.col(column), F.lit("")) for column in _scanned_columns(self._file_fields(path_fields).names)
        ]
        return F.coalesce(row, F.concat_ws(self.delimiter, *texts))

    def _is_broken(self, path_fields: Collection[str]) -> Column:
        from pyspark.sql import functions as F

        rows, row = self._rows(path_fields), self._row(path_fields)
        if self._scans_fields:
            return F.when(F.col(_PARSED).isNotNull(), ~row.rlike(rows.row)).otherwise(F.col(_ROW).isNotNull())
        apart = F.length(row) - F.length(F.replace(row, F.lit(self.delimiter), F.lit("")))
        counted = apart == len(self.delimiter) * (len(rows.names) - 1)
        return F.when(row.contains('"'), ~row.rlike(rows.row)).otherwise(~counted)

    def _misfits(self, field: pa.Field, value: Column) -> Iterator[Check]:
        from pyspark.sql import functions as F

        yield from misfits_of_text(field, value)
        if pa.types.is_boolean(field.type):  # Spark takes other words for one as well
            problem = f"field '{field.name}' is not {expected(field.type)}"
            yield problem, lambda text: ~F.lower(F.trim(text)).isin("true", "false")
        if pa.types.is_string(field.type):
            problem = f"field '{field.name}' has bytes that are not UTF-8, or U+FFFD, which stands for such bytes"
            yield problem, lambda text: text.contains(_UNDECODED)

    def _value(self, field: pa.Field) -> Column:
        from pyspark.sql import functions as F

        return of_text(F.col(field.name), field)

    def _check_each(self, spark: SparkSession, files: Sequence[UPath]) -> None:
        """Raises `MalformedInputError` for a file whose first line does not name the fields."""
        super()._check_each(spark, files)
        if not self.header or not files:
            return
        _silence(spark)
        path_fields = self._path_fields(files[0])
        rows = self._rows(path_fields)
        for file, line in zip(files, first_lines(spark, files), strict=True):
            if line is not None and not rows.is_header(line):
                columns = [name.strip() for name in next(csv.reader([line], delimiter=self.delimiter[:1]), [])]
                raise MalformedInputError(
                    f"source '{self.name}': the header of {file} has the columns {', '.join(columns)}, and"
                    f" {self.records.describe()} needs {', '.join(rows.names)}, in this order; correct the file or the"
                    " record, or read it with header=False if its first line is no header"
                )


class JsonSource(TextSource[Out]):
    """JSON files, one object per line.

    Paths, modes, partitions and malformed rows are as in `CsvSource`; there is an example at `CsvSource`. A member
    that the record does not have is ignored; a field that the object does not have is None, or makes the row
    malformed where the field may not be None. Half a surrogate pair is no character, and makes its row malformed. Spark
    reads one object of a line, and nothing of what follows it there;
    bounded files whose first line has more are a `PipelineError`.
    """

    format = "json"

    def _look_at(self, file: UPath) -> None:
        try:
            with file.open("rb") as opened:
                start = opened.read(_FIRST_BYTES).decode("utf-8-sig", "replace").lstrip()
            _, end = json.JSONDecoder().raw_decode(start)
        except (OSError, ValueError, RecursionError):  # Spark says what is wrong with it
            return
        more = start[end:].partition("\n")[0].strip()
        if more:
            raise PipelineError(
                f"source '{self.name}': the first line of {file} goes on behind its first object, with"
                f" {more[:40]!r}, and only one object of a line is read; write one to a line, as `jq -c .` does"
            )

    @property
    def scanned_as(self) -> str:
        return "text"

    def _parsed(self, frame: DataFrame, path_fields: Collection[str]) -> DataFrame:
        from pyspark.sql import functions as F
        from pyspark.sql.types import StringType

        file_schema = self._file_fields(path_fields)
        schema = spark_schema(as_texts(file_schema)).add(_CORRUPT, StringType())
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        row = F.col(_ROW)
        frame = frame.withColumnRenamed(_VALUE, _ROW).where(row.contains("{") | row.rlike(r"\S"))
        frame = frame.withColumn(_PARSED, F.from_json(_ROW, schema, options))
        return frame.withColumns({name: F.col(f"{_PARSED}.{name}") for name in file_schema.names})

    def _is_broken(self, path_fields: Collection[str]) -> Column:
        from pyspark.sql import functions as F

        row = F.col(_ROW)
        no_object = F.col(f"{_PARSED}.{_CORRUPT}").isNotNull() | ~F.ltrim(row).startswith("{")
        return no_object | has_half_surrogates(row) | ~F.is_valid_utf8(row)

    def _misfits(self, field: pa.Field, value: Column) -> Iterator[Check]:
        checks = unfit if pa.types.is_nested(field.type) else partial(unfit, value=value)
        return chain(within(field, field.name, checks), within(field, field.name, _overflows))

    def _value(self, field: pa.Field) -> Column:
        from pyspark.sql import functions as F

        return converted(F.col(field.name), field)

    @property
    def rows(self) -> Rows:
        return JsonRows(self.records.schema)


class ParquetSource(_FileSource[Out]):
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


def _scanned_columns(names: Collection[str]) -> list[str]:
    return [f"{_SCANNED}{place}" for place in range(len(names))]


def _silence(spark: SparkSession) -> None:
    """Have Spark not warn, for each file, that its header has one column fewer than are scanned."""
    if not is_connect(spark):
        logging = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
        checker = "org.apache.spark.sql.catalyst.csv.CSVHeaderChecker"
        logging.core.config.Configurator.setLevel(checker, logging.Level.ERROR)


def _missing(field: pa.Field, path: str) -> Iterator[Check]:
    if not field.nullable:
        yield f"field '{path}' is missing, and its type does not allow None", lambda value: value.isNull()


def _overflows(field: pa.Field, path: str) -> Iterator[Check]:
    from pyspark.sql import functions as F

    if pa.types.is_floating(field.type):
        yield f"field '{path}' is not {expected(field.type)}", lambda value: is_overflow(value, F.col(_ROW))


def _with_value(problem: str, value: Column, kind: pa.DataType) -> Column:
    from pyspark.sql import functions as F

    text = F.to_json(value) if pa.types.is_nested(kind) else value.cast("string")
    return F.concat(F.lit(f"{problem}; it is '"), F.substring(text, 1, _SHOWN), F.lit("'"))


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


def _shown(file: str) -> str:
    return file.removeprefix("file:").replace("///", "/")
