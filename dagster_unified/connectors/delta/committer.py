"""Commits to a Delta table: one small transaction, made with the `deltalake` package.

On a local file system entries are appended to the table's log without listing it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import unquote
from uuid import uuid4

import pyarrow as pa

from dagster_unified.connectors.delta.store import ask_store
from dagster_unified.connectors.protocol.commits import (
    Commit,
    CommitConflictError,
    Committable,
    Committer,
    CommitUncertainError,
    WriteAttempt,
    WriteIdentity,
)
from dagster_unified.connectors.protocol.frame import spark_schema
from dagster_unified.errors import SinkError
from dagster_unified.graph.fingerprint import digest
from dagster_unified.spark_internals import in_place
from dagster_unified.storage.paths import is_in_object_store, is_local, remove_tree

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
    from deltalake.transaction import AddAction, RemoveAction, Transaction
    from upath import UPath

_PLAIN_WRITER = 2
"""The last version of the protocol whose tables ask no more of an entry than `deltalake` does for files that are there.
"""

_PLAIN_FEATURES = {"appendOnly", "invariants", "timestampNtz"}
"""Features that newer tables may name and that require nothing more either."""

_PLAIN_PATH = re.compile(r"[\w./-]+", re.ASCII)
"""Paths that the log has as they are; it encodes others."""

_CHECKPOINT_INTERVAL = 100
"""Entries for each checkpoint, where the table does not say."""


class LogEnd:
    """The last entry of a table's log, and the versions of transactions up to it."""

    def __init__(self, table: DeltaTable, folder: Path) -> None:
        self._folder = folder
        self.version = table.version()
        """That of the last entry."""
        self._interval = int(table.metadata().configuration.get("delta.checkpointInterval") or _CHECKPOINT_INTERVAL)
        self._last = self._identity()
        self.transactions: dict[str, int] = {}
        """The versions of the application transactions that were appended since the table was read."""

    @classmethod
    def of(cls, table: DeltaTable, path: str) -> Self | None:
        """The end of the log of a table at a local path; None where entries need more than is known here."""
        protocol = table.protocol()
        plain = protocol.min_writer_version <= _PLAIN_WRITER or (
            protocol.writer_features is not None and _PLAIN_FEATURES.issuperset(protocol.writer_features)
        )
        if not plain or table.metadata().partition_columns:
            return None
        return cls(table, Path(path) / "_delta_log")

    def takes(self, adds: Sequence[AddAction]) -> bool:
        """Whether the next entry may add these files: an entry before a checkpoint is left to `deltalake`."""
        return (self.version + 2) % self._interval != 0 and all(_PLAIN_PATH.fullmatch(add.path) for add in adds)

    def append(self, adds: Sequence[AddAction], transactions: Sequence[Transaction]) -> bool:
        """Add files and transactions; returns False, and adds nothing, where another writer was first."""
        if self._last is None or self._identity() != self._last:  # the table was removed, or made anew
            return False
        actions = [_commit_info(), *map(_add, adds), *map(_transaction, transactions)]
        new = self._folder / f"_commit_{uuid4().hex}.json.tmp"
        try:
            new.write_text("\n".join(json.dumps(action, separators=(",", ":")) for action in actions))
            os.link(new, self._entry(self.version + 1))
        except FileExistsError:
            return False
        finally:
            new.unlink(missing_ok=True)
        self.version += 1
        self._last = self._identity()
        self.transactions.update({transaction.app_id: transaction.version for transaction in transactions})
        return True

    def _entry(self, version: int) -> Path:
        return self._folder / f"{version:020d}.json"

    def _identity(self) -> tuple[int, int] | None:
        """Tells the last entry from another with its name."""
        try:
            status = self._entry(self.version).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns


def _commit_info() -> dict[str, object]:
    operation = {"operation": "WRITE", "operationParameters": {"mode": "Append", "partitionBy": "[]"}}
    return {"commitInfo": {"timestamp": int(time.time() * 1000), **operation, "engineInfo": "dagster-unified"}}


