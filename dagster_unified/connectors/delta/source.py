"""The Delta Lake source: a table as it stands, and then what later versions add, with no JVM jar.

`log.py` says which files a version added. Workers read the files with pyarrow, and need no `deltalake`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, Self, overload
from urllib.parse import unquote

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from dagster_unified.connectors.delta import log
from dagster_unified.connectors.delta.changes import Change, ChangeKind, Row, change_of
from dagster_unified.connectors.delta.committer import partition_values
from dagster_unified.connectors.delta.pruning import may_have_rows
from dagster_unified.connectors.delta.store import ask_store, table_folder
from dagster_unified.connectors.protocol.bounds import PartitionBounds
from dagster_unified.connectors.protocol.frame import Malformed, as_fields
from dagster_unified.connectors.protocol.positions import Offsets
from dagster_unified.connectors.protocol.splits import SplitSource
from dagster_unified.errors import PipelineError, SourceError, nearest
from dagster_unified.graph.connectors import Boundedness, Place
from dagster_unified.operators.functions.type_variables import Out
from dagster_unified.operators.time import to_millis
from dagster_unified.records import record_type
from dagster_unified.storage.paths import folder_place, is_local, name_of, storage_path, worker_path
from dagster_unified.values import check_count

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import TypeForm
    from upath import UPath

_VERSION = "version"
"""The only part of a table; its offset is the next version to read, and 0 before the table was read."""

_READABLE = {"timestampNtz", "vacuumProtocolCheck", "deletionVectors"}
"""Features of tables that ask nothing of this reader; deletion vectors only where a file has one."""

_SPLIT_BYTES = 32 << 20
"""About how many bytes of files a split has."""

_BATCH_ROWS = 1 << 16

_ELSEWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|/")
"""The beginning of a path that is not below the table's folder."""

_CHANGE_TYPE = "_change_type"
"""The column of the change data feed that says what happened to a row."""

_IN_FEED = {
    ChangeKind.INSERT: "insert",
    ChangeKind.UPDATE_BEFORE: "update_preimage",
    ChangeKind.UPDATE_AFTER: "update_postimage",
    ChangeKind.DELETE: "delete",
}
_BEFORE = (ChangeKind.UPDATE_BEFORE, ChangeKind.DELETE)
_AFTER = (ChangeKind.INSERT, ChangeKind.UPDATE_AFTER)


class DataFile(msgspec.Struct, frozen=True):
    """A data file, or one of the equal parts that several tasks read of a large one."""

    path: str
    """Below the table's folder."""

    partition_values: dict[str, str | None]
    part: int = 0
    parts: int = 1
    kinds: tuple[ChangeKind, ...] = ()
    """The kinds of the changes that are read: of a file of the feed those that it has, of another the one of its rows.

    Empty where rows are no changes.
    """

    in_feed: bool = False
    version: int = 0
    committed_at: int = 0
    """Milliseconds since the epoch."""


