"""The file sink: a directory of Parquet or CSV files, which a rename replaces or an epoch adds to."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import EEXIST, ENOTEMPTY
from glob import escape as glob_escape
from typing import TYPE_CHECKING, Literal, Self
from uuid import uuid4

import pyarrow as pa

from dagster_unified.connectors.protocol.commits import (
    Commit,
    CommitConflictError,
    Committable,
    Committer,
    Epochs,
    PartitionsUnknownError,
    Rewritten,
    Ship,
    SparkSink,
    WriteAttempt,
    WriteIdentity,
)
from dagster_unified.errors import PipelineError, SinkError
from dagster_unified.graph.connectors import WHOLE, AssetName, Capabilities, Target, asset_path
from dagster_unified.operators.layout import PARTITION_INDEX
from dagster_unified.records import RecordType
from dagster_unified.storage.paths import (
    check_folder,
    folder_place,
    for_spark,
    is_in_object_store,
    is_local,
    load,
    put,
    remove_tree,
    size_of,
    storage_path,
)

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
    from upath import UPath


_CSV: dict[str, bool | str] = {
    "header": True,
    "escape": '"',
    "ignoreLeadingWhiteSpace": False,
    "ignoreTrailingWhiteSpace": False,
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""RFC 4180 with unchanged values: by default Spark strips blanks, cuts times off, and escapes quotes by backslashes."""


class StagedFolder(Committable, frozen=True, kw_only=True):
    """A folder of files. The identity and the id of its attempt say where it is."""