def _add(action: AddAction) -> dict[str, object]:
    return {
        "add": {
            "path": action.path,
            "partitionValues": {},
            "size": action.size,
            "modificationTime": action.modification_time,
            "dataChange": True,
            "stats": action.stats,
        }
    }


def _transaction(action: Transaction) -> dict[str, object]:
    return {"txn": {"appId": action.app_id, "version": action.version}}


_PARTITION = "part-of-"
"""The first part of the folder names of files that belong to a partition of the pipeline."""

_COMMITS_PER_LOG_CLEANUP = 100
"""Commits of a job from one cleanup of the table's log to the next."""

_REFUSALS = ("Unsupported table features", "append-only")
"""Messages of `deltalake` for commits that fail in every attempt."""

T = TypeVar("T")

NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""The folder of rows without a value in a column that a table is partitioned by."""


class DeltaFile(Committable, frozen=True, kw_only=True):
    """A data file with rows."""

    path: str
    """Below the table's folder."""

    nulls: tuple[str, ...] = ()
    """The columns that are null in some row."""


class DeltaCommitter(Committer[DeltaFile]):
    """Commits data files in the table's folder: adds them, or merges them by key."""

    def __init__(
        self,
        table: DeltaTable,
        path: UPath,
        mode: str,
        key: tuple[str, ...],
        partition_by: tuple[str, ...],
        sink: str,
        schema: pa.Schema,
    ) -> None:
        self._table, self._path = table, path
        self._mode, self._key, self._partition_by = mode, key, partition_by
        self._sink, self._schema = sink, schema
        self._is_current, self._commits_until_cleanup = True, 0  # the table was opened right now
        self._lacks_own = self._is_updated = False  # whether it lacks the last commit; was read anew to see that one
        self._is_shared = False  # whether others have been seen to write to the table of late
        self._log = self._log_end()
        self._never_null: set[str] = set()  # the columns that the table takes no null in

    @classmethod
    def of_table(
        cls,
        sink: str,
        path: UPath,
        schema: pa.Schema,
        mode: str,
        key: tuple[str, ...],
        partition_by: tuple[str, ...],
        storage_options: dict[str, str] | None,
    ) -> Self:
        """The committer of the table at a path, which is created if need be.

        Raises `SinkError` where its columns or partitions are not the sink's, or where it requires more from a writer
        than adding files.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        def opened() -> DeltaTable:
            return ask_store(path, lambda: DeltaTable(str(path), storage_options=storage_options))

        try:
            table = opened()
        except TableNotFoundError:
            _create_if_missing(path, schema, partition_by, storage_options)
            table = opened()
        committer = cls(table, path, mode, key, partition_by, sink, schema)
        committer._check_table()
        return committer

    def last_version(self, name: str) -> int | None:
        # As seldom as can be for writes that only add, since it takes longer the more files there are. A commit finds
        # what another process has committed in between.
        if not self._is_current:
            if not self._is_updated:
                self._update()
            self._is_updated = False
            self._check_table()
            self._is_current = True
        appended = None if self._log is None else self._log.transactions.get(name)
        return self._table.transaction_version(name) if appended is None else appended

    def begin(self, attempts: Sequence[WriteAttempt]) -> None:
        """Note that others may commit while rows are staged: `overwrite` removes their rows, and a merge reads them."""
        self._is_current = self._is_current and self._mode == "append"

    def commit(self, commits: Sequence[Commit[DeltaFile]]) -> None:
        from deltalake import CommitProperties
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import Transaction

        if not any(self._has_to_be_committed(commit) for commit in commits):
            return
        self._check_nulls([file for commit in commits for file in commit.committables])
        transactions = [Transaction(name, version) for commit in commits for name, version in commit.marks.items()]
        if self._log is not None and self._appended(self._log, commits, transactions):
            return
        undone = [action for commit in commits if commit.goes_back for action in self._undone(commit.identity)]
        # Of two runs of a partition at once, the second to commit must see what the first has added, and remove it.
        owners = [commit.identity.replaces for commit in commits if commit.identity.replaces is not None]
        if self._mode == "overwrite" and any(commit.identity.epoch is None for commit in commits):
            owners.append("dagster-unified/overwrite")  # of two at once, the second must see what the first has added
        transactions += [Transaction(o, (self._table.transaction_version(o) or 0) + 1) for o in owners]
        properties = CommitProperties(app_transactions=transactions)
        files = [file for commit in commits for file in commit.committables]
        upserts = self._mode == "upsert" and bool(files)
        adds = [] if upserts else [self._add(file) for file in files]
        removes = [] if upserts else [*undone, *self._replaced(adds, [commit.identity for commit in commits])]
        if removes and "deletionVectors" in (self._table.protocol().writer_features or ()):
            raise SinkError(
                f"sink '{self._sink}': files of the table at {self._path} may have deletion vectors, and cannot be"
                " removed without knowing them; write to another table, or drop its feature deletionVectors"
            )
        self._is_current, self._log, self._lacks_own = False, None, not upserts
        try:
            if upserts:
                self._merge(files, properties)
            else:
                self._table.create_write_transaction(
                    [*adds, *removes],
                    "append",
                    self._table.schema(),
                    partition_by=list(self._partition_by) or None,
                    commit_properties=properties,
                    post_commithook_properties=self._hooks(),
                )
        except CommitFailedError as error:
            if any(refusal in str(error) for refusal in _REFUSALS):
                raise SinkError(
                    f"sink '{self._sink}': the table at {self._path} cannot be written to: {error}; write to another"
                    " table, or change this one"
                ) from error
            raise CommitConflictError(f"Delta table at {self._path}: {error}; another write was first") from error
        except OSError as error:
            if not is_in_object_store(self._path) or isinstance(error, (FileNotFoundError, PermissionError)):
                raise
            raise CommitUncertainError(
                f"Delta table at {self._path}: the store did not answer a commit; nobody can tell yet whether it was"
                f" made ({error})"
            ) from error
        self._commits_until_cleanup -= 1

    def version(self) -> int:
        if self._log is None and self._lacks_own:
            self._update()
            # where others' rows matter, a commit looks again right before it stages its own
            self._is_updated = self._mode == "append"
        return self._table.version() if self._log is None else self._log.version

    def clean_up(self, attempts: Sequence[WriteAttempt], committed: bool) -> None:
        for attempt in attempts:
            if self._mode == "upsert":
                remove_tree(self._path / upsert_folder(attempt))
            elif not committed and not self._holds(data_folder(attempt)):
                remove_tree(self._path / data_folder(attempt))

    def _check_table(self) -> None:
        """Raise `SinkError` where the sink cannot write to the table, or no longer can."""
        self._check_columns()
        metadata = self._table.metadata()
        table_columns, sink_columns = tuple(metadata.partition_columns), self._partition_by
        if (
            table_columns != sink_columns and self._mode != "upsert"
        ):  # a file that does not say its partition has null there
            raise SinkError(
                f"sink '{self._sink}': the table at {self._path} is partitioned by"
                f" {', '.join(table_columns) or 'nothing'}, and the sink by {', '.join(sink_columns) or 'nothing'};"
                f" give partition_by={table_columns!r}, or write to another table"
            )
        reason = _unmet_requirement(self._table, self._mode)
        if reason is not None:
            raise SinkError(
                f"sink '{self._sink}': the table at {self._path} {reason}, and mode='{self._mode}' cannot keep to that;"
                " write to another table, or change this one"
            )

    def _check_columns(self) -> None:
        """Raise `SinkError` where the table's columns are not the stream's."""
        in_table = pa.schema(self._table.schema().to_arrow())
        wanted, existing = spark_schema(self._schema), spark_schema(in_table)
        for column in wanted:
            if column.name not in existing.names:
                raise SinkError(
                    f"sink '{self._sink}': the table at {self._path} has no column '{column.name}'; write to another"
                    " table, or add the column to it"
                )
            if existing[column.name].dataType != column.dataType:
                raise SinkError(
                    f"sink '{self._sink}': column '{column.name}' is {column.dataType.simpleString()}, and"
                    f" {existing[column.name].dataType.simpleString()} in the table at {self._path}; write to another"
                    " table, or make them the same"
                )
        never_null = {column.name for column in in_table if not column.nullable}
        if never_null - set(wanted.names):
            raise SinkError(
                f"sink '{self._sink}': the table at {self._path} has the column"
                f" '{min(never_null - set(wanted.names))}', which may not be null, and the records have no such field;"
                " add it to them, or write to another table"
            )
        self._never_null = never_null

    def _check_nulls(self, files: Sequence[DeltaFile]) -> None:
        """Raise `SinkError` where a row has a null that the table refuses; `deltalake` does not look into files."""
        refused = {name for file in files for name in file.nulls} & self._never_null
        if refused:
            raise SinkError(
                f"sink '{self._sink}': '{min(refused)}' is None in some records, and may not be null in the table at"
                f" {self._path}; filter such records out, give them a value, or let the table take nulls. Nothing of"
                " this write is in the table"
            )

    def _holds(self, folder: str) -> bool:
        """Whether files of a folder are in the table: a store may have tried again, and met our own commit."""
        self._is_current = False
        self._update()
        return any(row["path"].startswith(f"{folder}/") for row in active_files(self._table))

    def _update(self) -> None:
        ask_store(self._path, self._table.update_incremental)
        self._lacks_own = False
        self._log = self._log_end()

    def _log_end(self) -> LogEnd | None:
        """The end of the table's log, where entries are appended without `deltalake`."""
        if self._mode != "append" or self._is_shared or not is_local(self._path):
            return None
        return LogEnd.of(self._table, self._path.path)

    def _appended(self, log: LogEnd, commits: Sequence[Commit[DeltaFile]], transactions: Sequence[Transaction]) -> bool:
        """Append epochs to the log if they only add files; else let `deltalake` see what was appended before.

        Raises `CommitConflictError` where another write was first.
        """
        adds = [self._add(file) for commit in commits for file in commit.committables]
        appends = log.takes(adds) and not any(c.goes_back or c.identity.epoch is None for c in commits)
        if appends:
            is_first = log.append(adds, transactions)
        elif log.transactions:
            self._update()
            is_first = self._table.version() == log.version
        else:
            is_first = True
        if not is_first:  # `deltalake` checks the entries of others, and commits after them
            self._is_current, self._is_shared = False, True
            self._commits_until_cleanup = _COMMITS_PER_LOG_CLEANUP
            raise CommitConflictError(f"Delta table at {self._path}: another write was first")
        self._commits_until_cleanup -= appends
        return appends

    def _has_to_be_committed(self, commit: Commit[DeltaFile]) -> bool:
        """Whether a write changes the table, or must be recorded although it does not."""
        epoch = commit.identity.epoch
        first = commit.goes_back or (epoch == 0 and self._mode == "overwrite")
        return epoch is None or first or bool(commit.committables)

    def _hooks(self) -> PostCommitHookProperties:
        """What `deltalake` does after a commit: checkpoints as often as the table says, and sometimes a cleanup.

        A cleanup reads every entry of the log, which grows by one with each epoch. By default `deltalake` cleans up
        after every commit.
        """
        from deltalake import PostCommitHookProperties

        is_due = self._commits_until_cleanup <= 0
        if is_due:
            self._commits_until_cleanup, self._is_shared = _COMMITS_PER_LOG_CLEANUP, False
        return PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=None if is_due else False)

    def _merge(self, files: Sequence[DeltaFile], properties: CommitProperties) -> None:
        import pyarrow.dataset as ds  # loads pandas where it is installed, so only where it is needed

        paths = [self._path / file.path for file in files]
        if self._path.protocol:
            source = ds.dataset([path.path for path in paths], filesystem=self._path.fs, format="parquet")
        else:
            source = ds.dataset([str(path) for path in paths], format="parquet")
        same = " AND ".join(f'(target."{k}" IS NOT DISTINCT FROM source."{k}")' for k in self._key)
        merger = self._table.merge(
            source.scanner().to_reader(),
            predicate=same,
            source_alias="source",
            target_alias="target",
            commit_properties=properties,
            post_commithook_properties=self._hooks(),
        )
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    def _add(self, file: DeltaFile) -> AddAction:
        from deltalake.transaction import AddAction

        values: dict[str, str | None] = {}
        for folder in file.path.split("/")[:-1]:
            name, is_column, value = folder.partition("=")
            if is_column:
                values[name] = None if value == NO_PARTITION else unquote(value)
        return AddAction(file.path, file.bytes, values, _now(), True, json.dumps({"numRecords": file.rows}))

    def _undone(self, identity: WriteIdentity) -> list[RemoveAction]:
        """Removals of what a STREAMING job had added since an epoch to which it has gone back."""
        if self._mode == "upsert":
            return []
        prefix = _file_prefix(identity)
        first = f"{prefix}{identity.version:010d}-"
        return [
            _remove(row)
            for row in active_files(self._table)
            if row["path"].startswith(prefix) and row["path"].split("/")[0] >= first
        ]

    def _replaced(self, adds: Sequence[AddAction], identities: Sequence[WriteIdentity]) -> list[RemoveAction]:
        """Removals of the files that are replaced.

        These are the files of earlier runs of the same partitions of the pipeline; with `overwrite` also those of any
        pipeline, and those of no such partition. With `partition_by`, `overwrite` only removes from the table's
        partitions that are written. A STREAMING job keeps what it wrote in earlier epochs, and what a
        run of a partition has written since its first.
        """
        # with `overwrite` whoever wrote them, such as the pipeline under a name that it had before
        whose = _partition_prefix if self._mode == "overwrite" else _owner_prefix
        replaced_prefixes = tuple(whose(i) for i in identities if i.replaces is not None)
        kept_prefixes = tuple(_file_prefix(i) for i in identities if i.epoch is not None)
        if self._mode != "overwrite" and not replaced_prefixes:
            return []
        written = [dict(add.partition_values) for add in adds]
        files = active_files(self._table)
        kept = [row["modification_time"] for row in files if row["path"].startswith(kept_prefixes)]
        goes_on = any(self._table.transaction_version(i.writer) is not None for i in identities if i.epoch is not None)
        begun = min(kept, default=0 if goes_on else None)

        def goes(row: dict[str, Any]) -> bool:
            path: str = row["path"]
            if replaced_prefixes and path.startswith(_PARTITION):
                return path.startswith(replaced_prefixes)
            if begun is not None and path.startswith(_PARTITION) and row["modification_time"] > begun:
                return False
            return (
                self._mode == "overwrite"
                and not path.startswith(kept_prefixes)
                and (not self._partition_by or partition_values(row) in written)
            )

        return [_remove(row) for row in files if goes(row)]