class DeltaSource(SplitSource[Out]):
    """Reads a Delta table at `path`: its rows, and with `bounded=False` then those that later versions add.

    In BATCH a run reads the table as it stands when the run begins. A run for a partition reads the rows that
    `partitioned_by(field)` puts into it, and leaves out files whose partition or statistics say that they have none.
    In STREAMING a stream reads the table in one micro-batch, and ends, unless `bounded=False`: then it reads each
    later version, at most `max_versions_per_trigger` in one micro-batch. Versions are the source's positions:
    savepoints hold them, and `after` goes on from them in either mode.

    With `starting_version`, or `starting_time`, it reads only what that version and later ones add, in both modes.

    Only added rows are read. A version that changes or deletes rows, such as a merge or an overwrite, is a
    `SourceError` that names version and operation before anything of it is read; the table as it stands can still be
    read. With `changes=True` the records are a `Change` of each row instead: first an `insert` for each row of the
    table as it stands, then what versions insert, update and delete, in their order. A version with a change data feed
    (`delta.enableChangeDataFeed`) says each change; in another one the rows of removed files are deleted, and those of
    added files inserted. One task reads the changes of a micro-batch.

    Compaction adds no rows, and emits nothing. It is a `SourceError` as well where a version is no longer in the
    table's log, where a field has no column, or a column whose values could change when they become the field's, and
    where the table requires more of its readers, such as column mapping or deletion vectors.

    Examples:
        >>> class Order(NamedTuple):
        ...     id: int
        ...     shop: str
        >>> DeltaSource("/tables/orders", Order, starting_version=7).describe()
        'Delta table at /tables/orders from version 7'
        >>> DeltaSource("/tables/orders", Order, changes=True).describe()
        'changes of the Delta table at /tables/orders'
    """

    reads_table = True
    kind = "deltalake"

    @overload
    def __init__(
        self,
        path: str,
        record: TypeForm[Out],
        name: str | None = None,
        *,
        changes: Literal[False] = False,
        bounded: bool = True,
        starting_version: int | None = None,
        starting_time: datetime | None = None,
        max_versions_per_trigger: int | None = None,
        storage_options: dict[str, str] | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self: DeltaSource[Change[Row]],
        path: str,
        record: TypeForm[Row],
        name: str | None = None,
        *,
        changes: Literal[True],
        bounded: bool = True,
        starting_version: int | None = None,
        starting_time: datetime | None = None,
        max_versions_per_trigger: int | None = None,
        storage_options: dict[str, str] | None = None,
    ) -> None: ...

    def __init__(
        self,
        path: str,
        record: Any,
        name: str | None = None,
        *,
        changes: bool = False,
        bounded: bool = True,
        starting_version: int | None = None,
        starting_time: datetime | None = None,
        max_versions_per_trigger: int | None = None,
        storage_options: dict[str, str] | None = None,
    ) -> None:
        self.name = name or name_of(path, "table")
        self.folder = str(table_folder(path, self._where))
        self._row = record_type(record, self._where)
        self.changes = changes
        self.records = record_type(change_of(record), self._where) if changes else self._row
        self.boundedness = Boundedness.BOUNDED if bounded else Boundedness.UNBOUNDED
        self.starting_version, self.starting_time = starting_version, starting_time
        self.max_records_per_trigger = max_versions_per_trigger
        self.storage_options = storage_options
        if starting_version is not None and starting_time is not None:
            raise PipelineError(f"{self._where}: give starting_version or starting_time, not both")
        if starting_version is not None and (isinstance(starting_version, bool) or starting_version < 0):
            raise PipelineError(f"{self._where}: starting_version is a version of the table, not {starting_version!r}")
        if starting_time is not None and starting_time.tzinfo is None:
            raise PipelineError(f"{self._where}: starting_time needs a time zone, such as datetime(..., tzinfo=UTC)")
        if max_versions_per_trigger is not None:
            check_count(f"{self._where}: max_versions_per_trigger", max_versions_per_trigger)
        self._table_columns = self._row.schema
        self._partition_columns: frozenset[str] = frozenset()

    @property
    def _where(self) -> str:
        return f"source '{self.name}'"

    @property
    def _path(self) -> UPath:
        """The table's folder; for one on a disk a worker needs no universal-pathlib."""
        return worker_path(self.folder, self._where)

    def places(self) -> Sequence[Place]:
        return [folder_place(storage_path(self.folder, self._where))]

    def describe(self) -> str:
        start = ""
        if self.starting_version is not None:
            start = f" from version {self.starting_version}"
        elif self.starting_time is not None:
            start = f" from {self.starting_time.isoformat()}"
        followed = ", followed" if self.boundedness is Boundedness.UNBOUNDED else ""
        what = "changes of the Delta table" if self.changes else "Delta table"
        return f"{what} at {self.folder}{start}{followed}{self.of_partition()}"

    def settings(self) -> str:
        return f"{super().settings()} {self.starting_version} {self.starting_time} {self.changes}"

    # Positions

    @property
    def origin(self) -> str:
        return f"Delta table at {self.folder}"

    def identities(self) -> Mapping[str, str]:
        return {"the table": str(self._open().metadata().id)}

    def oldest(self) -> Offsets:
        return {_VERSION: 0}

    def newest(self) -> Offsets:
        return {_VERSION: self._newest_version(None) + 1}

    def available(self, since: Offsets) -> dict[str, int]:
        read = since.get(_VERSION, 0)
        newest = self._newest_version(read - 1 if read else None) + 1
        return dict(self._unlost(since, {_VERSION: newest}))

    def first(self) -> Offsets:
        if self.starting_version is not None:
            newest = self._newest_version(None)
            if self.starting_version > newest + 1:
                raise SourceError(
                    f"{self._where}: {self.origin} has versions up to {newest}, and starting_version is"
                    f" {self.starting_version}; start at a version that there is, or at the next one"
                )
            return {_VERSION: self.starting_version}
        return self.oldest() if self.starting_time is None else {_VERSION: self._version_at(self.starting_time)}

    def last(self) -> Offsets | None:
        return self.newest() if self.boundedness is Boundedness.BOUNDED else None

    def limited(self, start: Offsets, end: Offsets) -> Offsets:
        return end if self._reads_snapshot(start) else super().limited(start, end)

    def backlog(self, offset: str, latest: str) -> int | None:
        """Unknown: versions do not say how many rows they add."""
        return None

    def _reads_snapshot(self, start: Offsets) -> bool:
        """Whether reading begins with the table as it stands."""
        return start[_VERSION] == 0 and self.starting_version is None and self.starting_time is None

    def _newest_version(self, known: int | None) -> int:
        newest = log.newest_version(self._path, known)
        if newest is None:
            raise SourceError(f"{self._where}: there is no Delta table at {self.folder}; check the path")
        return newest

    def _version_at(self, moment: datetime) -> int:
        """The first version that was committed at a moment or later; the next one where there is none."""
        commits = sorted((int(entry["version"]), int(entry["timestamp"])) for entry in self._open().history())
        if commits[0][0] > 0 and commits[0][1] > to_millis(moment):
            raise SourceError(
                f"{self._where}: the log of {self.origin} begins with version {commits[0][0]}, which was committed"
                f" after starting_time, {moment.isoformat()}; start later, or read the table as it stands"
            )
        return next((number for number, millis in commits if millis >= to_millis(moment)), commits[-1][0] + 1)

    # Reading

    @property
    def columns(self) -> pa.Schema:
        """The columns of a split: the row's as the table has them, for changes within one."""
        if not self.changes:
            return self._table_columns
        schema = self.records.schema
        row = schema.field("row").with_type(pa.struct(list(self._table_columns)))
        return schema.set(schema.get_field_index("row"), row)

    def read(self, spark: SparkSession) -> DataFrame:
        return super(DeltaSource, self._with_table_columns()).read(spark)

    def read_stream(self, spark: SparkSession, folder: UPath) -> DataFrame:
        return super(DeltaSource, self._with_table_columns()).read_stream(spark, folder)

    def as_records(self, rows: DataFrame) -> DataFrame:
        return as_fields(rows, self.records.schema, self._where)

    def _with_table_columns(self) -> Self:
        """The same source, which reads the columns that the table has now; raises `SourceError` where it cannot."""
        table = self._open()
        protocol = table.protocol()
        self._check_readable(protocol.min_reader_version, protocol.reader_features, table.metadata().configuration)
        columns = pa.schema(table.schema().to_arrow())
        partitioned_by = table.metadata().partition_columns
        for name in self._row.names:
            if name not in columns.names:
                raise SourceError(
                    f"{self._where}: {self.origin} has no column '{name}'{nearest(name, columns.names)}; the record has"
                    " a field of this name"
                )
            if pa.types.is_binary(columns.field(name).type) and name in partitioned_by:
                raise SourceError(
                    f"{self._where}: {self.origin} is partitioned by '{name}', whose bytes this source does not read;"
                    " leave the field out of the record"
                )
        changed = copy.copy(self)
        changed._table_columns = pa.schema([columns.field(name) for name in self._row.names])
        changed._partition_columns = frozenset(self._row.names).intersection(partitioned_by)
        return changed

    def splits(self, start: Offsets, end: Offsets) -> Sequence[tuple[DataFile, ...]]:
        first, last = start[_VERSION], end[_VERSION]
        if first >= last:
            return []
        if self._reads_snapshot(start):
            files, as_read = self._snapshot(last - 1), DataFile("", {})
            if self.changes:
                as_read = _changed(self._version(last - 1), ChangeKind.INSERT)
            return _packed(files, as_read)
        versions = map(self._version, range(first, last))
        if self.changes:
            changes = tuple(file for version in versions for file in self._changes_of(version))
            return [changes] if changes else []
        return _packed([file for version in versions for file in self._added_by(version)], DataFile("", {}))

    def _snapshot(self, number: int) -> list[log.AddedFile]:
        """The files of a version that may have rows to read."""
        table = self._open(number)
        if "deletionVectors" in (table.protocol().reader_features or ()):
            for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
                for file_path in batch["filepath"].slice(0, 1).to_pylist():
                    raise self._has_deletion_vector(file_path, number)
        actions: list[dict[str, Any]] = pa.table(table.get_add_actions(flatten=False)).to_pylist()
        self._check_places([action["path"] for action in actions], number)
        covered, files = self._covered_columns(), []
        for action in actions:
            file = log.AddedFile(action["path"], action["size_bytes"], partition_values(action))
            statistics = log.Statistics(action.get("min") or {}, action.get("max") or {})
            if may_have_rows(file, statistics, covered, self._row.schema):
                files.append(file)
        return files

    def _version(self, number: int) -> log.Version:
        """The entry of a version, whose files can be read."""
        version = log.version(self._path, number)
        if version is None:
            raise SourceError(
                f"{self._where}: version {number} is no longer in the log of {self.origin}, which begins with"
                f" version {log.oldest_version(self._path)}; start without state, or with another uid, to read the"
                " table as it stands, and let the table keep its log for longer (delta.logRetentionDuration)"
            )
        self._check_version(version)
        return version

    def _added_by(self, version: log.Version) -> list[log.AddedFile]:
        """The files that a version adds, and which may have rows to read."""
        if version.removed:
            raise SourceError(
                f"{self._where}: version {version.number} of {self.origin} ({version.operation}) changes or deletes"
                " rows, and only added rows are read; read changes (changes=True), or the table as it stands, or start"
                f" after it, with starting_version={version.number + 1}"
            )
        covered, schema = self._covered_columns(), self._row.schema
        return [f for f in version.added if not covered or may_have_rows(f, log.statistics(f), covered, schema)]

    def _changes_of(self, version: log.Version) -> Iterator[DataFile]:
        """The files of a version's changes; what was before them comes before what is after them."""
        for kinds in (_BEFORE, _AFTER) if version.changes else ():
            template = _changed(version, *kinds)
            for change in version.changes:
                values = change.partition_values
                yield replace(template, path=unquote(change.path), partition_values=values, in_feed=True)
        if version.changes:
            return
        deleted, inserted = _changed(version, ChangeKind.DELETE), _changed(version, ChangeKind.INSERT)
        for removed in version.removed:
            if removed.partition_values is None and self._partition_columns:
                raise SourceError(
                    f"{self._where}: version {version.number} of {self.origin} ({version.operation}) does not say of"
                    f" which partition it removes {removed.path}; start after it, with"
                    f" starting_version={version.number + 1}"
                )
            yield replace(deleted, path=unquote(removed.path), partition_values=removed.partition_values or {})
        for added in version.added:
            yield replace(inserted, path=unquote(added.path), partition_values=added.partition_values)

    def _check_version(self, version: log.Version) -> None:
        """Raise `SourceError` where a version's rows cannot be read."""
        if version.protocol is not None:
            self._check_readable(version.protocol.min_reader_version, version.protocol.reader_features, {})
        if version.metadata is not None:
            self._check_readable(0, None, version.metadata.configuration)
            self._check_columns(version)
        files: tuple[log.AddedFile | log.RemovedFile, ...] = (*version.added, *version.removed)
        self._check_places([file.path for file in (*files, *version.changes)], version.number)
        for file in files:
            if file.deletion_vector is not None:
                raise self._has_deletion_vector(file.path, version.number)

    def _check_places(self, paths: Iterable[str], number: int) -> None:
        """Raise `SourceError` where a file is not in the table's folder, as the files of a shallow clone."""
        outside = next((path for path in paths if _ELSEWHERE.match(path)), None)
        if outside is not None:
            raise SourceError(
                f"{self._where}: file {outside} of version {number} of {self.origin} is not in the table's folder, as"
                " those of a shallow clone, which this source does not read; read the table that was cloned, or a deep"
                " clone"
            )

    def _check_columns(self, version: log.Version) -> None:
        """Raise `SourceError` where a version changes a column that is read."""
        assert version.metadata is not None
        from deltalake import Schema

        columns = pa.schema(Schema.from_json(version.metadata.schema_string).to_arrow())
        for column in self._table_columns:
            now = columns.field(column.name).type if column.name in columns.names else None
            if now != column.type:
                became = "is gone" if now is None else f"is {now}"
                raise SourceError(
                    f"{self._where}: column '{column.name}' of {self.origin} {became} in version {version.number}, and"
                    f" was read as {column.type}; change the record's field, and start again"
                )

    def _check_readable(
        self, reader: int, features: Sequence[str] | None, properties: Mapping[str, str | None]
    ) -> None:
        """Raise `SourceError` where the table requires more of its readers than this one does."""
        mapping = properties.get("delta.columnMapping.mode") or "none"
        unknown = sorted(set(features or ()) - _READABLE)
        if mapping == "none" and not unknown and (reader <= 2 or features is not None):
            return
        what = "column mapping" if mapping != "none" else ", ".join(unknown) or f"version {reader} of the protocol"
        raise SourceError(
            f"{self._where}: {self.origin} requires {what} of its readers, which this source does not know; read a copy"
            " of the table that does without it"
        )

    def _has_deletion_vector(self, file: str, number: int) -> SourceError:
        return SourceError(
            f"{self._where}: file {file} has a deletion vector in version {number} of {self.origin}, which this source"
            " does not read; rewrite such files first (REORG TABLE … APPLY (PURGE))"
        )

    def _covered_columns(self) -> PartitionBounds:
        """The bounds of columns of the table: those of a change are not in its files."""
        return {} if self.changes else self.covered()

    def read_split(self, split: tuple[DataFile, ...]) -> Iterator[pa.RecordBatch | Malformed]:
        for file in split:
            yield from self._rows_of(file)

    def _rows_of(self, file: DataFile) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq  # slow to load, and a pipeline is built without it

        path = self._path / file.path
        try:
            opened = pq.ParquetFile(str(path) if is_local(path) else path.open("rb"))
        except FileNotFoundError as error:
            raise SourceError(
                f"{self._where}: {path} is gone, since it was vacuumed or deleted after its version was committed;"
                " start without state, or with another uid, to read the table as it stands"
            ) from error
        with opened:
            groups = opened.num_row_groups
            chosen = range(groups * file.part // file.parts, groups * (file.part + 1) // file.parts)
            names = [*self._table_columns.names, *([_CHANGE_TYPE] if file.in_feed else [])]
            present = [name for name in names if name in opened.schema_arrow.names]
            batches = opened.iter_batches(_BATCH_ROWS, list(chosen), columns=present, use_threads=False)
            for batch in batches if chosen else ():
                yield (
                    self._changes_in(batch, file) if file.kinds else self._with_partition(batch, file.partition_values)
                )

    def _changes_in(self, batch: pa.RecordBatch, file: DataFile) -> pa.RecordBatch:
        """The rows of a file as changes."""
        import pyarrow.compute as pc

        rows = self._with_partition(batch, file.partition_values)
        if file.in_feed:
            kinds = {_IN_FEED[kind]: kind.value for kind in file.kinds}
            names = batch[_CHANGE_TYPE].cast(pa.string())
            chosen = pc.is_in(names, pa.array(list(kinds)))
            rows, kind = rows.filter(chosen), pa.array([kinds[name] for name in names.filter(chosen).to_pylist()])
        else:
            kind = pa.repeat(pa.scalar(file.kinds[0].value), len(rows))
        row = pa.StructArray.from_arrays(rows.columns, fields=list(self._table_columns))
        version = pa.repeat(pa.scalar(file.version, pa.int64()), len(rows))
        committed_at = pa.repeat(pa.scalar(file.committed_at * 1000, pa.int64()), len(rows))
        columns = [kind.cast(pa.string()), row, version, committed_at.cast(pa.timestamp("us", "UTC"))]
        return pa.RecordBatch.from_arrays(columns, names=self.columns.names)

    def _with_partition(self, batch: pa.RecordBatch, values: Mapping[str, str | None]) -> pa.RecordBatch:
        """The rows of a file with the columns that are not in it: of its partition, or null."""
        arrays = [
            batch.column(field.name).cast(field.type)  # files have views and dictionaries of texts as well
            if field.name in batch.schema.names
            else pa.repeat(_partition_scalar(values.get(field.name), field.type), len(batch))
            for field in self._table_columns
        ]
        return pa.RecordBatch.from_arrays(arrays, names=self._table_columns.names)

    def _open(self, number: int | None = None) -> DeltaTable:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        is_whole = number is not None
        try:
            return ask_store(
                storage_path(self.folder, self._where),
                lambda: DeltaTable(
                    self.folder, number, storage_options=self.storage_options, without_files=not is_whole
                ),
            )
        except TableNotFoundError:
            raise SourceError(f"{self._where}: there is no Delta table at {self.folder}; check the path") from None
        except DeltaError as error:
            what = self.origin if number is None else f"version {number} of {self.origin}"
            raise SourceError(
                f"{self._where}: {what} cannot be read: {error}; if the version was cleaned up, start without state"
            ) from error


def _partition_scalar(text: str | None, kind: pa.DataType) -> pa.Scalar:
    """A partition's value, which is a text in the log, and null where that is empty."""
    if text and pa.types.is_timestamp(kind):
        moment = datetime.fromisoformat(text)
        in_utc = moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
        return pa.scalar(in_utc if kind.tz is not None else moment.replace(tzinfo=None), kind)
    return pa.scalar(text or None, pa.string()).cast(kind)


def _changed(version: log.Version, *kinds: ChangeKind) -> DataFile:
    """A file of a version's changes, of these kinds, yet without a path."""
    return DataFile("", {}, kinds=kinds, version=version.number, committed_at=version.committed_at)


def _packed(files: Sequence[log.AddedFile], as_read: DataFile) -> list[tuple[DataFile, ...]]:
    """Splits of about the same size, of files that are read alike: several small ones, or a part of a large one."""
    splits: list[tuple[DataFile, ...]] = []
    pending: list[DataFile] = []
    size = 0
    for file in sorted(files, key=lambda file: file.path):
        parts = -(-file.size // _SPLIT_BYTES) or 1
        read = replace(as_read, path=unquote(file.path), partition_values=file.partition_values, parts=parts)
        if parts > 1:
            splits += [(replace(read, part=part),) for part in range(parts)]
            continue
        if size + file.size > _SPLIT_BYTES and pending:
            splits.append(tuple(pending))
            pending, size = [], 0
        pending.append(read)
        size += file.size
    return [*splits, tuple(pending)] if pending else splits