class FileSink(SparkSink[object, StagedFolder]):
    """A directory of Parquet or CSV files, replaced as a whole: readers see the old files or the new ones.

    In BATCH a run replaces the directory, and a run for a partition the folder `partition=<key>` in it. In STREAMING
    each epoch adds files with its number in their names; a new deployment begins with an empty directory. Exactly-once
    in both modes: a repeated run or epoch writes the same files again.

    CSV is as in RFC 4180: a header, texts in quotes where they need them, quotes in them doubled. Nothing stands for
    None, and `""` for an empty text; `CsvSource` tells them apart if it has a text for None.

    Spark's workers write to a folder next to the directory, and a rename puts it in place; a link is followed, and
    stays. Raises `PipelineError` for a path in an object store, where a folder is renamed file by file (use `DeltaSink`
    there), for another `format`, and for nested fields, bytes and a single field that may be None in CSV.

    Examples:
        >>> sink = sales.sink_to(FileSink("tables/sales", name="files"))
        >>> [sale.amount for sale in run_pipeline(pipeline, "BATCH").sinks["files"]]
        [3, 4, 5]
    """

    capabilities = Capabilities(transactional=True, replaces_partition=True, replaces_all=True, undoes=True)
    committable = StagedFolder

    def __init__(
        self,
        path: str,
        name: str | None = None,
        format: Literal["parquet", "csv"] = "parquet",  # noqa: A002
        asset: AssetName | None = None,
    ) -> None:
        self.path = storage_path(path, "file sink")
        self.name = name or self.path.name or "files"
        self.asset = asset_path(asset, f"sink '{self.name}'")
        if is_in_object_store(self.path):
            raise PipelineError(
                f"sink '{self.name}': {path} is in an object store, where a folder is renamed file by file, so that"
                f" readers would see half of what is written; use DeltaSink('{path}') there, or a folder on a disk"
            )
        if format not in ("parquet", "csv"):
            raise PipelineError(f"sink '{self.name}': format is 'parquet' or 'csv', not {format!r}")
        self.format = self.kind = format

    def describe(self) -> str:
        return f"{self.format} files at {self.path}"

    def target(self) -> Target:
        return Target(folder_place(self.path))

    def check(self, records: RecordType) -> None:
        if self.format != "csv":
            return
        if len(records.schema) == 1 and records.schema[0].nullable:
            raise PipelineError(
                f"{records.describe()} has one field, which may be None, and an empty line is no row of CSV; write"
                " Parquet, map None to a text, or add a field"
            )
        for field in records.schema:
            what = "nested" if pa.types.is_nested(field.type) else "bytes" if pa.types.is_binary(field.type) else None
            if what is not None:
                raise PipelineError(
                    f"field '{field.name}' is {what}, which CSV cannot hold; write Parquet, or map it to a text"
                )

    def committer(self, schema: pa.Schema) -> _FileCommitter:
        check_folder(self.path, self.name)
        if (self.path / "_delta_log").exists():
            raise SinkError(
                f"sink '{self.name}': {self.path} is a Delta table, and the sink replaces what is in its folder; give"
                " it another path, or move the table away"
            )
        return _FileCommitter(self.path, self.format)

    def takes_together(self) -> bool:
        return True

    def location(self, identity: WriteIdentity) -> str:
        return str(_folder(self.path, identity))

    def stage(self, frame: DataFrame, attempts: Sequence[WriteAttempt], ship: Ship) -> list[list[StagedFolder]]:
        if len(attempts) == 1:
            self._writer(frame.write).save(for_spark(_staged(self.path, attempts[0])))
        else:
            self._stage_together(frame, attempts)
        return [[StagedFolder(bytes=size_of(_staged(self.path, attempt)))] for attempt in attempts]

    def _stage_together(self, frame: DataFrame, attempts: Sequence[WriteAttempt]) -> None:
        """Write in one Spark job; each attempt gets a folder, which is then renamed."""
        together = self.path / f".{attempts[0].id}"
        try:
            self._writer(frame.write.partitionBy(PARTITION_INDEX)).save(for_spark(together))
            for index, attempt in enumerate(attempts):
                part_folder, staged = together / f"{PARTITION_INDEX}={index}", _staged(self.path, attempt)
                if part_folder.exists():
                    (part_folder / "_SUCCESS").touch()  # as Spark leaves it of a single one
                    shutil.move(part_folder.path, staged.path)  # a link may lead to another disk
                else:
                    self._writer(frame.drop(PARTITION_INDEX).limit(0).write).save(for_spark(staged))
        finally:
            remove_tree(together)

    def _writer(self, writer: DataFrameWriter) -> DataFrameWriter:
        return writer.mode("overwrite").format(self.format).options(**(_CSV if self.format == "csv" else {}))

    def elsewhere(self, path: str) -> Self:
        changed = copy.copy(self)
        changed.path = storage_path(path, "file sink")
        return changed

    def exists(self) -> bool:
        return bool(self.path.exists())

    def dataset(self, records: RecordType | None = None) -> ds.Dataset:
        return self._dataset(self.path, records)

    def partitions(
        self, writes: Sequence[WriteIdentity], records: RecordType | None = None
    ) -> Mapping[WriteIdentity, ds.Dataset]:
        if any(self.path.glob(f"*.{self.format}")):
            raise PartitionsUnknownError(
                f"sink '{self.name}': {self.path} has rows of no partition, such as those of a stream, or of a run"
                " without partitions"
            )
        folders = {write: folder for write in writes if (folder := _folder(self.path, write)).exists()}
        return {write: self._dataset(folder, records) for write, folder in folders.items()}

    def rewritten(self, epochs: Epochs, records: RecordType) -> Rewritten:
        committer = _FileCommitter(self.path, self.format)
        deployment, query = committer.last_writer()
        if query and deployment != (epochs.deployment, epochs.timeline):
            raise SinkError(f"sink '{self.name}': {self.path} holds what another deployment of the stream wrote")
        first, last = epochs.after.get(query, -1), epochs.until.get(query, -1)
        files = [file for file in self.path.glob(f"epoch-*.{self.format}") if first < _epoch_of(file) <= last]
        removed = self.schema_of(records).empty_table()
        return Rewritten(self._dataset_of(files, records).to_table(), removed)

    def _files(self, folder: UPath) -> list[UPath]:
        """The files below a folder."""
        return [
            f
            for f in folder.rglob(f"*.{self.format}")
            if not any(p.startswith(("_", ".")) for p in f.relative_to(folder).parts)
        ]

    def _dataset(self, folder: UPath, records: RecordType | None) -> ds.Dataset:
        """The rows of the files below a folder."""
        return self._dataset_of(self._files(folder), records)

    def _dataset_of(self, files: Sequence[UPath], records: RecordType | None) -> ds.Dataset:
        import pyarrow.dataset as ds

        as_written: str | ds.FileFormat = self.format
        if records is not None:
            if not files:
                return ds.dataset(self.schema_of(records).empty_table())
            if self.format == "csv":
                as_written = _csv_format(self.schema_of(records))
        return ds.dataset([f.path for f in files], format=as_written, filesystem=self.path.fs)

    def schema_of(self, records: RecordType) -> pa.Schema:
        if self.format == "parquet":
            return records.schema
        fields = records.schema  # a timedelta is a text of Spark's, which Arrow cannot read
        return pa.schema([f.with_type(pa.string()) if pa.types.is_duration(f.type) else f for f in fields])

    def preview(self, spark: SparkSession, rows: int) -> pa.Table | None:
        reader = spark.read.options(**_CSV) if self.format == "csv" else spark.read
        return load(reader.format(self.format), [self.path]).limit(rows).toArrow()


def _csv_format(schema: pa.Schema) -> ds.CsvFileFormat:
    """How Arrow reads the files: by default it guesses a column's type from its values."""
    import pyarrow.csv as csv
    import pyarrow.dataset as ds

    return ds.CsvFileFormat(
        csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            column_types=schema, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )


class _FileCommitter(Committer[StagedFolder]):
    """Puts staged folders in place by renames.

    It remembers the deployment and its timeline in a file of the directory. It need not remember epochs: a repeated
    epoch replaces its files.
    """

    def __init__(self, path: UPath, file_format: str) -> None:
        self._path, self._format = _without_links(path), file_format
        self._mark = self._path / "_deployment"

    def last_writer(self) -> tuple[tuple[str, int], str]:
        """The deployment that has written last and its timeline, and the query."""
        execution, timeline = self._deployment()
        deployment, _, query = execution.rpartition("/")
        return (deployment, timeline), query

    def last_version(self, name: str) -> int | None:
        deployment, timeline = self._deployment()
        return timeline if deployment and name.endswith(f"/{deployment}/streaming/timelines") else None

    def commit(self, commits: Sequence[Commit[StagedFolder]]) -> None:
        for commit in commits:
            if commit.identity.epoch is None:
                self._replace(commit.attempt)
            else:
                self._add_epoch(commit.attempt, commit.identity.epoch)

    def clean_up(self, attempts: Sequence[WriteAttempt], committed: bool) -> None:
        for attempt in attempts:
            remove_tree(_staged(self._path, attempt))

    def _replace(self, attempt: WriteAttempt) -> None:
        """Replace what was written before by the staged folder."""
        target = _target(self._path, attempt.identity)
        _swap(_staged(self._path, attempt), target)
        if attempt.identity.partition != WHOLE:  # what a run without partitions had written
            for whole in self._path.glob(f"*.{self._format}"):
                whole.unlink(missing_ok=True)  # another partition's run may be at it

    def _add_epoch(self, attempt: WriteAttempt, epoch: int) -> None:
        """Add an epoch's files under names of its own, so that a replayed epoch replaces them.

        A new deployment begins with an empty directory; a deployment that has gone back to a savepoint removes the
        epochs that it had written since.
        """
        identity = attempt.identity
        mine = f"{identity.execution} timeline {identity.timeline}"
        deployment, timeline = self._deployment()
        if deployment != identity.execution:
            fresh = self._path.parent / f".{self._path.name}.{uuid4().hex}"
            fresh.mkdir(parents=True)
            (fresh / self._mark.name).write_text(mine)
            _swap(fresh, self._path)
        elif timeline != identity.timeline:
            for undone in (f for f in self._path.glob("epoch-*") if f.name >= f"epoch-{epoch:010d}-"):
                undone.unlink()
            put(self._mark, mine.encode())
        prefix = f"epoch-{epoch:010d}-"
        for old in self._path.glob(f"{prefix}*"):
            old.unlink()
        staged = sorted(_staged(self._path, attempt).glob(f"*.{self._format}"))
        filled = [file for file in staged if epoch == 0 or self._has_rows(file)]
        for number, file in enumerate(filled):
            file.rename(self._path / f"{prefix}{number:04d}.{self._format}")

    def _deployment(self) -> tuple[str, int]:
        """The last deployment that has written, and its timeline; an empty name where none has."""
        text = self._mark.read_text() if self._mark.exists() else ""
        deployment, known, timeline = text.rpartition(" timeline ")
        return (deployment, int(timeline)) if known else ("", 0)

    def _has_rows(self, file: UPath) -> bool:
        with file.open("rb") as opened:
            if self._format == "csv":
                return len(opened.read(1 << 20).splitlines()) > 1
            import pyarrow.parquet as pq

            return int(pq.read_metadata(opened).num_rows) > 0


def _epoch_of(file: UPath) -> int:
    """The epoch that wrote a file."""
    return int(file.name.removeprefix("epoch-").partition("-")[0])


def _folder(path: UPath, identity: WriteIdentity) -> UPath:
    """The folder that a write replaces: the directory, or a partition's folder in it."""
    return (
        path if identity.epoch is not None or identity.partition == WHOLE else path / f"partition={identity.partition}"
    )


def _target(path: UPath, identity: WriteIdentity) -> UPath:
    """The same folder without links: a rename would replace a link, and does not reach another disk."""
    return _without_links(_folder(path, identity))


def _without_links(path: UPath) -> UPath:
    return path.with_segments(os.path.realpath(path.path)) if is_local(path) else path


def _staged(path: UPath, attempt: WriteAttempt) -> UPath:
    """The folder in which an attempt stages its files: next to its target, so that a rename is enough."""
    target = _target(path, attempt.identity)
    return target.parent / f".{target.name}.{attempt.id}"


def _swap(staged: UPath, target: UPath) -> None:
    """Put a folder in a place; raises `CommitConflictError` where another write has put one there meanwhile."""
    old = target.parent / f".{target.name}.old.{uuid4().hex}"
    with suppress(FileNotFoundError):
        target.rename(old)
    try:
        staged.rename(target)
    except OSError as error:
        if error.errno in (ENOTEMPTY, EEXIST):
            remove_tree(old)
            raise CommitConflictError(f"{target} was written by another run meanwhile") from error
        if old.exists():
            old.rename(target)
        raise
    for leftover in target.parent.glob(f".{glob_escape(target.name)}.old.*"):  # also by a process that was killed here
        remove_tree(leftover)