def _unmet_requirement(table: DeltaTable, mode: str) -> str | None:
    """A requirement of the table that a sink with this mode does not meet, in words."""
    configuration = table.metadata().configuration
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        return "gives its columns other names in its files (column mapping)"
    if mode != "append" and configuration.get("delta.appendOnly") == "true":
        return "is append-only"
    if mode == "upsert":  # deltalake writes the rows, and checks them
        return None
    for name, value in configuration.items():
        if name.startswith("delta.constraints."):
            return f"has the constraint '{name.removeprefix('delta.constraints.')}' ({value})"
    for column in table.schema().fields:
        if "delta.invariants" in column.metadata:
            return f"has a condition on the column '{column.name}'"
        if "delta.generationExpression" in column.metadata:
            return f"computes the column '{column.name}' ({column.metadata['delta.generationExpression']})"
    return None


def _create_if_missing(
    path: UPath, schema: pa.Schema, partition_by: tuple[str, ...], storage_options: dict[str, str] | None
) -> None:
    from deltalake import DeltaTable
    from deltalake.exceptions import CommitFailedError

    if path.fs.exists(path.path) is False:
        path.mkdir(parents=True, exist_ok=True)
    parts = list(partition_by) or None
    with suppress(CommitFailedError):  # another one has created it, or this one, and did not hear of it
        ask_store(
            path,
            lambda: DeltaTable.create(
                str(path), schema, mode="ignore", partition_by=parts, storage_options=storage_options
            ),
        )


def data_folder(attempt: WriteAttempt) -> str:
    """The folder of an attempt's data files, below the table's."""
    return f"{_file_prefix(attempt.identity)}{attempt.identity.version:010d}-{attempt.id}"


def upsert_folder(attempt: WriteAttempt) -> str:
    """The folder of the files that an attempt merges; they do not belong to the table."""
    return f"_data-{attempt.id}"


def staged_files(table: UPath, folder: UPath) -> list[DeltaFile]:
    """The files with rows below a folder. A folder without any is removed."""
    import pyarrow.parquet as pq

    files = []
    for name, size in sorted(in_place.take(folder).items()):
        file = folder / name
        with file.open("rb") as opened:
            metadata = pq.read_metadata(opened)
        if metadata.num_rows:
            path = file.relative_to(table).as_posix()
            nulls = tuple(sorted(_columns_with_nulls(metadata) | _null_partition_columns(path)))
            files.append(DeltaFile(path=path, rows=metadata.num_rows, bytes=size, nulls=nulls))
    if not files:
        remove_tree(folder)
    return files


def _columns_with_nulls(metadata: pq.FileMetaData) -> set[str]:
    """The columns with nulls, as a file's footer counts them.

    The footer does not tell a null list or record from a null in it, so nested columns are left out.
    """
    columns = set()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            statistics = column.statistics
            if statistics is not None and statistics.null_count and "." not in column.path_in_schema:
                columns.add(column.path_in_schema)
    return columns


def _null_partition_columns(path: str) -> set[str]:
    folders = (folder.partition("=") for folder in path.split("/")[:-1])
    return {name for name, _, value in folders if value == NO_PARTITION}


def active_files(table: DeltaTable) -> list[dict[str, Any]]:
    """The files of a table as it is now, as Delta's log describes them."""
    files: list[dict[str, Any]] = pa.table(table.get_add_actions(flatten=False)).to_pylist()
    return files


def partition_values(row: dict[str, Any]) -> dict[str, str | None]:
    """The values of the table partition that a file is in."""
    return {
        k: None if v is None else str(v) for k, v in (row.get("partition") or row.get("partition_values") or {}).items()
    }


def files_of_partitions(
    paths: Iterable[str], identities: Sequence[WriteIdentity]
) -> dict[WriteIdentity, list[str]] | None:
    """The files that one sink of a pipeline wrote of each partition.

    None where there are files of no partition: of a compaction, which puts the rows of several partitions into one, of
    a stream, of a run without partitions, or of others. Their rows may belong to any.
    """
    owners = {_owner_prefix(identity): identity for identity in identities}
    length = len(next(iter(owners), ""))
    of_partition: dict[WriteIdentity, list[str]] = {}
    for path in paths:
        if not path.startswith(_PARTITION):
            return None
        if (owner := owners.get(path[:length])) is not None:
            of_partition.setdefault(owner, []).append(path)
    return of_partition


def _partition_prefix(identity: WriteIdentity) -> str:
    """The first part of the folder names of all files of a partition."""
    return f"{_PARTITION}{digest(identity.partition)}-"


def _owner_prefix(identity: WriteIdentity) -> str:
    """The first part of the folder names of all files that one sink of a pipeline writes of a partition."""
    return f"{_partition_prefix(identity)}{digest(identity.replaces)}-"


def _file_prefix(identity: WriteIdentity) -> str:
    """The first part of the folder names of all files that one execution writes."""
    origin = digest(identity.origin)
    return f"data-{origin}-" if identity.replaces is None else f"{_owner_prefix(identity)}{origin}-"


def _remove(row: dict[str, Any]) -> RemoveAction:
    from deltalake.transaction import RemoveAction

    return RemoveAction(row["path"], True, _now(), row["size_bytes"], partition_values(row))


def _now() -> int:
    return int(datetime.now(timezone.utc).timestamp() * 1000)
